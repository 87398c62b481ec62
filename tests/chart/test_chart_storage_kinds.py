"""A change between kinds of storage makes the engine another workload: acknowledged or refused, never half of it.

Seen to fail: the upgrade deleted all pods of a model, and the claims with their KV, without a word. After a rollback
that had stopped half-way both workloads ran.
"""

from __future__ import annotations

import pytest

from deploy.chart.tools import Helm
from tests.chart.clusters import Cluster, HelmFailed
from tests.chart.releases import ENGINE, REDIS, merged

BASE = merged(REDIS, ENGINE, {"engine": {"replicas": 3}})
ENGINE_NAME = "cc-context-cache-engine"


def stored(kind: str, replaces: str = "", **more: str) -> dict:
    storage = {"type": kind, "replaces": replaces, **more}
    if kind == "hostPath":
        storage["hostPath"] = "/mnt/kv"
    return merged(BASE, {"sidecar": {"storage": storage}})


def engines(cluster: Cluster) -> dict[str, int | None]:
    found = {kind: cluster.replicas("engine", kind) for kind in ("Deployment", "StatefulSet")}
    return {kind: replicas for kind, replicas in found.items() if replicas is not None}


def refused(cluster: Cluster, helm: Helm, values: dict, *words: str) -> None:
    """Upgrade with a change to every part; assert that nothing changed, and why."""
    before = cluster.state()
    with pytest.raises(HelmFailed) as failed:
        cluster.helm(helm, "upgrade", values=merged(values, {"logLevel": "DEBUG"}))
    assert [word for word in words if word not in str(failed.value)] == []
    assert cluster.state() == before


def test_another_workload_needs_a_word_that_names_the_old_one_and_keeps_the_number_of_pods(cluster, helm):
    cluster.helm(helm, "install", values=stored("emptyDir"))
    cluster.scale("engine", 5, manager="vllm-autoscaler")
    says = ("sidecar.storage.replaces: Deployment", f"Deployment {ENGINE_NAME}", "5 pods", "their KV")
    refused(cluster, helm, stored("pvc"), *says)
    refused(cluster, helm, stored("pvc", "StatefulSet"), *says)
    cluster.helm(helm, "upgrade", values=stored("pvc", "Deployment"))
    assert engines(cluster) == {"StatefulSet": 5}

    # The word is for one replacement: it does not allow the way back.
    refused(cluster, helm, stored("emptyDir", "Deployment"), "replaces: StatefulSet", "claims", "whenDeleted")
    cluster.helm(helm, "upgrade", values=stored("emptyDir", "StatefulSet"))
    assert engines(cluster) == {"Deployment": 3}


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [None, 2])
def test_a_number_that_is_handed_over_goes_to_the_new_workload_and_helms_is_the_values(cluster, helm, replicas):
    cluster.helm(helm, "install", values=stored("hostPath"))
    changed = merged(stored("ephemeral", "StatefulSet"), {"engine": {"replicas": replicas}})
    cluster.helm(helm, "upgrade", values=changed)
    assert engines(cluster) == {"Deployment": replicas or 3}
    cluster.helm(helm, "upgrade", values=merged(changed, {"logLevel": "DEBUG"}))
    assert engines(cluster) == {"Deployment": replicas or 3}


@pytest.mark.parametrize(
    ("more", "word"),
    [({"whenDeleted": "Delete"}, "their claims and the KV"), ({"whenDeleted": "Retain"}, "their claims stay")],
)
@pytest.mark.thorough
def test_the_refusal_says_what_becomes_of_the_claims(cluster, helm, more, word):
    cluster.helm(helm, "install", values=stored("pvc", **more))
    refused(cluster, helm, stored("emptyDir"), word)


def test_two_workloads_that_a_failed_rollback_left_are_named_until_one_is_removed(cluster, helm):
    """The rollback creates the Deployment and stops at Valkey's claim, before it would delete the StatefulSet."""
    valkey = {"redis": {"url": ""}}
    cluster.helm(helm, "install", values=merged(stored("emptyDir"), valkey))
    # The way that the chart names for a larger claim.
    cluster.call("DELETE", cluster.path("StatefulSet", "cc-context-cache-valkey"), {"propagationPolicy": "Orphan"})
    grown = merged(valkey, {"valkey": {"storage": {"size": "4Gi"}}})
    cluster.helm(helm, "upgrade", values=merged(stored("pvc", "Deployment"), grown))
    with pytest.raises(HelmFailed, match="updates to statefulset spec"):
        cluster.helm(helm, "rollback", "1")
    assert engines(cluster) == {"Deployment": 3, "StatefulSet": 3}

    for values in (stored("pvc", "Deployment"), stored("emptyDir", "StatefulSet")):
        says = f"Deployment and StatefulSet {ENGINE_NAME} both exist"
        refused(cluster, helm, merged(values, grown), says, "kubectl delete")
    cluster.call("DELETE", cluster.path("Deployment", ENGINE_NAME))
    cluster.helm(helm, "upgrade", values=merged(stored("pvc"), grown))
    assert engines(cluster) == {"StatefulSet": 3}
    cluster.helm(helm, "uninstall", "--wait=false", "--no-hooks")
    assert engines(cluster) == {}
