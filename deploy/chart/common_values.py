"""Values that concern the whole release: names, our image, keys and secrets, pods' security, logs and traces."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from deploy.chart.kubernetes_values import FreeObject, SecretKey, SecretName, Strings
from deploy.chart.pod_values import ImageReference, Registry, Tag
from deploy.chart.section import Section

USER = 65532
"""User and group of every process in our image."""

Tenant = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"})]
PullSecrets = Annotated[
    list[str],
    WithJsonSchema({"type": "array", "items": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}}),
]


class Image(ImageReference):
    """The image of every process of ours."""

    registry: Registry = Field(
        "", description="host of the registry, also of images that name none; empty: the nodes' default"
    )
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="when nodes pull images, these and those of engine and Valkey"
    )
    pull_secrets: PullSecrets = Field(default_factory=list, description="names of Secrets with registry credentials")
    tag: Tag = Field("", description="tag; empty: the chart's appVersion; floating tags (latest) are refused")


class ServiceAccountValues(Section):
    """ServiceAccounts of gateway and context-manager. No other part talks to the Kubernetes API."""

    create: bool = Field(
        True, description="create them; false: <fullname>-gateway and <fullname>-context-manager exist already"
    )
    annotations: Strings = Field(default_factory=dict, description="their annotations")


class RbacValues(Section):
    """What those accounts may do, in the release's namespace only."""

    create: bool = Field(
        True,
        description="create the gateway's Role and RoleBinding: it reads EndpointSlices and pods; nobody else asks "
        "the Kubernetes API",
    )


class AuthValues(Section):
    """API keys of clients."""

    existing_secret: SecretName = Field(
        "",
        description="Secret with the hashes of the keys; empty: the chart makes one key, once, in <fullname>-api-key. "
        "Tools that render without a cluster (Argo CD, helm template) cannot see the one that exists and would make "
        "another: give them a Secret",
    )
    secret_key: SecretKey = Field(
        "api-keys.json", description='its key: {"keys": [{"sha256": "…", "tenant": "…"}]}, read again when it changes'
    )
    tenant: Tenant = Field("default", description="tenant of the generated key")


class SigningValues(Section):
    """The secret that gateways sign identities with and pods verify them with."""

    existing_secret: SecretName = Field(
        "",
        description="Secret with 32 bytes or more; empty: made once and kept, with the same warning as for auth. It is "
        "read at start: after a change restart gateways and vLLM pods",
    )
    secret_key: SecretKey = Field("secret", description="its key")


class TracingValues(Section):
    """OpenTelemetry: one trace per turn, through every part."""

    endpoint: Annotated[str, WithJsonSchema({"type": "string", "pattern": "^(https?://[^/@]+:[0-9]+)?$"})] = Field(
        "", description="OTLP/gRPC address of a collector with its port, http://host:4317; empty: no traces"
    )
    sample_ratio: float = Field(0.1, ge=0, le=1, description="share of the traces begun here that are kept")


class TestsValues(Section):
    """`helm test`: a pod creates a context, asks it, deletes it."""

    enabled: bool = Field(True, description="have the test")
    api_key_secret: SecretName = Field(
        "",
        description="Secret with one API key in plain text; empty: the generated one. With auth.existingSecret there "
        "is none, and no test, unless this names one",
    )
    api_key_secret_key: SecretKey = Field("api-key", description="its key")
    server_name: Annotated[
        str, WithJsonSchema({"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"})
    ] = Field("", description="with envoy.tls: name that its certificate carries, as the test uses the Service's name")
    ca_secret: SecretName = Field(
        "", description="with envoy.tls: Secret with ca.crt, who signed that certificate; empty: the system's CAs"
    )
    timeout_s: int = Field(300, ge=60, description="seconds until the test pod is given up")


def restricted_pod() -> dict[str, Any]:
    """Return the pod-level security context that Pod Security `restricted` asks for."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        # Without it the kubelet walks a whole volume of blocks at every start of a pod.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def restricted_container() -> dict[str, Any]:
    """Return the same for a container, with a root file system nobody can write to."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


SecurityContext = FreeObject
"""A PodSecurityContext or SecurityContext."""
