"""The releases every test of the chart looks at: each toggle by itself, what is used together, the extremes."""

from __future__ import annotations

import copy
from typing import Any

from tests.chart.rendering import Release

Values = dict[str, Any]

REDIS: Values = {"redis": {"url": "redis://redis.data.svc:6379/0"}}
ENGINE: Values = {"engine": {"model": "meta-llama/Llama-3.1-8B-Instruct"}}
CERT_MANAGER: Values = {
    "tls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}}
}
TLS_SECRET: Values = {"tls": {"enabled": True, "existingSecret": "parts-tls"}}
INJECTOR: Values = {"injector": {"enabled": True}}
MONITORING: Values = {
    "monitoring": {
        "podMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}, "runbookUrl": "https://wiki/runbook"},
        "dashboard": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
    }
}
GATEWAY_REF: Values = {"parentRefs": [{"name": "public", "namespace": "ingress", "sectionName": "https"}]}
ENVOY_GATEWAY: Values = {"envoy": {"mode": "envoyGateway", **GATEWAY_REF, "hostnames": ["llm.example.org"]}}
INFERENCE_POOL: Values = {"envoy": {"mode": "inferencePool", **GATEWAY_REF, "hostnames": ["llm.example.org"]}}
INGRESS: Values = {
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "3600"},
        "hosts": ["llm.example.org", "chat.example.org"],
        "tls": [{"secretName": "llm-tls", "hosts": ["llm.example.org", "chat.example.org"]}],
    }
}
NO_ENVOY: Values = {"envoy": {"mode": "none"}}
OF_POD: Values = {
    "annotations": {"example.org/team": "llm"},
    "labels": {"example.org/tier": "front"},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "llm", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "In", "values": ["llm"]}]}]
            }
        }
    },
    "priorityClassName": "llm-serving",
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
}
POD: Values = {
    "pod": OF_POD,
    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
}
GPU_POD: Values = {
    "pod": {
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }
}
RESTRICTED: Values = {
    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    },
}
LONG = "a-release-name-as-long-as-helm-lets-it-be-which-is-53"
DIGEST = "sha256:" + "0123456789abcdef" * 4


def merged(*parts: Values) -> Values:
    """Return values in which later parts win, mapping by mapping, as Helm merges files.

    A key of a part may be a path, as `--set` takes it: `gateway.service.port`.
    """
    result: Values = {}
    for part in parts:
        for path, value in part.items():
            *outer, key = path.split(".")
            inner: Any = {key: value}
            for name in reversed(outer):
                inner = {name: inner}
            _merge(result, inner)
    return result


def _merge(result: Values, part: Values) -> None:
    for key, value in part.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            _merge(result[key], value)
        else:
            result[key] = copy.deepcopy(value)


EVERYTHING = merged(
    ENGINE,
    CERT_MANAGER,
    INJECTOR,
    MONITORING,
    {
        "redis": {"url": ""},
        "tracing": {"endpoint": "http://otel.monitoring.svc:4317", "sampleRatio": 1},
        "gateway": {"autoscaling": {"enabled": True}},
        "envoy": {"autoscaling": {"enabled": True}, "tls": {"existingSecret": "front-tls"}},
        "engine": {"hfTokenSecret": {"name": "hf"}, "modelCache": {"size": "100Gi"}},
        "sidecar": {"storage": {"type": "ephemeral"}},
    },
)

# What is written over REDIS for each release.
LMCACHE = merged(
    ENGINE,
    {
        "engine.turn.lmcacheUrl": "http://$(HOST_IP):8080",
        "engine.turn.lmcacheCoordinatorUrl": "http://lmcache-coordinator:9300",
        "engine.lmcache.connector": {"lmcache.mp.host": "tcp://$(HOST_IP)", "lmcache.mp.port": 6555},
    },
)
"""LMCache keeps KV: a server on each node, one coordinator."""

_VALUES: dict[str, Values] = {
    "defaults": {},
    "valkey": {"redis": {"url": ""}},
    "valkey without storage": {"redis": {"url": ""}, "valkey": {"storage": {"enabled": False}}},
    "valkey with a storage class": {"redis.url": "", "valkey.storage": {"size": "20Gi", "storageClassName": "fast"}},
    "redis from a secret": {"redis": {"url": "", "existingSecret": "redis", "secretKey": "url"}},
    "redis over tls": {"redis": {"url": "rediss://redis.data.svc:6380/0", "tlsSecret": "redis-tls"}},
    "redis over mutual tls": {
        "redis.url": "rediss+cluster://redis.data.svc:6380/0",
        "redis.tlsSecret": "redis-tls",
        "redis.clientCertificate": True,
        "redis.egress.port": 6380,
    },
    "redis in one place": {
        "redis.egress.port": 6379,
        "redis.egress.to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "data"}}}],
    },
    "names of its own": {"fullnameOverride": "kv", "nameOverride": "kvctx"},
    "another domain": {"clusterDomain": "corp.internal"},
    "labels and annotations everywhere": {
        "commonLabels": {"example.org/cost-center": "42"},
        "commonAnnotations": {"example.org/owner": "llm-platform"},
    },
    "own registry": {
        "image": {"registry": "registry.example.org:5000", "repository": "llm/context-cache", "pullPolicy": "Always"},
        "envoy": {"image": {"registry": ""}},
    },
    "images by digest": merged(
        ENGINE, {"image": {"digest": DIGEST}}, {part: {"image": {"digest": DIGEST}} for part in ("engine", "envoy")}
    ),
    "an image tag": {"image": {"tag": "0.1.0-rc.1"}},
    "pull secrets": merged(ENGINE, {"podDefaults": {"imagePullSecrets": [{"name": "regcred"}]}}),
    "existing secrets": {
        "auth": {"existingSecret": "keys", "secretKey": "keys.json"},
        "signing": {"existingSecret": "sign", "secretKey": "hmac"},
    },
    "a named tenant": {"auth": {"tenant": "search-team"}},
    "no rbac": {"rbac": {"create": False}, "serviceAccount": {"create": False}},
    "annotated service accounts": {"serviceAccount": {"annotations": {"example.org/role": "reader"}}},
    "openshift-like security context": merged(ENGINE, INJECTOR, {"podDefaults.securityContext.fsGroup": 1000700000}),
    "gateway pods": {"gateway": POD},
    "context-manager pods": {"contextManager": POD},
    "envoy pods": {"envoy": POD},
    "engine pods": merged(ENGINE, {"engine": {**POD, "resources": {"limits": {"memory": "64Gi"}}}}),
    "injector pods": merged(INJECTOR, {"injector": POD}),
    "all pods": merged(ENGINE, INJECTOR, {"podDefaults": OF_POD}),
    "pods that differ": merged(
        ENGINE,
        INJECTOR,
        {
            "podDefaults": OF_POD,
            "gateway.pod.labels": {"example.org/tier": "other"},
            "gateway.pod.nodeSelector.pool": "gateways",
            "gateway.pod.tolerations": [],
            "gateway.pod.priorityClassName": "",
            "gateway.pod.topologySpreadConstraints": [],
            "gateway.pod.extraEnv": [],
            "gateway.pod.pdb.enabled": False,
        },
    ),
    "no spread": {"podDefaults": {"topologySpreadConstraints": []}},
    "no disruption budgets": merged(ENGINE, INJECTOR, {"podDefaults": {"pdb": {"enabled": False}}}),
    "single replicas": {"gateway": {"replicas": 1}, "contextManager": {"replicas": 1}, "envoy": {"replicas": 1}},
    "gateway settings": {
        "gateway": {
            "settings": {"tenantRatePerS": 5, "tenantBurst": 100, "saturatedWaiting": 8, "shedWaiting": 0},
            "drainDelayS": 10,
        }
    },
    "manager settings": {"contextManager": {"settings": {"maxTtlS": 86400, "tombstoneS": 60}}},
    "envoy settings": {"envoy": {"settings": {"failOpenStateless": False, "idleTimeoutS": 1200}, "concurrency": 4}},
    "hpa": {"gateway": {"autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 30}}},
    "hpa for envoy": {"envoy": {"autoscaling": {"enabled": True}}},
    "keda": {"gateway": {"keda": {"enabled": True, "prometheusServer": "http://prometheus.monitoring.svc:9090"}}},
    "load balancer": {
        "envoy.service.type": "LoadBalancer",
        "envoy.service.port": 8080,
        "envoy.service.annotations": {"example.org/lb": "internal"},
        "envoy.service.loadBalancerSourceRanges": ["10.0.0.0/8"],
    },
    "https for clients": {"envoy": {"tls": {"existingSecret": "front-tls"}}},
    "envoy gateway": ENVOY_GATEWAY,
    "envoy gateway and tls": merged(ENVOY_GATEWAY, CERT_MANAGER, ENGINE),
    "envoy gateway of this namespace": {"envoy": {"mode": "envoyGateway", "parentRefs": [{"name": "public"}]}},
    "inference pool": INFERENCE_POOL,
    "inference pool and engine": merged(INFERENCE_POOL, ENGINE),
    "no envoy": NO_ENVOY,
    "ingress": merged(ENGINE, INGRESS),
    "ingress to the gateway": merged(NO_ENVOY, TLS_SECRET, {"ingress": {"enabled": True}}),
    "route to envoy": {"envoy": {**GATEWAY_REF, "hostnames": ["llm.example.org"]}},
    "route to the gateway": merged(NO_ENVOY, {"envoy": GATEWAY_REF}),
    "no envoy and a node port": merged(NO_ENVOY, {"gateway": {"service": {"type": "NodePort", "port": 80}}}),
    "engine": ENGINE,
    "engine on four gpus": merged(
        ENGINE,
        {"engine": {"tensorParallelSize": 4, "gpu": {"count": 4}, "dtype": "bfloat16", "replicas": 2, **GPU_POD}},
    ),
    "engine on amd": merged(ENGINE, {"engine": {"gpu": {"resource": "amd.com/gpu", "count": 8}}}),
    "engine without gpu": ENGINE
    | {"engine.gpu.count": 0, "engine.blockSize": 32, "engine.dtype": "float32", "engine.maxModelLen": 2048},
    "engine with a runtime class": ENGINE | {"engine.runtimeClassName": "nvidia", "engine.shm.sizeLimit": "32Gi"},
    "engine with a model cache": ENGINE
    | {"engine.modelCache": {"existingClaim": "models", "mountPath": "/srv/models"}},
    "engine with a cache of its own": merged(
        ENGINE,
        {"engine": {"modelCache": {"size": "200Gi", "storageClassName": "fast"}, "hfTokenSecret": {"name": "hf"}}},
    ),
    "engine with more volumes and init containers": ENGINE
    | {
        "engine.modelCache.existingClaim": "models",
        "engine.modelCache.readOnly": True,
        "engine.extraInitContainers": [{"name": "fetch", "image": "fetch:1", **RESTRICTED}],
        "engine.extraVolumes": [{"name": "extra", "emptyDir": {"sizeLimit": "1Gi"}}],
        "engine.extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        "sidecar.settings.storeUrl": "file:///store",
        "sidecar.extraVolumes": [{"name": "store", "persistentVolumeClaim": {"claimName": "kv-store"}}],
        "sidecar.extraVolumeMounts": [{"name": "store", "mountPath": "/store"}],
    },
    "engine settings": ENGINE
    | {
        "engine.servedModelName": "llama",
        "engine.blockSize": 32,
        "engine.extraArgs": ["--enable-chunked-prefill"],
        "engine.turn.rpcDeadlineMs": 3000,
        "engine.turn.leaseTtlMs": 30000,
        "engine.connector.load_always_ms": 64,
        "engine.connector.weights_epoch": "2026-11",
        "engine.shutdownTimeoutS": 300,
    },
    "sidecar on ephemeral volumes": ENGINE
    | {"sidecar.storage": {"type": "ephemeral", "size": "1Ti", "storageClassName": "local-nvme"}},
    "sidecar on a claim": merged(ENGINE, INJECTOR, {"sidecar.storage": {"type": "pvc", "storageClassName": "ssd"}}),
    "sidecar on the node": merged(ENGINE, {"sidecar": {"storage": {"type": "hostPath", "hostPath": "/mnt/nvme/kv"}}}),
    "sidecar before an object store": ENGINE
    | {
        "sidecar.settings.storeUrl": "s3://kv/release",
        "sidecar.diskLimit": "18Gi",
        "sidecar.storage.size": "20Gi",
        "sidecar.extraEnv": [{"name": "AWS_REGION", "value": "eu-central-1"}],
    },
    "two models": merged(
        ENGINE,
        {
            "engine": {"servedModelName": "large", "gpu": {"count": 4}, "tensorParallelSize": 4},
            "models.small": {"model": "Qwen/Qwen3-0.6B", "gpu": {"count": 0}, "tensorParallelSize": 1, "blockSize": 32},
        },
    ),
    "models alone": {"models": {"one": {"model": "a/one"}, "two": {"model": "b/two", "replicas": 3}}},
    "sidecar settings": ENGINE
    | {
        "sidecar.settings.ioThreads": 8,
        "sidecar.settings.collectIntervalS": 10,
        "sidecar.memoryLimit": "64Gi",
        "sidecar.diskLimit": "900Gi",
        "sidecar.storage.size": "1Ti",
        "sidecar.resources.requests.cpu": "2",
        "sidecar.resources.requests.memory": "66Gi",
        "sidecar.resources.limits.memory": "66Gi",
    },
    "sidecar with events": ENGINE
    | {
        "sidecar.settings": {"eventsListen": "0.0.0.0:5561", "eventsTenants": ["team-a"], "eventsTopic": "kv"},
        "networkPolicy.eventSubscribers": [{"podSelector": {"matchLabels": {"app": "router"}}}],
    },
    "sidecars apart": merged(ENGINE, {"sidecar": {"peers": False}}),
    "sidecars of two networks": merged(ENGINE, {"sidecar": {"peerNetworks": ["10.0.0.0/8", "fd00::/8"]}}),
    "engines on other ports": merged(ENGINE, {"discovery": {"port": 8080, "sidecarPort": 50062}}),
    "injector": INJECTOR,
    "injector by cert-manager": merged(
        INJECTOR, CERT_MANAGER, {"injector": {"tls": {"certManager": True}, "failurePolicy": "Fail"}}
    ),
    "injector with a certificate": INJECTOR
    | {"injector.tls": {"existingSecret": "webhook-tls", "caBundle": "LS0tLS1CRUdJTg=="}},
    "injector for other namespaces": INJECTOR
    | {"injector.namespaceSelector.matchLabels.llm": "true", "injector.timeoutSeconds": 10},
    "tls by cert-manager": merged(CERT_MANAGER, ENGINE),
    "tls from a secret": merged(TLS_SECRET, ENGINE, INJECTOR),
    "tls and no envoy": merged(TLS_SECRET, NO_ENVOY, ENGINE),
    "tls to valkey": merged(TLS_SECRET, {"redis": {"url": ""}}),
    "no network policies": merged(ENGINE, {"networkPolicy": {"enabled": False}}),
    "narrow network policies": ENGINE
    | {
        "networkPolicy.clients": [{"namespaceSelector": {"matchLabels": {"llm-clients": "true"}}}],
        "networkPolicy.monitoring": [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        ],
        "networkPolicy.apiServer.cidrs": ["10.96.0.1/32"],
        "networkPolicy.apiServer.ports": [443],
    },
    "network policies of every kind": ENGINE
    | INJECTOR
    | {
        "networkPolicy.dns.to": [{"ipBlock": {"cidr": "169.254.20.10/32"}}],
        "networkPolicy.dns.ports": [53, 5353],
        "networkPolicy.apiServer.webhookClients": [{"ipBlock": {"cidr": "10.0.0.0/24"}}],
        "networkPolicy.modelDownload.enabled": False,
        "networkPolicy.injectedPods.restrictHttp": True,
        "networkPolicy.extraIngress.gateway": [{"from": [{"podSelector": {}}], "ports": [{"port": 8000}]}],
        "networkPolicy.extraEgress.engine": [{"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}]}],
    },
    "lmcache in the sidecar's place": LMCACHE,
    "lmcache over the sidecar": merged(LMCACHE, {"engine.lmcache.secondTier": True, "sidecar.storage.type": "pvc"}),
    "monitoring": merged(MONITORING, ENGINE, INJECTOR),
    "pod monitor": {"monitoring": {"podMonitor": {"enabled": True}}},
    "rules": {"monitoring": {"prometheusRule": {"enabled": True}}},
    "dashboard": {"monitoring": {"dashboard": {"enabled": True}}},
    "tracing": merged(ENGINE, {"tracing": {"endpoint": "http://otel.monitoring.svc:4317"}}),
    "no tests": {"tests": {"enabled": False}},
    "debug": merged(ENGINE, INJECTOR, {"logLevel": "DEBUG"}),
    "everything": {**EVERYTHING, "redis": {"url": ""}},
    "as little as possible": NO_ENVOY
    | {
        "networkPolicy.enabled": False,
        "tests.enabled": False,
        "rbac.create": False,
        "serviceAccount.create": False,
        "contextManager.replicas": 1,
        "gateway.replicas": 1,
        "podDefaults.topologySpreadConstraints": [],
        "podDefaults.pdb.enabled": False,
    },
}

RELEASES: dict[str, Release] = {name: Release(merged(REDIS, values)) for name, values in _VALUES.items()} | {
    "a long name": Release({**EVERYTHING}, name=LONG),
    "a long name of the chart": Release(merged(EVERYTHING, {"nameOverride": "n" * 40}), name="r" * 50),
    "a name that yaml takes for a truth value": Release(EVERYTHING, name="true"),
    "a name that yaml takes for a number": Release(EVERYTHING, name="1e3"),
    "a name with a dot": Release(EVERYTHING, name="llm.prod"),
    "a name like the chart's": Release(EVERYTHING, name="context-cache"),
    "another namespace": Release(EVERYTHING, namespace="team-b"),
    "kubernetes 1.30": Release(EVERYTHING, kube_version="1.30.0"),
    "kubernetes 1.37": Release(EVERYTHING, kube_version="1.37.0"),
}
