"""The HTTP front: one FastAPI application. It answers the calls of `routes.py` and carries the others to pods.

A carried request bypasses FastAPI's middleware and router, which would cost 8 us a request and 0.3 us a chunk.
`paths.kind_of` has classified it by then, as it does for Envoy's routes. This module decides nothing.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from opentelemetry.trace import SpanKind, get_current_span
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from contextcache.errors import ContextCacheError, EngineFailed, InvalidRequest, NoReadyEndpoint, PathNotFound
from contextcache.model import SessionId
from contextcache.wire.tracing import TRACEPARENT, fail
from gateway.compaction import Json
from gateway.console.pages import console_router
from gateway.flows import REQUEST_ID_HEADER, Admission, Forward, Gateway
from gateway.fronts import (
    CORS_EXPOSED_HEADERS,
    CORS_HEADERS,
    CORS_MAX_AGE_S,
    CORS_METHODS,
    CORS_POD_HEADERS,
    ClientGone,
    ErrorAnswer,
    ReadyState,
    describe,
    mint_request_id,
    plain_request_id,
)
from gateway.http import openapi, routes
from gateway.http.carrier import Broken, Carrier, ConnectFailed, ConnectTimedOut
from gateway.http.exchange import BackgroundExchange, Exchange
from gateway.kept import PARENT_HEADERS
from gateway.paths import COMPACTION_PATHS, Kind, own_path
from gateway.tenants.limits import HeldBody

log = logging.getLogger(__name__)

_CONTROL_BYTES_MAX = 1 << 20
"""Largest body of a control call, in bytes: one that is parsed in a few milliseconds."""
_COMPACTION_BYTES_MAX = 8 << 20
"""Largest body of a compaction, in bytes: twice the text of a window of a million tokens."""
_COMPACTION = re.compile("|".join(COMPACTION_PATHS))
_CONTROL_BODY_S = 5.0
"""Deadline in seconds for the next byte of a control call's body. The whole body has it plus 1 s for each 32 KiB."""
_LATE_CONNECTS_MAX = 3
"""Connect timeouts of one request before a 503. One timeout may only mean a busy pod or a busy event loop here."""


class HttpFront(FastAPI):
    """An ASGI application. All of its errors have one form."""

    def __init__(self, gateway: Gateway, *, carrier: Carrier) -> None:
        # No page shows the document: its scripts would come from other servers and share the console's origin.
        pages: dict[str, Any] = {"docs_url": None, "redoc_url": None}
        super().__init__(redirect_slashes=False, **pages)
        parts = gateway.parts
        self.gateway = gateway
        self.parts = parts
        self.ready_state = ReadyState(parts)
        self._carrier = carrier
        self._control_limits = replace(
            parts.limits,
            max_body_bytes=min(parts.limits.max_body_bytes, _CONTROL_BYTES_MAX),
            body_timeout_s=min(parts.limits.body_timeout_s, _CONTROL_BODY_S),
        )
        self._compaction_limits = replace(
            parts.limits, max_body_bytes=min(parts.limits.max_body_bytes, _COMPACTION_BYTES_MAX)
        )
        self._cors = _Cors(self._serve, parts.settings.cors_origins)
        openapi.document()  # read now: a missing file stops the start, and no request waits for the parser
        console = (console_router(),) if parts.settings.console else ()
        for router in (routes.contexts, routes.operations, *console):
            self.include_router(router)
        for kind in (ContextCacheError, RequestValidationError, HTTPException, Exception):
            self.add_exception_handler(kind, _typed_answer)

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request. The server passes no other kind of scope."""
        await self._cors(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(_with_own_path(scope), receive, send)
        started_s = time.monotonic()
        try:
            await self._answer(exchange)
        except ClientGone:
            log.debug("client gone", extra={"request_id": exchange.request_id})
        except Broken as exc:
            # A return without the last message breaks the client's connection, so the answer has no clean end.
            log.warning("answer cut off", extra={"request_id": exchange.request_id, "error": exc.message})
        except Exception as exc:  # noqa: BLE001  # a fault of ours costs one answer
            await exchange.send_error(ErrorAnswer.of(exc, request_id=exchange.request_id))
        self._ended(exchange, started_s)

    def _ended(self, exchange: Exchange, started_s: float) -> None:
        duration_s = time.monotonic() - started_s
        if exchange.status is not None and exchange.kind != Kind.OWN.value:
            self.parts.metrics.process.count_request(exchange.kind, str(exchange.status), duration_s)
        if log.isEnabledFor(logging.DEBUG):
            duration_ms = round(duration_s * 1000, 1)
            fields = {"request_id": exchange.request_id, "status": exchange.status, "duration_ms": duration_ms}
            log.debug("request ended", extra={"kind": exchange.kind, **fields})

    async def _answer(self, exchange: Exchange) -> None:
        """Answer or carry, inside a span that continues the client's trace or begins one."""
        kind = self.gateway.kind_of(exchange.method, exchange.path)
        exchange.kind = kind.value
        if kind is Kind.OWN:
            # The routes know GET only. The server omits the body of an answer to HEAD.
            scope = {**exchange.scope, "method": "GET"} if exchange.method == "HEAD" else exchange.scope
            await super().__call__(scope, exchange.receive, exchange.send)
            return
        parent = exchange.headers.get(TRACEPARENT, "")
        with self.parts.tracer.span(f"gateway {kind.value}", kind=SpanKind.SERVER, parent=parent) as span:
            span.set_attribute("contextcache.request_id", exchange.minted_id)
            with self.gateway.admitted(
                kind, exchange.headers, path=exchange.path, request_id=exchange.minted_id
            ) as admission:
                await (self._control if kind is Kind.CONTROL else self._carry)(admission, exchange)
            if exchange.status is not None:
                span.set_attribute("http.response.status_code", exchange.status)
                if exchange.status >= 500:
                    fail(span, str(exchange.status))

    async def _control(self, admission: Admission, exchange: Exchange) -> None:
        """Let a route answer, with the request's body in memory."""
        limits = self._compaction_limits if _COMPACTION.fullmatch(exchange.path) else self._control_limits
        with HeldBody(self.parts.tenants, admission.tenant, limits) as held:
            body = b""
            if exchange.method in {"PATCH", "POST"}:
                body = await exchange.read_body(held)
            exchange.scope["state"] = {
                "admission": admission,
                "request_id": exchange.request_id,
                "body": body,
                "ask": partial(self._ask, admission, exchange),
            }
            await super().__call__(exchange.scope, exchange.receive, exchange.send)

    async def _ask(self, admission: Admission, exchange: Exchange, path: str, fields: Json, parent: SessionId) -> Json:
        """Carry a background request of a control call to a pod, and return its answer.

        It has the headers of the client that no field of `fields` replaces. Raises the pod's error as ours.
        """
        inner = BackgroundExchange(exchange, path, {PARENT_HEADERS[0]: parent} if parent else {})
        body = msgspec.json.encode(fields)
        try:
            forward = await self.gateway.route(self.gateway.on_behalf(admission, path, inner.headers), body)
            await self._carry_to_any(forward, body, inner)
        except Broken as exc:
            raise EngineFailed(exc.message) from exc
        except ClientGone as exc:
            raise InvalidRequest("the client closed the connection before the answer") from exc
        return inner.answer()

    async def _carry(self, admission: Admission, exchange: Exchange) -> None:
        """Read the body, choose the pod and carry the request to it."""
        with HeldBody(self.parts.tenants, admission.tenant, self.parts.limits) as held:
            body = await exchange.read_body(held)
            before_s = time.perf_counter()
            forward = await self.gateway.route(admission, body)
            exchange.kind = forward.kind.value
            self.parts.metrics.route_seconds.labels(exchange.kind).observe(time.perf_counter() - before_s)
            describe(get_current_span(), forward)
            await self._carry_to_any(forward, body, exchange)

    async def _carry_to_any(self, forward: Forward, body: bytes, exchange: Exchange) -> None:
        """Carry to the chosen pod, and to another one after a failed connection. Raises NoReadyEndpoint."""
        num_late = 0
        while True:
            name = forward.endpoint.name
            try:
                counted = forward.query.counted_tenant
                with self.parts.endpoints.carrying(name, counted, is_direct=forward.is_direct):
                    forget_sent = self.gateway.sent(forward)
                    try:
                        await self._carrier.carry(forward, body, exchange)
                    except ConnectFailed:
                        forget_sent()
                        raise
                return
            except ConnectTimedOut as exc:
                num_late += 1
                if num_late == _LATE_CONNECTS_MAX:
                    raise NoReadyEndpoint(
                        "no pod accepted the connection before the deadline", retry_after_s=1
                    ) from exc
                forward = await self.gateway.reroute(forward, unreachable=name, certain=False)
            except ConnectFailed:
                # The loop ends: a pod that refused is not chosen again before a probe finds it healthy.
                forward = await self.gateway.reroute(forward, unreachable=name)

    @override
    def openapi(self) -> dict[str, Any]:
        """Return the document of `openapi.yaml`."""
        return openapi.document()


class _Cors(CORSMiddleware):
    """CORS for the listed origins. For other origins it removes the CORS headers of pods.

    A page sends its key in a header, so cookies are never allowed.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=CORS_METHODS,
            allow_headers=CORS_HEADERS,
            allow_private_network=True,
            expose_headers=CORS_EXPOSED_HEADERS,
            max_age=CORS_MAX_AGE_S,
        )

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if not self.allow_origins or "origin" not in headers:
            await self.app(scope, receive, send)
        elif self.is_allowed_origin(headers["origin"]):
            await super().__call__(scope, receive, send)
        else:
            await self.simple_response(scope, receive, send, headers)

    @override
    async def send(self, message: Message, send: Send, request_headers: Headers) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name in CORS_POD_HEADERS:
                del headers[name]
            if self.is_allowed_origin(request_headers["origin"]):
                await super().send(message, send, request_headers)
                return
        await send(message)

    @override
    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        answer.headers[REQUEST_ID_HEADER] = plain_request_id(request_headers) or mint_request_id()
        return answer


def _with_own_path(scope: Scope) -> Scope:
    """Return the scope with the path that routes and pods know: one of ours has no slash at its end."""
    path = own_path(scope["path"])
    return scope if path == scope["path"] else {**scope, "path": path, "raw_path": path.encode()}


async def _typed_answer(request: Request, exc: Exception) -> Response:
    """Answer an error of a route or of FastAPI."""
    answer = ErrorAnswer.of(_typed(exc), request_id=getattr(request.state, "request_id", ""))
    return Response(answer.body, status_code=answer.status, headers=dict(answer.headers))


def _typed(exc: Exception) -> Exception:
    if isinstance(exc, RequestValidationError):
        first = exc.errors()[0]
        name = str(first["loc"][-1])
        return InvalidRequest(f"{name}: {first['msg']}", param=name)
    return PathNotFound("no such path") if isinstance(exc, HTTPException) else exc
