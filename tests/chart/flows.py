"""What NetworkPolicies let through, worked out as the Kubernetes reference says: no cluster does it for us here.

Both ends count: a connection passes when the policies of the caller's pod let it out and those of the called one let
it in. A pod that no policy of a direction selects is open in that direction. Answers need no rule.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.chart.manifests import matches, of_kind
from tests.chart.rendering import Document

Flow = tuple[str, str, int]
"""Caller, called, port (TCP, unless the called one is DNS)."""


@dataclass(frozen=True)
class Party:
    """A pod, or an address outside the cluster: without labels, with an address."""

    name: str
    namespace: str = ""
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    address: str = ""


def pod(name: str, namespace: str, labels: Mapping[str, str] | None = None, ports: Mapping[str, int] | None = None):
    """Return a pod; its namespace carries the label that Kubernetes gives every namespace."""
    return Party(name, namespace, {"kubernetes.io/metadata.name": namespace}, labels or {}, ports or {})


def outside(name: str, address: str) -> Party:
    """Return something with an address and no pod."""
    return Party(name, address=address)


def allowed(
    documents: Iterable[Document], *, namespace: str, callers: list[Party], called: list[Party], ports: Iterable[int]
) -> set[Flow]:
    """Return every connection that passes, of all callers to all others."""
    policies = of_kind(documents, "NetworkPolicy")
    wanted = sorted(set(ports))
    return {
        (caller.name, other.name, port)
        for caller in callers
        for other in called
        if caller != other
        for port in wanted
        if _passes(policies, namespace, caller, other, port)
    }


def _passes(policies: list[Document], namespace: str, caller: Party, other: Party, port: int) -> bool:
    return _let(policies, namespace, "Egress", caller, other, port) and _let(
        policies, namespace, "Ingress", other, caller, port
    )


def _let(policies: list[Document], namespace: str, way: str, mine: Party, peer: Party, port: int) -> bool:
    """Return whether the policies of one end let the other pass."""
    mine_selected = [
        policy["spec"]
        for policy in policies
        if mine.namespace == namespace
        and matches(policy["spec"]["podSelector"], mine.labels)
        and way in _types(policy["spec"])
    ]
    if not mine_selected:
        return True
    called = mine if way == "Ingress" else peer
    peers, key = ("from", "ingress") if way == "Ingress" else ("to", "egress")
    return any(
        _port_fits(rule.get("ports", []), called, port) and _peer_fits(rule.get(peers, []), namespace, peer)
        for spec in mine_selected
        for rule in spec.get(key, [])
    )


def _types(spec: Mapping[str, Any]) -> list[str]:
    return spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]


def _port_fits(ports: list[Mapping[str, Any]], called: Party, port: int) -> bool:
    if not ports:
        return True
    for rule in ports:
        if rule.get("protocol", "TCP") != ("UDP" if port == 53 else "TCP"):
            continue
        number = rule.get("port")
        if isinstance(number, str):
            number = called.ports.get(number, -1)
        if number is None or number <= port <= rule.get("endPort", number):
            return True
    return False


def _peer_fits(peers: list[Mapping[str, Any]], namespace: str, peer: Party) -> bool:
    if not peers:
        return True
    return any(_is_peer(rule, namespace, peer) for rule in peers)


def _is_peer(rule: Mapping[str, Any], namespace: str, peer: Party) -> bool:
    if "ipBlock" in rule:
        return bool(peer.address) and _in_block(rule["ipBlock"], peer.address)
    if peer.address:
        return False
    if "namespaceSelector" in rule:
        if not matches(rule["namespaceSelector"], peer.namespace_labels):
            return False
    elif peer.namespace != namespace:
        return False
    return matches(rule.get("podSelector", {}), peer.labels)


def _in_block(block: Mapping[str, Any], text: str) -> bool:
    address = ipaddress.ip_address(text)
    inside = address in ipaddress.ip_network(block["cidr"])
    return inside and not any(address in ipaddress.ip_network(hole) for hole in block.get("except", []))
