"""What values do: no key is without an effect, and each arrives where it belongs."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deploy.chart.tools import HELMS
from tests.chart.manifests import env_of, name_of, of_kind, one, pod_of, pods
from tests.chart.releases import (
    DIGEST,
    ENGINE,
    ENVOY_GATEWAY,
    EVERYTHING,
    INGRESS,
    INJECTOR,
    LMCACHE,
    NO_ENVOY,
    OF_POD,
    REDIS,
    RELEASES,
    TLS_SECRET,
    Values,
    merged,
)
from tests.chart.rendering import CHART, EACH_HELM, REGISTRY, Release, helm_says, render, run_helm

KEDA: Values = {"gateway": {"keda": {"enabled": True, "prometheusServer": "http://prometheus:9090"}}}
BASES: list[Values] = [
    {**EVERYTHING, "redis": {"url": ""}},
    merged(REDIS, ENGINE, INJECTOR, KEDA, {"redis": {"tlsSecret": "t"}}),
    merged(REDIS, ENVOY_GATEWAY, TLS_SECRET, {"envoy": {"parentRefs": [{"name": "here"}]}}),
    merged(REDIS, LMCACHE),
    merged(REDIS, NO_ENVOY, {"auth": {"existingSecret": "keys"}, "tests": {"apiKeySecret": "key"}}),
    merged(REDIS, {"signing": {"existingSecret": "s"}, "networkPolicy": {"clients": [{"podSelector": {}}]}}),
    ENGINE
    | {
        "redis.url": "",
        "redis.existingSecret": "r",
        "engine.modelCache.existingClaim": "m",
        "engine.hfTokenSecret.name": "hf",
        "engine.gpu.count": 0,
        "engine.blockSize": 32,
        "envoy.tls.existingSecret": "f",
        "envoy.service.type": "LoadBalancer",
        "sidecar.storage.type": "pvc",
    },
    merged(REDIS, INJECTOR, {"injector": {"tls": {"existingSecret": "w", "caBundle": "YQ=="}}}),
]
WITHOUT_EFFECT = {
    "global": "for umbrella charts",
    "auth.tenant": "inside a Secret: test_chart_install.py",
    "sidecar.storage.replaces": "it is about a workload in the cluster: test_chart_storage_kinds.py",
}
SAMPLES: dict[str, Any] = {
    "commonLabels": {"example.org/a": "b"},
    "clusterDomain": "corp.internal",
    "logLevel": "DEBUG",
    "fullnameOverride": "other",
    "nameOverride": "other",
    "redis.url": "redis://other:6379/0",
    "tracing.sampleRatio": 0.5,
    "tracing.endpoint": "http://other:4317",
    "engine.model": "other",
    "engine.replicas": 2,
    "envoy.parentRefs": [{"name": "other"}],
    "envoy.hostnames": ["other.example.org"],
    "ingress.hosts": ["other.example.org"],
    "ingress.tls": [{"secretName": "other"}],
    "extraObjects": ["apiVersion: v1\nkind: ConfigMap\nmetadata: {name: other}\n"],
    "envoy.service.loadBalancerSourceRanges": ["10.1.0.0/16"],
    "gateway.service.loadBalancerSourceRanges": ["10.1.0.0/16"],
    "gateway.keda.prometheusServer": "http://other:9090",
    "gateway.keda.threshold": "7",
    "image.digest": DIGEST,
    "podDefaults.imagePullSecrets": [{"name": "other"}],
    "podDefaults.topologySpreadConstraints": [],
    "injector.tls.caBundle": "Yg==",
    "monitoring.prometheusRule.runbookUrl": "https://other",
    "networkPolicy.apiServer.cidrs": ["10.1.0.0/16"],
    "networkPolicy.apiServer.ports": [8443],
    "networkPolicy.dns.ports": [5353],
    "networkPolicy.store.ports": [9000],
    "sidecar.peerNetworks": ["10.1.0.0/16"],
    "sidecar.storage.type": "ephemeral",
    "sidecar.diskLimit": "10Gi",
    "sidecar.memoryLimit": "1Gi",
    "sidecar.storage.size": "500Gi",
    "engine.shm.sizeLimit": "9Gi",
    "engine.extraArgs": ["--other"],
    "engine.modelCache.mountPath": "/other",
    "engine.modelCache.size": "7Gi",
    "engine.modelCache.emptyDirSize": "7Gi",
    "engine.tensorParallelSize": 2,
    "engine.gpu.count": 2,
    "engine.blockSize": 32,
    "valkey.maxMemory": "100mb",
    "valkey.storage.size": "9Gi",
    "tls.certManager.duration": "1000h",
    "tls.certManager.renewBefore": "10h",
    "tls.serverName": "other",
    "models": {"other": {"model": "other"}},
    "sidecar.storage.hostPath": "/other",
}
"""Values for keys whose schema does not say enough."""
BESIDE: dict[str, Values] = {
    "gateway.service.loadBalancerSourceRanges": {"gateway": {"service": {"type": "LoadBalancer"}}},
    **{f"ingress.{key}": INGRESS for key in ("className", "annotations", "hosts", "tls")},
    "networkPolicy.eventSubscribers": {"sidecar.settings": {"eventsListen": "0.0.0.0:5561", "eventsTenants": ["*"]}},
    "networkPolicy.store.ports": {"sidecar": {"settings": {"storeUrl": "s3://kv"}}},
    "networkPolicy.store.to": {"sidecar": {"settings": {"storeUrl": "s3://kv"}}},
    "engine.tensorParallelSize": {"engine": {"gpu": {"count": 2}}},
    "redis.existingSecret": {"redis": {"url": ""}},
    "sidecar.storage.hostPath": {"sidecar": {"storage": {"type": "hostPath"}}},
    "gateway.keda.enabled": {"gateway": {"keda": {"prometheusServer": "http://p"}}},
    "tls.enabled": {"tls": {"existingSecret": "parts"}},
    "tls.certManager.enabled": {"tls.enabled": True, "tls.existingSecret": "", "tls.certManager.issuerRef.name": "ca"},
}
"""What some keys need beside them."""
WITHOUT = {
    # What a key takes the place of.
    "redis.existingSecret": {"redis": {"url": "redis://a:6379/0"}},
    "sidecar.storage.hostPath": {"sidecar": {"storage": {"type": "hostPath", "hostPath": "/mnt/kv"}}},
    "tls.certManager.enabled": {"tls": {"enabled": True, "existingSecret": "parts"}},
}
RANDOM = re.compile(
    r"^ +(secret|api-key|api-keys\.json|password|redis-url|valkey\.conf|tls\.crt|tls\.key|checksum/secret): .*$"
    r"|^ +caBundle: .{200,}$",
    re.MULTILINE,
)
"""Lines with what is random."""


def schema() -> dict[str, Any]:
    """Return the schema of the values."""
    return json.loads((CHART / "values.schema.json").read_text())


def leaves(root: dict, node: dict, path: str = "") -> Iterator[tuple[str, dict]]:
    """Return every key that has no keys of its own."""
    if "$ref" in node:
        node = {**root["$defs"][node["$ref"].rpartition("/")[2]], **{k: v for k, v in node.items() if k != "$ref"}}
    inner = node.get("properties")
    settings = path.rpartition(".")[2] in {
        "settings",
        "turn",
        "connector",
        "resources",
        "payloadResources",
        "turnResources",
        "attendantResources",
        "affinity",
    }
    if inner is None or settings or path.endswith("namespaceSelector"):
        yield path, node
        return
    for key, value in inner.items():
        yield from leaves(root, value, f"{path}.{key}" if path else key)


KEYS = dict(leaves(schema(), schema())) if (CHART / "values.schema.json").exists() else {}


def other_values(path: str, node: dict, default: Any) -> list[Any]:
    """Return values for a key that are not its default."""
    last = path.rpartition(".")[2]
    by_name: dict[str, Any] = {
        "settings": {"logLevel": "DEBUG"},
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "tolerations": [{"key": "other", "operator": "Exists"}],
        "resources": {"limits": {"memory": "900Gi"}},
        "payloadResources": {"limits": {"memory": "900Gi"}},
        "turnResources": {"limits": {"memory": "900Gi"}},
        "attendantResources": {"limits": {"memory": "900Gi"}},
        "extraEnv": [{"name": "OTHER", "value": "1"}],
        "turn": {"leaseTtlMs": 20000},
        "connector": {"deadline_factor": 7},
        "interval": "7s",
        "digest": DIGEST,
        "pod": {"nodeSelector": {"other": "other"}},
        "securityContext": {"runAsUser": 7},
        "containerSecurityContext": {"privileged": False},
        "namespaceSelector": {"matchLabels": {"other": "other"}},
        "maxUnavailable": 2,
    }
    settings = {
        "gateway.settings": {"tenantBurst": 7},
        "contextManager.settings": {"tenantContextsMax": 7},
        "sidecar.settings": {"ioThreads": 7},
        "envoy.settings": {"idleTimeoutS": 7},
        "injector.settings": {"maxRequests": 7},
    }
    if path in SAMPLES:
        return [SAMPLES[path]]
    if path in settings or last in by_name:
        return [settings.get(path, by_name.get(last))]
    if "enum" in node:
        return [value for value in node["enum"] if value != default]
    if path.startswith("networkPolicy.extra"):
        return [[{"ports": [{"port": 7}]}]]
    kind = node.get("type")
    if kind == "array":
        return [[{"podSelector": {"matchLabels": {"other": "other"}}}]]
    by_type = {"boolean": not default, "object": {"other": "other"}, "string": "other"}
    if kind in by_type:
        return [by_type[kind]]
    return [(default or 0) + 1]


@functools.cache
def settled(values: str) -> str | None:
    """Return a rendering without what is random, or nothing where the values are refused."""
    status, output, _ = helm_says(Release(json.loads(values)))
    return None if status != 0 else RANDOM.sub("", output)


@pytest.fixture(scope="module")
def defaults() -> Values:
    """The defaults of the values."""
    return yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.mark.thorough
@pytest.mark.parametrize("path", [path for path in KEYS if path not in WITHOUT_EFFECT])
def test_every_value_has_an_effect(path, defaults):
    default: Any = defaults
    for key in path.split("."):
        default = default.get(key) if isinstance(default, dict) else None
    beside = BESIDE.get(path, {})
    for value in other_values(path, KEYS[path], default):
        for base in BASES:
            before = settled(json.dumps(merged(base, WITHOUT.get(path, beside))))
            after = settled(json.dumps(merged(base, beside, {path: value})))
            if before is not None and after is not None and after != before:
                return
    pytest.fail(f"{path}: nothing changes, whatever it is")


def test_the_bases_render():
    assert [helm_says(Release(merged(base)))[2] for base in BASES] == [""] * len(BASES)


@pytest.mark.parametrize(
    ("component", "key", "release"),
    [
        ("gateway", "gateway", "gateway pods"),
        ("context-manager", "contextManager", "context-manager pods"),
        ("envoy", "envoy", "envoy pods"),
        ("engine", "engine", "engine pods"),
        ("injector", "injector", "injector pods"),
    ],
)
def test_the_block_of_a_pod_arrives_in_it_and_in_no_other(component, key, release):
    documents = render(RELEASES[release])
    pod = pod_of(documents, component)
    container = next(one for one in pod.containers if one["name"] in {component, "vllm"})
    wanted = RELEASES[release].values[key]

    assert OF_POD["annotations"].items() <= pod.annotations.items()
    assert OF_POD["labels"].items() <= pod.labels.items()
    for field in ("nodeSelector", "affinity", "priorityClassName", "tolerations"):
        assert pod.spec[field] == OF_POD[field], field
    assert env_of(container)["TZ"] == "UTC"
    assert container["resources"]["limits"]["memory"] == wanted["resources"]["limits"]["memory"]
    others = [other for other in pods(documents) if other.component != component]
    assert not [other.owner for other in others if "priorityClassName" in other.spec or "TZ" in str(other.spec)]


@pytest.mark.parametrize("helm", EACH_HELM)
def test_a_default_of_pods_arrives_in_each_and_a_component_overrides_it(helm):
    """Seen failing with `merge` for `mergeOverwrite`: the gateway kept every default."""
    made = {pod.component: pod for pod in pods(render(RELEASES["all pods"], helm))}
    other = {pod.component: pod for pod in pods(render(RELEASES["pods that differ"], helm))}
    gateway = other.pop("gateway")

    assert made.keys() == {"gateway", "context-manager", "envoy", "engine", "injector", "test"}
    for name, pod in [*made.items(), *other.items()]:
        assert OF_POD["labels"].items() <= pod.labels.items()
        assert pod.spec["nodeSelector"] == OF_POD["nodeSelector"]
        assert pod.spec["priorityClassName"] == "llm-serving"
        assert [one["key"] for one in pod.spec["tolerations"]] == [
            "nvidia.com/gpu" if name == "engine" else "dedicated"
        ]
        assert [one["maxSkew"] for one in pod.spec["topologySpreadConstraints"]] == [1, 1]
        assert ("TZ" in str(pod.spec)) == (name != "test")
    assert gateway.labels["example.org/tier"] == "other"
    assert gateway.spec["nodeSelector"] == {**OF_POD["nodeSelector"], "pool": "gateways"}
    assert not gateway.spec.keys() & {"tolerations", "priorityClassName", "topologySpreadConstraints"}
    assert "TZ" not in str(gateway.spec)
    budgets = [name_of(budget) for budget in of_kind(render(RELEASES["pods that differ"], helm), "PodDisruptionBudget")]
    assert sorted(budgets) == [
        f"cc-context-cache-{name}" for name in ("context-manager", "engine", "envoy", "injector")
    ]


@pytest.mark.parametrize("helm", HELMS, ids=lambda helm: helm.version)
def test_the_packaged_chart_renders_the_same(helm, tmp_path):
    packed = run_helm(helm, "package", str(CHART), "--destination", str(tmp_path))
    assert packed.returncode == 0, packed.stderr
    [archive] = tmp_path.glob("context-cache-*.tgz")
    values = {**REDIS, "auth": {"existingSecret": "k"}, "signing": {"existingSecret": "s"}}
    texts = [
        run_helm(helm, "template", "cc", where, "--values", "-", stdin=json.dumps(values)).stdout
        for where in (str(CHART), str(archive))
    ]

    assert texts[0] == texts[1] != ""


def test_images_come_from_where_the_values_say():
    images = {container["image"] for pod in pods(render(RELEASES["own registry"])) for container in pod.containers}
    fixed = {container["image"] for pod in pods(render(RELEASES["images by digest"])) for container in pod.containers}

    assert {image.partition(":5000/")[0] for image in images} == {"registry.example.org"}
    assert fixed == {
        f"{REGISTRY}/context-cache@{DIGEST}",
        f"{REGISTRY}/context-cache-vllm@{DIGEST}",
        f"docker.io/envoyproxy/envoy@{DIGEST}",
    }


def vllm_of(release: str) -> tuple[dict, list[str]]:
    """Return vLLM's pod and its words."""
    pod = pod_of(render(RELEASES[release]), "engine")
    vllm = next(one for one in pod.spec["containers"] if one["name"] == "vllm")
    return {**vllm, "pod": pod}, [*vllm.get("command", []), *vllm.get("args", [])]


@pytest.mark.parametrize(
    ("release", "resource", "count"),
    [
        ("engine", "nvidia.com/gpu", 1),
        ("engine on four gpus", "nvidia.com/gpu", 4),
        ("engine on amd", "amd.com/gpu", 8),
    ],
)
def test_the_engine_asks_for_its_gpus(release, resource, count):
    vllm, _ = vllm_of(release)

    assert vllm["resources"]["limits"][resource] == count


def test_an_engine_without_gpu_asks_for_none():
    vllm, _ = vllm_of("engine without gpu")

    assert not [name for name in vllm["resources"]["limits"] if "gpu" in name]


def test_vllm_is_told_what_the_values_say():
    _, words = vllm_of("engine settings")
    _, on_four = vllm_of("engine on four gpus")
    text = " ".join(words)

    for part in (
        "--served-model-name",
        "llama",
        "--block-size",
        "32",
        "--enable-chunked-prefill",
        "--shutdown-timeout",
    ):
        assert part in text, part
    assert "--enable-prompt-tokens-details" in words
    assert "--tensor-parallel-size" in " ".join(on_four)


def test_the_disk_of_the_sidecar_is_what_the_values_say():
    def volume(release: str) -> dict:
        pod = pod_of(render(RELEASES[release]), "engine")
        sidecar = next(one for one in pod.containers if one["name"] == "kv-sidecar")
        name = next(m["name"] for m in sidecar["volumeMounts"] if m["mountPath"] == "/var/lib/context-cache")
        return next(volume for volume in pod.spec["volumes"] if volume["name"] == name)

    ephemeral = volume("sidecar on ephemeral volumes")["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert volume("engine")["emptyDir"]["sizeLimit"] == "20Gi"
    assert volume("sidecar before an object store")["emptyDir"]["sizeLimit"] == "20Gi"
    assert ephemeral["storageClassName"] == "local-nvme"
    assert ephemeral["resources"]["requests"]["storage"] == "1Ti"
    assert volume("sidecar on the node")["hostPath"] == {"path": "/mnt/nvme/kv", "type": "Directory"}


def sidecar_env(workload: dict) -> dict[str, Any]:
    """Return the variables of a workload's kv-sidecar."""
    containers = workload["spec"]["template"]["spec"]["initContainers"]
    return {one["name"]: one.get("value") for c in containers if c["name"] == "kv-sidecar" for one in c["env"]}


def test_a_pod_whose_disk_stays_keeps_its_name_and_finds_it_again():
    """KV is looked for at the pod it was seen at last: with a disk of its own the pod must keep its name."""
    documents = render(RELEASES["sidecar on a claim"])
    claimed = one(documents, "StatefulSet", "-engine")["spec"]
    [claim] = claimed["volumeClaimTemplates"]
    parts = json.loads(one(documents, "ConfigMap", "-injector")["data"]["parts.json"])
    [injected] = [volume for volume in parts["volumes"] if volume["name"] == "kv-blocks"]
    on_node = one(render(RELEASES["sidecar on the node"]), "StatefulSet", "-engine")

    assert claim["metadata"]["name"] == "kv-blocks"
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "ssd",
        "resources": {"requests": {"storage": "20Gi"}},
    }
    assert claimed["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete", "whenScaled": "Delete"}
    assert not [v for v in claimed["template"]["spec"]["volumes"] if v["name"] == "kv-blocks"]
    assert claimed["serviceName"] == name_of(one(documents, "Service", "-engines"))
    assert injected["ephemeral"]["volumeClaimTemplate"]["spec"] == claim["spec"]
    # Two pods on one node never share a directory: its name is the pod's, which the variable before it says.
    env = sidecar_env(on_node)
    assert env["SIDECAR_DATA_DIR"] == "/var/lib/context-cache/llm/$(SIDECAR_ENDPOINT_NAME)"
    assert list(env).index("SIDECAR_ENDPOINT_NAME") < list(env).index("SIDECAR_DATA_DIR")


def test_each_model_has_pods_of_its_own_and_what_it_does_not_say_is_engine_s():
    documents = render(RELEASES["two models"])
    large, small = (one(documents, "Deployment", f"-{name}") for name in ("engine", "engine-small"))

    def vllm(deployment: dict) -> dict:
        return deployment["spec"]["template"]["spec"]["containers"][0]

    def args(deployment: dict) -> dict[str, str]:
        return dict(arg.split("=", 1) for arg in vllm(deployment)["args"] if "=" in arg)

    assert args(large)["--served-model-name"] == "large"
    assert "--served-model-name" not in args(small)
    assert (args(large)["--tensor-parallel-size"], args(small)["--tensor-parallel-size"]) == ("4", "1")
    assert args(small)["--model"] == "Qwen/Qwen3-0.6B"
    assert vllm(large)["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert "nvidia.com/gpu" not in vllm(small)["resources"]["limits"]
    # Both are the release's, and neither owns the other's pods.
    labels = [deployment["spec"]["template"]["metadata"]["labels"] for deployment in (large, small)]
    selectors = [deployment["spec"]["selector"]["matchLabels"] for deployment in (large, small)]
    assert len({label["context-cache.io/engines"] for label in labels}) == 1
    assert [[s.items() <= label.items() for label in labels] for s in selectors] == [[True, False], [False, True]]
    budgets = [budget["spec"]["selector"]["matchLabels"] for budget in of_kind(documents, "PodDisruptionBudget")]
    assert all(selector in budgets for selector in selectors)
    assert [name for name in ("engine-one", "engine-two") if one(render(RELEASES["models alone"]), "Deployment", name)]
    assert not [d for d in of_kind(render(RELEASES["models alone"]), "Deployment") if name_of(d).endswith("-engine")]


def test_keda_counts_what_all_gateways_have_in_hand():
    [scaled] = of_kind(render(RELEASES["keda"]), "ScaledObject")
    [trigger] = scaled["spec"]["triggers"]

    assert trigger["type"] == "prometheus"
    assert trigger["metadata"]["serverAddress"] == "http://prometheus.monitoring.svc:9090"
    assert "contextcache_gateway_requests_in_flight" in trigger["metadata"]["query"]
    assert 'namespace="llm"' in trigger["metadata"]["query"].replace(" ", "")


@pytest.mark.parametrize(
    ("release", "service", "port", "hosts"),
    [
        ("ingress", "cc-context-cache-envoy", 80, ["llm.example.org", "chat.example.org"]),
        ("ingress to the gateway", "cc-context-cache-gateway", 8000, [None]),
    ],
)
def test_an_ingress_leads_to_the_entry_point(release, service, port, hosts):
    documents = render(RELEASES[release])
    [ingress] = of_kind(documents, "Ingress")
    backends = [path["backend"]["service"] for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]

    assert backends == [{"name": service, "port": {"number": port}}] * len(hosts)
    assert port in [one["port"] for one in one(documents, "Service", service)["spec"]["ports"]]
    assert [rule.get("host") for rule in ingress["spec"]["rules"]] == hosts
    if release == "ingress":
        assert ingress["spec"]["ingressClassName"] == "nginx"
        assert ingress["spec"]["tls"] == INGRESS["ingress"]["tls"]
        assert ingress["metadata"]["annotations"] == INGRESS["ingress"]["annotations"]


@pytest.mark.parametrize(("release", "front"), [("route to envoy", "envoy"), ("route to the gateway", "gateway")])
def test_a_route_of_the_gateway_api_leads_to_the_entry_point_and_cuts_no_long_answer(release, front):
    documents = render(RELEASES[release])
    [route] = of_kind(documents, "HTTPRoute")
    [rule] = route["spec"]["rules"]
    port = {"envoy": 80, "gateway": 8000}[front]

    assert rule == {
        "backendRefs": [{"name": f"cc-context-cache-{front}", "port": port}],
        "timeouts": {"request": "0s"},
    }
    assert [parent["name"] for parent in route["spec"]["parentRefs"]] == ["public"]


def test_extra_objects_are_rendered_as_templates():
    head = {"apiVersion": "v1", "kind": "ConfigMap"}
    name = '{{ include "context-cache.fullname" . }}-extra'
    objects = [
        {**head, "metadata": {"name": name}, "data": {"replicas": "{{ .Values.gateway.replicas }}"}},
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-text\n",
    ]
    documents = render(Release(merged(REDIS, {"extraObjects": objects})))
    found = {name_of(document): document for document in of_kind(documents, "ConfigMap")}

    assert found["cc-context-cache-extra"]["data"] == {"replicas": "2"}
    assert "cc-text" in found


@pytest.mark.parametrize(
    ("component", "values", "grace_s"),
    [
        ("gateway", {}, 50),
        ("gateway", {"gateway": {"drainDelayS": 10, "settings": {"drainTimeoutS": 90.5}}}, 116),
        ("context-manager", {}, 25),
        ("context-manager", {"contextManager": {"settings": {"drainS": 60}}}, 80),
        ("engine", {}, 120),
        ("engine", {"engine": {"shutdownTimeoutS": 600}}, 660),
        ("engine", {"engine": {"turn": {"drainTimeoutS": 90}}}, 150),
        ("engine", {"sidecar": {"settings": {"handoverS": 60}}}, 160),
        ("engine", {"sidecar": {"peers": False}}, 100),
        ("engine", {"sidecar": {"peers": False, "settings": {"storeUrl": "s3://kv", "handoverS": 60}}}, 160),
    ],
)
def test_a_pod_has_the_time_that_its_drain_takes(component, values, grace_s):
    """Seen failing without the 15 s of the turn process, and with 20 s for every hand-over."""
    pod = pod_of(render(Release(merged(REDIS, ENGINE, values))), component)

    assert pod.spec["terminationGracePeriodSeconds"] == grace_s


def test_the_load_balancer_is_as_the_values_say():
    service = one(render(RELEASES["load balancer"]), "Service", "-envoy")

    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    assert service["spec"]["ports"][0]["port"] == 8080
    assert service["metadata"]["annotations"]["example.org/lb"] == "internal"


NULLS: Values = {
    "commonLabels": None,
    "commonAnnotations": None,
    "podDefaults": {
        "securityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        **dict.fromkeys(("labels", "annotations", "nodeSelector", "tolerations", "affinity", "extraEnv")),
        **dict.fromkeys(("topologySpreadConstraints", "priorityClassName", "imagePullSecrets")),
    },
    "gateway": {"resources": None},
    "engine": {"resources": None, "pod": {"tolerations": None}, "extraArgs": None},
    "sidecar": {"resources": None, "peerNetworks": None},
    "networkPolicy": {"clients": None, "dns": {"to": None}, "extraEgress": None, "extraIngress": None},
}
"""What files of values say to empty a list or map, or to leave the choice of a user to OpenShift."""


@pytest.mark.parametrize("helm", HELMS, ids=lambda helm: helm.version)
def test_nulls_empty_what_may_be_empty(helm):
    made = list(pods(render(Release(merged(REDIS, ENGINE, INJECTOR, NULLS)), helm)))

    assert {pod.spec["securityContext"].get("runAsUser") for pod in made} == {None}
    assert {pod.spec["securityContext"]["runAsNonRoot"] for pod in made} == {True}
    assert not [pod.owner for pod in made if pod.spec.get("tolerations")]


def test_what_an_operator_selects_by_wins_over_common_labels():
    labels = {"release": "prometheus", "app.kubernetes.io/part-of": "monitoring"}
    values = {
        "commonLabels": {"release": "llm", "grafana_dashboard": "no"},
        "monitoring": {
            "podMonitor": {"enabled": True, "labels": labels},
            "prometheusRule": {"enabled": True, "labels": labels},
            "dashboard": {"enabled": True},
        },
    }
    documents = render(Release(merged(REDIS, values)))
    dashboard = one(documents, "ConfigMap", "-dashboard")["metadata"]["labels"]

    for document in [*of_kind(documents, "PodMonitor"), *of_kind(documents, "PrometheusRule")]:
        assert labels.items() <= document["metadata"]["labels"].items()
    assert (dashboard["release"], dashboard["grafana_dashboard"]) == ("llm", "1")
