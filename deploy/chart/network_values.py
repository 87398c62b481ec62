"""Values of the NetworkPolicies: who may reach the release, and what its pods may reach outside it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from deploy.chart.kubernetes_values import FreeObject, NetworkPolicyPeers, Port
from deploy.chart.section import Section

_DNS: list[dict[str, Any]] = [
    {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    },
    {"ipBlock": {"cidr": "169.254.20.10/32"}},
    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}},
]
"""CoreDNS of most clusters, NodeLocal DNSCache, and OpenShift's."""


class Dns(Section):
    """Where names are resolved."""

    to: NetworkPolicyPeers = Field(
        default_factory=lambda: list(_DNS),
        description="who answers: kube-dns, NodeLocal DNSCache at its usual address, OpenShift's DNS",
    )
    ports: list[Port] = Field(
        default_factory=lambda: [53, 5353], min_length=1, description="ports, over UDP and TCP; 5353 is OpenShift's"
    )


class ApiServer(Section):
    """The Kubernetes API, which the gateway watches."""

    cidrs: list[str] = Field(
        default_factory=list, description="networks of the API servers, after address translation; []: any address"
    )
    ports: list[Port] = Field(
        default_factory=lambda: [443, 6443], min_length=1, description="their ports, after address translation too"
    )
    webhook_clients: NetworkPolicyPeers = Field(
        default_factory=list,
        description="who calls the injector: the API servers' networks or the pods of a konnectivity agent; []: any, "
        "as these addresses differ from cluster to cluster and the calls are harmless",
    )


class ModelDownload(Section):
    """How vLLM gets its model from a hub."""

    enabled: bool = Field(
        True,
        description="let the chart's engine fetch a model; turn it off once the model is in the cache: with it off "
        "engines reach nothing outside the release",
    )
    port: Port = Field(443, description="the hub's port")
    to: NetworkPolicyPeers = Field(default_factory=list, description="where the hub is; []: any address")


class InjectedPods(Section):
    """Pods that belong to somebody else and got a sidecar."""

    restrict_http: bool = Field(
        False,
        description="let only this release's parts reach vLLM in injected pods, as in the chart's own; false: whoever "
        "reached it before still does, without a context and without an API key",
    )


class PerComponent(Section):
    """Rules for one component each, as Kubernetes writes them in a NetworkPolicy."""

    gateway: list[FreeObject] = Field(default_factory=list, description="of the gateway")
    context_manager: list[FreeObject] = Field(default_factory=list, description="of the context-manager")
    envoy: list[FreeObject] = Field(default_factory=list, description="of Envoy")
    engine: list[FreeObject] = Field(default_factory=list, description="of the chart's own engine")
    injector: list[FreeObject] = Field(default_factory=list, description="of the injector")
    valkey: list[FreeObject] = Field(default_factory=list, description="of the chart's Valkey")


class NetworkPolicyValues(Section):
    """Default deny in and out for every pod of the release, then exactly the flows that are needed."""

    enabled: bool = Field(
        True, description="create NetworkPolicies; they need a network plugin that enforces them, others ignore them"
    )
    clients: NetworkPolicyPeers = Field(
        default_factory=list,
        description="who may reach the front: Envoy with envoy.mode proxy, the gateway with none; []: anybody",
    )
    proxies: NetworkPolicyPeers = Field(
        default_factory=list,
        description="with envoy.mode envoyGateway or inferencePool: the pods of that Envoy, which reach gateway and "
        "engines; []: any pod in the cluster",
    )
    monitoring: NetworkPolicyPeers = Field(
        default_factory=list,
        description="who may scrape metrics; []: any pod in the cluster, but not vLLM's own metrics: they are on the "
        "port of its API, which opens only to peers named here",
    )
    trace_collectors: NetworkPolicyPeers = Field(
        default_factory=list, description="where tracing.endpoint is; []: any address on its port"
    )
    dns: Dns = Field(default_factory=Dns, description="DNS")
    api_server: ApiServer = Field(default_factory=ApiServer, description="the Kubernetes API")
    model_download: ModelDownload = Field(default_factory=ModelDownload, description="models from a hub")
    injected_pods: InjectedPods = Field(
        default_factory=InjectedPods,
        description="pods with an injected sidecar: the sidecar's ports are closed, nothing else of theirs changes",
    )
    extra_ingress: PerComponent = Field(
        default_factory=PerComponent, description="more NetworkPolicyIngressRules, by component"
    )
    extra_egress: PerComponent = Field(
        default_factory=PerComponent, description="more NetworkPolicyEgressRules, by component"
    )
