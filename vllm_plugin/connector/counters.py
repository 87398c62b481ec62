"""Counts of what the connector did, kept in the objects and shown through vLLM's own /metrics. Knows no request.

The worker's counts travel to the API server as vLLM's `KVConnectorStats` (see stats.py); names and reasons are
short fixed phrases, so they are safe as labels.
"""

from __future__ import annotations

import threading
from collections import Counter

from contextcache.wire.tracing import Tracer, open_tracer
from vllm_plugin.connector.settings import ConnectorSettings


class Counters:
    """Thread-safe counts by (name, reason)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total: Counter[tuple[str, str]] = Counter()
        self._fresh: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, reason: str = "", amount: int = 1) -> None:
        """Count `amount` more of `name`, for `reason` when there is one."""
        with self._lock:
            self._total[name, reason] += amount
            self._fresh[name, reason] += amount

    def get(self, name: str, reason: str | None = None) -> int:
        """Return the count since the start, of one reason or of all."""
        with self._lock:
            return sum(count for (key, why), count in self._total.items() if key == name and reason in (None, why))

    def take_fresh(self) -> dict[tuple[str, str], int]:
        """Return what was added since the last call."""
        with self._lock:
            fresh, self._fresh = self._fresh, Counter()
        return dict(fresh)


def connector_tracer(settings: ConnectorSettings, counters: Counters) -> Tracer:
    """Return the tracer of one half of the connector; traces are continued only, none begins here."""
    return open_tracer(
        settings.traces_endpoint,
        part="connector",
        sample_ratio=0,
        on_lost=lambda num_spans: counters.add("lost_spans", amount=num_spans),
    )
