"""A release on a cluster: installed, upgraded, uninstalled by both Helms. What was generated stays what it was."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest

from tests.chart.api_server import ApiServer, running_api_server
from tests.chart.manifests import identity, pods
from tests.chart.releases import ENGINE, INJECTOR, REDIS, RELEASES, merged
from tests.chart.rendering import CHART, EACH_HELM, Release, render, run_helm

VALKEY = {"redis": {"url": ""}}


@pytest.fixture(params=EACH_HELM, ids=lambda helm: helm.version)
def helm(request, tmp_path):
    """Run one version of Helm against an empty cluster: `helm(command, …, values)`; the cluster is `helm.cluster`."""
    with running_api_server() as cluster:

        class Runner:
            """Helm with a cluster."""

            def __init__(self, found: ApiServer) -> None:
                self.cluster = found

            def __call__(self, command: str, *arguments: str, values: dict | None = None) -> str:
                env = {"KUBECONFIG": str(cluster.kubeconfig(tmp_path / "kubeconfig", "llm"))}
                given = [] if values is None else ["--values", "-"]
                done = run_helm(
                    request.param,
                    *(command, "cc", *arguments, "--namespace", "llm", *given),
                    stdin=json.dumps(values or {}),
                    env=env,
                )
                assert done.returncode == 0, done.stderr
                return done.stdout

        yield Runner(cluster)


def generated(cluster: ApiServer) -> dict[str, str]:
    """Return every value of every Secret that the chart made."""
    return {
        f"{name}/{key}": value
        for name, secret in cluster.of_kind("Secret").items()
        for key, value in secret["data"].items()
    }


CHANGES = ["--disable-openapi-validation"]


def test_an_upgrade_keeps_every_generated_secret(helm):
    before = merged(VALKEY, INJECTOR, ENGINE)
    helm("install", str(CHART), *CHANGES, values=before)
    first = generated(helm.cluster)
    webhooks = helm.cluster.of_kind("MutatingWebhookConfiguration")
    helm("upgrade", str(CHART), *CHANGES, values=merged(before, {"gateway": {"replicas": 3}, "logLevel": "DEBUG"}))

    assert generated(helm.cluster) == first
    assert len(first) >= 6
    assert [made["webhooks"][0]["clientConfig"] for made in webhooks.values()] == [
        made["webhooks"][0]["clientConfig"] for made in helm.cluster.of_kind("MutatingWebhookConfiguration").values()
    ]
    replicas = {name: made["spec"].get("replicas") for name, made in helm.cluster.of_kind("Deployment").items()}
    assert replicas["cc-context-cache-gateway"] == 3


def test_another_release_gets_secrets_of_its_own(helm):
    helm("install", str(CHART), *CHANGES, values=VALKEY)
    first = generated(helm.cluster)
    helm.cluster.objects.clear()
    helm("install", str(CHART), *CHANGES, values=VALKEY)
    second = generated(helm.cluster)

    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())


def test_a_secret_that_lost_a_key_gets_that_one_again_and_keeps_the_others(helm):
    helm("install", str(CHART), *CHANGES, values=VALKEY)
    first = generated(helm.cluster)
    del helm.cluster.objects["secrets", "cc-context-cache-signing"]
    helm("upgrade", str(CHART), *CHANGES, values=VALKEY)
    second = generated(helm.cluster)

    assert {key for key in first if first[key] != second[key]} == {"cc-context-cache-signing/secret"}


def test_the_generated_key_opens_the_gateway_and_the_secrets_are_long_enough(helm):
    helm("install", str(CHART), *CHANGES, values=merged(REDIS, {"auth": {"tenant": "search"}}))
    secrets = {name: base64.b64decode(value) for name, value in generated(helm.cluster).items()}
    keys = json.loads(secrets["cc-context-cache-api-keys/api-keys.json"])
    key = secrets["cc-context-cache-api-key/api-key"]

    assert keys == {"keys": [{"sha256": hashlib.sha256(key).hexdigest(), "tenant": "search"}]}
    assert len(key) >= 32
    assert len(secrets["cc-context-cache-signing/secret"]) >= 32


def test_uninstall_leaves_nothing(helm):
    helm("install", str(CHART), *CHANGES, values=RELEASES["everything"].values)
    installed = helm.cluster.left()
    helm("uninstall", "--wait=false", "--no-hooks")

    assert len(installed) > 30
    assert helm.cluster.left() == set()


def test_what_is_installed_is_what_is_rendered(helm):
    release = Release(merged(REDIS, ENGINE))
    helm("install", str(CHART), *CHANGES, values=release.values)
    rendered = {
        identity(document)
        for document in render(release)
        if "helm.sh/hook" not in document["metadata"].get("annotations", {})
    }

    assert {
        (made["kind"], made["metadata"]["name"])
        for key, made in helm.cluster.objects.items()
        if key in helm.cluster.left()
    } == rendered


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("defaults", ["kubectl", "port-forward", "cc-context-cache-envoy"]),
        ("no envoy", ["port-forward", "cc-context-cache-gateway"]),
        ("envoy gateway", ["llm.example.org"]),
        ("inference pool", ["llm.example.org"]),
        ("existing secrets", ["keys"]),
        ("valkey", ["valkey"]),
        ("engine", ["kv-sidecar", '"ephemeral-storage":"20Gi"', '"nvidia.com/gpu":1']),
        ("injector", ["kv-sidecar", '"ephemeral-storage":"20Gi"']),
    ],
)
def test_the_notes_tell_the_story_in_three_calls(helm, name, words):
    notes = helm("install", str(CHART), *CHANGES, values=RELEASES[name].values).partition("NOTES:")[2]

    assert notes.count("curl") >= 3
    assert "/v1/context" in notes
    assert "session_id" in notes
    assert [word for word in words if word.lower() not in notes.lower()] == []
    assert "<no value>" not in notes


def test_notes_show_no_secret(helm):
    notes = helm("install", str(CHART), *CHANGES, values=VALKEY)

    for value in generated(helm.cluster).values():
        assert value not in notes
        assert base64.b64decode(value).decode() not in notes


def test_the_test_hook_is_a_restricted_pod_that_tells_the_story_and_goes_by_itself():
    hooks = [
        document
        for document in render(RELEASES["defaults"])
        if "test" in document["metadata"].get("annotations", {}).get("helm.sh/hook", "")
    ]
    [pod] = [pod for pod in pods(hooks) if pod.owner.startswith("Job/")]
    [container] = pod.containers
    words = [*container.get("command", []), *container.get("args", [])]

    assert "--story" in words
    assert "doctor" in words
    assert pod.spec["restartPolicy"] == "Never"
    assert "before-hook-creation" in hooks[0]["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    assert hooks[0]["spec"]["ttlSecondsAfterFinished"] == 3600
    assert hooks[0]["spec"]["backoffLimit"] == 0


@pytest.mark.parametrize("name", ["no tests", "existing secrets"])
def test_without_tests_or_without_a_key_there_is_no_hook(name):
    assert [document for document in render(RELEASES[name]) if document["kind"] in {"Job", "Pod"}] == []


def replicas_of(cluster: ApiServer) -> dict[str, int | None]:
    """Return what Deployments say of their replicas, by the end of their names."""
    made = cluster.of_kind("Deployment")
    return {name.removeprefix("cc-context-cache-"): found["spec"].get("replicas") for name, found in made.items()}


@pytest.mark.parametrize(
    "scaler", [{"autoscaling": {"enabled": True}}, {"keda": {"enabled": True, "prometheusServer": "http://p:9090"}}]
)
def test_an_autoscaler_that_is_new_finds_the_pods_that_there_are(helm, scaler):
    """Without a line Kubernetes takes 1 until the autoscaler acts."""
    helm("install", str(CHART), *CHANGES, values=merged(REDIS, {"gateway": {"replicas": 4}}))
    helm("upgrade", str(CHART), *CHANGES, values=merged(REDIS, {"gateway": scaler}))
    kept = replicas_of(helm.cluster)["gateway"]
    helm.cluster.of_kind("Deployment")["cc-context-cache-gateway"]["spec"]["replicas"] = 1
    helm("upgrade", str(CHART), *CHANGES, values=merged(REDIS, {"gateway": scaler}))

    assert kept == 4
    assert replicas_of(helm.cluster)["gateway"] == 2


PVC = merged(REDIS, ENGINE, {"sidecar": {"storage": {"type": "pvc"}}})


@pytest.mark.parametrize(
    "storage", [{"size": "200Gi"}, {"storageClassName": "fast"}, {"type": "hostPath", "hostPath": "/var/lib/kv"}]
)
def test_a_change_of_the_engines_claims_is_refused_before_anything_changes(helm, storage):
    """Seen to fail: gateways and managers were upgraded, then the StatefulSet was refused."""
    helm("install", str(CHART), *CHANGES, values=PVC)
    before = json.dumps(helm.cluster.of_kind("Deployment"), sort_keys=True)
    changed = merged(PVC, {"sidecar": {"storage": storage}, "logLevel": "DEBUG"})

    with pytest.raises(AssertionError, match=r"sidecar.storage: Kubernetes cannot change"):
        helm("upgrade", str(CHART), *CHANGES, values=changed)
    assert json.dumps(helm.cluster.of_kind("Deployment"), sort_keys=True) == before
    helm("upgrade", str(CHART), *CHANGES, values=PVC)


@pytest.mark.parametrize(
    ("storage", "named"),
    [
        ({"size": "20Gi"}, "valkey.storage: Kubernetes cannot change"),
        ({"storageClassName": "fast"}, "valkey.storage: Kubernetes cannot change"),
        ({"enabled": False}, "valkey.storage.enabled"),
    ],
)
def test_a_change_of_valkey_s_volume_is_refused_before_anything_changes(helm, storage, named):
    helm("install", str(CHART), *CHANGES, values=VALKEY)
    before = json.dumps(helm.cluster.of_kind("Deployment"), sort_keys=True)
    changed = merged(VALKEY, {"valkey": {"storage": storage}, "logLevel": "DEBUG"})

    with pytest.raises(AssertionError, match=named):
        helm("upgrade", str(CHART), *CHANGES, values=changed)
    assert json.dumps(helm.cluster.of_kind("Deployment"), sort_keys=True) == before
    helm("upgrade", str(CHART), *CHANGES, values=VALKEY)
