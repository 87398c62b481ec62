"""Values of the gateway."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from deploy.chart.chart_settings import settings_schema
from deploy.chart.kubernetes_values import Port, Resources, Strings
from deploy.chart.pod_values import Autoscaling, Pod, PodDisruptionBudget, resources
from deploy.chart.section import Section
from gateway.settings import GatewaySettings

GatewaySettingsMap = Annotated[dict[str, Any], WithJsonSchema(settings_schema(GatewaySettings, "GATEWAY_"))]


class GatewayService(Section):
    """The Service of the HTTP front and the external processor."""

    type: Literal["ClusterIP", "LoadBalancer", "NodePort"] = Field(
        "ClusterIP", description="type; clients use it with envoy.mode none only"
    )
    port: Port = Field(8000, description="port of the HTTP front")
    annotations: Strings = Field(default_factory=dict, description="its annotations")


class Keda(Section):
    """A KEDA ScaledObject on the requests that gateways have in hand."""

    enabled: bool = Field(False, description="scale with KEDA, instead of autoscaling")
    min_replicas: int = Field(2, ge=1, description="fewest pods")
    max_replicas: int = Field(10, ge=1, description="most pods")
    prometheus_server: Annotated[str, WithJsonSchema({"type": "string", "pattern": "^(https?://.+)?$"})] = Field(
        "", description="URL of the Prometheus that scrapes the gateways"
    )
    threshold: Annotated[str, WithJsonSchema({"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"})] = Field(
        "50", description="requests in hand that one gateway should have: one process is one core"
    )


class GatewayValues(Pod):
    """Routes requests to vLLM pods and answers for contexts."""

    replicas: int = Field(
        2, ge=1, description="pods, unless an autoscaler has them; null: whoever else scales them has them"
    )
    settings: GatewaySettingsMap = Field(
        default_factory=dict, description="settings of the process, GATEWAY_… variables"
    )
    service: GatewayService = Field(default_factory=GatewayService, description="its Service")
    resources: Resources = Field(
        # Bodies in hand are bounded by maxBufferedBytes, 1 GiB by default.
        default_factory=lambda: resources("500m", "512Mi", "2Gi"),
        description="requests and limits of the container; the memory limit covers settings.maxBufferedBytes",
    )
    pdb: PodDisruptionBudget = Field(default_factory=PodDisruptionBudget, description="its PodDisruptionBudget")
    autoscaling: Autoscaling = Field(default_factory=Autoscaling, description="a HorizontalPodAutoscaler on CPU")
    keda: Keda = Field(default_factory=Keda, description="a KEDA ScaledObject on requests in hand, instead")
    drain_delay_s: int = Field(
        5,
        ge=0,
        description="seconds from SIGTERM (not ready from then on) to closing the ports; proxies notice meanwhile",
    )
    termination_grace_period_seconds: int = Field(
        60,
        ge=1,
        description="seconds until the pod is killed; more than drainDelayS and settings.drainTimeoutS together",
    )
