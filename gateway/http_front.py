"""The HTTP front: sends control calls to FastAPI and everything else to the byte carrier. Decides nothing.

Plain ASGI rather than a FastAPI catch-all, because carried requests outnumber control calls by far and need
nothing of what FastAPI does.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from contextcache.admission import TenantsInHand
from contextcache.errors import ContextCacheError, NoReadyEndpoint
from contextcache.rpc import cause_of
from contextcache.tracing import NO_TRACER, TRACEPARENT, Span, Tracer, current_span
from gateway.body_budget import BodyBudget
from gateway.carrier import Broken, Carrier, ConnectFailed
from gateway.exchange import ClientGone, Exchange
from gateway.flows import Admission, Forward, Gateway
from gateway.metrics import Metrics
from gateway.paths import Kind
from gateway.ports import EndpointDirectory

log = logging.getLogger(__name__)

_REFUSED = "refused"
"""Kind under which requests are counted that never got as far as having one."""


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """What one gateway process takes on."""

    max_body_bytes: int = 32 << 20
    max_in_flight: int = 2048
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 600.0
    """Longest silence of an answer that a front waits for itself; the HTTP front's connections have it of their own."""


class HttpFront:
    """An ASGI application; errors of every kind leave it in one shape."""

    def __init__(  # noqa: PLR0913  # one place is told everything, by name
        self,
        *,
        gateway: Gateway,
        endpoints: EndpointDirectory,
        carrier: Carrier,
        control: ASGIApp,
        budget: BodyBudget,
        limits: FrontLimits,
        metrics: Metrics,
        tenants: TenantsInHand | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """`budget` is the process's, for the other front too; `tenants`: what each may have in flight."""
        self._tenants = TenantsInHand() if tenants is None else tenants
        self._tracer = tracer
        self._gateway = gateway
        self._endpoints = endpoints
        self._carrier = carrier
        self._control = control
        self._limits = limits
        self._metrics = metrics
        self._budget = budget
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; WebSockets are refused."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway does not speak {scope['type']}")
        exchange = Exchange(scope, receive, send)
        self._in_flight += 1
        try:
            kind = await self._answer(exchange)
        finally:
            self._in_flight -= 1
        if exchange.status is not None and kind != Kind.OWN.value:
            self._metrics.requests.labels(kind, str(exchange.status)).inc()

    async def _answer(self, exchange: Exchange) -> str:
        """Answer, whatever happens, and return the kind to count the request under."""
        kind: str = _REFUSED
        started_s = time.monotonic()
        try:
            found = self._gateway.kind_of(exchange.method, exchange.path)
            kind = found.value
            if found is Kind.OWN:
                await self._control(exchange.scope, exchange.receive, exchange.send)
            else:
                kind = await self._traced(found, exchange)
        except ClientGone:
            log.debug("client gone", extra={"request_id": exchange.request_id})
        except Broken as exc:
            # Returning without the last message breaks the client's connection: there must be no clean end.
            log.warning("answer broken off", extra={"request_id": exchange.request_id, "error": exc.message})
        except ContextCacheError as exc:
            await self._send_error(exchange, exc)
        except Exception:
            # The boundary of a request: a fault of ours costs one answer, in the shape of every other error.
            log.exception("request failed", extra={"request_id": exchange.request_id})
            if exchange.status is None:
                await exchange.send_error(ContextCacheError("the gateway failed"))
        if log.isEnabledFor(logging.DEBUG):
            duration_ms = round((time.monotonic() - started_s) * 1000, 1)
            fields = {"request_id": exchange.request_id, "status": exchange.status, "duration_ms": duration_ms}
            log.debug("request ended", extra={"kind": kind, **fields})
        return kind

    async def _traced(self, kind: Kind, exchange: Exchange) -> str:
        """Answer or carry inside a span that continues the client's trace, or begins one."""
        parent = exchange.headers.get(TRACEPARENT, "")
        with self._tracer.span(f"gateway {kind.value}", kind="server", parent=parent) as span:
            span.set("contextcache.request_id", exchange.minted_id)
            found: str = kind.value
            if kind is Kind.CONTROL:
                await self._control(exchange.scope, exchange.receive, exchange.send)
            else:
                found = await self._carry(kind, exchange)
            if exchange.status is not None:
                span.set("http.response.status_code", exchange.status)
                if exchange.status >= 500:
                    span.fail(str(exchange.status))
            return found

    async def _carry(self, kind: Kind, exchange: Exchange) -> str:
        """Admit, route and carry; return the kind the request turned out to be."""
        admission = self._gateway.admit(kind, exchange.headers, request_id=exchange.minted_id)
        if self._in_flight > self._limits.max_in_flight:
            raise NoReadyEndpoint("the gateway carries as many requests as it may", retry_after_s=1)
        held = self._budget.hold(admission.tenant, limit_bytes=self._limits.max_body_bytes)
        with self._tenants.request(admission.tenant), held:
            body = await exchange.read_body(held, idle_timeout_s=self._limits.body_timeout_s)
            forward = await self._route(admission, body)
            await self._carry_to_any(forward, body, exchange)
        return forward.kind.value

    async def _route(self, admission: Admission, body: bytes) -> Forward:
        before_s = time.perf_counter()
        forward = await self._gateway.route(admission, body)
        self._metrics.route_seconds.labels(forward.kind.value).observe(time.perf_counter() - before_s)
        describe(current_span(), forward)
        return forward

    async def _carry_to_any(self, forward: Forward, body: bytes, exchange: Exchange) -> None:
        """Carry to the chosen pod, or to another while pods refuse the connection. Raises NoReadyEndpoint."""
        while True:
            name = forward.endpoint.name
            try:
                with self._endpoints.carrying(name):
                    await self._carrier.carry(forward, body, exchange)
            except ConnectFailed:
                # Ends: a refused pod is not chosen again before a probe has found it healthy.
                forward = await self._gateway.reroute(forward, unreachable=name)
            else:
                return

    async def _send_error(self, exchange: Exchange, error: ContextCacheError) -> None:
        if error.http_status >= 500:
            fields = {
                "request_id": exchange.request_id,
                "code": error.code,
                "error": error.message,
                "cause": cause_of(error),
            }
            log.warning("request refused", extra=fields)
        if exchange.status is None:
            await exchange.send_error(error)


def describe(span: Span, forward: Forward) -> None:
    """Say on a request's span where it goes, and why there."""
    span.rename(f"gateway {forward.kind.value}")
    span.set("contextcache.endpoint", forward.endpoint.name)
    span.set("contextcache.choice", forward.choice.reason.value)
    if forward.session is not None:
        span.set("contextcache.session_id", forward.session.session_id)
