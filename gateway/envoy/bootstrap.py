"""Envoy's bootstrap: the one template that the local stack, the tests and clusters run. Pure: settings in, dict out.

What belongs here: the listener, what happens to every request, the access log, the bounds. Routes, clusters and
Envoy's own answers have modules of their own.
"""

from __future__ import annotations

from typing import Any

from contextcache.identity import IDENTITY_HEADER, UNROUTED_HEADER
from gateway.envoy.api_keys import key_filter, refusal_counter
from gateway.envoy.clusters import (
    BUFFER_BYTES,
    LB_NAMESPACE,
    PLUGIN,
    clusters,
    internal_listeners,
    socket_address,
    streams_listener,
)
from gateway.envoy.local_replies import local_reply_config
from gateway.envoy.probes import admin_cluster, connection_limit, probe_listener
from gateway.envoy.routes import EXT_PROC, TYPE, routes
from gateway.envoy.settings import EnvoySettings, duration
from gateway.envoy.tls import downstream_tls
from gateway.envoy.traces import tracing
from gateway.flows import ROUTING_HEADERS
from gateway.fronts import CORS_EXPOSED_HEADERS, CORS_HEADERS, CORS_MAX_AGE_S, CORS_METHODS, CORS_POD_HEADERS

LISTENER = "http"
STAT_PREFIX = "front"
"""Envoy's statistics of requests are under `http.front.`."""

CORS = "envoy.filters.http.cors"

_TRACKED_BYTES_LOG2 = 17
"""Streams that hold 128 KiB or more are told apart by size, in eight steps up to 16 MiB."""
_RECEIPT_HEADERS = (
    "x-session-id",
    "x-context-cache",
    "x-context-cached-tokens",
    "x-context-mode",
    "x-context-generation",
)


def bootstrap(settings: EnvoySettings) -> dict[str, Any]:
    """Return the bootstrap."""
    return {
        "node": {"id": "context-cache", "cluster": "context-cache"},
        "admin": {"address": socket_address(settings.admin_address)},
        "static_resources": {
            "listeners": [_listener(settings), streams_listener(), *probe_listener(settings)],
            "clusters": [*clusters(settings), *admin_cluster(settings)],
        },
        "bootstrap_extensions": [internal_listeners()],
        **connection_limit(settings),
        "overload_manager": _overload_manager(settings),
    }


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listener(settings: EnvoySettings) -> dict[str, Any]:
    return {
        "name": LISTENER,
        "address": socket_address(_joined(settings.listen_host, settings.listen_port)),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        # A drain closes listeners of this direction, and those of probes and metrics stay.
        "traffic_direction": "INBOUND",
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": _connection_manager(settings),
                    }
                ],
                **downstream_tls(settings),
            }
        ],
    }


def _connection_manager(settings: EnvoySettings) -> dict[str, Any]:
    return {
        "@type": f"{TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": STAT_PREFIX,
        "codec_type": "AUTO",
        "use_remote_address": True,
        "xff_num_trusted_hops": settings.trusted_hops,
        "server_header_transformation": "PASS_THROUGH",
        # Paths are matched as they are spelled; see `routes`.
        "normalize_path": False,
        "merge_slashes": False,
        "path_with_escaped_slashes_action": "KEEP_UNCHANGED",
        # The client's own request id goes through and comes back; a bare one is made when there is none.
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "request_id_extension": {
            "typed_config": {
                "@type": f"{TYPE}extensions.request_id.uuid.v3.UuidRequestIdConfig",
                "pack_trace_reason": False,
            }
        },
        "early_header_mutation_extensions": [_early_header_mutation()],
        "common_http_protocol_options": {"max_headers_count": 200, "idle_timeout": "3600s"},
        # Checks of load balancers, and nginx as it comes; they may name no host. An answer that announces no size ends
        # with the connection.
        "http_protocol_options": {"accept_http_10": True, "default_host_for_http_10": "context-cache"},
        "http2_protocol_options": {
            "max_concurrent_streams": 1024,
            "initial_stream_window_size": BUFFER_BYTES,
            "initial_connection_window_size": 16 * BUFFER_BYTES,
        },
        "max_request_headers_kb": 60,
        "request_headers_timeout": "10s",
        "request_timeout": duration(settings.upload_timeout_s),
        "stream_idle_timeout": duration(settings.idle_timeout_s),
        "delayed_close_timeout": "1s",
        "local_reply_config": local_reply_config(settings),
        "access_log": [*refusal_counter(settings), *_access_log(settings)],
        **tracing(settings),
        "http_filters": _http_filters(settings),
        "route_config": {"name": "routes", "virtual_hosts": [_virtual_host(settings)]},
    }


def _virtual_host(settings: EnvoySettings) -> dict[str, Any]:
    # What Envoy tells about the client beside X-Forwarded-For is not for pods.
    removed = ["x-envoy-external-address", "x-envoy-internal"]
    return {
        "name": "all",
        "domains": ["*"],
        "request_headers_to_remove": removed,
        # As the HTTP front: what a pod runs on is nobody's business.
        "response_headers_to_remove": ["server", *(CORS_POD_HEADERS if settings.cors_origins else ())],
        **_cors_policy(settings),
        "routes": routes(settings),
    }


def _cors_policy(settings: EnvoySettings) -> dict[str, Any]:
    """Tell browsers that pages of these origins may call and read, as the HTTP front does."""
    if not settings.cors_origins:
        return {}
    policy = {
        "@type": f"{TYPE}extensions.filters.http.cors.v3.CorsPolicy",
        "allow_origin_string_match": [{"exact": origin} for origin in settings.cors_origins],
        "allow_methods": ", ".join(CORS_METHODS),
        "allow_headers": ", ".join(CORS_HEADERS),
        "expose_headers": ", ".join(CORS_EXPOSED_HEADERS),
        "max_age": str(CORS_MAX_AGE_S),
        "allow_private_network_access": True,
    }
    return {"typed_per_filter_config": {CORS: policy}}


def _early_header_mutation() -> dict[str, Any]:
    """Take from every request, before anything reads it, what would steer it, and mark it as not yet routed."""
    stolen = sorted({*ROUTING_HEADERS, IDENTITY_HEADER} - {UNROUTED_HEADER})
    mutations: list[dict[str, Any]] = [{"remove": name} for name in stolen]
    # Retries, timeouts, alternative hosts: Envoy takes orders in headers from whoever is near.
    mutations += [
        {"remove_on_match": {"key_matcher": {"prefix": prefix}}} for prefix in ("x-envoy-", "x-gateway-destination-")
    ]
    mutations.append(
        {
            "append": {
                "header": {"key": UNROUTED_HEADER, "value": "1"},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        }
    )
    return {
        "name": "envoy.http.early_header_mutation.header_mutation",
        "typed_config": {
            "@type": f"{TYPE}extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
            "mutations": mutations,
        },
    }


def _http_filters(settings: EnvoySettings) -> list[dict[str, Any]]:
    # Browsers ask without a key whether a page may call, so that comes before keys; without a policy the filter does
    # nothing. Then keys: who has none costs nothing more, neither a buffer nor a look of the plugin. Nothing buffers
    # before the plugin has admitted a request by its head and counted its body's size.
    return [
        {"name": CORS, "typed_config": {"@type": f"{TYPE}extensions.filters.http.cors.v3.Cors"}},
        *key_filter(settings),
        {"name": EXT_PROC, "typed_config": _ext_proc(settings)},
        {
            "name": "envoy.filters.http.router",
            "typed_config": {
                "@type": f"{TYPE}extensions.filters.http.router.v3.Router",
                "suppress_envoy_headers": True,
            },
        },
    ]


def _ext_proc(settings: EnvoySettings) -> dict[str, Any]:
    return {
        "@type": f"{TYPE}extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {
            "envoy_grpc": {"cluster_name": PLUGIN},
            "retry_policy": {
                "retry_on": "unavailable,connect-failure,reset,refused-stream",
                # Soon: while every gateway is down, each fail-open request waits for this.
                "num_retries": 2,
                "retry_back_off": {"base_interval": "0.010s", "max_interval": "0.020s"},
            },
        },
        # The request only. The plugin returns when it has answered, so running answers do not depend on it.
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            # A request may have trailers and no body: not shown them, the plugin would never answer, and Envoy pass on
            # what nobody routed.
            "request_trailer_mode": "SEND",
            "response_header_mode": "SKIP",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SKIP",
        },
        "allow_mode_override": True,
        "message_timeout": duration(settings.plugin_timeout_s),
        # Routes say otherwise where a request may pass without the plugin.
        "failure_mode_allow": False,
        "status_on_error": {"code": "ServiceUnavailable"},
        # The route was chosen by the path as it came; the plugin has no say in that.
        "route_cache_action": "RETAIN",
        "metadata_options": {
            "receiving_namespaces": {"untyped": [LB_NAMESPACE, f"{LB_NAMESPACE}.subset_hint"]},
            "forwarding_namespaces": {"untyped": [LB_NAMESPACE, f"{LB_NAMESPACE}.subset_hint"]},
        },
    }


def _access_log(settings: EnvoySettings) -> list[dict[str, Any]]:
    """Log one JSON line a request: who was asked what and how it went; no body, no key, no query."""
    if not settings.access_log:
        return []
    fields: dict[str, str] = {
        "time": "%START_TIME%",
        "method": "%REQ(:METHOD):16%",
        "path": "%PATH(NQ):256%",
        "route": "%ROUTE_NAME%",
        "status": "%RESPONSE_CODE%",
        "flags": "%RESPONSE_FLAGS%",
        "details": "%RESPONSE_CODE_DETAILS%",
        "duration_ms": "%DURATION%",
        "request_ms": "%REQUEST_DURATION%",
        "first_byte_ms": "%RESPONSE_DURATION%",
        "pod": "%UPSTREAM_HOST%",
        "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
        "received_bytes": "%BYTES_RECEIVED%",
        "sent_bytes": "%BYTES_SENT%",
        "client": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
        "request_id": "%REQ(X-REQUEST-ID):128%",
        "plugin_head_us": f"%FILTER_STATE({EXT_PROC}:FIELD:request_header_latency_us)%",
        "plugin_body_us": f"%FILTER_STATE({EXT_PROC}:FIELD:request_body_total_latency_us)%",
        "plugin_was_away": f"%FILTER_STATE({EXT_PROC}:FIELD:failed_open)%",
    }
    for name in _RECEIPT_HEADERS:
        fields[name.removeprefix("x-").replace("-", "_")] = f"%RESP({name.upper()}):128%"
    return [
        {
            "name": "envoy.access_loggers.file",
            "typed_config": {
                "@type": f"{TYPE}extensions.access_loggers.file.v3.FileAccessLog",
                "path": settings.access_log,
                "log_format": {"json_format": fields, "omit_empty_values": True},
            },
        }
    ]


def _overload_manager(settings: EnvoySettings) -> dict[str, Any]:
    heap, connections = (
        "envoy.resource_monitors.fixed_heap",
        "envoy.resource_monitors.global_downstream_max_connections",
    )
    monitors = "extensions.resource_monitors"
    return {
        "refresh_interval": "0.25s",
        "resource_monitors": [
            {
                "name": heap,
                "typed_config": {
                    "@type": f"{TYPE}{monitors}.fixed_heap.v3.FixedHeapConfig",
                    "max_heap_size_bytes": settings.max_heap_bytes,
                },
            },
            {
                "name": connections,
                "typed_config": {
                    "@type": f"{TYPE}{monitors}.downstream_connections.v3.DownstreamConnectionsConfig",
                    "max_active_downstream_connections": settings.max_connections,
                },
            },
        ],
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": _TRACKED_BYTES_LOG2},
        "actions": [
            {
                "name": "envoy.overload_actions.shrink_heap",
                "triggers": [{"name": heap, "threshold": {"value": 0.85}}],
            },
            {
                # The streams that hold most end first, of HTTP/2 alone (Envoy 1.40): those of HTTP/1.1 are not tracked.
                "name": "envoy.overload_actions.reset_high_memory_stream",
                "triggers": [{"name": heap, "scaled": {"scaling_threshold": 0.88, "saturation_threshold": 0.94}}],
            },
            {
                "name": "envoy.overload_actions.stop_accepting_requests",
                "triggers": [{"name": heap, "threshold": {"value": 0.95}}],
            },
        ],
    }
