"""The whole of the chart's values: one field a section, each section a module of its own."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, WithJsonSchema

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
from deploy.chart.engine_values import Discovery, Engine, Sidecar
from deploy.chart.envoy_values import EnvoyValues
from deploy.chart.gateway_values import GatewayValues
from deploy.chart.injector_values import InjectorValues
from deploy.chart.kubernetes_values import FreeObject, Labels, Strings
from deploy.chart.manager_values import ContextManagerValues
from deploy.chart.monitoring_values import MonitoringValues
from deploy.chart.network_values import NetworkPolicyValues
from deploy.chart.redis_values import RedisValues, ValkeyValues
from deploy.chart.section import Section
from deploy.chart.tls_values import Tls

_NAME = r"^([a-z]([-a-z0-9]*[a-z0-9])?)?$"
Name = Annotated[str, WithJsonSchema({"type": "string", "pattern": _NAME, "maxLength": 40})]
"""What names of objects begin with: they stay DNS labels with any suffix."""
Domain = Annotated[str, WithJsonSchema({"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"})]
LogLevel = Annotated[str, WithJsonSchema({"enum": ["DEBUG", "INFO", "WARNING", "ERROR"]})]


class ChartValues(Section):
    """What a user of the chart can say."""

    name_override: Name = Field("", description="instead of context-cache in names and in app.kubernetes.io/name")
    fullname_override: Name = Field(
        "", description="what every name begins with, at most 40 characters; empty: release name and chart name"
    )
    common_labels: Labels = Field(default_factory=dict, description="more labels of every object")
    common_annotations: Strings = Field(default_factory=dict, description="more annotations of every object")
    cluster_domain: Domain = Field("cluster.local", description="DNS domain of the cluster")
    log_level: LogLevel = Field("INFO", description="least level of log lines of every process of ours")
    global_: FreeObject = Field(
        default_factory=dict, alias="global", description="values of an umbrella chart; nothing here reads them"
    )
    pod_security_context: SecurityContext = Field(
        default_factory=restricted_pod, description="securityContext of pods; the default fits Pod Security restricted"
    )
    container_security_context: SecurityContext = Field(
        default_factory=restricted_container, description="securityContext of containers; the same"
    )
    image: Image = Field(default_factory=Image, description="the image of every process of ours")
    service_account: ServiceAccountValues = Field(
        default_factory=ServiceAccountValues, description="ServiceAccounts of gateway and context-manager"
    )
    rbac: RbacValues = Field(default_factory=RbacValues, description="what those accounts may do")
    auth: AuthValues = Field(default_factory=AuthValues, description="API keys of clients")
    signing: SigningValues = Field(
        default_factory=SigningValues, description="the secret that gateways sign with and pods verify with"
    )
    redis: RedisValues = Field(
        default_factory=RedisValues,
        description="the store of sessions: exactly one of redis.url, redis.existingSecret and valkey.enabled",
    )
    valkey: ValkeyValues = Field(
        default_factory=ValkeyValues,
        description="one Valkey node, for trying: its restart is an outage, and its volume goes with the release",
    )
    gateway: GatewayValues = Field(
        default_factory=GatewayValues, description="routes requests to vLLM pods and answers for contexts"
    )
    context_manager: ContextManagerValues = Field(
        default_factory=ContextManagerValues,
        description="who has which context, until when, whose turn; stateless over Redis",
    )
    envoy: EnvoyValues = Field(default_factory=EnvoyValues, description="what clients talk to")
    engine: Engine = Field(default_factory=Engine, description="vLLM of the chart's own, with a kv-sidecar beside it")
    sidecar: Sidecar = Field(
        default_factory=Sidecar, description="the kv-sidecar beside every vLLM pod, the chart's own and injected ones"
    )
    discovery: Discovery = Field(
        default_factory=Discovery, description="what every vLLM pod of the release has in common"
    )
    injector: InjectorValues = Field(
        default_factory=InjectorValues,
        description="the webhook that adds sidecar and plugin to vLLM Deployments you have",
    )
    tls: Tls = Field(default_factory=Tls, description="mutual TLS between the parts")
    network_policy: NetworkPolicyValues = Field(
        default_factory=NetworkPolicyValues, description="default deny, and then exactly the flows that are needed"
    )
    monitoring: MonitoringValues = Field(
        default_factory=MonitoringValues,
        description="PodMonitors, alert rules and a dashboard for the Prometheus operator and Grafana",
    )
    tracing: TracingValues = Field(default_factory=TracingValues, description="OpenTelemetry traces")
    tests: TestsValues = Field(default_factory=TestsValues, description="helm test")
