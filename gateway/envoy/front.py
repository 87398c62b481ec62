"""The Envoy front: an external processor that tells Envoy where a request goes. It sees requests, and no answers.

It knows the messages (`messages.py`), and not the server that carries them (`server.py`). One call of `process` is one
request: it reads the head, reads the body if the head does not say enough, answers, and returns. Envoy then goes on
alone, so a streaming answer does not depend on this process.

The first message names one of two modes for bodies:
- BUFFERED: Envoy holds the body, shows it whole when asked, and takes one answer to each message.
- FULL_DUPLEX_STREAMED, which InferencePool gateways use: Envoy sends pieces of the body unasked, keeps none of them,
  and forwards nothing before our answer to the head. Envoy's own timeout does not apply there, so ours do. Every piece
  must be sent back. If the proxy shows answers in this mode too, `process` stays and sends them back: a processor that
  leaves loses the parts of an answer that Envoy has shown to it.
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
"""Status in metrics of a request that was sent to a pod. Envoy sees the pod's answer, and this front does not."""
_ONE_HOP_HEADERS = frozenset({"proxy-authorization", "proxy-connection"})
"""Headers for one hop. Envoy itself removes the others of that kind."""
_LARGE_BODIES_AT_ONCE = 4
"""Bodies of the largest size that Envoy may show of one tenant at one time. Further ones get a 429 at their heads."""
_REFUSAL_TIMEOUT_S = 5.0
"""Longest wait until Envoy takes the answer of an error."""


class Stream(Protocol):
    """Messages of one request. Both calls raise ClientGone once the stream has ended."""

    traceparent: str
    """Span of the proxy that this stream belongs to. Empty: the proxy makes none, and the request's header counts."""
    reaches_engines: bool
    """True: the proxy reaches vLLM itself too. False: it lists one address of a pod, as an InferencePool does."""

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
    mode: pb.ProtocolConfiguration
    """Modes in which the proxy sends bodies of requests and of answers."""
    deadline: asyncio.Timeout
    status: str = ""
    """Status in metrics. Empty: the request is not counted, because its client is gone."""
    routing_s: float = 0.0
    """Time in `flows`, without the wait for the body."""

    @property
    def is_buffered(self) -> bool:
        return self.mode.request_body_mode == pb.BODY_SEND_MODE_BUFFERED

    @property
    def is_duplex(self) -> bool:
        return self.mode.request_body_mode == pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED

    @property
    def shows_answer(self) -> bool:
        """Whether the proxy shows the answer in pieces, and forwards only the pieces that come back."""
        return self.mode.response_body_mode == pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED

    def extend(self, within_s: float | None) -> None:
        """Set the deadline anew; None: there is none."""
        self.deadline.reschedule(None if within_s is None else asyncio.get_running_loop().time() + within_s)


class EnvoyFront:
    """Answers Envoy. Its errors have the same shape as those of the HTTP front."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._parts = gateway.parts
        self._limits = gateway.parts.limits
        self._timeout_s = gateway.parts.settings.ext_proc_timeout_s
        self._shown = TenantsInHand(bytes_max=_LARGE_BODIES_AT_ONCE * self._limits.max_body_bytes)

    async def process(self, stream: Stream) -> None:
        """Answer one request's messages and return. Raises nothing."""
        with self._parts.metrics.ext_proc_streams.track_inprogress():
            await self._process(stream)

    async def _process(self, stream: Stream) -> None:
        call: _Call | None = None
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                first = await stream.read()
                if first.observability_mode or not first.HasField("request_headers"):
                    # A copy for observers, or a phase that is not processed here. Envoy goes on without an answer.
                    return
                call = _Call(stream, messages.read_head(first.request_headers), messages.mode_of(first), deadline)
                # A proxy that traces writes its own header last, over ours. Our span is then beside the pod's.
                parent = stream.traceparent or call.head.headers.get(TRACEPARENT, "")
                with self._parts.tracer.span("gateway request", kind=SpanKind.SERVER, parent=parent) as span:
                    span.set_attribute("contextcache.request_id", call.head.minted_id)
                    await self._answer(call, subset=messages.allowed_subset(first.metadata_context))
        except ClientGone:
            log.debug("client gone", extra={"request_id": "" if call is None else call.head.request_id})
        except TimeoutError:
            if call is not None:
                late = DeadlineExceeded("the request did not arrive before its deadline", retry_after_s=1)
                await self._refuse(call, late)
        except Exception as exc:  # noqa: BLE001  # a fault of ours costs one answer, in the shape of every other error
            await self._refuse(call, exc)
        finally:
            # Envoy cancels a stream that it does not need any more, possibly before our last write returns.
            if call is not None and call.status:
                self._parts.metrics.process.count_request(call.head.kind, call.status, time.monotonic() - started_s)

    async def _answer(self, call: _Call, *, subset: frozenset[str] | None) -> None:
        """Admit and route a request, and answer Envoy. Raises ContextCacheError, ClientGone."""
        head = call.head
        kind = self._gateway.kind_of(head.method, head.path)
        head.kind = kind.value
        if kind in {Kind.OWN, Kind.CONTROL}:
            raise PathNotFound("the proxy must route this call to the gateway's HTTP front")
        with self._gateway.admitted(
            kind,
            head.headers,
            path=head.path,
            request_id=head.minted_id,
            subset=subset,
            only_turn=not call.stream.reaches_engines,
        ) as admission:
            self._limits.check_size(head.declared_bytes)
            # A proxy that buffers would forward the body of an answered head at once, unbounded and uncounted.
            if not (head.has_body and call.is_buffered):
                forward = await self._route_by_head(call, admission)
                if forward is not None:
                    await self._send_on(call, forward)
                    return
            with self._shown.body(admission.tenant) as shown:
                if head.declared_bytes > LARGE_BYTES:
                    # The proxy takes us for dead if a body that it has shown gets no answer.
                    shown(head.declared_bytes)
                if call.is_duplex:
                    await self._answer_pieces(call, admission)
                elif call.is_buffered:
                    await self._answer_whole(call, admission)
                else:
                    raise ContextCacheError(
                        "the proxy must send request bodies to the gateway: mode BUFFERED or FULL_DUPLEX_STREAMED"
                    )

    async def _route_by_head(self, call: _Call, admission: Admission) -> Forward | None:
        """Return the route of a request; None if it depends on the body."""
        before_s = time.perf_counter()
        forward = await self._gateway.route_by_head(admission, has_body=call.head.has_body)
        call.routing_s += time.perf_counter() - before_s
        if forward is None:
            return None if call.head.has_body else await self._route(call, admission, b"")
        return self._noted(call, forward)

    async def _route(self, call: _Call, admission: Admission, body: bytes) -> Forward:
        before_s = time.perf_counter()
        forward = await self._gateway.route(admission, body)
        call.routing_s += time.perf_counter() - before_s
        return self._noted(call, forward)

    async def _send_on(self, call: _Call, forward: Forward) -> None:
        """Answer a head that says enough. Envoy forwards the body unseen where the mode allows that."""
        has_body = call.head.has_body
        await call.stream.write(self._head_answer(call, forward, skips_body=has_body and not call.is_duplex))
        await self._send_back(call, request_ended=not (has_body and call.is_duplex))

    async def _answer_whole(self, call: _Call, admission: Admission) -> None:
        """Let the proxy collect the body, and answer it.

        The tenant's bytes are counted before the proxy collects any. A body without a size may have the largest.
        """
        head = call.head
        announced_bytes = head.declared_bytes if "content-length" in head.headers else self._limits.max_body_bytes
        with HeldBody(self._parts.tenants, admission.tenant, self._limits) as held:
            held.reserve(announced_bytes)
            await call.stream.write(messages.head_answer())
            # The upload has its own time limit.
            call.extend(None)
            message = await held.wait_for(call.stream.read(), size_bytes=head.declared_bytes)
            call.extend(self._timeout_s)
            if not message.HasField("request_body"):
                raise InvalidRequest("the request has trailers but no body")
            held.add(message.request_body.body)
            del message  # it holds the body a second time
            # Routed after the upload: the pod's load and the identity's time are then current.
            forward = await self._route_by_head(call, admission) or await self._route(call, admission, held.whole())
            answer = messages.body_answer(self._changes(call, forward), pod=forward.address, body=forward.body)
            await call.stream.write(answer)
        await self._send_back(call)

    async def _answer_pieces(self, call: _Call, admission: Admission) -> None:
        """Collect the body, answer the head, and send the body back."""
        with HeldBody(self._parts.tenants, admission.tenant, self._limits) as held:
            held.reserve(call.head.declared_bytes)
            # The body has its own time limit.
            call.extend(None)
            has_trailers = await _collect(call.stream, held)
            call.extend(self._timeout_s)
            body = held.whole()
            forward = await self._route(call, admission, body)
            await call.stream.write(self._head_answer(call, forward))
            sent = body if forward.body is None else forward.body
            await _write_all(call.stream, messages.body_pieces(sent, ends=not has_trailers))
            if has_trailers:
                await call.stream.write(messages.request_trailers_answer())
        await self._send_back(call)

    async def _send_back(self, call: _Call, *, request_ended: bool = True) -> None:
        """Send back the rest of the request's body, and the answer if it is shown, to their ends.

        The upload has the time of `Upload`, and each message of an answer has `idle_timeout_s`. A pod may answer before
        it has the whole request. Raises BodyTooLarge, UploadTooSlow, ClientGone.
        """
        answer_ended = not call.shows_answer
        upload = Upload(self._limits)
        while not (request_ended and answer_ended):
            call.extend(self._limits.idle_timeout_s)
            message = await (call.stream.read() if request_ended else upload.wait_for(call.stream.read()))
            if message.HasField("request_body"):
                upload.came(len(message.request_body.body))
            await _write_all(call.stream, messages.unchanged(message))
            request_ended = request_ended or messages.ends_request(message)
            answer_ended = answer_ended or messages.ends_answer(message)

    def _noted(self, call: _Call, forward: Forward) -> Forward:
        """Count a routed request, at its pod and in metrics."""
        call.head.kind, call.status = forward.kind.value, _ROUTED
        self._parts.metrics.route_seconds.labels(call.head.kind).observe(call.routing_s)
        counted = forward.query.counted_tenant
        self._parts.endpoints.note_routed(forward.endpoint.name, counted, is_direct=forward.is_direct)
        self._gateway.sent(forward)
        describe(get_current_span(), forward)
        return forward

    def _head_answer(self, call: _Call, forward: Forward, *, skips_body: bool = False) -> pb.ProcessingResponse:
        changes = self._changes(call, forward)
        return messages.head_answer(changes, pod=forward.address, skips_body=skips_body)

    def _changes(self, call: _Call, forward: Forward) -> pb.HeaderMutation:
        """Return the changes of the request's headers."""
        headers = {**forward.set_headers, **trace_headers(), **forward.routing_headers}
        if call.head.headers.get(REQUEST_ID_HEADER) != call.head.request_id:
            headers.setdefault(REQUEST_ID_HEADER, call.head.request_id)
        if forward.body is not None:
            # Envoy refuses a changed body whose length differs from the head's.
            headers["content-length"] = str(len(forward.body))
        # Only headers of this request: Envoy counts a removal that it does not allow as rejected (`x-envoy-…`).
        removed = (forward.remove_headers | _ONE_HOP_HEADERS) & call.head.headers.keys()
        return messages.header_mutation(headers, sorted(removed))

    async def _refuse(self, call: _Call | None, exc: Exception) -> None:
        """Answer the client in the pod's place. A stream without a first message gets no answer."""
        answer = ErrorAnswer.of(exc, request_id="" if call is None else call.head.request_id)
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
