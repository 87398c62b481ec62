"""Values of what Prometheus and Grafana get: who scrapes what, alert rules, a dashboard."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, WithJsonSchema

from deploy.chart.kubernetes_values import Strings
from deploy.chart.section import Section

Duration = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"})]
Url = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^(https?://[^ ]+)?$"})]


class PodMonitor(Section):
    """PodMonitors of the Prometheus operator: each pod of the release, injected ones too."""

    enabled: bool = Field(False, description="create them; needs the operator's CustomResourceDefinitions")
    interval: Duration = Field("30s", description="time between two scrapes")
    labels: Strings = Field(
        default_factory=dict, description="labels the operator selects by, such as release: kube-prometheus-stack"
    )


class PrometheusRule(Section):
    """Alert rules of the Prometheus operator, each with a section in docs/operations/alerts.md."""

    enabled: bool = Field(False, description="create them; needs the operator's CustomResourceDefinitions")
    labels: Strings = Field(default_factory=dict, description="labels the operator selects by")
    runbook_url: Url = Field(
        "", description="address of your copy of docs/operations/alerts.md, for links in alerts; empty: its path here"
    )


class Dashboard(Section):
    """A ConfigMap with the dashboard, for Grafana's sidecar."""

    enabled: bool = Field(False, description="create it")
    labels: Strings = Field(
        default_factory=lambda: {"grafana_dashboard": "1"}, description="labels that the sidecar looks for"
    )
    annotations: Strings = Field(
        default_factory=dict, description="its annotations, such as the folder: grafana_folder: LLM"
    )


class MonitoringValues(Section):
    """Metrics, alerts and a dashboard. Names and meanings: docs/operations/."""

    pod_monitor: PodMonitor = Field(default_factory=PodMonitor, description="PodMonitors for the Prometheus operator")
    prometheus_rule: PrometheusRule = Field(
        default_factory=PrometheusRule, description="alert rules for the Prometheus operator"
    )
    dashboard: Dashboard = Field(default_factory=Dashboard, description="the Grafana dashboard")
