"""Values that cannot work are refused before anything is installed, in words that name the key."""

from __future__ import annotations

import json

import pytest

from deploy.chart.tools import HELM_3, HELM_4
from tests.chart.releases import ENGINE, INJECTOR, LMCACHE, REDIS, Values, merged
from tests.chart.rendering import CHART, Release, helm_says

GPU = merged(ENGINE, {"engine.gpu.count": 4})

WRONG: dict[str, tuple[Values, str]] = {
    # Values, and the words that the complaint must have.
    "an unknown key": ({"gateways.replicas": 3}, "gateways"),
    "an unknown key in a section": ({"gateway.replica": 3}, "gateway, replica"),
    "an unknown key deep down": (ENGINE | {"engine.gpu.type": "H100"}, "gpu, type"),
    "no pods": ({"gateway.replicas": 0}, "gateway, replicas"),
    "pods as text": ({"contextManager.replicas": "2"}, "contextManager, replicas"),
    "half a pod": ({"envoy.replicas": 1.5}, "envoy, replicas"),
    "no registry of our images": (
        {"image.registry": ""},
        "image.registry is empty, --set image.registry=registry.example.org",
    ),
    "a registry of the engine's image alone": (
        ENGINE | {"image.registry": "", "engine.image.registry": "registry.example.org"},
        "image.registry is empty",
    ),
    "a floating tag": ({"image.tag": "latest"}, "image.tag, changes over time, Set a version"),
    "a floating tag of the engine": (ENGINE | {"engine.image.tag": "latest"}, "engine.image.tag, engine.image.digest"),
    "a floating tag of one of the models": (ENGINE | {"models.small.image.tag": "main"}, "models.small.image.tag"),
    "a registry with a scheme": ({"image.registry": "https://registry.example.org"}, "image, registry"),
    "a registry with a slash at its end": ({"image.registry": "registry.example.org/"}, "image, registry"),
    "a collector without a port": ({"tracing.endpoint": "http://otel.monitoring.svc"}, "tracing, endpoint"),
    "two ports of a pod that are one": (ENGINE | {"discovery.sidecarPort": 8000}, "discovery.sidecarPort"),
    "events on a port of the pod": (
        ENGINE | {"sidecar.settings": {"eventsListen": "0.0.0.0:9090", "eventsTenants": ["*"]}},
        "sidecar.settings.eventsListen, 9091",
    ),
    "one port for vLLM and its turn process": (
        ENGINE | {"discovery.turnPort": 8000},
        "discovery.port, discovery.turnPort",
    ),
    "the port of the sidecar's metrics": ({"discovery.port": 9091}, "discovery.port, 9091"),
    "a model cache where something else is": (
        ENGINE | {"engine.modelCache.mountPath": "/dev/shm"},
        "engine.modelCache.mountPath",
    ),
    "an argument that is a value, in its short form": (
        ENGINE | {"engine.extraArgs": ["-tp=2"]},
        "engine.extraArgs, -tp, .tensorParallelSize",
    ),
    "an argument that is a value, spelt with underscores": (
        ENGINE | {"engine.extraArgs": ["--block_size=32"]},
        "engine.extraArgs, --block_size",
    ),
    "LMCache that nothing can be deleted in": (
        ENGINE | {"engine.turn.lmcacheUrl": "http://lmcache:8080"},
        "engine.turn.lmcacheUrl, engine.turn.lmcacheCoordinatorUrl",
    ),
    "LMCache in injected pods": (LMCACHE | INJECTOR, "engine.turn.lmcacheUrl, injector.enabled"),
    "vLLM's Rust front end": (
        ENGINE | {"engine.pod.extraEnv": [{"name": "VLLM_USE_RUST_FRONTEND", "value": "1"}]},
        "engine.pod.extraEnv, VLLM_USE_RUST_FRONTEND, ids of a chat",
    ),
    "vLLM's Rust front end of one of the models": (
        ENGINE | {"models.small.pod.extraEnv": [{"name": "VLLM_USE_RUST_FRONTEND", "value": "true"}]},
        "models.small.pod.extraEnv, VLLM_USE_RUST_FRONTEND",
    ),
    "a second connector": (
        ENGINE | {"engine.extraArgs": ["--kv-offloading-size=8"]},
        "engine.extraArgs, --kv-offloading-size",
    ),
    "a component taken away by a null": ({"gateway": None}, "gateway: null"),
    "a store taken away by a null": ({"valkey": None}, "valkey: null"),
    "a section taken away by a null": (ENGINE | {"engine.gpu": None}, "engine.gpu: null"),
    "a section within a section taken away by a null": ({"tls.certManager.issuerRef": None}, "issuerRef: null"),
    "settings taken away by a null": ({"sidecar.settings": None}, "sidecar.settings: null"),
    "what only the test looks at taken away by a null": ({"tests": None}, "tests: null"),
    "half a digest": ({"image.digest": "sha256:12"}, "image, digest"),
    "a pull policy of one's own": ({"image.pullPolicy": "Sometimes"}, "pullPolicy"),
    "a repository in capitals": ({"image.repository": "Context-Cache"}, "repository"),
    "a name with capitals": ({"fullnameOverride": "ContextCache"}, "fullnameOverride"),
    "a name that is too long": ({"fullnameOverride": "x" * 41}, "fullnameOverride"),
    "a name that begins with a digit": ({"fullnameOverride": "1st"}, "fullnameOverride"),
    "a label that the chart sets": ({"commonLabels": {"app.kubernetes.io/name": "x"}}, "commonLabels"),
    "a label with a space": ({"commonLabels": {"a b": "c"}}, "commonLabels"),
    "a label of a pod that is a number": ({"gateway.pod.labels.a": 1}, "pod, labels"),
    "a log level of one's own": ({"logLevel": "verbose"}, "logLevel"),
    "two stores": ({"redis.existingSecret": "redis"}, "redis.url, redis.existingSecret"),
    "a store and a secret with one": ({"redis.existingSecret": "r"}, "redis.url, redis.existingSecret"),
    "a store that is no redis": ({"redis.url": "http://redis:6379"}, "redis, url"),
    "a password in the open": ({"redis.url": "redis://user:secret@redis:6379/0"}, "redis, url"),
    "a port out of range": ({"gateway.service.port": 70000}, "service, port"),
    "a service of one's own kind": ({"envoy.service.type": "Internal"}, "service, type"),
    "a mode of one's own": ({"envoy.mode": "sidecar"}, "envoy, mode"),
    "a route without a gateway": ({"envoy.mode": "envoyGateway"}, "envoy.parentRefs"),
    "a pool without a gateway": ({"envoy.mode": "inferencePool"}, "envoy.parentRefs"),
    "an ingress beside a gateway's routes": (
        {"ingress.enabled": True, "envoy": {"mode": "envoyGateway", "parentRefs": [{"name": "public"}]}},
        "ingress.enabled, envoyGateway",
    ),
    "a path of one's own in an ingress": ({"ingress.hosts": [{"host": "a.example.org"}]}, "ingress, hosts"),
    "two autoscalers": (
        {"gateway": {"autoscaling": {"enabled": True}, "keda": {"enabled": True, "prometheusServer": "http://p"}}},
        "gateway.autoscaling, gateway.keda",
    ),
    "keda without prometheus": ({"gateway.keda.enabled": True}, "gateway.keda.prometheusServer"),
    "fewer at most than at least": (
        {"gateway.autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}},
        "gateway.autoscaling, maxReplicas",
    ),
    "a setting that there is not": ({"gateway.settings.tenantRate": 1}, "settings, tenantRate"),
    "a setting out of range": ({"gateway.settings.saturatedKvUsage": 2}, "saturatedKvUsage"),
    "a setting that the chart sets": ({"gateway.settings.port": 1}, "settings, port"),
    "a setting of the manager's that the chart sets": (
        {"contextManager.settings.redisUrl": "redis://a"},
        "settings, redisUrl",
    ),
    "a setting of the sidecar's that is text": ({"sidecar.settings.ioThreads": "4"}, "ioThreads"),
    "a setting of envoy's that there is not": ({"envoy.settings.timeout": 1}, "settings, timeout"),
    "a setting of the turn's out of range": (ENGINE | {"engine.turn.leaseTtlMs": 0}, "leaseTtlMs"),
    "a key of the connector's that there is not": (
        ENGINE | {"engine.connector.minLoadTokens": 1},
        "connector, minLoadTokens",
    ),
    "a setting as an extra variable": ({"gateway.pod.extraEnv": [{"name": "GATEWAY_PORT", "value": "1"}]}, "extraEnv"),
    "a variable without a name": ({"podDefaults.extraEnv": [{"value": "1"}]}, "extraEnv, name"),
    "a model without a model": ({"models.small.replicas": 2}, "models, model"),
    "a model by a name that no object can have": ({"models.Small_1.model": "m"}, "models, Small_1"),
    "a model with a slip in a key": ({"models.small": {"model": "m", "replica": 2}}, "models, replica"),
    "a model that does not spread over its gpus": (
        GPU | {"engine.tensorParallelSize": 3},
        "engine.tensorParallelSize, engine.gpu.count",
    ),
    "blocks that engine blocks do not fill": (ENGINE | {"engine.blockSize": 48}, "engine.blockSize, blockTokens"),
    "blocks that attention on a CPU does not know": (
        ENGINE | {"engine.gpu.count": 0},
        "engine.blockSize, 32, engine.gpu.count",
    ),
    "one name for two models": (
        ENGINE | {"engine.servedModelName": "chat", "models.small": {"model": "x", "servedModelName": "chat"}},
        "models, chat, servedModelName",
    ),
    "a name for a model that is another one": (
        {"models": {"first": {"model": "one"}, "second": {"model": "two", "servedModelName": "one"}}},
        "models, one, two",
    ),
    "memory beyond what the sidecar may have": (
        ENGINE | {"sidecar.memoryLimit": "16Gi"},
        "sidecar.memoryLimit, sidecar.resources.limits.memory",
    ),
    "memory that leaves the sidecar none for itself": (
        ENGINE | {"sidecar.memoryLimit": "5.6Gi"},
        "sidecar.memoryLimit, sidecar.resources.limits.memory, 512Mi",
    ),
    "shared memory beyond what vLLM may have": (
        ENGINE | {"engine.shm.sizeLimit": "48Gi"},
        "engine.shm.sizeLimit, engine.resources.limits.memory",
    ),
    "a disk limit beyond the disk": (
        ENGINE | {"sidecar.diskLimit": "200Gi"},
        "sidecar.diskLimit, sidecar.storage.size",
    ),
    "an amount of nonsense": (ENGINE | {"sidecar.memoryLimit": "lots"}, "memoryLimit"),
    "a disk of one's own kind": ({"sidecar.storage.type": "nfs"}, "storage, type"),
    "a name that a pod of a StatefulSet has no room for": (
        {"fullnameOverride": "f" * 40, "models.fourteen-chars.model": "m", "sidecar.storage.type": "pvc"},
        "models, 52",
    ),
    "a directory of the nodes that is none": (
        ENGINE | {"sidecar.storage.type": "hostPath"},
        "sidecar.storage.hostPath",
    ),
    "a directory of the nodes for injected pods": (
        ENGINE | INJECTOR | {"sidecar.storage": {"type": "hostPath", "hostPath": "/mnt/kv"}},
        "hostPath, injector.enabled",
    ),
    "less than no gpu": (ENGINE | {"engine.gpu.count": -1}, "gpu, count"),
    "tls out of nowhere": ({"tls.enabled": True}, "tls.existingSecret, tls.certManager.enabled"),
    "tls from two places": (
        {
            "tls.enabled": True,
            "tls.existingSecret": "t",
            "tls.certManager.enabled": True,
            "tls.certManager.issuerRef.name": "ca",
        },
        "tls.existingSecret, tls.certManager",
    ),
    "tls without an issuer": ({"tls.enabled": True, "tls.certManager.enabled": True}, "tls.certManager.issuerRef.name"),
    "a duration of nonsense": ({"tls.certManager.duration": "90 days"}, "certManager, duration"),
    "a failure policy of one's own": (INJECTOR | {"injector.failurePolicy": "Retry"}, "injector, failurePolicy"),
    "a webhook that waits too long": (INJECTOR | {"injector.timeoutSeconds": 31}, "timeoutSeconds"),
    "a peer that is text": ({"networkPolicy.clients": ["10.0.0.0/8"]}, "networkPolicy, clients"),
    "a peer with a field that there is not": ({"networkPolicy.clients": [{"cidr": "10.0.0.0/8"}]}, "clients, cidr"),
    "more than all traces": ({"tracing.sampleRatio": 2}, "tracing, sampleRatio"),
    "a collector that is no url": ({"tracing.endpoint": "otel:4317"}, "tracing, endpoint"),
    "resources of nonsense": ({"gateway.resources.limits.memory": "much"}, "resources, memory"),
    "a toleration with a field that there is not": (
        {"envoy.pod.tolerations": [{"key": "a", "op": "Exists"}]},
        "tolerations, op",
    ),
    "no evictions at all": ({"gateway.pod.pdb.maxUnavailable": 0}, "pdb, maxUnavailable"),
    "a key of pods that there is not": ({"gateway.pod.nodeselector": {}}, "pod, nodeselector"),
    "a spread by labels of one's own": (
        {
            "podDefaults.topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
            ]
        },
        "topologySpreadConstraints, labelSelector",
    ),
    "what pods differ in taken away by a null": ({"gateway.pod": None}, "gateway.pod: null"),
    "a monitor's interval of nonsense": ({"monitoring.podMonitor.interval": "often"}, "interval"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("helm", [HELM_3, HELM_4], ids=lambda helm: helm.version)
def test_wrong_values_are_refused_in_words_that_name_the_key(helm, name):
    values, words = WRONG[name]
    status, output, complaint = helm_says(Release(merged(REDIS, values)), helm)

    assert (status != 0, output) == (True, "")
    assert all(word in complaint.replace("/", ".") for word in words.split(", ")), complaint
    assert len(complaint) < 1200, "not readable"


def test_there_are_enough_wrong_values_and_they_are_wrong_for_one_reason():
    """Each becomes right when what is wrong with it is taken away: its base is a release that renders."""
    assert len(WRONG) >= 40
    for base in (REDIS, merged(REDIS, ENGINE), merged(REDIS, INJECTOR), merged(REDIS, GPU)):
        status, _, complaint = helm_says(Release(base))

        assert status == 0, complaint


def sections(node: dict, path: str = ""):
    """Return every schema of an object with its place."""
    if isinstance(node, dict):
        yield path, node
        for key, inner in node.items():
            yield from sections(inner, f"{path}/{key}")
    elif isinstance(node, list):
        for number, inner in enumerate(node):
            yield from sections(inner, f"{path}/{number}")


def test_every_section_refuses_unknown_keys_and_describes_each_one():
    schema = json.loads((CHART / "values.schema.json").read_text())
    named = [(path, node) for path, node in sections(schema) if "properties" in node and "type" in node]

    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert len(named) > 40
    assert [path for path, node in named if node.get("additionalProperties") is not False] == []
    undescribed = [
        f"{path}/{key}"
        for path, node in named
        for key, value in node["properties"].items()
        # What Kubernetes defines is described there.
        if "description" not in value and "items" not in path.split("/") and _is_ours(path)
    ]
    assert undescribed == []


def _is_ours(path: str) -> bool:
    last = path.rpartition("/")[2]
    return last not in {"resources", "affinity", "namespaceSelector", "ipBlock", "podSelector"}
