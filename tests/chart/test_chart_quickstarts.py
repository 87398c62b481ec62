"""The values that pages for new users print: Helm 3 and 4 render each, and the pods fit where the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from deploy.chart.tools import HELM_3, HELM_4
from tests.chart.rendering import Release, render
from tests.chart.small_node import requests_of

PAGES = {
    "start/kubernetes": {"engine": "registry.example/context-cache-vllm"},
    "start/kind": {"engine": "localhost/context-cache-vllm"},
    "start/existing-pods": {},
    "guides/migration": {"engine": "registry.example/context-cache-vllm"},
}
"""Pages, and the image of each engine container that their values make."""
KINDS = {"Deployment", "StatefulSet"}
_VALUES = re.compile(r"^```yaml\n(# my-values\.yaml\n.*?)^```$", re.MULTILINE | re.DOTALL)


def values_of(page: str) -> list[dict]:
    return [yaml.safe_load(text) for text in _VALUES.findall(Path(f"docs/{page}.md").read_text())]


def engines(documents: list[dict]) -> list[str]:
    workloads = [document for document in documents if document["kind"] in KINDS]
    containers = [each for workload in workloads for each in workload["spec"]["template"]["spec"]["containers"]]
    return [container["image"].partition(":")[0] for container in containers if container["name"] == "vllm"]


@pytest.mark.parametrize("helm", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
@pytest.mark.parametrize("page", PAGES)
def test_the_values_of_a_page_are_rendered(page, helm):
    found = values_of(page)

    assert found
    for values in found:
        documents = render(Release(values, name="context-cache"), helm)
        assert engines(documents) == list(PAGES[page].values())


def test_the_page_for_kind_tells_what_its_pods_request():
    [values] = values_of("start/kind")
    workloads = [each for each in render(Release(values, name="context-cache")) if each["kind"] in KINDS]
    assert {workload["spec"].get("replicas", 1) for workload in workloads} == {1}
    requests = [requests_of(workload["spec"]["template"]["spec"]) for workload in workloads]
    cpu, memory = (float(sum(each[name] for each in requests)) for name in ("cpu", "memory"))

    text = Path("docs/start/kind.md").read_text()
    assert f"request {cpu:.1f} CPUs and {memory / 2**30:.1f} GiB of memory" in text
