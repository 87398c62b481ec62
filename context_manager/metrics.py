"""Every metric of the context manager. Labels are operations and error codes: bounded, never ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contextcache.errors import ContextCacheError
from contextcache.model import Usage
from contextcache.process.metrics import ProcessMetrics

_MODELS_MAX = 64
"""Maximum number of models with a label of their own. Adapters are models too, so a pod can serve thousands."""


class ManagerMetrics:
    """Counters and histograms, registered in the registry that is passed in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"contextcache_manager_{name}", meaning, labels, registry=registry)

        self._usage = counter(
            "usage_total",
            "Usage of all tenants, by quantity (docs/guides/accounting.md). A commit that was repeated because its "
            "answer was lost counts twice here; GET /v1/usage counts it once. `other`: a model after the 64th",
            ("quantity", "model"),
        )
        self._models = set[str]()
        self.sessions_reserved = counter("sessions_reserved_total", "Sessions reserved")
        self.turns_committed = counter("turns_committed_total", "Committed turns, creates included")
        self.turns_aborted = counter("turns_aborted_total", "Turns aborted")
        self.sessions_unregistered = counter("sessions_unregistered_total", "Sessions that clients deleted")
        self.sessions_expired = counter(
            "sessions_expired_total", "Expired sessions that this process turned into tombstones"
        )
        self.sessions_abandoned = counter("sessions_abandoned_total", "Reserved sessions whose lease ended unused")
        self.sessions_damaged = counter(
            "sessions_damaged_total", "Damaged sessions that a sweep set aside. They expire in Redis at their TTL"
        )
        self.refusals = counter("refusals_total", "Refused calls, by operation and error code", ("operation", "code"))
        self.sweep_failures = counter("sweep_failures_total", "Sweeper passes in which at least one shard failed")
        self.last_sweep = Gauge(
            "contextcache_manager_last_sweep_timestamp_seconds",
            "Unix time in seconds of this process's last complete sweep. 0: none yet. One manager makes each "
            "pass: take the maximum over all managers",
            registry=registry,
        )
        self.sessions = Gauge(
            "contextcache_manager_sessions",
            "Live sessions of the deployment. Every manager counts all of them every 30 s: take the maximum. "
            "NaN: the store did not answer",
            registry=registry,
        )
        self.redis_errors = counter(
            "redis_errors_total",
            "Failed Redis commands, by the client library's error name. `TooFewReplicas`: too few replicas "
            "acknowledged a commit in time",
            ("error",),
        )
        self.redis_evicted_keys = Gauge(
            "contextcache_manager_redis_evicted_keys",
            "Keys that Redis evicted since its start, over all primaries. Their contexts are lost. NaN: unknown",
            registry=registry,
        )
        self.redis_preconditions = Gauge(
            "contextcache_manager_redis_precondition",
            "State of a Redis precondition (docs/operations/preconditions.md): 1 met, 0 not met, NaN unknown",
            ("name",),
            registry=registry,
        )
        self.process = ProcessMetrics("contextcache_manager", registry)
        self._store_duration = Histogram(
            "contextcache_manager_store_duration_seconds",
            "Seconds that the store took for one operation, refusals included",
            ("operation",),
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
            registry=registry,
        )

    def count_usage(self, usage: Iterable[Usage]) -> None:
        """Count usage."""
        for one in usage:
            if len(self._models) < _MODELS_MAX:
                self._models.add(one.model)
            model = one.model if one.model in self._models else "other"
            for quantity, number in one.counts.items():
                self._usage.labels(quantity, model).inc(number)

    @contextmanager
    def store_call(self, operation: str) -> Iterator[None]:
        """Time the enclosed store call and count it as refused when it raises one of our errors."""
        with self._store_duration.labels(operation).time():
            try:
                yield
            except ContextCacheError as exc:
                self.refusals.labels(operation, exc.code).inc()
                raise
