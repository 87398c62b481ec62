"""What the chart gives the injector: pods patched with it are valid, restricted where they were, and of the release."""

from __future__ import annotations

import base64
import json
import ssl

import kubernetes_validate
import pytest

from deploy.chart.tools import HELM_3, HELM_4
from pod_injector.parts import default_parts, read_parts
from pod_injector.pod_patch import injection_patch
from pod_injector.settings import InjectorSettings
from tests.chart.rendering import Release, render
from tests.unit.pod_injector.pods import apply_patch, make_engine, make_pod

VALUES = {"injector": {"enabled": True}, "redis": {"url": "redis://redis:6379/0"}}
TLS = {"tls": {"enabled": True, "existingSecret": "parts-tls"}}
RELEASES = {
    "plain": VALUES,
    "tls": VALUES | TLS,
    "pull secrets": VALUES | {"podDefaults": {"imagePullSecrets": [{"name": "ours"}]}},
    "another port": VALUES | {"discovery": {"port": 8080, "sidecarPort": 50062}},
    "a volume for blocks": VALUES | {"sidecar": {"storage": {"type": "ephemeral", "size": "200Gi"}}},
}
RESTRICTED = {
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
}


def one(documents, kind, name="injector"):
    """Return the release's object of a kind whose name ends in `name`."""
    (found,) = [item for item in documents if item["kind"] == kind and item["metadata"]["name"].endswith(name)]
    return found


def parts_of(documents, directory):
    file = directory / "parts.json"
    file.write_text(one(documents, "ConfigMap")["data"]["parts.json"])
    return read_parts(file)


def pod_for(values):
    port = values.get("discovery", {}).get("port", 8000)
    return make_pod(make_engine(args=["m", "--port", str(port)]), securityContext={"fsGroup": 1000})


@pytest.mark.parametrize("version", ["1.30", "1.32", "1.35", "1.37"])
@pytest.mark.parametrize("name", RELEASES)
def test_a_pod_patched_with_the_charts_parts_is_valid(tmp_path, name, version):
    pod = pod_for(RELEASES[name])
    after = apply_patch(pod, injection_patch(pod, parts_of(render(Release(RELEASES[name])), tmp_path)))

    kubernetes_validate.validate(after, version, strict=True)


@pytest.mark.parametrize("name", RELEASES)
def test_every_mount_of_an_injected_pod_has_its_volume(tmp_path, name):
    pod = pod_for(RELEASES[name])
    spec = apply_patch(pod, injection_patch(pod, parts_of(render(Release(RELEASES[name])), tmp_path)))["spec"]

    volumes = [volume["name"] for volume in spec["volumes"]]
    containers = [*spec["containers"], *spec["initContainers"]]
    mounted = {mount["name"] for container in containers for mount in container["volumeMounts"]}
    assert len(volumes) == len(set(volumes))
    assert mounted == set(volumes)


@pytest.mark.parametrize("name", RELEASES)
def test_what_is_added_satisfies_pod_security_restricted(tmp_path, name):
    parts = parts_of(render(Release(RELEASES[name])), tmp_path)
    pod = pod_for(RELEASES[name])
    after = apply_patch(pod, injection_patch(pod, parts))

    turn = after["spec"]["containers"][-1]
    for container in (*after["spec"]["initContainers"], turn):
        context = container["securityContext"]
        assert context.items() >= RESTRICTED.items()
        assert context["capabilities"]["drop"] == ["ALL"]
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["resources"]["requests"]
    assert not [volume for volume in after["spec"]["volumes"] if "hostPath" in volume]


def test_the_releases_service_selects_an_injected_pod(tmp_path):
    documents = render(Release(VALUES))
    pod = pod_for(VALUES)
    labels = apply_patch(pod, injection_patch(pod, parts_of(documents, tmp_path)))["metadata"]["labels"]

    selector = one(documents, "Service", "engines")["spec"]["selector"]
    assert labels.items() >= selector.items()


def test_with_mutual_tls_the_engine_serves_https_and_is_probed_by_it(tmp_path):
    probe = {"httpGet": {"path": "/health", "port": 8000}}
    pod = make_pod(make_engine(readinessProbe=probe))
    after = apply_patch(pod, injection_patch(pod, parts_of(render(Release(RELEASES["tls"])), tmp_path)))

    engine = after["spec"]["containers"][0]
    assert any("--ssl-certfile" in item.get("value", "") for item in engine["env"])
    assert engine["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert "context-cache-tls" in {mount["name"] for mount in engine["volumeMounts"]}


def test_the_connector_of_an_injected_pod_is_that_of_the_charts_own_engine(tmp_path):
    documents = render(Release(VALUES | {"engine": {"model": "m"}}))
    parts = parts_of(documents, tmp_path)
    own = one(documents, "Deployment", "engine")["spec"]["template"]["spec"]

    config = json.loads(parts.arguments[parts.arguments.index("--kv-transfer-config") + 1])
    args = own["containers"][0]["args"]
    said = next(arg.partition("=")[2] for arg in args if arg.startswith("--kv-transfer-config="))
    assert config == json.loads(said)
    assert parts.sidecar["env"] == own["initContainers"][0]["env"]
    assert parts.turn["env"] == own["containers"][1]["env"]


@pytest.mark.parametrize("helm", [HELM_3, HELM_4], ids=["helm 3", "helm 4"])
def test_the_api_server_believes_the_certificate_that_the_chart_made(tmp_path, helm):
    documents = render(Release(VALUES), helm)
    secret = one(documents, "Secret", "injector-tls")["data"]
    webhook = one(documents, "MutatingWebhookConfiguration")["webhooks"][0]
    for key in ("tls.crt", "tls.key"):
        (tmp_path / key).write_bytes(base64.b64decode(secret[key]))
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    client_context = ssl.create_default_context(cadata=base64.b64decode(webhook["clientConfig"]["caBundle"]).decode())
    service = webhook["clientConfig"]["service"]

    host = f"{service['name']}.{service['namespace']}.svc"
    assert shake_hands(client_context, server_context, host)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(client_context, server_context, "other.llm.svc")


def shake_hands(client_context, server_context, host):
    """Connect in memory as the API server would."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
    waiting = [client, server_context.wrap_bio(to_server, to_client, server_side=True)]
    while waiting:
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                pass
    return client.getpeercert()


def test_with_the_webhook_down_pods_start_all_the_same():
    webhook = one(render(Release(VALUES)), "MutatingWebhookConfiguration")["webhooks"][0]

    # A real API server (1.36) then started the rollout without the sidecar (docs/operations/pod-injector.md).
    assert webhook["failurePolicy"] == "Ignore"
    assert webhook["timeoutSeconds"] <= 10
    assert webhook["objectSelector"] == {"matchLabels": {"context-cache.io/inject": "true"}}
    assert webhook["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "llm"}}
    assert webhook["sideEffects"] == "None"
    assert webhook["rules"] == [
        {
            "apiGroups": [""],
            "apiVersions": ["v1"],
            "operations": ["CREATE"],
            "resources": ["pods"],
            "scope": "Namespaced",
        }
    ]


def test_the_webhook_reaches_the_injectors_port_and_the_process_its_files():
    documents = render(Release(VALUES))
    service = one(documents, "Service")
    container = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    env = {item["name"].removeprefix("INJECTOR_").lower(): item["value"] for item in container["env"]}

    settings = InjectorSettings(**env)
    assert ports[service["spec"]["ports"][0]["targetPort"]] == settings.port
    assert ports["metrics"] == settings.metrics_port
    files = (settings.cert_file, settings.key_file, settings.parts_file)
    assert all(any(file.is_relative_to(mount) for mount in mounts) for file in files)
    assert settings.host == settings.metrics_host == "0.0.0.0"
    assert set(env) <= set(InjectorSettings.model_fields)


def test_two_releases_of_one_name_in_two_namespaces_have_two_webhooks():
    names = {
        one(render(Release(VALUES, namespace=namespace)), "MutatingWebhookConfiguration")["metadata"]["name"]
        for namespace in ("a", "b")
    }

    assert len(names) == 2


def test_default_parts_decide_as_those_of_the_charts_default_values(tmp_path):
    """`doctor --would-inject` without a release: names, ports, mounts and arguments are the chart's."""

    def deciding(parts):
        ours = (parts.payload, parts.sidecar, parts.turn)
        ports = [port["containerPort"] for container in ours for port in container.get("ports", [])]
        names = [container["name"] for container in ours], [volume["name"] for volume in parts.volumes]
        options = [word for word in parts.arguments if word.startswith("--")]
        return names, ports, parts.port, parts.https, parts.mounts, options, parts.python_path, parts.engines

    chart_s = parts_of(render(Release(VALUES, name="context-cache")), tmp_path)

    assert deciding(default_parts()) == deciding(chart_s)
