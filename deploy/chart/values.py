"""The whole of the chart's values: one field a section, each section a module of its own."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, create_model

from deploy.chart.common_values import (
    AuthValues,
    Image,
    RbacValues,
    SecurityContext,
    ServiceAccountValues,
    SigningValues,
    TestsValues,
    TracingValues,
    restricted_container,
    restricted_pod,
)
from deploy.chart.gateway_values import GatewayValues
from deploy.chart.kubernetes_values import FreeObject, Labels, Strings
from deploy.chart.manager_values import ContextManagerValues
from deploy.chart.redis_values import RedisValues, ValkeyValues
from deploy.chart.section import Section

_NAME = r"^([a-z]([-a-z0-9]*[a-z0-9])?)?$"
Name = Annotated[str, WithJsonSchema({"type": "string", "pattern": _NAME, "maxLength": 40})]
"""What names of objects begin with: they stay DNS labels with any suffix."""
Domain = Annotated[str, WithJsonSchema({"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"})]
LogLevel = Annotated[str, WithJsonSchema({"enum": ["DEBUG", "INFO", "WARNING", "ERROR"]})]


class _Common(Section):
    global_: FreeObject = Field(
        default_factory=dict, alias="global", description="values of an umbrella chart; nothing here reads them"
    )
    name_override: Name = Field("", description="instead of context-cache in names and in app.kubernetes.io/name")
    fullname_override: Name = Field(
        "", description="what every name begins with, at most 40 characters; empty: release name and chart name"
    )
    common_labels: Labels = Field(default_factory=dict, description="more labels of every object")
    common_annotations: Strings = Field(default_factory=dict, description="more annotations of every object")
    cluster_domain: Domain = Field("cluster.local", description="DNS domain of the cluster")
    log_level: LogLevel = Field("INFO", description="least level of log lines of every process of ours")
    image: Image = Field(default_factory=Image, description="the image of every process of ours")
    service_account: ServiceAccountValues = Field(
        default_factory=ServiceAccountValues, description="ServiceAccounts of gateway and context-manager"
    )
    rbac: RbacValues = Field(default_factory=RbacValues, description="what those accounts may do")
    pod_security_context: SecurityContext = Field(
        default_factory=restricted_pod, description="securityContext of pods; the default fits Pod Security restricted"
    )
    container_security_context: SecurityContext = Field(
        default_factory=restricted_container, description="securityContext of containers; the same"
    )
    auth: AuthValues = Field(default_factory=AuthValues, description="API keys of clients")
    signing: SigningValues = Field(
        default_factory=SigningValues, description="the secret that gateways sign with and pods verify with"
    )
    redis: RedisValues = Field(default_factory=RedisValues, description="the store of sessions")
    valkey: ValkeyValues = Field(default_factory=ValkeyValues, description="one Valkey node, for trying")
    gateway: GatewayValues = Field(default_factory=GatewayValues, description="routes requests to vLLM pods")
    context_manager: ContextManagerValues = Field(
        default_factory=ContextManagerValues, description="who has which context, until when"
    )
    tracing: TracingValues = Field(default_factory=TracingValues, description="OpenTelemetry traces")
    tests: TestsValues = Field(default_factory=TestsValues, description="helm test")


# Modules of other sections that may not be written yet.
_LATER = (
    ("engine", "engine_values", "Engine"),
    ("sidecar", "engine_values", "Sidecar"),
    ("discovery", "engine_values", "Discovery"),
    ("envoy", "envoy_values", "EnvoyValues"),
    ("injector", "injector_values", "InjectorValues"),
    ("tls", "tls_values", "Tls"),
    ("network_policy", "network_values", "NetworkPolicyValues"),
    ("monitoring", "monitoring_values", "MonitoringValues"),
)


class _NotYet(Section):
    enabled: bool = Field(False, description="not written yet")


def _later() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, module, name in _LATER:
        if find_spec(f"deploy.chart.{module}") is None:
            found[field] = (_NotYet, Field(default_factory=_NotYet, description="not written yet"))
            continue
        section = getattr(import_module(f"deploy.chart.{module}"), name, None)
        if section is not None:
            found[field] = (section, Field(default_factory=section, description=section.__doc__.split("\n")[0]))
    return found


ChartValues: type[Section] = create_model("ChartValues", __base__=_Common, **_later())
