"""Values of the context-manager."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from context_manager.settings import ManagerSettings
from deploy.chart.chart_settings import settings_schema
from deploy.chart.kubernetes_values import Resources
from deploy.chart.pod_values import Pod, PodDisruptionBudget, resources

ManagerSettingsMap = Annotated[dict[str, Any], WithJsonSchema(settings_schema(ManagerSettings, "MANAGER_"))]


class ContextManagerValues(Pod):
    """Keeps who has which context, until when, whose turn; stateless over Redis."""

    replicas: int = Field(2, ge=1, description="pods; null: whoever else scales them has them")
    settings: ManagerSettingsMap = Field(
        default_factory=dict, description="settings of the process, MANAGER_… variables"
    )
    resources: Resources = Field(
        default_factory=lambda: resources("250m", "256Mi", "1Gi"), description="requests and limits of the container"
    )
    pdb: PodDisruptionBudget = Field(default_factory=PodDisruptionBudget, description="its PodDisruptionBudget")
    termination_grace_period_seconds: int = Field(
        30, ge=1, description="seconds until the pod is killed; more than settings.drainS"
    )
