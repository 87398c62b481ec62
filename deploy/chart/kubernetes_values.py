"""Values whose shape Kubernetes defines, strict as far as of use: a slip in a name is found in rendering."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

QUANTITY = r"^[0-9]+(\.[0-9]+)?([eE][0-9]+|m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$"
"""A Kubernetes quantity, unsigned."""
DNS_LABEL = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"
"""A name of an object, or nothing."""
_LABEL_KEY = r"^([a-zA-Z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
_OWN_LABELS = r"^(app\.kubernetes\.io|helm\.sh|context-cache\.io)/"

Quantity = Annotated[
    str,
    WithJsonSchema({"type": ["string", "integer", "number"], "pattern": QUANTITY, "examples": ["500m", "8Gi"]}),
]
"""An amount such as 500m or 8Gi."""
SecretName = Annotated[
    str, WithJsonSchema({"type": "string", "pattern": r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", "maxLength": 253})
]
"""Name of an object in the release's namespace; empty: none."""
SecretKey = Annotated[str, WithJsonSchema({"type": "string", "pattern": r"^[-._a-zA-Z0-9]+$"})]
"""A key of a Secret."""
Strings = Annotated[dict[str, str], WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}})]
"""Annotations, or a node selector."""
Labels = Annotated[
    dict[str, str],
    WithJsonSchema(
        {
            "type": "object",
            # Not propertyNames: Helm 4 reports what those refuse without saying where.
            "patternProperties": {_LABEL_KEY: {"type": "string", "maxLength": 63}, _OWN_LABELS: False},
            "additionalProperties": False,
        }
    ),
]
"""Labels; those the chart sets itself (app.kubernetes.io/…, helm.sh/…, context-cache.io/…) are refused."""
FreeObject = Annotated[dict[str, Any], WithJsonSchema({"type": "object"})]
"""An object whose fields Kubernetes checks."""
LabelSelector = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "matchLabels": {
                    "type": "object",
                    "additionalProperties": {"type": "string"},
                    "description": "labels that must be there",
                },
                "matchExpressions": {
                    "type": "array",
                    "items": {"type": "object"},
                    "description": "requirements of labels",
                },
            },
        }
    ),
]
"""A Kubernetes LabelSelector."""

_AMOUNTS = {
    "type": "object",
    "additionalProperties": {"type": ["string", "integer", "number"], "pattern": QUANTITY},
}
Resources = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "requests": {**_AMOUNTS, "description": "what is set aside"},
                "limits": {**_AMOUNTS, "description": "the most it may take"},
                "claims": {"type": "array", "description": "ResourceClaims of the pod that it uses"},
            },
        }
    ),
]
"""Resources of a container."""
Tolerations = Annotated[
    list[dict[str, Any]],
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "key": {"type": "string"},
                    "operator": {"enum": ["Exists", "Equal", "Lt", "Gt"]},
                    "value": {"type": "string"},
                    "effect": {"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute", ""]},
                    "tolerationSeconds": {"type": "integer"},
                },
            },
        }
    ),
]
"""Taints of nodes that pods may run on all the same."""
Affinity = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {kind: {"type": "object"} for kind in ("nodeAffinity", "podAffinity", "podAntiAffinity")},
        }
    ),
]
"""A Kubernetes Affinity."""
NetworkPolicyPeers = Annotated[
    list[dict[str, Any]],
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "minProperties": 1,
                "additionalProperties": False,
                "properties": {
                    "ipBlock": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["cidr"],
                        "properties": {
                            "cidr": {"type": "string"},
                            "except": {"type": "array", "items": {"type": "string"}},
                        },
                    },
                    "namespaceSelector": {"type": "object"},
                    "podSelector": {"type": "object"},
                },
            },
        }
    ),
]
"""Kubernetes NetworkPolicyPeers."""
ExtraEnv = Annotated[
    list[dict[str, Any]],
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name"],
                "additionalProperties": False,
                "properties": {
                    # Twice the same name is refused by server-side apply, so what the chart sets has no second way.
                    "name": {
                        "type": "string",
                        "pattern": r"^[A-Za-z_][A-Za-z0-9_.-]*$",
                        "not": {"pattern": r"^(GATEWAY|MANAGER|SIDECAR|TURN|INJECTOR|ENVOY)_"},
                    },
                    "value": {"type": "string"},
                    "valueFrom": {"type": "object"},
                },
            },
        }
    ),
]
"""Environment variables that are no settings of ours; those have keys of their own."""
Port = Annotated[int, Field(ge=1, le=65535)]
"""A TCP port."""
