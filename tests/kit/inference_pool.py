"""Envoy as an InferencePool's gateway configures it, and an endpoint picker that is not ours.

Unlike our own bootstrap: bodies of requests stream through the processors (FULL_DUPLEX_STREAMED), the heads of answers
are shown to them as well, the pod is taken from the header, and a filter in front may allow only some of the pods.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from contextcache.extproc.v3 import external_processor_pb2 as pb
from gateway.envoy.server import SERVICE_NAME

_TYPE = "type.googleapis.com/envoy."
_DESTINATION = "x-gateway-destination-endpoint"
_HINT = "envoy.lb.subset_hint"
_NAMESPACES = {"untyped": ["envoy.lb", _HINT]}


def as_inference_pool(
    found: dict[str, Any],
    *,
    pods: Sequence[str],
    subset: Sequence[str] = (),
    pickers: Sequence[str] = (),
    shows_answers: bool = False,
) -> dict[str, Any]:
    """Return our bootstrap with such a gateway's filters and routing.

    `subset`: addresses that a filter in front allows; `pickers`: gRPC addresses of processors behind ours.
    `shows_answers`: the bodies of answers stream through ours as well.
    """
    resources = found["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["local_reply_config"], manager["early_header_mutation_extensions"]
    manager["http_filters"] = [
        *([_subset_filter(subset)] if subset else []),
        _processor("ext_proc", "plugin", shows_answers=shows_answers),
        *(_processor(f"picker_{number}", f"picker_{number}") for number in range(len(pickers))),
        _filter("router", "filters.http.router.v3.Router", {}),
    ]
    to_pod = {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "60s"}}
    manager["route_config"] = {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [to_pod]}]}
    plugin = next(cluster for cluster in resources["clusters"] if cluster["name"] == "plugin")
    resources["clusters"] = [
        plugin,
        _cluster("pool", pods) | {"load_balancing_policy": {"policies": [_by_header()]}},
        *(
            _cluster(f"picker_{number}", [address])
            | {"typed_extension_protocol_options": plugin["typed_extension_protocol_options"]}
            for number, address in enumerate(pickers)
        ),
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


@dataclass
class OtherPicker:
    """An endpoint picker behind ours: obeys the subset it is shown, else names its own favourite."""

    favourite: str
    port: int = 0
    hints: list[list[str]] = field(default_factory=list)
    """Subset of each request, empty without one."""

    async def process(self, messages: AsyncIterator[pb.ProcessingRequest], _context: Any) -> AsyncIterator[Any]:
        held: list[pb.HttpBody] = []
        subset: list[str] = []
        async for message in messages:
            if message.HasField("request_headers"):
                hint = message.metadata_context.filter_metadata.get(_HINT)
                allowed = hint["x-gateway-destination-endpoint-subset"] if hint is not None else ()
                subset = [str(address) for address in allowed]
                self.hints.append(subset)
                if message.request_headers.end_of_stream:
                    yield self._head(subset)
                    return
            elif message.HasField("request_body"):
                held.append(message.request_body)
                if message.request_body.end_of_stream:
                    break
        yield self._head(subset)
        for piece in held:
            body = pb.StreamedBodyResponse(body=piece.body, end_of_stream=piece.end_of_stream)
            answer = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=body))
            yield pb.ProcessingResponse(request_body=pb.BodyResponse(response=answer))

    def _head(self, subset: list[str]) -> pb.ProcessingResponse:
        address = subset[0] if subset else self.favourite
        header = pb.HeaderValueOption(
            header=pb.HeaderValue(key=_DESTINATION, raw_value=address.encode()),
            append_action=pb.HEADER_APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD,
        )
        answer = pb.CommonResponse(header_mutation=pb.HeaderMutation(set_headers=[header]))
        found = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=answer))
        found.dynamic_metadata.update({"envoy.lb": {_DESTINATION: address}})
        return found


@asynccontextmanager
async def running_picker(favourite: str) -> AsyncIterator[OtherPicker]:
    """Serve until the block ends."""
    picker = OtherPicker(favourite)
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(
        picker.process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {"Process": method}),))
    picker.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield picker
    finally:
        await server.stop(0)
