"""Scheduling on one small node: whether its pods run, and the reason why one does not.

The node is a common one: 8 CPUs, 32 GiB of memory, one GPU, a root disk of 100 GB, each less the kubelet's share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tests.chart.quantities import value

Object = dict[str, Any]

SMALL_NODE = {"cpu": "8", "memory": "30Gi", "ephemeral-storage": "89Gi", "nvidia.com/gpu": "1"}
"""Allocatable amounts by resource."""


@dataclass(frozen=True)
class Placed:
    """One pod of a workload."""

    workload: str
    phase: str
    """`Running` or `Pending`."""
    reason: str = ""
    """The scheduler's sentence about a pending pod."""


def scheduled(workloads: Iterable[Object], node: dict[str, str] = SMALL_NODE) -> list[Placed]:
    """Place the pods of Deployments and StatefulSets on one node, in order; a pod that does not fit takes nothing."""
    free = {resource: value(amount) for resource, amount in node.items()}
    placed = []
    for workload in workloads:
        asked = requests_of(workload["spec"]["template"]["spec"])
        for _ in range(workload["spec"]["replicas"]):
            short = [resource for resource, amount in asked.items() if amount > free.get(resource, 0)]
            if short:
                why = ", ".join(f"1 Insufficient {resource}" for resource in sorted(short))
                placed.append(Placed(workload["metadata"]["name"], "Pending", f"0/1 nodes are available: {why}."))
                continue
            free = {resource: amount - asked.get(resource, 0) for resource, amount in free.items()}
            placed.append(Placed(workload["metadata"]["name"], "Running"))
    return placed


def requests_of(pod: Object) -> dict[str, Fraction]:
    """Return the requests of a pod: the sum of containers that stay, or more while one initializes.

    A container that limits a resource and does not request it requests the limit.
    """
    staying: dict[str, Fraction] = {}
    peak: dict[str, Fraction] = {}
    for container in pod.get("initContainers", []):
        asked = _of(container)
        if container.get("restartPolicy") == "Always":
            staying = _added(staying, asked)
        else:
            peak = _larger(peak, _added(staying, asked))
    for container in pod["containers"]:
        staying = _added(staying, _of(container))
    return _larger(peak, staying)


def _of(container: Object) -> dict[str, Fraction]:
    resources = container.get("resources", {})
    asked = resources.get("limits", {}) | resources.get("requests", {})
    return {name: value(amount) for name, amount in asked.items()}


def _added(one: dict[str, Fraction], other: dict[str, Fraction]) -> dict[str, Fraction]:
    return {name: one.get(name, Fraction()) + other.get(name, Fraction()) for name in one.keys() | other.keys()}


def _larger(one: dict[str, Fraction], other: dict[str, Fraction]) -> dict[str, Fraction]:
    return {name: max(one.get(name, Fraction()), other.get(name, Fraction())) for name in one.keys() | other.keys()}
