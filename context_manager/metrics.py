"""Every metric of the context manager. Labels are operations and error codes: bounded, never ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contextcache.errors import ContextCacheError
from contextcache.model import Usage
from contextcache.process.metrics import CertificateMetrics


class ManagerMetrics:
    """Counters and histograms, registered in the registry that is passed in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"contextcache_manager_{name}", meaning, labels, registry=registry)

        self._usage = counter(
            "usage_total",
            "What was used, by what is counted (docs/guides/accounting.md), by all tenants together. A commit that "
            "was repeated because its answer was lost counts again here; GET /v1/usage has it once",
            ("what",),
        )
        self.sessions_reserved = counter("sessions_reserved_total", "Sessions reserved")
        self.turns_committed = counter("turns_committed_total", "Turns committed, the create included")
        self.turns_aborted = counter("turns_aborted_total", "Turns aborted")
        self.sessions_unregistered = counter("sessions_unregistered_total", "Sessions deleted by a client")
        self.sessions_expired = counter("sessions_expired_total", "Sessions this process turned into tombstones")
        self.sessions_abandoned = counter("sessions_abandoned_total", "Reserved sessions whose lease ended unused")
        self.sessions_damaged = counter(
            "sessions_damaged_total", "Sessions that a sweep could not read and set aside; Redis lets them go by itself"
        )
        self.refusals = counter("refusals_total", "Calls refused, by operation and error code", ("operation", "code"))
        self.sweep_failures = counter("sweep_failures_total", "Passes of the sweeper in which a shard failed, or all")
        self.last_sweep = Gauge(
            "contextcache_manager_last_sweep_timestamp_seconds",
            "Unix time of this process's last whole sweep; 0: none yet. One manager makes each pass: take the largest",
            registry=registry,
        )
        self.sessions = Gauge(
            "contextcache_manager_sessions",
            "Live sessions of the deployment, counted every 30 s by each manager: take the largest. NaN: the store did "
            "not answer",
            registry=registry,
        )
        self.redis_errors = counter(
            "redis_errors_total",
            "Redis commands that failed, by the client library's name for the error; `TooFewReplicas`: too few "
            "replicas took a commit in time",
            ("error",),
        )
        self.redis_evicted_keys = Gauge(
            "contextcache_manager_redis_evicted_keys",
            "Keys that Redis evicted since its start, all primaries together: contexts that are lost. NaN: unknown",
            registry=registry,
        )
        self.redis_preconditions = Gauge(
            "contextcache_manager_redis_precondition",
            "Whether Redis is set as it must be (docs/operations/preconditions.md). 1: yes, 0: no, NaN: unknown",
            ("name",),
            registry=registry,
        )
        self.clock_skew = Gauge(
            "contextcache_manager_clock_skew_seconds",
            "This machine's clock less Redis's, which is the one that counts",
            registry=registry,
        )
        self.lost_spans = counter("lost_spans_total", "Spans of traces that did not reach the collector")
        self.certificates = CertificateMetrics("contextcache_manager", registry)
        self._store_duration = Histogram(
            "contextcache_manager_store_duration_seconds",
            "Time the store took for one operation, refusals included",
            ("operation",),
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
            registry=registry,
        )

    def count_usage(self, usage: Iterable[Usage]) -> None:
        """Count what was used."""
        for what, number in (pair for one in usage for pair in one.counts.items()):
            self._usage.labels(what).inc(number)

    @contextmanager
    def store_call(self, operation: str) -> Iterator[None]:
        """Time the enclosed store call and count it as refused when it raises one of our errors."""
        with self._store_duration.labels(operation).time():
            try:
                yield
            except ContextCacheError as exc:
                self.refusals.labels(operation, exc.code).inc()
                raise
