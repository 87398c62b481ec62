"""Values of Envoy, or of whatever proxy stands in front instead."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from deploy.chart.chart_settings import settings_schema
from deploy.chart.kubernetes_values import DNS_LABEL, Resources, SecretName, Strings
from deploy.chart.pod_values import (
    Autoscaling,
    ImageReference,
    Pod,
    PodDisruptionBudget,
    Registry,
    Repository,
    Tag,
    resources,
)
from deploy.chart.section import Section
from gateway.envoy.settings import EnvoySettings

EnvoySettingsMap = Annotated[dict[str, Any], WithJsonSchema(settings_schema(EnvoySettings, "ENVOY_"))]
_HOSTNAME = r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
Hostname = Annotated[str, WithJsonSchema({"type": "string", "pattern": _HOSTNAME, "maxLength": 253})]
Network = Annotated[str, WithJsonSchema({"type": "string", "pattern": r"^[0-9a-fA-F.:]+/[0-9]{1,3}$"})]
Name = Annotated[str, WithJsonSchema({"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"})]
Namespace = Annotated[str, WithJsonSchema({"type": "string", "pattern": DNS_LABEL, "maxLength": 63})]


ENVOY_VERSION = "1.40.0"
"""Of the official image: what the tests run, as constraints.txt pins the wheel."""


class EnvoyImage(ImageReference):
    """Envoy's own image."""

    registry: Registry = Field("docker.io", description="host of the registry; empty: image.registry")
    repository: Repository = Field("envoyproxy/envoy", description="path in the registry")
    tag: Tag = Field(f"distroless-v{ENVOY_VERSION}", description="tag; this version is the one that the tests run")


class EnvoyService(Section):
    """The Service that clients use."""

    type: Literal["ClusterIP", "LoadBalancer", "NodePort"] = Field("ClusterIP", description="type")
    port: Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": 65535})] = Field(
        0, description="port; 0: 80, or 443 with envoy.tls"
    )
    annotations: Strings = Field(default_factory=dict, description="its annotations")
    load_balancer_source_ranges: list[Network] = Field(
        default_factory=list, description="networks that a LoadBalancer lets in; empty: any"
    )


class EnvoyTls(Section):
    """HTTPS for clients."""

    existing_secret: SecretName = Field(
        "", description="Secret with tls.crt and tls.key; read again when it changes; empty: plain HTTP"
    )


class ParentReference(Section):
    """A Gateway, or one of its listeners, that the routes belong to."""

    name: Name = Field(description="name of the Gateway")
    namespace: Namespace = Field("", description="its namespace; empty: the release's")
    section_name: Annotated[str, WithJsonSchema({"type": "string", "pattern": DNS_LABEL})] = Field(
        "", description="one of its listeners; empty: all"
    )


class ClientTrafficPolicy(Section):
    """With mode envoyGateway: what the Gateway takes from every request before anything reads it."""

    enabled: bool = Field(
        True,
        description="create ClientTrafficPolicies that strip steering headers, for Gateways of the release's "
        "namespace; one Gateway has one, so turn it off where there is one already and add the same headers there",
    )


class EnvoyValues(Pod):
    """What clients talk to."""

    mode: Literal["proxy", "envoyGateway", "inferencePool", "none"] = Field(
        "proxy",
        description="proxy: an Envoy of the release; envoyGateway: routes and policies for Envoy Gateway (1.5 or "
        "later); inferencePool: an InferencePool and routes for a Gateway that knows them; none: clients use the "
        "gateway's Service",
    )
    replicas: int = Field(
        2,
        ge=1,
        description="pods of mode proxy, unless the autoscaler has them; null: whoever else scales them has them",
    )
    settings: EnvoySettingsMap = Field(
        default_factory=dict, description="settings of the bootstrap, as context-cache envoy --help lists them"
    )
    image: EnvoyImage = Field(default_factory=EnvoyImage, description="Envoy's image")
    concurrency: int = Field(2, ge=1, description="Envoy's worker threads")
    drain_delay_s: int = Field(
        5,
        ge=1,
        description="seconds from the pod's end (not ready from then on) to closing the port; load balancers notice "
        "then",
    )
    drain_timeout_s: int = Field(600, ge=0, description="seconds running answers get to finish after that")
    service: EnvoyService = Field(default_factory=EnvoyService, description="the Service of mode proxy")
    tls: EnvoyTls = Field(default_factory=EnvoyTls, description="HTTPS for clients in mode proxy")
    resources: Resources = Field(
        default_factory=lambda: resources("500m", "512Mi", "2560Mi"),
        description="requests and limits of Envoy; the memory limit lies above settings.maxHeapBytes, 2 GiB",
    )
    attendant_resources: Resources = Field(
        default_factory=lambda: resources("10m", "64Mi", "128Mi"),
        description="requests and limits of the attendant, which follows the API keys and drains Envoy, and of the "
        "init container that writes the bootstrap",
    )
    pdb: PodDisruptionBudget = Field(default_factory=PodDisruptionBudget, description="its PodDisruptionBudget")
    autoscaling: Autoscaling = Field(default_factory=Autoscaling, description="a HorizontalPodAutoscaler on CPU")
    parent_refs: list[ParentReference] = Field(
        default_factory=list, description="Gateways of modes envoyGateway and inferencePool; at least one there"
    )
    hostnames: list[Hostname] = Field(
        default_factory=list, description="host names of the routes of these modes; empty: all of the Gateway's"
    )
    client_traffic_policy: ClientTrafficPolicy = Field(
        default_factory=ClientTrafficPolicy, description="headers stripped at the edge in mode envoyGateway"
    )
