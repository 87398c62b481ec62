"""Every metric of the injector. Labels are closed sets."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class InjectorMetrics:
    """Counters, gauges and histograms, registered with the registry they are given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.reviews = Counter(
            "contextcache_injector_reviews_total",
            "Pods looked at, by outcome: injected, present (was injected already), or why not (the values of "
            "context-cache.io/inject-skipped).",
            ["outcome"],
            registry=registry,
        )
        self.events = Counter(
            "contextcache_injector_events_total",
            "Events about pods that were left alone, by outcome: written, known (the owner was told within the hour), "
            "failed, or dropped because too many waited.",
            ["outcome"],
            registry=registry,
        )
        self.refused_requests = Counter(
            "contextcache_injector_refused_requests_total",
            "Requests that were no review or came at a bad moment, by HTTP status.",
            ["status"],
            registry=registry,
        )
        self.review_seconds = Histogram(
            "contextcache_injector_review_seconds",
            "Seconds from a review's head to its answer.",
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0),
            registry=registry,
        )
        self.certificate_expiry = Gauge(
            "contextcache_injector_certificate_expiry_timestamp_seconds",
            "Unix time at which the certificate shown to the API server ends.",
            registry=registry,
        )
        self.certificate_reload_failures = Counter(
            "contextcache_injector_certificate_reload_failures_total",
            "Changes of the certificate's files that could not be read; the last good certificate stays.",
            registry=registry,
        )
