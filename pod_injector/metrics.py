"""Metrics of the injector. Labels are closed sets."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contextcache.process.metrics import add_build_info


class InjectorMetrics:
    """Counters, gauges and histograms in a registry that is passed in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        add_build_info("contextcache_injector", registry)
        self.reviews = Counter(
            "contextcache_injector_reviews_total",
            "Reviewed pods, by outcome. `injected`: patched. `present`: patched before. Others: the reason "
            "in context-cache.io/inject-skipped.",
            ["outcome"],
            registry=registry,
        )
        self.refused_requests = Counter(
            "contextcache_injector_refused_requests_total",
            "Requests that were refused or were not a review, by HTTP status.",
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
            "Unix time in seconds at which the certificate shown to the API server expires.",
            registry=registry,
        )
        self.certificate_reload_failures = Counter(
            "contextcache_injector_certificate_reload_failures_total",
            "Failed reloads of changed certificate files. The last good certificate stays in use.",
            registry=registry,
        )
