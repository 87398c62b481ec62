"""The custom resources that the chart may make, and their shapes: the fields that we use, and no others.

Written after the definitions of prometheus-operator 0.80, KEDA 2.16, cert-manager 1.16, Gateway API 1.2 (v1), Envoy
Gateway 1.3 and Gateway API Inference Extension 1.0. A kind that is not here is a mistake: `kubernetes-validate` would
let it pass unseen.
"""

from __future__ import annotations

from typing import Any

import jsonschema

from tests.chart.rendering import Document

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(h|m|s|ms))+$"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def record(*required: str, **properties: Schema) -> Schema:
    """Return the schema of an object that has these fields and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": list(required)}


def many(item: Schema, at_least: int = 1) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": item, "minItems": at_least}


SELECTOR = record(
    matchLabels=LABELS,
    matchExpressions=many(record("key", "operator", key=TEXT, operator=TEXT, values=many(TEXT))),
)
METADATA = record("name", "labels", name=TEXT, labels=LABELS, annotations=LABELS)
RELABELING = record(
    sourceLabels=many(TEXT),
    targetLabel=TEXT,
    regex={"type": "string"},
    replacement={"type": "string"},
    action={"enum": ["replace", "Replace", "keep", "Keep", "drop", "Drop", "labeldrop", "LabelDrop", "labelmap"]},
    separator={"type": "string"},
)
PARENT = record("name", name=TEXT, namespace=TEXT, sectionName=TEXT, group=TEXT, kind=TEXT, port=PORT)
BACKEND = record(
    "name", name=TEXT, port=PORT, kind=TEXT, group={"type": "string"}, weight={"type": "integer"}, namespace=TEXT
)
HEADER = record("name", "value", name=TEXT, value=TEXT, type={"enum": ["Exact", "RegularExpression"]})
CHANGED_HEADER = record("name", "value", name=TEXT, value=TEXT)
FILTER = record(
    "type",
    type={"enum": ["RequestHeaderModifier", "ResponseHeaderModifier", "ExtensionRef", "URLRewrite"]},
    requestHeaderModifier=record(set=many(CHANGED_HEADER), add=many(CHANGED_HEADER), remove=many(TEXT)),
    responseHeaderModifier=record(set=many(CHANGED_HEADER), add=many(CHANGED_HEADER), remove=many(TEXT)),
    extensionRef=record("group", "kind", "name", group=TEXT, kind=TEXT, name=TEXT),
)
ROUTE_RULE = record(
    "backendRefs",
    name=TEXT,
    matches=many(
        record(
            path=record("type", "value", type={"enum": ["Exact", "PathPrefix", "RegularExpression"]}, value=TEXT),
            method={"enum": ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]},
            headers=many(HEADER),
        )
    ),
    filters=many(FILTER),
    backendRefs=many(BACKEND),
    timeouts=record(request=DURATION, backendRequest=DURATION),
)
TARGET = record("kind", "name", group=TEXT, kind=TEXT, name=TEXT, sectionName=TEXT)
PROCESSING_MODE = record(
    request=record(
        attributes=many(TEXT), body={"enum": ["Streamed", "Buffered", "BufferedPartial", "FullDuplexStreamed"]}
    ),
    response=record(attributes=many(TEXT), body={"enum": ["Streamed", "Buffered", "BufferedPartial"]}),
    allowModeOverride={"type": "boolean"},
)
METADATA_OPTIONS = record(accessibleNamespaces=many(TEXT), writableNamespaces=many(TEXT))

CUSTOM_RESOURCES: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): record(
        "selector",
        "podMetricsEndpoints",
        selector=SELECTOR,
        namespaceSelector=record(matchNames=many(TEXT), any={"type": "boolean"}),
        jobLabel=TEXT,
        podTargetLabels=many(TEXT),
        podMetricsEndpoints=many(
            record(
                port=TEXT,
                portNumber=PORT,
                path=TEXT,
                interval=DURATION,
                scrapeTimeout=DURATION,
                scheme={"enum": ["http", "https", "HTTP", "HTTPS"]},
                honorLabels={"type": "boolean"},
                relabelings=many(RELABELING),
                metricRelabelings=many(RELABELING),
                filterRunning={"type": "boolean"},
                tlsConfig={"type": "object"},
            )
        ),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): record(
        "groups",
        groups=many(
            record(
                "name",
                "rules",
                name=TEXT,
                interval=DURATION,
                rules=many(
                    {
                        "oneOf": [
                            record(
                                "alert",
                                "expr",
                                "labels",
                                "annotations",
                                alert=TEXT,
                                expr=TEXT,
                                labels=LABELS,
                                annotations=LABELS,
                                **{"for": DURATION, "keep_firing_for": DURATION},
                            ),
                            record("record", "expr", record=TEXT, expr=TEXT, labels=LABELS),
                        ]
                    }
                ),
            )
        ),
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): record(
        "scaleTargetRef",
        "triggers",
        scaleTargetRef=record("name", name=TEXT, kind=TEXT, apiVersion=TEXT),
        minReplicaCount={"type": "integer", "minimum": 1},
        maxReplicaCount={"type": "integer", "minimum": 1},
        pollingInterval={"type": "integer"},
        cooldownPeriod={"type": "integer"},
        fallback=record(
            "failureThreshold", "replicas", failureThreshold={"type": "integer"}, replicas={"type": "integer"}
        ),
        triggers=many(record("type", "metadata", type=TEXT, metadata=LABELS, metricType=TEXT, name=TEXT)),
    ),
    ("cert-manager.io/v1", "Certificate"): record(
        "secretName",
        "issuerRef",
        secretName=TEXT,
        commonName=TEXT,
        dnsNames=many(TEXT),
        duration=DURATION,
        renewBefore=DURATION,
        isCA={"type": "boolean"},
        usages=many({"enum": ["server auth", "client auth", "digital signature", "key encipherment", "cert sign"]}),
        privateKey=record(
            algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
            size={"type": "integer"},
            rotationPolicy={"enum": ["Always", "Never"]},
            encoding={"enum": ["PKCS1", "PKCS8"]},
        ),
        issuerRef=record("name", name=TEXT, kind=TEXT, group=TEXT),
        secretTemplate=record(labels=LABELS, annotations=LABELS),
        revisionHistoryLimit={"type": "integer"},
    ),
    ("cert-manager.io/v1", "Issuer"): record(selfSigned={"type": "object"}, ca=record("secretName", secretName=TEXT)),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): record(
        "parentRefs", "rules", parentRefs=many(PARENT), hostnames=many(TEXT), rules=many(ROUTE_RULE)
    ),
    ("gateway.envoyproxy.io/v1alpha1", "EnvoyExtensionPolicy"): record(
        "targetRefs",
        targetRefs=many(TARGET),
        extProc=many(
            record(
                "backendRefs",
                backendRefs=many(BACKEND),
                backendSettings={"type": "object"},
                processingMode=PROCESSING_MODE,
                messageTimeout=DURATION,
                failOpen={"type": "boolean"},
                metadata=METADATA_OPTIONS,
            )
        ),
        lua=many({"type": "object"}),
    ),
    ("gateway.networking.k8s.io/v1", "BackendTLSPolicy"): record(
        "targetRefs",
        "validation",
        targetRefs=many(record("group", "kind", "name", group={"type": "string"}, kind=TEXT, name=TEXT)),
        validation=record(
            "hostname",
            "caCertificateRefs",
            hostname=TEXT,
            caCertificateRefs=many(record("group", "kind", "name", group={"type": "string"}, kind=TEXT, name=TEXT)),
        ),
    ),
    ("gateway.envoyproxy.io/v1alpha1", "BackendTrafficPolicy"): record(
        "targetRefs",
        targetRefs=many(TARGET),
        loadBalancer=record(
            "type",
            type={"enum": ["ConsistentHash", "LeastRequest", "Random", "RoundRobin"]},
            endpointOverride=record("extractFrom", extractFrom=many(record("header", header=TEXT))),
        ),
    ),
    ("gateway.envoyproxy.io/v1alpha1", "ClientTrafficPolicy"): record(
        "targetRefs",
        targetRefs=many(TARGET),
        headers=record(
            earlyRequestHeaders=record(set=many(CHANGED_HEADER), add=many(CHANGED_HEADER), remove=many(TEXT))
        ),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): record(
        "selector",
        "targetPorts",
        "endpointPickerRef",
        selector=record("matchLabels", matchLabels=LABELS),
        targetPorts=many(record("number", number=PORT)),
        endpointPickerRef=record(
            "name",
            name=TEXT,
            group={"type": "string"},
            kind=TEXT,
            port=record("number", number=PORT),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
}


def faults(document: Document) -> list[str]:
    """Return what is wrong with a custom resource of a kind in CUSTOM_RESOURCES."""
    spec = CUSTOM_RESOURCES[document["apiVersion"], document["kind"]]
    schema = record("apiVersion", "kind", "metadata", "spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=spec)
    validator = jsonschema.Draft202012Validator(schema)
    return [f"{'/'.join(map(str, fault.path))}: {fault.message[:160]}" for fault in validator.iter_errors(document)]
