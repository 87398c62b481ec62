"""Every metric of the gateway, registered with the registry it is given. Labels are bounded: no ids, no tenants."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contextcache.process.metrics import ProcessMetrics

_ROUTE_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5)


class Metrics:
    """The gateway's counters, gauges and histograms."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.process = ProcessMetrics("contextcache_gateway", registry)
        self.route_seconds = Histogram(
            "contextcache_gateway_route_seconds",
            "Seconds that the gateway added before a request left for its pod: parsing, look-up and signing.",
            ["kind"],
            buckets=_ROUTE_BUCKETS,
            registry=registry,
        )
        self.tenant_refusals = counter(
            "contextcache_gateway_tenant_refusals_total",
            "Requests refused at a limit of their tenant, by limit. `requests`, `bytes`: the tenant's own "
            "limit. `share`: its fair share of the gateway or of a busy pod.",
            ["limit"],
        )
        self.choices = counter(
            "contextcache_gateway_choices_total",
            "Pod choices, by reason: holder, holder_away, holder_draining, holder_saturated, holder_queue, "
            "affinity, least_loaded.",
            ["reason"],
        )
        self.pulls = counter(
            "contextcache_gateway_pulls_total",
            "Pulls of KV from a holder that the gateway started at sidecars, by outcome: started, present, "
            "refused, unreachable.",
            ["outcome"],
        )
        self.ext_proc_streams = gauge(
            "contextcache_gateway_ext_proc_streams",
            "Requests whose head or body Envoy is still sending to this gateway.",
        )
        self.endpoint_clock_skew = gauge(
            "contextcache_gateway_endpoint_clock_skew_seconds",
            "Clock of the pod minus the clock of this machine, in whole seconds, by endpoint. Identities "
            "expire after a minute by the pod's clock.",
            ["endpoint"],
        )
        self.endpoint_load = gauge(
            "contextcache_gateway_endpoint_load_requests",
            "Requests that a pod reported, by endpoint and state: running, waiting.",
            ["endpoint", "state"],
        )
        self.endpoint_reload_failures = counter(
            "contextcache_gateway_endpoint_reload_failures_total",
            "Failed reloads of a changed endpoint file. The last good endpoints stay in use.",
        )
        self.discovery_failures = counter(
            "contextcache_gateway_discovery_failures_total",
            "Failed lists and watches of the Kubernetes API, by resource and reason: unavailable, forbidden, "
            "unauthorized, starting, not_found, expired, invalid, internal. `starting`: the server refused a "
            "call that it allowed before, for less than a minute. The last known pods stay in use.",
            ["resource", "reason"],
        )
        self.discovery_synced = gauge(
            "contextcache_gateway_discovery_synced_timestamp_seconds",
            "Unix time in seconds of the last answer of the Kubernetes API, by resource. No sample without discovery.",
            ["resource"],
        )
        self.requests_in_flight = gauge(
            "contextcache_gateway_requests_in_flight",
            "Requests in flight that this gateway carries itself, by endpoint. Requests behind Envoy are not included.",
            ["endpoint"],
        )
        self.endpoint_ready = gauge(
            "contextcache_gateway_endpoint_ready_state", "Readiness of an endpoint: 1 ready, 0 not ready.", ["endpoint"]
        )
        self.freed_bytes = counter("contextcache_gateway_freed_bytes_total", "Bytes of KV that deletes freed.")
        self.unreachable_deletes = counter(
            "contextcache_gateway_unreachable_deletes_total",
            "Deletes that did not reach a sidecar. Its KV is freed as an orphan, or at its TTL.",
            ["endpoint"],
        )
        self.auth_failures = counter("contextcache_gateway_auth_failures_total", "Requests without a known API key.")
        self.key_reload_failures = counter(
            "contextcache_gateway_key_reload_failures_total",
            "Failed reloads of a changed key file. The last good keys stay in use.",
        )
        self.broken_exchanges = counter(
            "contextcache_gateway_broken_exchanges_total",
            "Exchanges with a pod that broke, by phase: connect, before_headers, after_headers, client_gone.",
            ["reason"],
        )
        self.probe_failures = counter(
            "contextcache_gateway_probe_failures_total", "Probe rounds that failed by an internal fault."
        )
        self.ready = gauge(
            "contextcache_gateway_ready_state",
            "Readiness of this gateway, as `/readyz` last answered: 1 ready, 0 not ready or not asked yet.",
        )
