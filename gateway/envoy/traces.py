"""Spans of Envoy: one a request, and one a look at it by the plugin, to an OpenTelemetry collector by OTLP over gRPC.

A request's `traceparent` is continued as it says and goes on to the pod and to the plugin; without one Envoy begins a
trace. A collector that is away costs spans and nothing else.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from gateway.envoy.routes import TYPE
from gateway.envoy.settings import TRACES_PORT, EnvoySettings, duration
from gateway.envoy.tls import public_tls

TRACES = "traces"
"""Cluster of the collector."""


def tracing(settings: EnvoySettings) -> dict[str, Any]:
    """Return the connection manager's part, or nothing without a collector."""
    if not settings.traces_endpoint:
        return {}
    return {
        "tracing": {
            # A header of the client's is no order to keep its trace; its traceparent is.
            "client_sampling": {"value": 0},
            # The sampler decides. This share would decide about the caller's traces too, against their own flag.
            "random_sampling": {"value": 100},
            "provider": {
                "name": "envoy.tracers.opentelemetry",
                "typed_config": {
                    "@type": f"{TYPE}config.trace.v3.OpenTelemetryConfig",
                    "grpc_service": {"envoy_grpc": {"cluster_name": TRACES}, "timeout": "5s"},
                    "service_name": "envoy",
                    "sampler": _sampler(settings),
                },
            },
        }
    }


def _sampler(settings: EnvoySettings) -> dict[str, Any]:
    """Keep what the caller keeps, and of other traces the share that the settings say."""
    samplers = "envoy.tracers.opentelemetry.samplers"
    types = f"{TYPE}extensions.tracers.opentelemetry.samplers.v3"
    share = {"numerator": round(settings.traces_sample_ratio * 1_000_000), "denominator": "MILLION"}
    by_ratio = {"@type": f"{types}.TraceIdRatioBasedSamplerConfig", "sampling_percentage": share}
    return {
        "name": f"{samplers}.parent_based",
        "typed_config": {
            "@type": f"{types}.ParentBasedSamplerConfig",
            "wrapped_sampler": {"name": f"{samplers}.trace_id_ratio_based", "typed_config": by_ratio},
        },
    }


def traces_cluster(settings: EnvoySettings) -> list[dict[str, Any]]:
    """Return the collector's cluster, or nothing."""
    if not settings.traces_endpoint:
        return []
    url = urlsplit(settings.traces_endpoint)
    host, port = url.hostname or "", url.port or TRACES_PORT
    address = {"socket_address": {"address": host, "port_value": port}}
    options = {
        "@type": f"{TYPE}extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return [
        {
            "name": TRACES,
            "type": "STRICT_DNS",
            "dns_lookup_family": "ALL",
            "connect_timeout": duration(settings.connect_timeout_s),
            # Not asked for its health, and not waited for.
            "wait_for_warm_on_init": False,
            "load_assignment": {
                "cluster_name": TRACES,
                "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
            },
            "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
            **(public_tls(host, settings.traces_ca_file) if url.scheme == "https" else {}),
        }
    ]
