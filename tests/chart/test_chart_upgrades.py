"""Upgrades keep API keys that were added.

Seen to fail: Helm 3 dropped an added tenant without a word, Helm 4 stopped with a conflict.
"""

from __future__ import annotations

import base64
import json

import pytest

from deploy.chart.tools import HELM_3, HELM_4, HELMS
from tests.chart.clusters import running_cluster
from tests.chart.manifests import env_of, one, pod_of
from tests.chart.releases import ENGINE, REDIS, merged
from tests.chart.rendering import Release, helm_says, render
from tests.kit.kube_servers import REAL

SECRET = "cc-context-cache-api-keys"
ADDED = {"sha256": "a" * 64, "tenant": "added", "plain": "keep"}
CLUSTERS = pytest.mark.parametrize(
    "kind",
    ["fake", pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="TEST_KUBECONFIG is not set"))],
)
BOTH = pytest.mark.parametrize("helm", HELMS, ids=lambda helm: helm.version)


def keys_of(cluster) -> dict:
    return json.loads(base64.b64decode(cluster.get("Secret", SECRET)["data"]["api-keys.json"]))


def edit_keys(cluster, text: str) -> None:
    """Write the Secret as `kubectl edit` does."""
    patch = {"data": {"api-keys.json": base64.b64encode(text.encode()).decode()}}
    path = f"{cluster.path('Secret', SECRET)}?fieldManager=kubectl-edit"
    cluster.call("PATCH", path, patch, "application/merge-patch+json")


@BOTH
@CLUSTERS
def test_a_key_that_was_added_to_the_generated_secret_stays(kind, helm):
    with running_cluster(kind) as cluster:
        cluster.helm(helm, "install", values=REDIS)
        made = keys_of(cluster)
        edit_keys(cluster, json.dumps({**made, "keys": [*made["keys"], ADDED]}, indent=2))
        for values in (REDIS, merged(REDIS, {"logLevel": "DEBUG"})):
            cluster.helm(helm, "upgrade", values=values)

        assert keys_of(cluster) == {"keys": [*made["keys"], ADDED]}


@BOTH
def test_the_generated_key_comes_back_and_follows_its_tenant_beside_the_added_one(helm):
    with running_cluster("fake") as cluster:
        cluster.helm(helm, "install", values=REDIS)
        [own] = keys_of(cluster)["keys"]
        changed = merged(REDIS, {"auth": {"tenant": "other"}})
        cluster.helm(helm, "upgrade", values=changed)

        assert keys_of(cluster) == {"keys": [own | {"tenant": "other"}]}


@BOTH
@pytest.mark.parametrize("text", ["no JSON", '{"keys": []} more', "[]", '{"keys": "none"}'])
def test_a_file_of_keys_that_cannot_be_read_is_left_to_its_author(helm, text):
    with running_cluster("fake") as cluster:
        cluster.helm(helm, "install", values=REDIS)
        edit_keys(cluster, text)
        cluster.helm(helm, "upgrade", values=REDIS)

        found = base64.b64decode(cluster.get("Secret", SECRET)["data"]["api-keys.json"]).decode()
        assert found == text


@BOTH
def test_odd_entries_among_the_keys_stop_no_upgrade(helm):
    odd = ["text", 7, None, {"sha256": 5}, {"tenant": ["x"]}]
    with running_cluster("fake") as cluster:
        cluster.helm(helm, "install", values=REDIS)
        made = keys_of(cluster)
        edit_keys(cluster, json.dumps({"keys": [*made["keys"], *odd]}))
        cluster.helm(helm, "upgrade", values=REDIS)

        assert keys_of(cluster) == {"keys": [*made["keys"], *odd]}


@pytest.mark.parametrize("helm", [HELM_3, HELM_4], ids=lambda helm: helm.version)
@pytest.mark.parametrize("name", ["Llama", "meta-llama-3-1-70b", "a", "-a", "a_b", "9b"])
def test_a_name_of_a_model_that_cannot_be_is_refused_with_the_rule(helm, name):
    status, _, complaint = helm_says(Release(merged(REDIS, {"models": {name: {"model": "org/some"}}})), helm)

    assert status != 0
    assert f"models.{name}: " in complaint
    assert "2 to 15 lower-case letters, digits and dashes" in complaint
    assert "servedModelName" in complaint


@BOTH
def test_a_model_s_number_of_pods_may_be_another_manager_s(helm):
    with running_cluster("fake") as cluster:
        values = merged(REDIS, {"models": {"small": {"model": "org/some", "replicas": 2}}})
        cluster.helm(helm, "install", values=values)
        cluster.scale("engine-small", 5, manager="kube-controller-manager")
        cluster.helm(helm, "upgrade", values=merged(values, {"models": {"small": {"replicas": None}}}))

        assert cluster.replicas("engine-small") == 5


def test_an_engine_runs_as_the_account_that_the_values_name_and_mounts_no_token():
    pod = pod_of(render(Release(merged(ENGINE, {"engine": {"serviceAccountName": "kv-store"}}))), "engine").spec

    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("kv-store", False)
    assert "serviceAccountName" not in pod_of(render(Release(ENGINE)), "engine").spec


def test_two_releases_of_one_name_share_no_directory_of_a_node():
    values = merged(ENGINE, {"sidecar": {"storage": {"type": "hostPath", "hostPath": "/mnt/kv"}}})

    def directory(namespace: str) -> str:
        pod = pod_of(render(Release(values, namespace=namespace)), "engine")
        [sidecar] = [container for container in pod.containers if container["name"] == "kv-sidecar"]
        return env_of(sidecar)["SIDECAR_DATA_DIR"]

    assert directory("one") == "/var/lib/context-cache/one/$(SIDECAR_ENDPOINT_NAME)"
    assert directory("two") == "/var/lib/context-cache/two/$(SIDECAR_ENDPOINT_NAME)"


ENDPOINT = [{"name": "AWS_ENDPOINT_URL", "value": "http://minio.data.svc:9000"}]
HIDDEN = [{"name": "AWS_ENDPOINT_URL", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "url"}}}]
TO = [{"podSelector": {"matchLabels": {"app": "minio"}}}]


@pytest.mark.parametrize(
    ("url", "env", "policy", "opened"),
    [
        ("s3://kv/pod", [], {}, {443: None}),
        ("gs://kv", [], {}, {443: None}),
        ("az://kv", [{"name": "AZURE_STORAGE_ENDPOINT", "value": "https://kv.blob.core.windows.net"}], {}, {443: None}),
        ("s3://kv", ENDPOINT, {}, {9000: None}),
        ("s3://kv", [{"name": "AWS_ENDPOINT_URL", "value": "http://minio.data.svc"}], {}, {80: None}),
        ("s3://kv", HIDDEN, {"ports": [9000], "to": TO}, {9000: TO}),
        ("s3://kv", ENDPOINT, {"ports": [9443, 443]}, {9443: None, 443: None}),
        ("file:///mnt/kv", [], {}, {}),
        ("", ENDPOINT, {"ports": [9000]}, {}),
    ],
)
def test_the_engine_reaches_the_shared_store_where_its_address_says(url, env, policy, opened):
    """Seen to fail: the policy cut an endpoint at port 9000, and S3 at 443 where no model is downloaded."""
    values = merged(
        ENGINE,
        {"sidecar": {"settings": {"storeUrl": url} if url else {}, "extraEnv": env}},
        {"networkPolicy": {"modelDownload": {"enabled": False}, "store": policy}},
    )
    rules = one(render(Release(values)), "NetworkPolicy", "-engine")["spec"]["egress"]
    found = {port["port"]: rule.get("to") for rule in rules for port in rule["ports"]}
    before = one(
        render(Release(merged(values, {"sidecar": {"settings": {"storeUrl": ""}}}))), "NetworkPolicy", "-engine"
    )
    closed = {port["port"] for rule in before["spec"]["egress"] for port in rule["ports"]}

    assert {port: to for port, to in found.items() if port not in closed} == opened
