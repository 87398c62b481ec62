"""The pods behind Services of a Kubernetes namespace, followed while they come, drain and go. Knows no wire.

In memory: with the API server away the last known pods stay. How they do is asked elsewhere, by the probe.

Rules:
- One endpoint a pod, named like it; an address without a pod behind it has no name that sessions could remember.
- Every pod of the slices is listed, ready or not. A pod whose engine restarts still has a sidecar whose KV others pull
  and deletes must reach; whether its engine takes requests is what the gateway's own probe asks, each second.
- What Kubernetes calls terminating or not serving, and what is annotated to drain, is draining: it gets nothing new
  while another pod is ready. So a readiness gate is obeyed, and a kubelet wrong about every pod stops nobody.
- IPv4 before IPv6; of a pod's several entries the best one counts, its sidecar may come from another of them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contextcache.clock import Clock
from contextcache.kubernetes.objects import ENDPOINT_SLICES, PODS, KubernetesObject, KubernetesReader, Selection
from gateway.metrics import Metrics
from gateway.pods.reflector import Reflector
from gateway.pods.state import Endpoint

log = logging.getLogger(__name__)

DRAIN_ANNOTATION = "context-cache.io/drain"
INJECTED_ANNOTATION = "context-cache.io/injected"
SIDECAR_CONTAINER = "kv-sidecar"


@dataclass(frozen=True, slots=True)
class SliceRules:
    """How a Service's ports are read."""

    port_name: str = "http"
    sidecar_port_name: str = "kv-grpc"
    scheme: str = "http"


@dataclass(frozen=True, slots=True)
class Address:
    """One pod in one slice."""

    pod: str
    host: str
    """As in a URL: an IPv6 address in brackets."""
    is_ipv6: bool
    serving: bool
    terminating: bool
    ports: Mapping[str, int]
    """By name."""


@dataclass(frozen=True, slots=True)
class Pod:
    """What a Pod object says beyond its slices."""

    leaving: bool
    """It was deleted and ends, or somebody annotated it to drain."""
    has_sidecar: bool


class KubernetesEndpoints:
    """Endpoints from EndpointSlices and Pods; `changed` is a Source of WatchedEndpoints."""

    def __init__(
        self,
        api: KubernetesReader,
        *,
        namespace: str,
        selector: str,
        rules: SliceRules,
        resync_s: float,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """`selector` chooses the slices, which have the labels of their Service, and the pods, which have them too."""
        slices, pods = (Selection(resource, namespace, selector) for resource in (ENDPOINT_SLICES, PODS))
        self._slices = Reflector(api, slices, addresses_of, resync_s=resync_s, metrics=metrics, clock=clock)
        self._pods = Reflector(api, pods, pod_of, resync_s=resync_s, metrics=metrics, clock=clock)
        self._rules = rules
        self._versions = (0, 0)
        self.endpoints: tuple[Endpoint, ...] = ()
        """The last known ones."""

    async def run(self) -> None:
        """Follow both kinds until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._slices.run(), name="endpoint slices")
            group.create_task(self._pods.run(), name="pods")

    async def until_tried(self, timeout_s: float) -> bool:
        """Wait until both kinds were asked for once; False when that took too long, or the slices did not come."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._slices.tried.wait()
                await self._pods.tried.wait()
        except TimeoutError:
            return False
        return self._slices.listed

    def changed(self) -> Sequence[Endpoint] | None:
        """Return all endpoints when they have changed, else None: nothing before the first list of slices."""
        versions = (self._slices.version, self._pods.version)
        if versions == self._versions or not self._slices.listed:
            return None
        self._versions = versions
        addresses = (address for found in self._slices.objects.values() for address in found)
        endpoints = endpoints_of(addresses, self._pods.objects, rules=self._rules)
        if endpoints == self.endpoints:
            return None
        self.endpoints = endpoints
        log.info("endpoints discovered", extra={"num_endpoints": len(endpoints)})
        return endpoints


def addresses_of(endpoint_slice: KubernetesObject) -> tuple[Address, ...]:
    """Return the pods of an EndpointSlice (discovery.k8s.io/v1); none for what is no address of a pod."""
    ports = {
        str(port.get("name") or ""): port["port"]
        for port in _entries(endpoint_slice, "ports")
        if _is_port(port.get("port")) and port.get("protocol", "TCP") == "TCP"
    }
    found = (_address(entry, ports) for entry in _entries(endpoint_slice, "endpoints"))
    return tuple(address for address in found if address is not None)


def pod_of(pod: KubernetesObject) -> Pod:
    """Return what counts of a Pod (v1)."""
    metadata = pod.get("metadata") or {}
    annotations = metadata.get("annotations") or {}
    spec = pod.get("spec") or {}
    containers = [*_entries(spec, "initContainers"), *_entries(spec, "containers")]
    return Pod(
        leaving=bool(metadata.get("deletionTimestamp")) or annotations.get(DRAIN_ANNOTATION) == "true",
        has_sidecar=bool(annotations.get(INJECTED_ANNOTATION))
        or any(container.get("name") == SIDECAR_CONTAINER for container in containers),
    )


def endpoints_of(addresses: Iterable[Address], pods: Mapping[str, Pod], *, rules: SliceRules) -> tuple[Endpoint, ...]:
    """Return one endpoint for each pod with the HTTP port, by name.

    A pod that is not in `pods` (not seen yet, or not ours to see) is as its slices say.
    """
    by_pod: dict[str, list[Address]] = {}
    for address in addresses:
        if rules.port_name in address.ports:
            by_pod.setdefault(address.pod, []).append(address)
    return tuple(_endpoint(name, by_pod[name], pods.get(name), rules) for name in sorted(by_pod))


def _endpoint(name: str, entries: list[Address], pod: Pod | None, rules: SliceRules) -> Endpoint:
    entries = sorted(entries, key=lambda entry: _worse_last(entry, rules))
    best = entries[0]
    sidecar = ""
    if pod is None or pod.has_sidecar:
        # Two Services may share the pod, and one of them know the sidecar's port.
        sidecar = next(
            (_host_port(entry, rules.sidecar_port_name) for entry in entries if _has_sidecar(entry, rules)), ""
        )
    return Endpoint(
        name,
        f"{rules.scheme}://{_host_port(best, rules.port_name)}",
        sidecar,
        draining=best.terminating or not best.serving or (pod is not None and pod.leaving),
    )


def _worse_last(entry: Address, rules: SliceRules) -> tuple[Any, ...]:
    # The host and ports come last, so that equal slices in another order give the same endpoint.
    has_sidecar = _has_sidecar(entry, rules)
    ports = (entry.ports[rules.port_name], entry.ports.get(rules.sidecar_port_name, 0))
    return entry.is_ipv6, entry.terminating, not entry.serving, not has_sidecar, entry.host, ports


def _has_sidecar(entry: Address, rules: SliceRules) -> bool:
    return rules.sidecar_port_name in entry.ports


def _host_port(entry: Address, port_name: str) -> str:
    return f"{entry.host}:{entry.ports[port_name]}"


def _address(entry: KubernetesObject, ports: Mapping[str, int]) -> Address | None:
    target = entry.get("targetRef") or {}
    hosts = entry.get("addresses") or []
    if target.get("kind") != "Pod" or not target.get("name") or not hosts:
        return None
    try:
        # The API says of more than one address: use the first.
        ip = ipaddress.ip_address(hosts[0])
    except ValueError:
        return None
    plain = (ip.version == 6 and ip.ipv4_mapped) or ip
    if plain.is_link_local or plain.is_multicast or plain.is_unspecified:
        # Never a pod's, and 169.254.169.254 would be the cloud's; API servers refuse them as well.
        return None
    conditions = entry.get("conditions") or {}
    is_ipv6 = ip.version == 6
    return Address(
        pod=target["name"],
        host=f"[{ip}]" if is_ipv6 else str(ip),
        is_ipv6=is_ipv6,
        # Nothing said means: as `ready` says, and that means: yes.
        serving=_condition(conditions, "serving", unknown=_condition(conditions, "ready", unknown=True)),
        terminating=_condition(conditions, "terminating", unknown=False),
        ports=ports,
    )


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 65535


def _condition(conditions: KubernetesObject, name: str, *, unknown: bool) -> bool:
    value = conditions.get(name)
    return unknown if value is None else value is True


def _entries(found: KubernetesObject, name: str) -> list[KubernetesObject]:
    return [entry for entry in found.get(name) or [] if isinstance(entry, dict)]
