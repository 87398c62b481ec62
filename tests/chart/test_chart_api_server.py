"""The API server that these tests run Helm against, held to the documented behaviour of a real one.

Each rule here is one that the chart depends on in an upgrade. The same tests run on a real server (`TEST_KUBECONFIG`).
"""

from __future__ import annotations

import pytest

from tests.chart.clusters import Cluster, Refused, running_cluster
from tests.chart.quantities import canonical, value
from tests.chart.small_node import SMALL_NODE, requests_of, scheduled
from tests.kit.kube_servers import SERVERS

APPLY = "application/apply-patch+yaml"
STRATEGIC = "application/strategic-merge-patch+json"
NAME = "cc-context-cache-part"
CONFLICT = 409
INVALID = 422


@pytest.fixture(params=SERVERS, scope="module")
def server(request):
    with running_cluster(request.param) as cluster:
        yield cluster


@pytest.fixture
def cluster(server):
    yield server
    for kind in ("Deployment", "StatefulSet"):
        if server.get(kind, NAME):
            server.call("DELETE", server.path(kind, NAME))


def deployment(replicas: int | None = None, **container: object) -> dict:
    labels = {"app": "part"}
    pod = {"containers": [{"name": "one", "image": "registry.invalid/one:1", **container}]}
    spec = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}}
    if replicas is not None:
        spec["replicas"] = replicas
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": NAME}, "spec": spec}


def stateful_set(size: str) -> dict:
    made = deployment()
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    made["kind"] = "StatefulSet"
    made["spec"] |= {"serviceName": NAME, "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}]}
    return made


def apply(cluster: Cluster, made: dict, manager: str = "helm", *, force: str = "false") -> dict:
    path = f"{cluster.path(made['kind'], NAME)}?fieldManager={manager}&force={force}"
    return cluster.call("PATCH", path, made, APPLY)


def create(cluster: Cluster, made: dict) -> dict:
    return cluster.call("POST", f"{cluster.path(made['kind'])}?fieldManager=helm", made)


def patch(cluster: Cluster, change: dict) -> dict:
    return cluster.call("PATCH", f"{cluster.path('Deployment', NAME)}?fieldManager=helm", change, STRATEGIC)


def owners_of_replicas(cluster: Cluster) -> set[tuple[str, str, str]]:
    found = cluster.get("Deployment", NAME)
    assert found is not None
    return {
        (entry["manager"], entry["operation"], entry.get("subresource", ""))
        for entry in found["metadata"]["managedFields"]
        if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
    }


def test_an_absent_number_of_replicas_becomes_one_and_belongs_to_the_creator_but_not_to_an_applier(cluster):
    assert create(cluster, deployment())["spec"]["replicas"] == 1
    assert owners_of_replicas(cluster) == {("helm", "Update", "")}
    cluster.call("DELETE", cluster.path("Deployment", NAME))
    assert apply(cluster, deployment())["spec"]["replicas"] == 1
    assert owners_of_replicas(cluster) == set()


def test_an_applier_that_leaves_its_field_out_resets_it_to_the_default(cluster):
    apply(cluster, deployment(3))
    assert owners_of_replicas(cluster) == {("helm", "Apply", "")}
    assert apply(cluster, deployment())["spec"]["replicas"] == 1


def test_scaling_takes_the_field_and_another_value_is_then_a_conflict(cluster):
    apply(cluster, deployment(3))
    cluster.scale("part", 10, manager="kube-controller-manager")
    assert owners_of_replicas(cluster) == {("kube-controller-manager", "Update", "scale")}
    with pytest.raises(
        Refused, match=r'conflict with "kube-controller-manager" with subresource "scale".*replicas'
    ) as no:
        apply(cluster, deployment(3))

    assert no.value.code == CONFLICT
    assert cluster.replicas("part") == 10
    assert apply(cluster, deployment())["spec"]["replicas"] == 10


def test_an_applier_of_the_same_value_shares_the_field_and_force_takes_it(cluster):
    apply(cluster, deployment(3))
    cluster.scale("part", 10, manager="kubectl")
    apply(cluster, deployment(10))
    assert owners_of_replicas(cluster) == {("helm", "Apply", ""), ("kubectl", "Update", "scale")}
    assert apply(cluster, deployment(4), force="true")["spec"]["replicas"] == 4
    assert owners_of_replicas(cluster) == {("helm", "Apply", "")}


def test_a_strategic_patch_with_null_resets_the_field_and_one_without_it_keeps_it(cluster):
    create(cluster, deployment(3))
    cluster.scale("part", 10, manager="kubectl")
    patch(cluster, {"spec": {"minReadySeconds": 1}})
    assert cluster.replicas("part") == 10
    assert owners_of_replicas(cluster) == {("kubectl", "Update", "scale")}
    patch(cluster, {"spec": {"replicas": None}})
    assert cluster.replicas("part") == 1
    assert owners_of_replicas(cluster) == {("helm", "Update", "")}


def test_a_strategic_patch_changes_the_item_of_a_list_that_it_names(cluster):
    create(cluster, deployment(env=[{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]))
    change = {"name": "one", "env": [{"name": "B", "value": "3"}, {"name": "A", "$patch": "delete"}]}
    changed = patch(cluster, {"spec": {"template": {"spec": {"containers": [change]}}}})

    [container] = changed["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "B", "value": "3"}]
    assert container["image"] == "registry.invalid/one:1"


def test_a_replaced_object_may_leave_an_owner_out(cluster):
    apply(cluster, deployment(3))
    cluster.scale("part", 10, manager="kubectl")
    found = cluster.get("Deployment", NAME)
    assert found is not None
    metadata = found["metadata"]
    metadata["managedFields"] = [entry for entry in metadata["managedFields"] if "subresource" not in entry]
    cluster.call("PUT", f"{cluster.path('Deployment', NAME)}?fieldManager=kubectl-replace", found)

    assert owners_of_replicas(cluster) == set()
    assert apply(cluster, deployment(3))["spec"]["replicas"] == 3


def test_a_selector_cannot_change(cluster):
    create(cluster, deployment())
    with pytest.raises(Refused, match="field is immutable") as no:
        patch(cluster, {"spec": {"selector": {"matchLabels": {"more": "1"}}}})
    assert no.value.code == INVALID


@pytest.mark.parametrize("size", ["2048Mi", "2097152Ki", "2147483648", "2.0Gi"])
def test_the_claim_of_a_stateful_set_may_be_spelled_anew_but_not_change(cluster, size):
    made = apply(cluster, stateful_set(size))
    asked = made["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]
    assert asked == ("2147483648" if size.isdecimal() else "2Gi")
    apply(cluster, stateful_set("2Gi"))
    with pytest.raises(Refused, match="updates to statefulset spec for fields other than") as no:
        apply(cluster, stateful_set("3Gi"))
    assert no.value.code == INVALID


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("2048Mi", "2Gi"),
        ("1024Gi", "1Ti"),
        ("0.5Ti", "512Gi"),
        ("1.5Ti", "1536Gi"),
        ("2000M", "2G"),
        ("1500M", "1500M"),
        ("0.5Gi", "512Mi"),
        ("512", "512"),
        ("1024", "1024"),
        ("1000", "1k"),
        ("0.5", "500m"),
        ("1000m", "1"),
        ("1e3", "1e3"),
        ("1000e3", "1e6"),
        ("0.1Ki", "102400m"),
        (4, "4"),
        ("0", "0"),
    ],
)
def test_quantities_are_kept_in_their_canonical_form(given, kept):
    assert canonical(given) == kept
    assert value(kept) == value(given)


def test_a_quantity_that_is_none_is_refused():
    with pytest.raises(ValueError, match="quantities must match"):
        canonical("4 GB")


def test_a_pod_that_asks_for_more_than_the_small_node_has_is_pending_with_the_reason():
    made = deployment(2, resources={"requests": {"ephemeral-storage": "100Gi", "memory": "31Gi"}})
    [first, _] = scheduled([made])

    assert (first.phase, first.workload) == ("Pending", NAME)
    assert first.reason == "0/1 nodes are available: 1 Insufficient ephemeral-storage, 1 Insufficient memory."


def test_pods_run_until_the_small_node_is_full():
    made = deployment(3, resources={"requests": {"cpu": "3500m"}, "limits": {"memory": "1Gi"}})

    assert [pod.phase for pod in scheduled([made])] == ["Running", "Running", "Pending"]
    assert scheduled([made])[2].reason == "0/1 nodes are available: 1 Insufficient cpu."
    assert SMALL_NODE == {"cpu": "8", "memory": "30Gi", "ephemeral-storage": "89Gi", "nvidia.com/gpu": "1"}


def test_native_sidecars_add_to_a_pod_and_other_init_containers_do_not():
    pod = {
        "initContainers": [
            {"name": "sidecar", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}},
            {"name": "first", "resources": {"requests": {"cpu": "4"}}},
        ],
        "containers": [{"name": "one", "resources": {"requests": {"cpu": "2", "memory": "1Gi"}}}],
    }
    assert requests_of(pod) == {"cpu": 5, "memory": 1024**3}
