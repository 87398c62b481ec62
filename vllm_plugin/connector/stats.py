"""The connector's counts as vLLM's `KVConnectorStats`, and as Prometheus counters on vLLM's /metrics.

vLLM carries the stats from workers and scheduler to the API server, which owns the registry; nothing is counted here.
"""

from __future__ import annotations

from collections import Counter as CountOf
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from contextcache.v1 import kv_sidecar_pb2 as pb

_SEPARATOR = "/"
BYTES = "loaded_bytes"
"""The one count that is not of events."""


def hit_source(tier: pb.Tier.ValueType) -> Any:
    """Return a tier in the words of vLLM's `prompt_tokens_cached_by_source` (vLLM >= 0.32)."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    names = {
        pb.TIER_HOST: CacheHitSource.HOST,
        pb.TIER_DISK: CacheHitSource.DISK,
        pb.TIER_PEER: CacheHitSource.P2P,
    }
    return names.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not followed by mypy
    """`data` maps `event` or `event/reason` to how often it happened since the last stats."""

    @classmethod
    def from_counts(cls, counts: Mapping[tuple[str, str], int]) -> ConnectorStats:
        """Return the stats of what `Counters.take_fresh` gave."""
        return cls(data={_SEPARATOR.join(filter(None, key)): count for key, count in counts.items()})

    @override
    def reset(self) -> None:
        self.data: dict[str, int] = {}

    @override
    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        counts: CountOf[str] = CountOf(self.data)
        counts.update(other.data)
        return ConnectorStats(data=dict(counts))

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
            documentation="What the connector did or could not do, by event and reason.",
            labelnames=[*labelnames, "event", "reason"],
        )
        self._bytes = counter(
            name="contextcache_connector_loaded_bytes",
            documentation="Bytes of KV injected into the engine.",
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
