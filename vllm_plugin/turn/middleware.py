"""The ASGI middleware vLLM loads (`--middleware vllm_plugin.turn.middleware.TurnMiddleware`). Thin.

It acts on requests with a valid `x-context-identity` header, or, in single-tenant mode, on all that could create or
name a context; and on those that passed a gateway that was away. Every other request is counted for its tenant and
passes without being looked at. `/health` tells the gateway's probe the requests in flight of each tenant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from opentelemetry.trace import SpanKind

from contextcache.claim import (
    RESPONSES_PATH,
    SESSION_HEADER,
    TURN_PATHS,
    is_opaque,
    read_claims,
    read_object,
    refuse_session,
    remove_forbidden_keys,
)
from contextcache.clock import Clock, SystemClock
from contextcache.errors import (
    AlreadyAnswered,
    BodyTooLarge,
    ContextCacheError,
    ContextQuotaExceeded,
    EngineFailed,
    InvalidRequest,
    NoReadyEndpoint,
    TooManyInFlight,
)
from contextcache.fields import OUR_FIELDS, refuse_misspelt
from contextcache.identity import (
    IDENTITY_HEADER,
    IN_FLIGHT_HEADER,
    TENANT_HEADER,
    UNROUTED_HEADER,
    Identity,
    in_flight_header,
    read_identity,
    read_tag,
    tenant_tag,
)
from contextcache.model import NewSession, SessionId
from contextcache.names import new_session_id
from contextcache.process.logs import show_logs_of, traceback_without_messages
from contextcache.process.settings import read_secret
from contextcache.requests import LargeBodies, TakeBytes, joined_headers
from contextcache.responses import RESPONSE_FIELDS, telling_what_is_missing
from contextcache.terms import IDEMPOTENCY_HEADER, read_repeatable, session_id_of
from contextcache.wire.rpc import cause_of
from contextcache.wire.tracing import TRACEPARENT
from vllm_plugin.turn.admission import BodyQueue, TurnAdmission
from vllm_plugin.turn.answer.anthropic import Anthropic
from vllm_plugin.turn.answer.chat import Dialect
from vllm_plugin.turn.answer.events import UNBUFFERED, begins_stream
from vllm_plugin.turn.answer.keep_alive import KeepAlive, read_keep_alive
from vllm_plugin.turn.answer.responses import Responses
from vllm_plugin.turn.app import compose_turns
from vllm_plugin.turn.engine import ASGIApp, Engine, Message, Receive, Scope, Send, body_then, send_error
from vllm_plugin.turn.kept import KeptRequests
from vllm_plugin.turn.prompt.request import CONTEXT_PATH, MESSAGES_PATH, TurnRequest, read_new_session
from vllm_plugin.turn.settings import TurnSettings
from vllm_plugin.turn.story import TurnStory
from vllm_plugin.turn.turn import Client
from vllm_plugin.turn.unrouted import stateless_body, without_strangers
from vllm_plugin.turn.waiting import Draining

log = logging.getLogger(__name__)

_PATHS = TURN_PATHS | {CONTEXT_PATH}
_IN_FLIGHT = IN_FLIGHT_HEADER.encode()
_HEALTH_PATH = "/health"
_SKEW_RETRY_S = 5
"""Another pod's clock may be right, and NTP takes longer."""
_ITEMS_AT_ONCE = 1000
"""Items of a response's body that are read in one step of the loop: vLLM's own types take a tenth of a ms each."""
_BODY_IDLE_S = 60.0
"""Without a byte of a request's body; a gateway sends it in one go."""


class TurnMiddleware:
    """Pure ASGI. Built once per API server process; connects on the first turn."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: TurnSettings | None = None,
        story: TurnStory | None = None,
        admission: TurnAdmission | None = None,
        kept: KeptRequests | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Read the environment unless settings are given. Raises OSError, ValueError: no secret, no start."""
        show_logs_of("vllm_plugin.turn")
        self._app = without_strangers(app)
        self._settings = settings if settings is not None else TurnSettings()
        self._secret = read_secret(self._settings.secret_file)
        self._clock = clock if clock is not None else SystemClock()
        if story is None:
            story, admission, kept = compose_turns(self._settings, self._secret)
        self._story = story
        self._kept = kept
        self._large_bodies = LargeBodies()
        self._body_queue = BodyQueue()
        self._draining = Draining(timeout_s=self._settings.drain_timeout_s, give_up=story.give_up)
        self._admission = admission or TurnAdmission(self._settings, quotas=None, clock=self._clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or run its turn."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        is_http = scope["type"] == "http"
        is_post, is_health = is_http and scope["method"] == "POST", is_http and scope["path"] == _HEALTH_PATH
        if self._draining.value and (is_post or is_health):
            # vLLM itself would answer 500, and 200 for its health.
            await self._refuse(NoReadyEndpoint("this pod is shutting down", retry_after_s=1), _Started(send))
        elif is_post and not is_health:
            await self._answer_counted(scope, receive, _Started(send))
        else:
            await self._app(scope, receive, self._telling_in_flight(send) if is_health else send)

    async def _answer_counted(self, scope: Scope, receive: Receive, started: _Started) -> None:
        raw = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"])
        headers = joined_headers(raw)
        client = Client(scope, headers, self._tag_of(headers), receive, started, Engine(self._app, scope))
        token = headers.get(IDENTITY_HEADER)
        is_unrouted = token is None and UNROUTED_HEADER in headers
        is_signed = token is not None and client.path in _PATHS
        try:
            with self._admission.request(client.tag) if client.tag else nullcontext():
                if is_unrouted or is_signed or self._settings.single_tenant:
                    await self._answer_client(client, started, token, is_unrouted=is_unrouted)
                else:
                    await self._app(scope, self._body_queue.receive(client.tag, receive), started)
        except TooManyInFlight as exc:
            await self._refuse(exc, started)

    async def _answer_client(self, client: Client, started: _Started, token: str | None, *, is_unrouted: bool) -> None:
        """Run a request's turn, or pass it; errors are told here."""
        try:
            if (silence_s := read_keep_alive(client.headers)) is not None:
                started.send = client.keep_alive = KeepAlive(started.send, client.path, silence_s)
            if is_unrouted:
                await self._pass_unrouted(client)
            elif client.path not in _PATHS:
                await self._pass_without_context(client)
            else:
                parent = client.headers.get(TRACEPARENT, "")
                with self._story.tracer.span(f"turn {client.path}", kind=SpanKind.SERVER, parent=parent):
                    await self._turn(client, token)
        except ContextCacheError as exc:
            if client.path == RESPONSES_PATH and (exc.param or "").startswith("messages"):
                exc.param = "input"  # vLLM makes the messages from the input's items; their positions differ
            await self._refuse(exc, started)
        except Exception as exc:  # noqa: BLE001  # the boundary of a request
            raised = traceback_without_messages(exc)
            log.error("turn failed", extra={"exception": raised})  # noqa: TRY400  # its message may quote the request
            failed = EngineFailed("the turn failed")
            if started.value:
                # The server then closes the connection: an answer without its end must not look whole. It logs the
                # exception. Ours quotes no request, as another might.
                raise failed from None
            await self._refuse(failed, started)

    def _tag_of(self, headers: Mapping[str, str]) -> str:
        """Return the tag of the request's tenant; empty: the gateway sent none."""
        if self._settings.single_tenant:
            return tenant_tag(self._settings.single_tenant, self._secret)
        return "" if UNROUTED_HEADER in headers else read_tag(headers.get(TENANT_HEADER, ""))

    def _telling_in_flight(self, send: Send) -> Send:
        """Return a `send` that adds the requests in flight by tenant, for the gateway's probe."""

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                counts = in_flight_header(self._admission.requests_of_all()).encode()
                message = {**message, "headers": [*message.get("headers", ()), (_IN_FLIGHT, counts)]}
            await send(message)

        return told

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Live as long as the server: it may be gone as soon as it has heard that its application is."""

        async def told(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._draining.listen()
                await self._story.start()
            elif message["type"].startswith("lifespan.shutdown."):
                await self._story.close()
            await send(message)

        await self._app(scope, receive, told)

    async def _turn(self, client: Client, token: str | None) -> None:
        if token is None:
            request_id = client.headers.get("x-request-id", "direct")
            identity = Identity(self._settings.single_tenant, request_id, expires_at_ms=self._clock.now_ms())
        else:
            identity = self._signed(token, may_create=client.path == CONTEXT_PATH)
        client.identity = identity
        tenant = identity.tenant
        # A gateway that is older than this pod sends no tag.
        counted = nullcontext() if client.tag else self._admission.request(tenant_tag(tenant, self._secret))
        try:
            with counted, self._admission.body(tenant) as held:
                raw = await self._body_of(client, held)
                if token is None or client.path == CONTEXT_PATH or identity.session_id is not None:
                    await self._answer(client, raw, is_routed=token is not None)
                else:
                    await self._pass_plain(client, raw)
        finally:
            if identity.is_branch and identity.session_id is not None:
                await self._story.drop_branch(tenant, identity.session_id)

    def _signed(self, token: str, *, may_create: bool) -> Identity:
        """Return the identity that the gateway signed. Raises ForgedIdentity, NoReadyEndpoint.

        An expired identity names no context and keeps nothing: a request that needs neither passes as a plain one.
        """
        identity, now_ms = read_identity(token, self._secret), self._clock.now_ms()
        metrics = self._story.metrics
        if identity.issued_at_ms:
            metrics.gateway_clock_skew.set((now_ms - identity.issued_at_ms) / 1000)
        if now_ms < identity.expires_at_ms:
            return identity
        metrics.expired_identities.inc()
        if not may_create and identity.session_id is None:
            return replace(identity, kept="")
        event = "signed" if identity.issued_at_ms else "ended"
        since_ms = identity.issued_at_ms or identity.expires_at_ms
        raise NoReadyEndpoint(
            "the clocks of this pod and of the gateway differ: by this pod's clock the request's identity was "
            f"{event} {(now_ms - since_ms) / 1000:.0f} s ago",
            retry_after_s=_SKEW_RETRY_S,
        )

    async def _answer(self, client: Client, raw: bytes, *, is_routed: bool) -> None:
        """Run the turn of a whole request, or pass it. `is_routed`: a gateway has found its context."""
        path, headers, tenant = client.path, client.headers, client.identity.tenant
        named: SessionId | None = None
        if path != CONTEXT_PATH:
            named = client.identity.session_id if is_routed else await self._named(client, raw)
            if named is None:
                await self._pass(client, raw)
                return
        _check_content_type(headers)
        client.dialect = await _dialect_of(client.scope)
        body, request = await self._large_bodies.read(
            lambda whole: _read_turn(client, whole, named),
            raw,
            objects_max=_ITEMS_AT_ONCE if path == RESPONSES_PATH else None,
        )
        session_id, said = named, request.repeatable
        if session_id is None and said is not None and body.get("session_id") is None:
            session_id = session_id_of(tenant, said.key, self._secret)
        new: NewSession | None = None
        if named is None or request.creates_if_missing:
            new = read_new_session(body, tenant=tenant, model=request.model, session_id=session_id)
            session_id = new.session_id
        try:
            with telling_what_is_missing(request.said):
                await self._story.run(client, request, named, new, self._admission.check_quota)
        except (AlreadyAnswered, ContextQuotaExceeded):  # the first request may have been under the quota
            if said is None or session_id is None:
                raise
            if not await self._story.answer_again(tenant, session_id, said, client):
                raise

    async def _named(self, client: Client, raw: bytes) -> SessionId | None:
        """Return the context that an unrouted request continues or creates; None: it has none."""
        claims = await self._large_bodies.read(partial(read_claims, path=client.path), raw)
        header, tenant = client.headers.get(SESSION_HEADER), client.identity.tenant
        asked = await self._story.labels.continued_by(tenant, client.path, claims, header)
        if asked is None or asked.session_id:
            return None if asked is None else asked.session_id
        # A response creates a context, whose id is chosen as the gateway does.
        said = read_repeatable(client.headers.get(IDEMPOTENCY_HEADER), ())
        return new_session_id() if said is None else session_id_of(tenant, said.key, self._secret)

    async def _pass_without_context(self, client: Client) -> None:
        """Let a call through that cannot carry a context; refuse it when it names one."""
        if is_opaque(client.headers.get("content-type", "")):
            await self._app(client.scope, client.receive, client.send)
            return
        with self._admission.body(self._settings.single_tenant) as held:
            raw = await self._body_of(client, held)
            refuse_session(await self._large_bodies.read(partial(read_claims, path=client.path), raw))
            await self._pass(client, raw)

    async def _pass_unrouted(self, client: Client) -> None:
        """Let a stateless request through without forbidden keys; refuse a context's."""
        path, headers = client.path, client.headers
        if is_opaque(headers.get("content-type", "")) and path not in _PATHS:
            await self._app(client.scope, client.receive, client.send)
            return
        raw = await self._body_of(client, None)
        body = await self._large_bodies.read(lambda whole: stateless_body(path, headers, whole), raw)
        await self._pass(client if body is raw else _with_length(client, body), body)

    async def _pass_plain(self, client: Client, raw: bytes) -> None:
        """Let a request without a context through, with an order to keep its KV if its key asks for that."""
        claims = None
        if client.identity.kept and self._kept is not None:
            claims = await self._large_bodies.read(partial(read_claims, path=client.path), raw)
        if claims is None or self._kept is None:
            await self._pass(client, raw)
            return
        body, client.send = self._kept.begin(client.path, client.identity, claims, client.send)
        await self._pass(_with_length(client, body), body)

    async def _pass(self, client: Client, raw: bytes) -> None:
        """Give the engine the request with its whole body."""
        receive = self._body_queue.receive(client.tag, body_then(raw, client.receive))
        is_stream = client.keep_alive is not None and await self._large_bodies.read(_asks_for_stream, raw)
        async with client.filling(stream=is_stream):
            await self._app(client.scope, receive, client.send)

    async def _body_of(self, client: Client, held: TakeBytes | None) -> bytes:
        return await read_body(client.receive, limit_bytes=self._settings.max_body_bytes, held=held)

    async def _refuse(self, error: ContextCacheError, started: _Started) -> None:
        self._story.metrics.refused_requests.labels(code=error.code).inc()
        if error.http_status >= 500:
            # The engine's words are for the client alone: they may quote the prompt.
            told = "" if isinstance(error, EngineFailed) else error.message
            log.warning("turn refused", extra={"code": error.code, "error": told, "cause": cause_of(error)})
        if not started.value:  # else the answer has begun; it ends without its end
            await send_error(started, error)


class _Started:
    """A client's `send`: it knows whether an answer has begun, and tells proxies not to hold a stream back."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.value = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.value = True
            if begins_stream(message):
                headers = list(message["headers"])
                said = {name.lower() for name, _ in headers}
                message = {**message, "headers": headers + [told for told in UNBUFFERED if told[0] not in said]}
        await self.send(message)


def _asks_for_stream(raw: bytes) -> bool:
    try:
        return read_object(raw).get("stream") is True
    except InvalidRequest:
        return False  # the engine refuses it with the reason


def _with_length(client: Client, body: bytes) -> Client:
    """Return a request with another body's length."""
    others = [(name, value) for name, value in client.scope["headers"] if name.lower() != b"content-length"]
    headers = [*others, (b"content-length", str(len(body)).encode())]
    client.scope = {**client.scope, "headers": headers}
    return client


def _check_content_type(headers: Mapping[str, str]) -> None:
    """Raise InvalidRequest for a body that is not declared as JSON: the engine refuses such a body without a context.

    A page of another origin can send no such header without being asked for permission first.
    """
    if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise InvalidRequest("Content-Type must be application/json", param="Content-Type")


async def _dialect_of(scope: Scope) -> Dialect:
    """Return the dialect of a turn. Raises InvalidRequest for one that this engine lacks."""
    if scope["path"] == RESPONSES_PATH:
        return Responses.of(scope)
    return await Anthropic.of(scope) if scope["path"] == MESSAGES_PATH else Dialect()


def _read_turn(client: Client, raw: bytes, named: SessionId | None) -> tuple[dict[str, Any], TurnRequest]:
    """Return a turn's body and its request. `named`: the context it was routed for; None: it creates one."""
    path, headers = client.path, client.headers
    body = read_object(raw)
    refuse_misspelt(body, OUR_FIELDS | RESPONSE_FIELDS if path == RESPONSES_PATH else OUR_FIELDS)
    remove_forbidden_keys(body)
    if named is not None and body.get("session_id") not in (None, named):
        # The gateway may have signed by the head alone, without reading the name in the body.
        raise InvalidRequest("the body and the X-Session-ID header name different contexts", param="session_id")
    request = client.dialect.turn(path, body, headers, raw, named)
    if IDEMPOTENCY_HEADER not in headers:
        return body, request
    said = (path, named or "", headers.get("if-match", ""), headers.get("x-usage-format", ""))
    parts = (*(text.encode() for text in said), raw)
    return body, replace(request, repeatable=read_repeatable(headers[IDEMPOTENCY_HEADER], parts))


async def read_body(receive: Receive, *, limit_bytes: int, held: TakeBytes | None = None) -> bytes:
    """Return the whole request body, counted in `held`.

    Raises BodyTooLarge, TooManyInFlight, InvalidRequest when the client left before its end.
    """
    body = bytearray()
    while True:
        try:
            async with asyncio.timeout(_BODY_IDLE_S):
                message = await receive()
        except TimeoutError as exc:
            raise InvalidRequest(f"no byte of the body arrived for {_BODY_IDLE_S:.0f} s") from exc
        if message["type"] == "http.disconnect":
            raise InvalidRequest("the client closed the connection before its body was complete")
        chunk = message.get("body", b"")
        if len(body) + len(chunk) > limit_bytes:
            raise BodyTooLarge(f"the body is over {limit_bytes} bytes")
        if held is not None:
            held(len(chunk))
        body += chunk
        if not message.get("more_body", False):
            return bytes(body)
