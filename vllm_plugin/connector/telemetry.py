"""Counts of the connector's events, shown through vLLM's own /metrics. Knows no request.

The counts of workers and scheduler travel to the API server, which owns the registry, as vLLM's `KVConnectorStats`.
Names and reasons are short fixed phrases, so they are safe as labels.
"""

from __future__ import annotations

import threading
from collections import Counter as CountOf
from typing import Any

from prometheus_client import Counter
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.tracing import Tracer, open_tracer
from vllm_plugin.connector.settings import ConnectorSettings

_SEPARATOR = "/"
BYTES = "loaded_bytes"
"""The one count that is not of events."""


class Counters:
    """Thread-safe counts by `event` or `event/reason`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total: CountOf[str] = CountOf()
        self._fresh: CountOf[str] = CountOf()

    def add(self, name: str, reason: str = "", amount: int = 1) -> None:
        """Count `amount` more of `name`, for `reason` when there is one."""
        key = f"{name}{_SEPARATOR}{reason}" if reason else name
        with self._lock:
            self._total[key] += amount
            self._fresh[key] += amount

    def get(self, name: str, reason: str | None = None) -> int:
        """Return the count since the start, of one reason or of all."""
        with self._lock:
            keys = [key.partition(_SEPARATOR) for key in self._total]
            return sum(self._total["".join(key)] for key in keys if key[0] == name and reason in (None, key[2]))

    def take_fresh(self) -> dict[str, int]:
        """Return the counts since the last call."""
        with self._lock:
            fresh, self._fresh = self._fresh, CountOf()
        return dict(fresh)


def connector_tracer(settings: ConnectorSettings, counters: Counters) -> Tracer:
    """Return the tracer of one half of the connector; traces are continued only, none begins here."""
    return open_tracer(
        settings.traces_endpoint,
        part="connector",
        sample_ratio=0,
        on_lost=lambda num_spans: counters.add("lost_spans", amount=num_spans),
    )


_SOURCES = {
    pb.TIER_HOST: CacheHitSource.HOST,
    pb.TIER_DISK: CacheHitSource.DISK,
    pb.TIER_PEER: CacheHitSource.P2P,
}


def hit_source(tier: pb.Tier.ValueType) -> Any:
    """Return a tier in the words of vLLM's `prompt_tokens_cached_by_source`."""
    return _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not followed by mypy
    """`data` are counts from `Counters.take_fresh`."""

    @override
    def reset(self) -> None:
        self.data: dict[str, int] = {}

    @override
    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        return ConnectorStats(data=dict(CountOf(self.data) + CountOf(other.data)))

    @override
    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    @override
    def is_empty(self) -> bool:
        return not self.data


class ConnectorPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is not followed by mypy
    """`contextcache_connector_events_total{event,reason}` and `contextcache_connector_loaded_bytes_total`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._events = counter(
            name="contextcache_connector_events",
            documentation="Events of the connector, by event and reason.",
            labelnames=[*labelnames, "event", "reason"],
        )
        self._bytes = counter(
            name="contextcache_connector_loaded_bytes",
            documentation="Bytes of KV loaded into the engine.",
            labelnames=labelnames,
        )

    @override
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for key, count in transfer_stats_data.items():
            event, _, reason = key.partition(_SEPARATOR)
            if event == BYTES:
                self._bytes.labels(*engine).inc(count)
            else:
                self._events.labels(*engine, event, reason).inc(count)
