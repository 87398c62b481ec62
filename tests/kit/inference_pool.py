"""Envoy as an InferencePool's gateway configures it.

Unlike our own bootstrap: bodies of requests stream through the processors (FULL_DUPLEX_STREAMED), the heads of answers
are shown to them as well, the pod is taken from the header, and a filter in front may allow only some of the pods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_TYPE = "type.googleapis.com/envoy."
_DESTINATION = "x-gateway-destination-endpoint"
_HINT = "envoy.lb.subset_hint"
_NAMESPACES = {"untyped": ["envoy.lb", _HINT]}


def as_inference_pool(
    found: dict[str, Any],
    *,
    pods: Sequence[str],
    subset: Sequence[str] = (),
    shows_answers: bool = False,
) -> dict[str, Any]:
    """Return our bootstrap with such a gateway's filters and routing.

    `subset`: addresses that a filter in front allows.
    `shows_answers`: the bodies of answers stream through ours as well.
    """
    resources = found["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["local_reply_config"], manager["early_header_mutation_extensions"]
    manager["http_filters"] = [
        *([_subset_filter(subset)] if subset else []),
        _processor("ext_proc", "plugin", shows_answers=shows_answers),
        _filter("router", "filters.http.router.v3.Router", {}),
    ]
    to_pod = {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "60s"}}
    manager["route_config"] = {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [to_pod]}]}
    plugin = next(cluster for cluster in resources["clusters"] if cluster["name"] == "plugin")
    resources["clusters"] = [
        plugin,
        _cluster("pool", pods) | {"load_balancing_policy": {"policies": [_by_header()]}},
    ]
    return found


def _subset_filter(subset: Sequence[str]) -> dict[str, Any]:
    value = {"x-gateway-destination-endpoint-subset": list(subset)}
    config = {"metadata": [{"metadata_namespace": _HINT, "value": value}]}
    return _filter("set_metadata", "filters.http.set_metadata.v3.Config", config)


def _processor(name: str, cluster: str, *, shows_answers: bool = False) -> dict[str, Any]:
    config = {
        "grpc_service": {"envoy_grpc": {"cluster_name": cluster}},
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED" if shows_answers else "NONE",
            "response_trailer_mode": "SEND" if shows_answers else "SKIP",
        },
        "message_timeout": "60s",
        "failure_mode_allow": False,
        "metadata_options": {"receiving_namespaces": _NAMESPACES, "forwarding_namespaces": _NAMESPACES},
    }
    return _filter(name, "filters.http.ext_proc.v3.ExternalProcessor", config)


def _filter(name: str, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"name": f"envoy.filters.http.{name}", "typed_config": {"@type": f"{_TYPE}extensions.{kind}", **config}}


def _by_header() -> dict[str, Any]:
    config = {
        "@type": f"{_TYPE}extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": _DESTINATION}],
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.round_robin",
                        "typed_config": {
                            "@type": f"{_TYPE}extensions.load_balancing_policies.round_robin.v3.RoundRobin"
                        },
                    }
                }
            ]
        },
    }
    return {"typed_extension_config": {"name": "envoy.load_balancing_policies.override_host", "typed_config": config}}


def _cluster(name: str, addresses: Sequence[str]) -> dict[str, Any]:
    hosts = [address.split(":") for address in addresses]
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        for host, port in hosts
    ]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "20s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }
