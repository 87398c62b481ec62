"""The Envoy front: an external processor that tells Envoy where a request goes. Sees requests only, never answers.

Knows the messages (`messages.py`), not the server that carries them (`server.py`). One call of
`process` is one request: its head, its body where the head does not say enough, our answer, and `process` returns.
Envoy then goes on alone, so that an answer that is streaming does not notice when this process ends.

Envoy sends bodies in one of two modes, which the first message names. BUFFERED: Envoy holds the body, shows it whole
when asked, and takes one answer to each message. FULL_DUPLEX_STREAMED (what InferencePool gateways use): the body
comes in pieces unasked, Envoy keeps none of them, and nothing moves on before our answer to the head. There Envoy's
own timeout does not apply, so ours do, and every piece has to be sent back. Where a proxy shows answers in that mode
too, `process` stays and sends them back: what Envoy has shown of an answer is lost when its processor leaves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.trace import SpanKind, get_current_span

from contextcache.errors import ContextCacheError, DeadlineExceeded, InvalidRequest, PathNotFound
from contextcache.extproc.v3 import external_processor_pb2 as pb
from contextcache.requests import LARGE_BYTES, TenantsInHand
from contextcache.wire.tracing import TRACEPARENT, trace_headers
from gateway.envoy import messages
from gateway.envoy.messages import RequestHead
from gateway.flows import REQUEST_ID_HEADER, Admission, Forward, Gateway
from gateway.fronts import ClientGone, ErrorAnswer, describe
from gateway.paths import Kind
from gateway.tenants.limits import HeldBody, Upload

log = logging.getLogger(__name__)

_ROUTED = "routed"
"""Status under which a request is counted that went on to a pod: Envoy sees what came of it, we do not."""
_ONE_HOP_HEADERS = frozenset({"proxy-authorization", "proxy-connection"})
"""Envoy ends the other headers that are for one hop itself."""
_LARGE_BODIES_AT_ONCE = 4
"""Bodies of the largest size that Envoy may show of one tenant at one time; what is more is 429 at its head."""
_REFUSAL_TIMEOUT_S = 5.0
"""Longest that an error's answer waits for Envoy to take it."""


class Stream(Protocol):
    """The messages of one request. Both calls raise ClientGone once the stream has ended."""

    traceparent: str
    """Span of the proxy that this stream belongs to; empty: it makes none, and the request's own header counts."""

    async def read(self) -> pb.ProcessingRequest:
        """Return the next message."""
        ...

    async def write(self, message: pb.ProcessingResponse) -> None:
        """Send an answer."""
        ...


@dataclass(slots=True)
class _Call:
    """One request on its stream."""

    stream: Stream
    head: RequestHead
    body_mode: int
    """A `pb.BodySendMode`: how the proxy would send a body."""
    shows_answer: bool
    """Whether the proxy shows the answer piece by piece and sends on only what comes back."""
    deadline: asyncio.Timeout
    status: str = ""
    """What the request is counted under; empty: not at all, it went away."""
    routing_s: float = 0.0
    """Spent in `flows`; waiting for the body is not."""

    @property
    def is_duplex(self) -> bool:
        return self.body_mode == pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED


class EnvoyFront:
    """Answers Envoy; errors of every kind leave it in the shape of the HTTP front's."""

    def __init__(self, gateway: Gateway) -> None:
        parts = gateway.parts
        self._gateway = gateway
        self._parts = parts
        self._limits = parts.limits
        self._timeout_s = parts.settings.ext_proc_timeout_s
        self._shown = TenantsInHand(bytes_max=_LARGE_BODIES_AT_ONCE * parts.limits.max_body_bytes)

    async def process(self, stream: Stream) -> None:
        """Answer one request's messages, whatever happens, and return."""
        self._parts.metrics.ext_proc_streams.inc()
        try:
            await self._process(stream)
        finally:
            self._parts.metrics.ext_proc_streams.dec()

    async def _process(self, stream: Stream) -> None:
        call: _Call | None = None
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                first = await stream.read()
                if first.observability_mode or not first.HasField("request_headers"):
                    # A copy to look at, or a phase that is not ours: Envoy goes on without an answer.
                    return
                call = _call_of(first, stream, deadline)
                # A proxy that traces writes its own header last, over ours: then we stand beside the pod, below it.
                parent = stream.traceparent or call.head.headers.get(TRACEPARENT, "")
                with self._parts.tracer.span("gateway request", kind=SpanKind.SERVER, parent=parent) as span:
                    span.set_attribute("contextcache.request_id", call.head.minted_id)
                    await self._answer(call, subset=messages.allowed_subset(first.metadata_context))
        except ClientGone:
            log.debug("client gone", extra={"request_id": _id_of(call)})
        except TimeoutError:
            await self._refuse(
                call, DeadlineExceeded("the request did not arrive before its deadline", retry_after_s=1)
            )
        except Exception as exc:  # noqa: BLE001  # a fault of ours costs one answer, in the shape of every other error
            await self._refuse(call, exc)
        finally:
            # Envoy cancels a stream that it needs no more, which may be before our last write returns.
            if call is not None and call.status:
                self._parts.metrics.requests.labels(call.head.kind, call.status).inc()

    async def _answer(self, call: _Call, *, subset: frozenset[str] | None) -> None:
        """Admit, route and tell Envoy. Raises ContextCacheError, ClientGone."""
        head = call.head
        kind = self._gateway.kind_of(head.method, head.path)
        call.head.kind = kind.value
        if kind in {Kind.OWN, Kind.CONTROL}:
            raise PathNotFound("the proxy must route this call to the gateway's HTTP front")
        with self._gateway.admitted(
            kind, head.headers, path=head.path, request_id=head.minted_id, subset=subset
        ) as admission:
            await self._answer_admitted(call, admission)

    async def _answer_admitted(self, call: _Call, admission: Admission) -> None:
        head = call.head
        self._limits.check_size(head.declared_bytes)
        # A proxy that buffers would send on at once, unbounded and uncounted, the body of a head that says enough.
        if not (head.has_body and call.body_mode == pb.BODY_SEND_MODE_BUFFERED):
            forward = await self._route_by_head(call, admission)
            if forward is not None:
                await self._send_on(call, forward)
                return
        with self._shown.body(admission.tenant) as shown:
            if head.declared_bytes > LARGE_BYTES:
                # Once shown, a body has to be answered before the proxy takes us for dead.
                shown(head.declared_bytes)
            await self._answer_body(call, admission)

    async def _answer_body(self, call: _Call, admission: Admission) -> None:
        if call.is_duplex:
            await self._answer_pieces(call, admission)
        elif call.body_mode == pb.BODY_SEND_MODE_BUFFERED:
            await self._answer_whole(call, admission)
        else:
            raise ContextCacheError(
                "the proxy must send request bodies to the gateway: mode BUFFERED or FULL_DUPLEX_STREAMED"
            )

    async def _route_by_head(self, call: _Call, admission: Admission) -> Forward | None:
        """Return where a request goes; None when its body is needed to know."""
        before_s = time.perf_counter()
        forward = await self._gateway.route_by_head(admission, has_body=call.head.has_body)
        if forward is None and not call.head.has_body:
            forward = await self._gateway.route(admission, b"")
        call.routing_s = time.perf_counter() - before_s
        return None if forward is None else self._noted(call, forward)

    async def _route(self, call: _Call, admission: Admission, body: bytes) -> Forward:
        before_s = time.perf_counter()
        forward = await self._gateway.route(admission, body)
        call.routing_s += time.perf_counter() - before_s
        return self._noted(call, forward)

    async def _send_on(self, call: _Call, forward: Forward) -> None:
        """Answer a head that said enough; the body goes on unseen where the mode allows that."""
        skips_body = call.head.has_body and not call.is_duplex
        answer = messages.head_answer(self._changes(call, forward), pod=forward.endpoint.address, skips_body=skips_body)
        await call.stream.write(answer)
        await self._send_back(call, request_ended=not (call.head.has_body and call.is_duplex))

    async def _answer_whole(self, call: _Call, admission: Admission) -> None:
        """Let the head pass, so that the proxy collects the body, and answer that.

        The tenant's bytes are taken before the proxy collects any, and the proxy holds no body that is not counted. One
        that does not say its size may be of any.
        """
        announced_bytes = (
            call.head.declared_bytes if "content-length" in call.head.headers else self._limits.max_body_bytes
        )
        with HeldBody(self._parts.tenants, admission.tenant, self._limits) as held:
            held.reserve(announced_bytes)
            await call.stream.write(messages.head_answer())
            # The upload has its own time.
            call.deadline.reschedule(None)
            message = await held.wait_for(call.stream.read(), size_bytes=call.head.declared_bytes)
            call.deadline.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
            if not message.HasField("request_body"):
                raise InvalidRequest("the request has trailers but no body")
            held.add(message.request_body.body)
            del message  # it has the body once more
            # Routed now, not at the head: the pod's load and the identity's time are of after the upload.
            forward = await self._route_by_head(call, admission)
            if forward is None:
                forward = await self._route(call, admission, held.whole())
            changes = self._changes(call, forward)
            await call.stream.write(messages.body_answer(changes, pod=forward.endpoint.address, body=forward.body))
        await self._send_back(call)

    async def _answer_pieces(self, call: _Call, admission: Admission) -> None:
        """Collect the body, answer the head, and send the body back."""
        with HeldBody(self._parts.tenants, admission.tenant, self._limits) as held:
            held.reserve(call.head.declared_bytes)
            # The body has its own time.
            call.deadline.reschedule(None)
            has_trailers = await _collect(call.stream, held)
            call.deadline.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
            body = held.whole()
            forward = await self._route(call, admission, body)
            changes = self._changes(call, forward)
            await call.stream.write(messages.head_answer(changes, pod=forward.endpoint.address))
            sent = body if forward.body is None else forward.body
            await _write_all(call.stream, messages.body_pieces(sent, ends=not has_trailers))
            if has_trailers:
                await call.stream.write(messages.request_trailers_answer())
        await self._send_back(call)

    async def _send_back(self, call: _Call, *, request_ended: bool = True) -> None:
        """Send back what is left of the request's body, and the answer where it is shown, to their ends.

        Uploads and answers may be long: the first have the time of `Upload`, of the others each message has its own.
        A pod may answer before it has the whole request. Raises BodyTooLarge, UploadTooSlow, ClientGone.
        """
        answer_ended = not call.shows_answer
        if request_ended and answer_ended:
            return
        upload = Upload(self._limits)
        while not (request_ended and answer_ended):
            call.deadline.reschedule(asyncio.get_running_loop().time() + self._limits.idle_timeout_s)
            message = await (call.stream.read() if request_ended else upload.wait_for(call.stream.read()))
            if message.HasField("request_body"):
                upload.came(len(message.request_body.body))
            await _write_all(call.stream, messages.unchanged(message))
            request_ended = request_ended or messages.ends_request(message)
            answer_ended = answer_ended or messages.ends_answer(message)

    def _noted(self, call: _Call, forward: Forward) -> Forward:
        call.head.kind, call.status = forward.kind.value, _ROUTED
        self._parts.metrics.route_seconds.labels(call.head.kind).observe(call.routing_s)
        self._parts.endpoints.note_routed(forward.endpoint.name, forward.query.counted_tenant)
        self._gateway.sent(forward)
        describe(get_current_span(), forward)
        return forward

    def _changes(self, call: _Call, forward: Forward) -> pb.HeaderMutation:
        """Return the changes of the request's headers."""
        headers = {**forward.set_headers, **trace_headers(), **forward.routing_headers}
        if call.head.headers.get(REQUEST_ID_HEADER) != call.head.request_id:
            headers.setdefault(REQUEST_ID_HEADER, call.head.request_id)
        if forward.body is not None:
            # Envoy refuses a changed body of another length than the head says.
            headers["content-length"] = str(len(forward.body))
        # Only what is there: Envoy counts as rejected what it does not let us touch (`x-envoy-…`).
        removed = (forward.remove_headers | _ONE_HOP_HEADERS) & call.head.headers.keys()
        return messages.header_mutation(headers, sorted(removed))

    async def _refuse(self, call: _Call | None, exc: Exception) -> None:
        """Answer the client in the pod's place; a stream that has said nothing gets no answer."""
        answer = ErrorAnswer.of(exc, request_id=_id_of(call))
        if call is None:
            return
        call.status = str(answer.status)
        try:
            async with asyncio.timeout(_REFUSAL_TIMEOUT_S):
                await call.stream.write(messages.error_answer(answer, request_id=call.head.request_id))
        except (ClientGone, TimeoutError):
            self._parts.metrics.broken_exchanges.labels("client_gone").inc()


async def _collect(stream: Stream, held: HeldBody) -> bool:
    """Read pieces to the end of the body; return whether trailers follow. Raises UploadTooSlow."""
    while True:
        message = await held.wait_for(stream.read())
        if message.HasField("request_trailers"):
            return True
        held.add(message.request_body.body)
        if message.request_body.end_of_stream:
            return False


async def _write_all(stream: Stream, answers: Iterable[pb.ProcessingResponse]) -> None:
    for answer in answers:
        await stream.write(answer)


def _call_of(first: pb.ProcessingRequest, stream: Stream, deadline: asyncio.Timeout) -> _Call:
    head = messages.read_head(first.request_headers)
    return _Call(
        stream=stream,
        head=head,
        # Proxies older than the field buffer, or this is not for them.
        shows_answer=first.protocol_config.response_body_mode == pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED,
        body_mode=first.protocol_config.request_body_mode
        if first.HasField("protocol_config")
        else pb.BODY_SEND_MODE_BUFFERED,
        deadline=deadline,
    )


def _id_of(call: _Call | None) -> str:
    return "" if call is None else call.head.request_id
