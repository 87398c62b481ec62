"""Where Envoy sends requests: the pods, the plugin's processors, its HTTP fronts; and when it thinks one is ill.

Rule: one late answer takes nobody away, and the last one is never taken away. Two health checks in a row must fail;
with all of a cluster ill, requests go there anyway and are answered, or refused at once.

HTTP fronts are the exception: a front that leaves two checks in a row without an answer is hung. Its requests end, and
new requests are refused, so that no client waits for it. A front that answers that it is not ready is *degraded*: it
gets new requests only while no front is ready, and its requests in flight go on.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any

from gateway.envoy.routes import GATEWAY_HTTP, GATEWAY_STREAMS, PODS, TYPE
from gateway.envoy.settings import EnvoySettings, duration, split_address
from gateway.envoy.tls import upstream_tls
from gateway.envoy.traces import traces_cluster

PLUGIN = "plugin"
"""Cluster of the external processors."""
PROCESSOR_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LB_NAMESPACE = "envoy.lb"
DESTINATION_KEY = "x-gateway-destination-endpoint"
"""Key in the dynamic metadata `envoy.lb` under which the plugin names the pod."""

BUFFER_BYTES = 64 << 10
"""Bytes that Envoy reads ahead of a connection, or of a stream of HTTP/2: 20 000 connections are 1.3 GB of the heap.

A client that reads slowly slows the pod, and one that uploads slowly fills no more than this.
"""
_KEEP_ALIVE_S = 4
"""uvicorn closes an idle connection after 5 s: we let go first, so that no request meets a closing connection."""
_TCP_USER_TIMEOUT = {"level": 6, "name": 18, "int_value": 15_000, "state": "STATE_PREBIND"}
_NOTICE_THE_DEAD = {
    # A pod whose node is gone sends no reset: asked after 10 s of silence, given up after three answers that did not
    # come, or 15 s after bytes that nobody confirmed. The kernel answers for a pod that is merely busy.
    "upstream_connection_options": {
        "tcp_keepalive": {"keepalive_time": 10, "keepalive_interval": 3, "keepalive_probes": 3}
    },
    "upstream_bind_config": {"socket_options": [_TCP_USER_TIMEOUT]},
}
_LOAD_BALANCING = {
    # Only when all are ill is their illness ignored.
    "healthy_panic_threshold": {"value": 1.0},
    # Workers learn of an ill member at once, not with everything else that changes within a second.
    "update_merge_window": "0s",
}
_LEAST_REQUEST = {
    "name": "envoy.load_balancing_policies.least_request",
    "typed_config": {"@type": f"{TYPE}extensions.load_balancing_policies.least_request.v3.LeastRequest"},
}


def clusters(settings: EnvoySettings) -> list[dict[str, Any]]:
    """Return the clusters of the parts, the way of large bodies, and the trace collector's when there is one."""
    parts = [_pods(settings), _plugin(settings), _gateway_http(settings)]
    return [*parts, _gateway_streams(settings), *traces_cluster(settings)]


def streams_listener() -> dict[str, Any]:
    """Return the listener inside Envoy through which large bodies reach a front, as bytes of a TCP connection.

    Their answers may take long, so no time limit of a request ends one that a hung front has. Envoy ends the TCP
    connections to a member that fails its health checks, but only the idle ones of HTTP (1.40,
    `close_connections_on_host_health_failure`).
    """
    proxy = {
        "@type": f"{TYPE}extensions.filters.network.tcp_proxy.v3.TcpProxy",
        "stat_prefix": GATEWAY_STREAMS,
        "cluster": GATEWAY_HTTP,
        "max_connect_attempts": 3,
        # Silence is the HTTP route's to bound.
        "idle_timeout": "0s",
    }
    return {
        "name": GATEWAY_STREAMS,
        "internal_listener": {},
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "ignore_global_conn_limit": True,
        "filter_chains": [{"filters": [{"name": "envoy.filters.network.tcp_proxy", "typed_config": proxy}]}],
    }


def internal_listeners() -> dict[str, Any]:
    """Return the extension of a bootstrap that has listeners inside Envoy."""
    name = "envoy.extensions.bootstrap.internal_listener.v3.InternalListener"
    config = {"@type": f"{TYPE}extensions.bootstrap.internal_listener.v3.InternalListener", "buffer_size_kb": 64}
    return {"name": name, "typed_config": config}


def _gateway_streams(settings: EnvoySettings) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": {"envoy_internal_address": {"server_listener_name": GATEWAY_STREAMS}}}}
    return {
        "name": GATEWAY_STREAMS,
        "type": "STATIC",
        "connect_timeout": duration(settings.connect_timeout_s),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "load_assignment": {"cluster_name": GATEWAY_STREAMS, "endpoints": [{"lb_endpoints": [endpoint]}]},
        "circuit_breakers": _circuit_breakers(settings),
        # A request each: a connection stays at the front it was made to, also when that one drains.
        "typed_extension_protocol_options": http_1(max_requests_per_connection=1),
    }


def _pods(settings: EnvoySettings) -> dict[str, Any]:
    # The choice is read from metadata, which no client can write, never from the header of the same name.
    chosen = {"metadata": {"key": LB_NAMESPACE, "path": [{"key": DESTINATION_KEY}]}}
    override_host = {
        "@type": f"{TYPE}extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [chosen],
        "fallback_policy": {"policies": [{"typed_extension_config": _LEAST_REQUEST}]},
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override_host}
    return {
        **_cluster(PODS, settings.pods, settings),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        **_NOTICE_THE_DEAD,
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "health_checks": [_health_check({"http_health_check": {"path": "/health"}})],
        # A pod that its Service no longer lists gets nothing new, though it answers still: it ends or is not ready.
        "ignore_health_on_host_removal": True,
        "typed_extension_protocol_options": http_1(),
        **upstream_tls(settings, "http/1.1"),
    }


def _plugin(settings: EnvoySettings) -> dict[str, Any]:
    addresses = [gateway.ext_proc for gateway in settings.gateways]
    grpc = {"grpc_health_check": {"service_name": PROCESSOR_SERVICE}}
    return {
        **_cluster(PLUGIN, addresses, settings),
        "lb_policy": "LEAST_REQUEST",
        "health_checks": [_health_check(grpc)],
        "outlier_detection": {
            "split_external_local_origin_errors": True,
            "consecutive_local_origin_failure": 2,
            "consecutive_5xx": 5,
            "consecutive_gateway_failure": 5,
            "interval": "1s",
            "base_ejection_time": "3s",
            "max_ejection_time": "10s",
            "max_ejection_percent": 50,
            "always_eject_one_host": False,
        },
        "typed_extension_protocol_options": _protocol(
            {
                "explicit_http_config": {
                    "http2_protocol_options": {"connection_keepalive": {"interval": "30s", "timeout": "5s"}}
                }
            }
        ),
        **upstream_tls(settings, "h2"),
    }


def _gateway_http(settings: EnvoySettings) -> dict[str, Any]:
    addresses = [gateway.http for gateway in settings.gateways]
    return {
        **_cluster(GATEWAY_HTTP, addresses, settings),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "lb_policy": "LEAST_REQUEST",
        # Not /healthz: a front that drains must be left before it closes its connections. One that lacks the context
        # manager or a pod is left too while another has them, and asked all the same when none has. Both answer 503,
        # with a header that makes them degraded and not failed.
        "health_checks": [
            _health_check(
                {
                    "http_health_check": {
                        "path": "/readyz",
                        "expected_statuses": [{"start": 200, "end": 201}, {"start": 503, "end": 504}],
                    }
                }
            )
        ],
        "close_connections_on_host_health_failure": True,
        "common_lb_config": {**_LOAD_BALANCING, "healthy_panic_threshold": {"value": 0.0}},
        "typed_extension_protocol_options": http_1(),
        **upstream_tls(settings, "http/1.1"),
    }


def _cluster(name: str, addresses: Sequence[str], settings: EnvoySettings) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": socket_address(address)}} for address in addresses]
    by_name = not all(_is_ip(address) for address in addresses)
    # A name is looked up every second and each address is a member; of both families, as pods may have either.
    dns = {"dns_refresh_rate": "1s", "respect_dns_ttl": False, "dns_lookup_family": "ALL"} if by_name else {}
    return {
        "name": name,
        "type": "STRICT_DNS" if by_name else "STATIC",
        **dns,
        "connect_timeout": duration(settings.connect_timeout_s),
        "common_lb_config": _LOAD_BALANCING,
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": endpoints}],
            # A degraded member is asked while there is no healthy one, not as soon as some are missing.
            "policy": {"overprovisioning_factor": 100_000},
        },
        "circuit_breakers": _circuit_breakers(settings),
    }


def _circuit_breakers(settings: EnvoySettings) -> dict[str, Any]:
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {"thresholds": [dict.fromkeys(limits, settings.max_requests)]}


def socket_address(address: str) -> dict[str, Any]:
    """Return `host:port` as Envoy says it."""
    host, port = split_address(address)
    return {"socket_address": {"address": host, "port_value": port}}


def _is_ip(address: str) -> bool:
    try:
        ipaddress.ip_address(split_address(address)[0])
    except ValueError:
        return False
    return True


def _health_check(how: dict[str, Any]) -> dict[str, Any]:
    return {
        "timeout": "2s",
        "interval": "1s",
        # Without traffic Envoy would look once a minute.
        "no_traffic_interval": "1s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        **how,
    }


def http_1(**common: int) -> dict[str, Any]:
    """Return the options of a cluster that speaks HTTP/1.1. `common`: more of its HttpProtocolOptions."""
    return _protocol(
        {
            "common_http_protocol_options": {"idle_timeout": f"{_KEEP_ALIVE_S}s", **common},
            "explicit_http_config": {"http_protocol_options": {}},
        }
    )


def _protocol(options: dict[str, Any]) -> dict[str, Any]:
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {name: {"@type": f"{TYPE}extensions.upstreams.http.v3.HttpProtocolOptions", **options}}
