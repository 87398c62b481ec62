"""What pods ask of a node: the default release runs on one small node, and its notes say what it asks for.

Seen to fail: an engine pod asked for 100Gi of ephemeral-storage and stayed Pending on a node with a disk of 100 GB.
"""

from __future__ import annotations

import json

import pytest

from tests.chart.manifests import of_kind, one
from tests.chart.quantities import value
from tests.chart.releases import ENGINE, INJECTOR
from tests.chart.rendering import CHART, Release, render
from tests.chart.small_node import SMALL_NODE, requests_of, scheduled

DOCS = CHART.parents[1] / "docs"


def injected_pod() -> dict:
    """Return a vLLM pod of somebody else's with what the chart's defaults have the injector add."""
    parts = json.loads(one(render(Release(INJECTOR)), "ConfigMap", "injector")["data"]["parts.json"])
    vllm = {"name": "vllm", "resources": {"requests": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}}}
    return {"initContainers": [parts["payload"], parts["sidecar"]], "containers": [vllm, parts["turn"]]}


@pytest.mark.parametrize(
    "values", [ENGINE, {"models": {"small": {"model": "Qwen/Qwen3-0.6B"}}}], ids=["engine", "models"]
)
def test_every_pod_of_a_release_with_a_model_only_runs_on_one_small_node(values):
    workloads = of_kind(render(Release(values)), "Deployment", "StatefulSet")
    # The pod with the GPU last: it gets what the others leave.
    workloads.sort(key=lambda workload: "engine" in workload["metadata"]["name"])

    placed = scheduled(workloads)
    assert [pod for pod in placed if pod.phase != "Running"] == []
    assert any("engine" in pod.workload for pod in placed)


def test_an_injected_pod_runs_where_it_ran_before():
    asked = requests_of(injected_pod())

    assert asked["ephemeral-storage"] == value("20Gi")
    assert all(amount <= value(SMALL_NODE[resource]) for resource, amount in asked.items())


def test_the_pages_say_what_an_engine_pod_and_an_injected_one_request():
    engine = one(render(Release(ENGINE)), "Deployment", "engine")["spec"]["template"]["spec"]
    asked = requests_of(engine)

    assert (asked["cpu"], asked["memory"]) == (value("4750m"), value("21.25Gi"))
    assert asked["ephemeral-storage"] == value("20Gi")
    assert (
        "4.75 CPUs, 21.25 GiB of memory and 20 GiB of the node's disk" in (DOCS / "operations/install.md").read_text()
    )
    assert "750m of CPU, 5.25Gi of memory" in (DOCS / "operations/pod-injector.md").read_text()
