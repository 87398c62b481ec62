"""The number of replicas through upgrades and rollbacks, where an autoscaler or a person scales too: both Helms.

Each test was seen to fail before the chart looked at field ownership: pods ended (3 to 1, 10 to 2), or Helm 4 stopped
half-way with a conflict.
"""

from __future__ import annotations

from typing import Any

import pytest

from deploy.chart.tools import HELM_3, HELM_4
from tests.chart.clusters import Cluster, HelmFailed
from tests.chart.releases import ENGINE, INJECTOR, REDIS, merged
from tests.chart.rendering import Release, render

AUTOSCALER = "kube-controller-manager"
BASE = merged(REDIS, ENGINE)
PARTS = {"engine": "engine", "gateway": "gateway", "contextManager": "context-manager", "envoy": "envoy"}
NEXT = {"logLevel": "DEBUG"}
SCALED = {"autoscaling": {"enabled": True}}


def numbers(cluster: Cluster, kind: str = "Deployment") -> dict[str, int | None]:
    return {
        part: cluster.replicas(part, "StatefulSet" if (kind, part) == ("StatefulSet", "engine") else "Deployment")
        for part in PARTS.values()
    }


@pytest.mark.parametrize("kind", ["Deployment", pytest.param("StatefulSet", marks=pytest.mark.thorough)])
def test_handing_the_number_over_ends_no_pod_and_old_values_bring_no_old_number_back(cluster, helm, kind):
    storage = {"sidecar": {"storage": {"type": "pvc"}}} if kind == "StatefulSet" else {}
    fixed = merged(BASE, storage, {key: {"replicas": 3 + (key in {"gateway", "envoy"})} for key in PARTS})
    handed = merged(BASE, storage, {key: {"replicas": None} for key in PARTS})
    cluster.helm(helm, "install", values=fixed)
    cluster.helm(helm, "upgrade", values=handed)
    assert numbers(cluster, kind) == {"engine": 3, "gateway": 4, "context-manager": 3, "envoy": 4}

    cluster.scale("engine", 5, manager="vllm-autoscaler", kind=kind)
    notes = cluster.helm(helm, "upgrade", values=merged(handed, NEXT))
    assert numbers(cluster, kind) == {"engine": 5, "gateway": 4, "context-manager": 3, "envoy": 4}
    assert "cc-context-cache-engine: 5, set by vllm-autoscaler" in " ".join(notes.split())

    # The page's way back across a hand-over.
    cluster.helm(helm, "upgrade", values=fixed)
    assert numbers(cluster, kind) == {"engine": 5, "gateway": 4, "context-manager": 3, "envoy": 4}


def test_a_number_that_another_manager_set_stays_until_that_manager_is_taken_out(cluster, helm):
    cluster.helm(helm, "install", values=BASE)
    cluster.scale("engine", 3, manager="kubectl")
    notes = cluster.helm(helm, "upgrade", values=merged(BASE, NEXT))
    assert cluster.replicas("engine") == 3
    assert "cc-context-cache-engine: 3, set by kubectl; the values say 1" in " ".join(notes.split())
    assert "autoscaling.md" in notes
    assert "cc-context-cache-gateway:" not in notes

    # What the page's `jq` and `kubectl replace` do.
    path = cluster.path("Deployment", "cc-context-cache-engine")
    found = cluster.call("GET", path)
    entries = found["metadata"]["managedFields"]
    found["metadata"]["managedFields"] = [entry for entry in entries if entry.get("subresource") != "scale"]
    cluster.call("PUT", f"{path}?fieldManager=kubectl-replace", found)
    notes = cluster.helm(helm, "upgrade", values=merged(BASE, {"engine": {"replicas": 2}}))
    assert cluster.replicas("engine") == 2
    assert "set by" not in notes


def test_an_autoscalers_ten_pods_stay_through_upgrade_switching_off_and_rollback(cluster, helm):
    scaled = merged(BASE, {"gateway": SCALED, "envoy": SCALED})
    cluster.helm(helm, "install", values=scaled)
    for part in ("gateway", "envoy"):
        cluster.scale(part, 10, manager=AUTOSCALER)

    seen = []
    for command, given in (
        ("upgrade", merged(scaled, NEXT)),
        ("upgrade", BASE),
        ("rollback", "2"),
        ("rollback", "1"),
        ("rollback", "3"),
    ):
        said = (
            cluster.helm(helm, command, given) if command == "rollback" else cluster.helm(helm, command, values=given)
        )
        assert (cluster.get("HorizontalPodAutoscaler", "cc-context-cache-envoy") is None) == (given in (BASE, "3"))
        if given is BASE:
            assert f"cc-context-cache-envoy: 10, set by {AUTOSCALER}; the values say 2" in " ".join(said.split())
        seen.append((cluster.replicas("gateway"), cluster.replicas("envoy")))
    assert seen == [(10, 10)] * 5


def test_an_autoscaler_that_a_later_revision_brings_starts_from_the_live_number(cluster, helm):
    fixed, scaled = merged(BASE, {"gateway": {"replicas": 4}}), merged(BASE, {"gateway": SCALED})
    cluster.helm(helm, "install", values=fixed)
    cluster.helm(helm, "upgrade", values=scaled)
    assert cluster.replicas("gateway") == 4
    cluster.scale("gateway", 10, manager=AUTOSCALER)
    cluster.helm(helm, "upgrade", values=merged(scaled, NEXT))
    cluster.helm(helm, "upgrade", values=fixed)
    assert cluster.replicas("gateway") == 10
    cluster.helm(helm, "rollback", "3")
    assert cluster.replicas("gateway") == 10

    # Helm renders nothing for a rollback: this revision's record has its number, as the page says.
    if helm is HELM_3:
        cluster.helm(helm, "rollback", "1")
        assert cluster.replicas("gateway") == 4
    else:
        with pytest.raises(HelmFailed, match=f'conflict with "{AUTOSCALER}"'):
            cluster.helm(helm, "rollback", "1")
        assert cluster.replicas("gateway") == 10


def test_a_tool_that_contains_helm_is_no_other_manager(cluster):
    """Flux writes as `helm-controller`."""
    cluster.helm(HELM_3, "install", values=BASE)
    path = cluster.path("Deployment", "cc-context-cache-engine")
    found = cluster.call("GET", path)
    for entry in found["metadata"]["managedFields"]:
        entry["manager"] = entry["manager"].replace("helm", "helm-controller")
    cluster.call("PUT", f"{path}?fieldManager=helm-controller", found)
    cluster.helm(HELM_3, "upgrade", values=merged(BASE, {"engine": {"replicas": 2}}))
    assert cluster.replicas("engine") == 2


@pytest.mark.thorough
@pytest.mark.parametrize("born_fixed", [True, False])
def test_a_release_of_helm_3_keeps_its_number_under_helm_4(cluster, born_fixed):
    fixed, handed = merged(BASE, {"engine": {"replicas": 3}}), merged(BASE, {"engine": {"replicas": None}})
    cluster.helm(HELM_3, "install", values=fixed if born_fixed else handed)
    if not born_fixed:
        cluster.scale("engine", 3, manager="vllm-autoscaler")
    cluster.helm(HELM_4, "upgrade", values=merged(handed, NEXT))
    assert cluster.replicas("engine") == 3
    cluster.helm(HELM_4, "upgrade", "--server-side=true", values=handed)
    assert cluster.replicas("engine") == 3
    cluster.helm(HELM_4, "upgrade", values=merged(handed, NEXT))
    assert cluster.replicas("engine") == 3


def deployments(values: dict[str, Any]) -> dict[str, dict]:
    return {made["metadata"]["name"]: made for made in render(Release(values)) if made["kind"] == "Deployment"}


def test_rendered_without_a_cluster_a_handed_over_number_has_no_line_and_any_other_has_one():
    """Argo CD renders so. Seen to fail with an empty line, which means 1."""
    parts = [*PARTS, "injector"]
    handed = deployments(merged(BASE, INJECTOR, {part: {"replicas": None} for part in parts}))
    fixed = deployments(merged(BASE, INJECTOR))

    assert len(handed) == len(parts)
    assert [name for name, made in handed.items() if "replicas" in made["spec"]] == []
    assert [name for name, made in fixed.items() if "replicas" not in made["spec"]] == []
