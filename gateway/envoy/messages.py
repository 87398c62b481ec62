"""Messages of Envoy's external processing: reads a request's head and makes the answers. Pure.

`front.py` decides on the answers. Header values are written as `raw_value`, which every Envoy that sends raw values
accepts. Envoy removes headers before it sets others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from google.protobuf.struct_pb2 import Struct

from contextcache.extproc.v3 import external_processor_pb2 as pb
from contextcache.identity import DESTINATION_HEADER
from contextcache.requests import joined_headers
from gateway.flows import REQUEST_ID_HEADER
from gateway.fronts import ErrorAnswer, FrontRequest, header_text

LOAD_BALANCING_NAMESPACE = "envoy.lb"
"""Namespace of dynamic metadata that Envoy's load balancers read."""
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
"""Allowed pods as `host:port`, in the endpoint picker protocol 1.0.0 of the Gateway API Inference Extension."""
ENGINES_METADATA = "x-context-engines"
"""Key in the gRPC metadata of a proxy that reaches vLLM itself as well as the turn processes, as our own Envoy may."""
PIECE_BYTES = 60 << 10
"""Largest piece of a body in full duplex mode. Envoy accepts 64 KiB, and other pickers stay below 62 000 bytes."""

_PSEUDO_HEADERS = frozenset({":authority", ":protocol", ":scheme"})
_WITHOUT_BODY = pb.ProcessingMode(
    response_header_mode=pb.HEADER_SEND_MODE_SKIP,
    request_trailer_mode=pb.HEADER_SEND_MODE_SKIP,
    response_trailer_mode=pb.HEADER_SEND_MODE_SKIP,
)
"""Mode without a body too: an override replaces all modes, and a body mode that is not named is `NONE`."""


class RequestHead(FrontRequest):
    """Head of a request as Envoy shows it. The path is as sent, still percent-encoded, without the query."""

    def __init__(self, method: str, path: str, headers: Mapping[str, str], *, has_body: bool) -> None:
        super().__init__(method, path, headers)
        self.has_body = has_body


def read_head(message: pb.HttpHeaders) -> RequestHead:
    """Return the request head in the first message of a stream."""
    # The hottest loop of the front. Each access to a field of a message costs a look-up, so each is read once.
    pairs: list[tuple[str, str]] = []
    for header in message.headers.headers:
        raw = header.raw_value
        pairs.append((header.key.lower(), header_text(raw) if raw else header.value))
    headers = joined_headers(pairs)
    method, path = headers.pop(":method", ""), headers.pop(":path", "")
    for name in _PSEUDO_HEADERS & headers.keys():
        del headers[name]
    return RequestHead(method, path.partition("?")[0], headers, has_body=not message.end_of_stream)


def mode_of(first: pb.ProcessingRequest) -> pb.ProtocolConfiguration:
    """Return the modes in which the proxy sends bodies. A proxy without the field is older than it, and buffers."""
    if first.HasField("protocol_config"):
        return first.protocol_config
    return pb.ProtocolConfiguration(request_body_mode=pb.BODY_SEND_MODE_BUFFERED)


def allowed_subset(metadata: pb.Metadata) -> frozenset[str] | None:
    """Return the pod addresses that the proxy allows; None: all. An empty list allows none."""
    namespaces = metadata.filter_metadata
    if SUBSET_NAMESPACE not in namespaces or SUBSET_KEY not in namespaces[SUBSET_NAMESPACE].fields:
        return None
    value = namespaces[SUBSET_NAMESPACE].fields[SUBSET_KEY]
    if value.HasField("list_value"):
        addresses: Iterable[str] = (found.string_value for found in value.list_value.values)
    else:
        addresses = value.string_value.split(",")
    return frozenset(address.strip() for address in addresses)


def header_mutation(set_headers: Mapping[str, str], remove_headers: Iterable[str]) -> pb.HeaderMutation:
    """Return a change of headers. Envoy removes first, and then sets or overwrites."""
    return pb.HeaderMutation(
        set_headers=[
            pb.HeaderValueOption(
                header=pb.HeaderValue(key=name, raw_value=value.encode()),
                append_action=pb.HEADER_APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for name, value in set_headers.items()
        ],
        remove_headers=remove_headers,
    )


def head_answer(
    mutation: pb.HeaderMutation | None = None, *, pod: str = "", skips_body: bool = False
) -> pb.ProcessingResponse:
    """Answer a request's head.

    `pod`: address of the chosen pod, empty while the pod is not chosen.
    `skips_body`: Envoy forwards the body without showing it (not in full duplex mode).
    """
    return pb.ProcessingResponse(
        request_headers=pb.HeadersResponse(response=pb.CommonResponse(header_mutation=mutation)),
        dynamic_metadata=_destination(pod) if pod else None,
        mode_override=_WITHOUT_BODY if skips_body else None,
    )


def body_answer(mutation: pb.HeaderMutation, *, pod: str, body: bytes | None = None) -> pb.ProcessingResponse:
    """Answer a whole body. `pod`: address of the chosen pod. `body`: the changed body; None: unchanged."""
    answer = pb.ProcessingResponse(dynamic_metadata=_destination(pod))
    # In place: a message given to another message's constructor is serialised and parsed again, with its body.
    common = answer.request_body.response
    common.header_mutation.CopyFrom(mutation)
    if body is not None:
        common.body_mutation.body = body
    return answer


def body_pieces(body: bytes, *, ends: bool) -> Iterator[pb.ProcessingResponse]:
    """Yield a body, or a piece of one, for full duplex mode. `ends`: nothing follows; an empty piece then says so."""
    for start in range(0, len(body) or int(ends), PIECE_BYTES):
        is_last = start + PIECE_BYTES >= len(body)
        answer = pb.ProcessingResponse()
        piece = answer.request_body.response.body_mutation.streamed_response
        piece.body, piece.end_of_stream = body[start : start + PIECE_BYTES], ends and is_last
        yield answer


def request_trailers_answer() -> pb.ProcessingResponse:
    """Answer a request's trailers: Envoy forwards them unchanged."""
    return pb.ProcessingResponse(request_trailers=pb.TrailersResponse())


def unchanged(message: pb.ProcessingRequest) -> Iterator[pb.ProcessingResponse]:
    """Yield the answers that forward a message unchanged. The message is of a routed request, or of its answer."""
    match message.WhichOneof("request"):
        case "request_body":
            yield from body_pieces(message.request_body.body, ends=message.request_body.end_of_stream)
        case "request_trailers":
            yield request_trailers_answer()
        case "response_headers":
            yield pb.ProcessingResponse(response_headers=pb.HeadersResponse())
        case "response_body":
            # One piece: Envoy sent it within its own limit.
            answer = pb.ProcessingResponse()
            piece = answer.response_body.response.body_mutation.streamed_response
            piece.body, piece.end_of_stream = message.response_body.body, message.response_body.end_of_stream
            yield answer
        case "response_trailers":
            yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())


def ends_request(message: pb.ProcessingRequest) -> bool:
    """Return whether nothing of the request follows."""
    return message.HasField("request_trailers") or message.request_body.end_of_stream


def ends_answer(message: pb.ProcessingRequest) -> bool:
    """Return whether nothing of the answer follows."""
    ended = message.response_headers.end_of_stream or message.response_body.end_of_stream
    return ended or message.HasField("response_trailers")


def error_answer(answer: ErrorAnswer, *, request_id: str) -> pb.ProcessingResponse:
    """Answer the client with an error, as the HTTP front does."""
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=answer.status),
            headers=header_mutation({**dict(answer.headers), REQUEST_ID_HEADER: request_id}, ()),
            body=answer.body,
            details=answer.code,
        )
    )


def _destination(address: str) -> Struct:
    """Return the dynamic metadata from which Envoy's load balancer takes the pod."""
    metadata = Struct()
    metadata.update({LOAD_BALANCING_NAMESPACE: {DESTINATION_HEADER: address}})
    return metadata
