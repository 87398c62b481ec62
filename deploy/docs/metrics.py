"""Metrics of every process as lists: name, kind, labels, and the text that Prometheus shows too."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from typing_extensions import override

from context_manager.metrics import ManagerMetrics
from gateway.metrics import Metrics as GatewayMetrics
from kv_sidecar.metrics import SidecarMetrics
from pod_injector.metrics import InjectorMetrics
from vllm_plugin.turn.metrics import TurnMetrics

_CONNECTOR = Path(__file__).parents[2] / "vllm_plugin" / "connector" / "telemetry.py"
PARTS: Mapping[str, Callable[[CollectorRegistry], object]] = {
    "gateway": GatewayMetrics,
    "manager": ManagerMetrics,
    "sidecar": SidecarMetrics,
    "turn": TurnMetrics,
    "injector": InjectorMetrics,
}
"""By the second word of their metrics. The connector's package imports vLLM: its source is read instead."""
_SHARED = (
    "_build_info",
    "_certificate_expiry_timestamp_seconds",
    "_certificate_reload_failures_total",
    "_lost_spans_total",
    "_request_duration_seconds",
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as Prometheus sees it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


class _Recording(CollectorRegistry):
    """A registry that tells who was registered, in order."""

    def __init__(self) -> None:
        self.collectors: list[Collector] = []
        super().__init__()

    @override
    def register(self, collector: Collector) -> None:
        self.collectors.append(collector)
        super().register(collector)


def metrics_list(part: str) -> str:
    """Return the metrics of a part, or those that several parts have (`shared`)."""
    if part == "shared":
        metrics = [metric for metric in metrics_of("gateway") if metric.name.endswith(_SHARED)]
        return "\n".join(_entry(metric, metric.name.replace("_gateway_", "_…_")) for metric in metrics)
    return "\n".join(
        _entry(metric, metric.name)
        for metric in metrics_of(part)
        if part == "injector" or not metric.name.endswith(_SHARED)
    )


def metrics_of(part: str) -> list[Metric]:
    """Return every metric of a part."""
    return list(_read_connector() if part == "connector" else _registered(part))


def _registered(part: str) -> Iterator[Metric]:
    registry = _Recording()
    PARTS[part](registry)
    for collector in registry.collectors:
        for family in collector.collect():
            labels = tuple(getattr(collector, "_labelnames", ("tenant",)))
            yield Metric(
                family.name + ("_total" if family.type == "counter" else ""), family.type, labels, family.documentation
            )


def _read_connector() -> Iterator[Metric]:
    for call in ast.walk(ast.parse(_CONNECTOR.read_text())):
        given = {word.arg: word.value for word in call.keywords} if isinstance(call, ast.Call) else {}
        if given.keys() >= {"name", "documentation", "labelnames"}:
            name, meaning = (ast.literal_eval(given[key]) for key in ("name", "documentation"))
            labels = (item.value for item in getattr(given["labelnames"], "elts", ()) if isinstance(item, ast.Constant))
            yield Metric(f"{name}_total", "counter", tuple(map(str, labels)), meaning)


def _entry(metric: Metric, name: str) -> str:
    by = " by " + ", ".join(metric.labels) if metric.labels else ""
    return f"- `{name}` ({metric.kind}{by}): {metric.meaning.rstrip('.')}"
