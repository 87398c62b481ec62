"""Every metric of the gateway, registered with the registry it is given. Labels are bounded: no ids, no tenants."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contextcache.process.metrics import CertificateMetrics

_ROUTE_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5)


class Metrics:
    """The gateway's counters, gauges and histograms."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.certificates = CertificateMetrics("contextcache_gateway", registry)
        self.requests = Counter(
            "contextcache_gateway_requests_total",
            "Requests answered, by kind and HTTP status. `completion` was refused before it was known to be a turn or "
            "stateless, `refused` before it was known to be anything. Status `routed`: sent on to a pod by Envoy, "
            "whose answer this process does not see.",
            ["kind", "status"],
            registry=registry,
        )
        self.route_seconds = Histogram(
            "contextcache_gateway_route_seconds",
            "Seconds the gateway itself added before a request left for its pod: body parsing, look-up, signing.",
            ["kind"],
            buckets=_ROUTE_BUCKETS,
            registry=registry,
        )
        self.tenant_refusals = Counter(
            "contextcache_gateway_tenant_refusals_total",
            "Requests refused because their tenant has as much in hand as it may, by limit: requests, bytes, share (an "
            "equal share of what this gateway carries or of a busy pod).",
            ["limit"],
            registry=registry,
        )
        self.choices = Counter(
            "contextcache_gateway_choices_total",
            "Pods chosen, by reason: holder, holder_away, holder_draining, holder_saturated, holder_queue, affinity, "
            "least_loaded, strategy.",
            ["reason"],
            registry=registry,
        )
        self.pulls = Counter(
            "contextcache_gateway_pulls_total",
            "Sidecars told to fetch KV from the holder, by outcome: started, present, refused, unreachable.",
            ["outcome"],
            registry=registry,
        )
        self.ext_proc_streams = Gauge(
            "contextcache_gateway_ext_proc_streams",
            "Requests whose head or body Envoy is still sending here.",
            registry=registry,
        )
        self.endpoint_clock_skew = Gauge(
            "contextcache_gateway_endpoint_clock_skew_seconds",
            "A pod's clock less this machine's, to a second, by endpoint. An identity is good for "
            "GATEWAY_IDENTITY_TTL_S by the pod's clock.",
            ["endpoint"],
            registry=registry,
        )
        self.endpoint_load = Gauge(
            "contextcache_gateway_endpoint_load_requests",
            "Requests a pod said it has, by endpoint and state: running, waiting.",
            ["endpoint", "state"],
            registry=registry,
        )
        self.endpoint_reload_failures = Counter(
            "contextcache_gateway_endpoint_reload_failures_total",
            "Changes of the endpoint file that could not be read; the last good endpoints stay.",
            registry=registry,
        )
        self.discovery_failures = Counter(
            "contextcache_gateway_discovery_failures_total",
            "Lists and watches of the Kubernetes API that failed, by resource and reason: unavailable, forbidden, "
            "unauthorized, starting (refused, for less than a minute, what was allowed before), not_found, expired, "
            "invalid, internal. The last known pods stay.",
            ["resource", "reason"],
            registry=registry,
        )
        self.discovery_synced = Gauge(
            "contextcache_gateway_discovery_synced_timestamp_seconds",
            "Unix time at which the Kubernetes API last said something, by resource; no sample without discovery.",
            ["resource"],
            registry=registry,
        )
        self.requests_in_flight = Gauge(
            "contextcache_gateway_requests_in_flight",
            "Requests being carried, by endpoint.",
            ["endpoint"],
            registry=registry,
        )
        self.endpoint_ready = Gauge(
            "contextcache_gateway_endpoint_ready_state",
            "1 when an endpoint is ready, else 0.",
            ["endpoint"],
            registry=registry,
        )
        self.freed_bytes = Counter(
            "contextcache_gateway_freed_bytes_total",
            "Bytes of KV freed by deletes.",
            registry=registry,
        )
        self.unreachable_deletes = Counter(
            "contextcache_gateway_unreachable_deletes_total",
            "Deletes that did not reach a sidecar; the KV goes by its TTL.",
            ["endpoint"],
            registry=registry,
        )
        self.auth_failures = Counter(
            "contextcache_gateway_auth_failures_total",
            "Requests without a key anybody owns.",
            registry=registry,
        )
        self.key_reload_failures = Counter(
            "contextcache_gateway_key_reload_failures_total",
            "Changes of the key file that could not be read; the last good keys stay.",
            registry=registry,
        )
        self.broken_exchanges = Counter(
            "contextcache_gateway_broken_exchanges_total",
            "Exchanges that did not end as they should: connect, before_headers, after_headers, client_gone.",
            ["reason"],
            registry=registry,
        )
        self.probe_failures = Counter(
            "contextcache_gateway_probe_failures_total",
            "Probe rounds that failed by a fault of our own.",
            registry=registry,
        )
        self.ready = Gauge(
            "contextcache_gateway_ready_state",
            "1 when this gateway said that it is ready, 0 when not, as `/readyz` was last answered; 0 before that.",
            registry=registry,
        )
        self.lost_spans = Counter(
            "contextcache_gateway_lost_spans_total",
            "Spans of traces that did not reach the collector.",
            registry=registry,
        )
