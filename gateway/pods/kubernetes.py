"""The pods behind the Services of a Kubernetes namespace. Knows no wire.

Pods stay in memory: if the API server is away, the last known pods stay. The probe finds out whether they are healthy.

Rules:

- One endpoint per pod, with the pod's name. An address without a pod has no name that sessions could remember.
- Every pod of the slices is listed, ready or not. A pod whose engine restarts still has a sidecar, whose KV others pull
  and deletes must reach. The gateway's own probe decides each second whether the engine takes requests.
- A pod that is terminating, not serving, or annotated to drain gets no new requests while another pod is ready.
  So readiness gates are obeyed, and a kubelet that is wrong about every pod stops none.
- IPv4 comes before IPv6. The best of a pod's entries counts; its sidecar and its turn process may come from others.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from contextcache.clock import Clock
from contextcache.kubernetes.objects import ENDPOINT_SLICES, PODS, KubernetesObject, Selection
from gateway.metrics import Metrics
from gateway.pods.reflector import Reflector
from gateway.pods.state import Endpoint

if TYPE_CHECKING:
    from contextcache.kubernetes.client import KubernetesApi

log = logging.getLogger(__name__)

RESYNC_S = 300.0
"""Seconds between two full lists, which find changes that a watch lost."""
DRAIN_ANNOTATION = "context-cache.io/drain"
INJECTED_ANNOTATION = "context-cache.io/injected"
SIDECAR_CONTAINER = "kv-sidecar"
TURN_CONTAINER = "turn"


@dataclass(frozen=True, slots=True)
class SliceRules:
    """Names of the Services' ports, and the scheme of the HTTP API and of the turn process."""

    port_name: str = "http"
    sidecar_port_name: str = "kv-grpc"
    turn_port_name: str = "turn"
    scheme: str = "http"


@dataclass(frozen=True, slots=True)
class SliceAddress:
    """One pod in one slice."""

    pod: str
    host: str
    """Host part of a URL: an IPv6 address is in brackets."""
    is_ipv6: bool
    serving: bool
    terminating: bool
    ports: Mapping[str, int]
    """By name."""

    def at(self, port_name: str) -> str:
        """Return `host:port`; empty without this port."""
        return f"{self.host}:{self.ports[port_name]}" if port_name in self.ports else ""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """Facts of a Pod object that its slices lack."""

    leaving: bool
    """True: the pod is being deleted, or annotated to drain."""
    has_sidecar: bool
    has_turn: bool
    """False: the turn runs in vLLM's API server, as in pods of release 0.1.0, whatever ports the Service lists."""


class KubernetesEndpoints:
    """Endpoints from EndpointSlices and Pods; `changed` is a Source of WatchedEndpoints."""

    def __init__(
        self,
        api: KubernetesApi,
        *,
        namespace: str,
        selector: str,
        rules: SliceRules,
        metrics: Metrics,
        clock: Clock,
        resync_s: float = RESYNC_S,
    ) -> None:
        """`selector` selects the slices, which have the labels of their Service, and the pods with the same labels."""
        slices, pods = (Selection(resource, namespace, selector) for resource in (ENDPOINT_SLICES, PODS))
        followed = partial(Reflector, api, resync_s=resync_s, metrics=metrics, clock=clock)
        self._slices: Reflector[tuple[SliceAddress, ...]] = followed(slices, addresses_of)
        self._pods: Reflector[PodFacts] = followed(pods, pod_of)
        self._rules = rules
        self._versions = (0, 0)
        self.endpoints: tuple[Endpoint, ...] = ()
        """The last known pods."""

    async def run(self) -> None:
        """Follow slices and pods until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._slices.run(), name="endpoint slices")
            group.create_task(self._pods.run(), name="pods")

    async def until_tried(self, timeout_s: float) -> bool:
        """Wait for the first answer, or failure, of both lists; return whether slices arrived within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._slices.tried.wait()
                await self._pods.tried.wait()
        except TimeoutError:
            return False
        return self._slices.listed

    def changed(self) -> Sequence[Endpoint] | None:
        """Return all endpoints if they have changed since the last call, else None. None before the first list."""
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


def addresses_of(endpoint_slice: KubernetesObject) -> tuple[SliceAddress, ...]:
    """Return the pods of an EndpointSlice (discovery.k8s.io/v1), without entries that are no pod's address."""
    ports = {
        str(port.get("name") or ""): port["port"]
        for port in _entries(endpoint_slice, "ports")
        if _is_port(port.get("port")) and port.get("protocol", "TCP") == "TCP"
    }
    found = (_address(entry, ports) for entry in _entries(endpoint_slice, "endpoints"))
    return tuple(address for address in found if address is not None)


def pod_of(pod: KubernetesObject) -> PodFacts:
    """Return the facts of a Pod (v1)."""
    metadata, spec = pod.get("metadata") or {}, pod.get("spec") or {}
    annotations = metadata.get("annotations") or {}
    containers = {one.get("name") for field in ("initContainers", "containers") for one in _entries(spec, field)}
    return PodFacts(
        leaving=bool(metadata.get("deletionTimestamp")) or annotations.get(DRAIN_ANNOTATION) == "true",
        has_sidecar=bool(annotations.get(INJECTED_ANNOTATION)) or SIDECAR_CONTAINER in containers,
        has_turn=TURN_CONTAINER in containers,
    )


def endpoints_of(
    addresses: Iterable[SliceAddress], pods: Mapping[str, PodFacts], *, rules: SliceRules
) -> tuple[Endpoint, ...]:
    """Return one endpoint for each pod with the HTTP port, by name.

    For a pod that is not in `pods`, not seen yet or not selected, the slices alone count.
    """
    by_pod: dict[str, list[SliceAddress]] = {}
    for address in addresses:
        if rules.port_name in address.ports:
            by_pod.setdefault(address.pod, []).append(address)
    return tuple(_endpoint(name, by_pod[name], pods.get(name), rules) for name in sorted(by_pod))


def _endpoint(name: str, entries: list[SliceAddress], pod: PodFacts | None, rules: SliceRules) -> Endpoint:
    entries = sorted(entries, key=lambda entry: _worse_last(entry, rules))
    best = entries[0]
    # Two Services may select the pod, and only one of them have the sidecar's port, or the turn process's.
    sidecars = [entry.at(rules.sidecar_port_name) for entry in entries if pod is None or pod.has_sidecar]
    turns = [entry.at(rules.turn_port_name) for entry in entries if pod is None or pod.has_turn]
    turn = next(filter(None, turns), "")
    return Endpoint(
        name,
        f"{rules.scheme}://{best.at(rules.port_name)}",
        next(filter(None, sidecars), ""),
        draining=best.terminating or not best.serving or (pod is not None and pod.leaving),
        turn_url=turn and f"{rules.scheme}://{turn}",
    )


def _worse_last(entry: SliceAddress, rules: SliceRules) -> tuple[Any, ...]:
    # Host and ports come last, so that equal slices in another order give the same endpoint.
    has_sidecar = rules.sidecar_port_name in entry.ports
    ports = [entry.ports.get(name, 0) for name in (rules.port_name, rules.sidecar_port_name, rules.turn_port_name)]
    return entry.is_ipv6, entry.terminating, not entry.serving, not has_sidecar, entry.host, ports


def _address(entry: KubernetesObject, ports: Mapping[str, int]) -> SliceAddress | None:
    target = entry.get("targetRef") or {}
    hosts = entry.get("addresses") or []
    if target.get("kind") != "Pod" or not target.get("name") or not hosts:
        return None
    try:
        # The API defines the first of several addresses as the one to use.
        ip = ipaddress.ip_address(hosts[0])
    except ValueError:
        return None
    plain = (ip.version == 6 and ip.ipv4_mapped) or ip
    if plain.is_link_local or plain.is_multicast or plain.is_unspecified:
        # No pod has these, and 169.254.169.254 is the cloud's metadata server. API servers refuse them too.
        return None
    conditions = entry.get("conditions") or {}
    is_ipv6 = ip.version == 6
    return SliceAddress(
        pod=target["name"],
        host=f"[{ip}]" if is_ipv6 else str(ip),
        is_ipv6=is_ipv6,
        # The API defines a missing `serving` as `ready`, and a missing `ready` as true.
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
