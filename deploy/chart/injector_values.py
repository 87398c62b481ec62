"""Values of the injector: the webhook that adds sidecar and plugin to vLLM pods of others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from deploy.chart.chart_settings import settings_schema
from deploy.chart.kubernetes_values import LabelSelector, Resources, SecretName
from deploy.chart.pod_values import Pod, PodDisruptionBudget, resources
from deploy.chart.section import Section
from injector.settings import InjectorSettings

InjectorSettingsMap = Annotated[dict[str, Any], WithJsonSchema(settings_schema(InjectorSettings, "INJECTOR_"))]
Base64 = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[A-Za-z0-9+/=\\n]*$"})]
"""What a caBundle is written in."""


class InjectorTls(Section):
    """The webhook's certificate, which the API server checks. Neither set: the chart makes one, once, and keeps it."""

    cert_manager: bool = Field(
        False, description="cert-manager makes, renews and announces it, by an Issuer of the release's own"
    )
    existing_secret: SecretName = Field(
        "", description="Secret with tls.crt and tls.key for <fullname>-injector.<namespace>.svc; needs caBundle"
    )
    ca_bundle: Base64 = Field("", description="base64 of the PEM certificates that sign existingSecret's")


class InjectorValues(Pod):
    """Adds sidecar and plugin to vLLM pods with the label context-cache.io/inject: "true"."""

    enabled: bool = Field(False, description="run the webhook; see docs/injector.md")
    replicas: int = Field(2, ge=1, description="pods; null: whoever else scales them has them")
    settings: InjectorSettingsMap = Field(
        default_factory=dict, description="settings of the process, INJECTOR_… variables"
    )
    resources: Resources = Field(
        default_factory=lambda: resources("50m", "64Mi", "256Mi"), description="requests and limits of the container"
    )
    payload_resources: Resources = Field(
        default_factory=lambda: {
            "requests": {"cpu": "50m", "memory": "64Mi"},
            "limits": {"cpu": "1", "memory": "512Mi"},
        },
        description="of the init container that copies the plugin into an injected pod, which ends before vLLM starts",
    )
    pdb: PodDisruptionBudget = Field(default_factory=PodDisruptionBudget, description="its PodDisruptionBudget")
    failure_policy: Literal["Ignore", "Fail"] = Field(
        "Ignore",
        description="Ignore: while no injector answers, vLLM pods start without a sidecar. Fail: they do not start, "
        "and autoscaling of vLLM stands still with the injector",
    )
    namespace_selector: LabelSelector = Field(
        default_factory=dict,
        description="namespaces whose pods may be injected; {}: the release's own. Its gateways find pods there only; "
        "pods elsewhere need the signing Secret, the TLS Secret and a front of their own",
    )
    timeout_seconds: int = Field(5, ge=1, le=30, description="seconds the API server waits for an answer")
    tls: InjectorTls = Field(default_factory=InjectorTls, description="the webhook's certificate")
