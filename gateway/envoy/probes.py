"""What the outside may see of Envoy's admin interface: its metrics and whether it takes requests. Nothing else of it.

The admin interface can stop Envoy and show its certificates, so it stays on loopback. A listener of Envoy's own shows
three fixed paths, spelled exactly so and without a query:

    GET /stats/prometheus   as admin answers it
    GET /ready              200, and 503 from the beginning of a drain on
    GET /healthz            200

It obeys neither the limit of client connections nor the one of memory: an Envoy that refuses clients has to be seen.
Bounds of its own: `CONNECTIONS_MAX` at one time, each silent for at most `SILENCE_S`.
"""

from __future__ import annotations

from typing import Any

from gateway.envoy.clusters import http_1, socket_address
from gateway.envoy.routes import TYPE
from gateway.envoy.settings import EnvoySettings

PROBES = "probes"
ADMIN = "admin"
CONNECTIONS_MAX = 256
SILENCE_S = 5


def probe_listener(settings: EnvoySettings) -> list[dict[str, Any]]:
    """Return the listener, or nothing where none is asked for."""
    if not settings.metrics_listen:
        return []
    filters = [
        {"name": "envoy.filters.network.http_connection_manager", "typed_config": _connection_manager()},
    ]
    return [
        {
            "name": PROBES,
            "address": socket_address(settings.metrics_listen),
            "ignore_global_conn_limit": True,
            "bypass_overload_manager": True,
            "filter_chains": [{"filters": filters}],
        }
    ]


def admin_cluster(settings: EnvoySettings) -> list[dict[str, Any]]:
    """Return the admin interface as a cluster, or nothing."""
    if not settings.metrics_listen:
        return []
    endpoint = {"endpoint": {"address": socket_address(settings.admin_address)}}
    return [
        {
            "name": ADMIN,
            "type": "STATIC",
            "connect_timeout": "1s",
            "load_assignment": {"cluster_name": ADMIN, "endpoints": [{"lb_endpoints": [endpoint]}]},
            "typed_extension_protocol_options": http_1(),
        }
    ]


def connection_limit(settings: EnvoySettings) -> dict[str, Any]:
    """Return the bootstrap's part that bounds the listener's connections, or nothing."""
    if not settings.metrics_listen:
        return {}
    limit = {f"envoy.resource_limits.listener.{PROBES}.connection_limit": CONNECTIONS_MAX}
    return {"layered_runtime": {"layers": [{"name": "limits", "static_layer": limit}]}}


def _connection_manager() -> dict[str, Any]:
    health_check = {
        "@type": f"{TYPE}extensions.filters.http.health_check.v3.HealthCheck",
        "pass_through_mode": False,
        "headers": _asked("/ready"),
    }
    router = {"@type": f"{TYPE}extensions.filters.http.router.v3.Router", "suppress_envoy_headers": True}
    routes = [
        {
            "match": {"prefix": "/", "headers": _asked("/stats/prometheus")},
            "route": {"cluster": ADMIN, "timeout": "30s"},
        },
        {"match": {"prefix": "/", "headers": _asked("/healthz")}, "direct_response": {"status": 200}},
        {"match": {"prefix": "/"}, "direct_response": {"status": 404}},
    ]
    return {
        "@type": f"{TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": PROBES,
        "codec_type": "HTTP1",
        "common_http_protocol_options": {"max_headers_count": 50, "idle_timeout": f"{SILENCE_S}s"},
        "max_request_headers_kb": 16,
        "request_headers_timeout": f"{SILENCE_S}s",
        "request_timeout": f"{SILENCE_S}s",
        "stream_idle_timeout": f"{SILENCE_S}s",
        "delayed_close_timeout": "1s",
        "http_filters": [
            {"name": "envoy.filters.http.health_check", "typed_config": health_check},
            {"name": "envoy.filters.http.router", "typed_config": router},
        ],
        "route_config": {
            "name": PROBES,
            "virtual_hosts": [
                {
                    "name": PROBES,
                    "domains": ["*"],
                    "response_headers_to_remove": ["server"],
                    "routes": routes,
                }
            ],
        },
    }


def _asked(target: str) -> list[dict[str, Any]]:
    """Match a GET of this target as it is spelled, its query included."""
    wanted = {":path": target, ":method": "GET"}
    return [{"name": name, "string_match": {"exact": value}} for name, value in wanted.items()]
