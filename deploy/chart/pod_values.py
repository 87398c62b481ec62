"""Values that every component with pods has: where they run, what they may use, how many may be missing."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, WithJsonSchema

from deploy.chart.kubernetes_values import (
    Affinity,
    ExtraEnv,
    Labels,
    Quantity,
    Resources,
    SecretName,
    Strings,
    Tolerations,
)
from deploy.chart.section import Section

TAG = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"
_NOT_FLOATING = {"anyOf": [{"const": ""}, {"pattern": TAG, "not": {"enum": ["latest", "main", "master", "edge"]}}]}
Tag = Annotated[str, WithJsonSchema({"type": "string", **_NOT_FLOATING})]
"""An image's tag; floating ones are refused."""
Digest = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^(sha256:[a-f0-9]{64})?$"})]
"""An image's digest, or nothing."""
Registry = Annotated[
    str,
    WithJsonSchema(
        {"type": "string", "pattern": r"^([A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?)?$", "not": {"pattern": "//"}}
    ),
]
"""Host of a registry, with a path where it has one; without https:// and a slash at the end."""
Repository = Annotated[str, WithJsonSchema({"type": "string", "pattern": r"^[a-z0-9]+([._/-]+[a-z0-9]+)*$"})]
"""Path of an image in its registry."""


class ImageReference(Section):
    """Where an image is."""

    registry: Registry = Field("", description="host of the registry; empty: image.registry")
    repository: Repository = Field("context-cache", description="path in the registry")
    tag: Tag = Field("", description="tag; empty: the chart's appVersion; floating tags (latest) are refused")
    digest: Digest = Field("", description="sha256:…; when set it decides, whatever the tag")


class PodDisruptionBudget(Section):
    """How many pods an eviction may take."""

    enabled: bool = Field(True, description="create a PodDisruptionBudget")
    max_unavailable: Annotated[
        int | str, WithJsonSchema({"type": ["integer", "string"], "pattern": "^[0-9]+%?$", "minimum": 1})
    ] = Field(1, description="pods that evictions may take at one time, a number or a percentage")


class Autoscaling(Section):
    """A HorizontalPodAutoscaler on CPU."""

    enabled: bool = Field(False, description="scale by CPU; the number of replicas is then the autoscaler's")
    min_replicas: int = Field(2, ge=1, description="fewest pods")
    max_replicas: int = Field(10, ge=1, description="most pods")
    target_cpu_utilization_percentage: int = Field(
        70,
        ge=1,
        le=1000,
        alias="targetCPUUtilizationPercentage",
        description="percent of the requested CPU that pods use on average",
    )


class Pod(Section):
    """The block of keys that each component's pods have."""

    resources: Resources = Field(default_factory=dict, description="requests and limits of the container")
    pod_annotations: Strings = Field(default_factory=dict, description="more annotations of the pods")
    pod_labels: Labels = Field(default_factory=dict, description="more labels of the pods")
    node_selector: Strings = Field(default_factory=dict, description="labels of the nodes that pods may run on")
    tolerations: Tolerations = Field(
        default_factory=list, description="taints of nodes that pods may run on all the same"
    )
    affinity: Affinity = Field(default_factory=dict, description="affinity of the pods")
    priority_class_name: SecretName = Field("", description="PriorityClass of the pods; empty: the cluster's default")
    topology_spread: bool = Field(True, description="spread pods over hosts and zones, as far as there are any")
    extra_env: ExtraEnv = Field(
        default_factory=list, description="more environment variables; settings have keys of their own and are refused"
    )


def resources(cpu: Quantity, memory: Quantity, memory_limit: Quantity) -> dict[str, dict[str, Quantity]]:
    """Return requests and a limit of memory. CPU has no limit: a throttled process only answers later."""
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory_limit}}
