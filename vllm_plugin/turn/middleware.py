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
from contextcache.model import NewSession, SessionId, TenantId
from contextcache.names import new_session_id
from contextcache.process.logs import show_logs_of, traceback_without_messages
from contextcache.process.settings import read_secret
from contextcache.requests import LargeBodies, TakeBytes, joined_headers
from contextcache.responses import RESPONSE_FIELDS, telling_what_is_missing
from contextcache.terms import IDEMPOTENCY_HEADER, read_repeatable, session_id_of
from contextcache.wire.rpc import cause_of
from contextcache.wire.tracing import TRACEPARENT
from vllm_plugin.turn.admission import BodyQueue, TurnAdmission
from vllm_plugin.turn.anthropic import Anthropic
from vllm_plugin.turn.app import compose_turns
from vllm_plugin.turn.engine import ASGIApp, Engine, Message, Receive, Scope, Send, send_error
from vllm_plugin.turn.event_stream import begins_stream
from vllm_plugin.turn.keep_alive import KeepAlive, read_keep_alive
from vllm_plugin.turn.kept import KeptRequests
from vllm_plugin.turn.request import (
    CONTEXT_PATH,
    MESSAGES_PATH,
    TurnRequest,
    read_new_session,
    read_turn,
)
from vllm_plugin.turn.responses import Responses
from vllm_plugin.turn.settings import TurnSettings
from vllm_plugin.turn.story import Client, TurnStory, Words
from vllm_plugin.turn.unrouted import stateless_body, without_strangers
from vllm_plugin.turn.waiting import Draining

log = logging.getLogger(__name__)

_PATHS = TURN_PATHS | {CONTEXT_PATH}
_UNROUTED, _TENANT, _IN_FLIGHT = (name.encode() for name in (UNROUTED_HEADER, TENANT_HEADER, IN_FLIGHT_HEADER))
_UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Headers of a stream by which caches do not store it, and nginx passes each event on as it comes."""
_HEALTH_PATH = "/health"
_SKEW_RETRY_S = 5
"""Another pod's clock may be right, and NTP takes longer."""
_ITEMS_AT_ONCE = 1000
"""Of a response's body, read between two steps of the loop: vLLM's own types take a tenth of a ms each."""
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
        if self._draining.value and _needs_engine(scope):
            # What vLLM makes of it is an error 500, and of its own health a 200.
            ending = NoReadyEndpoint("this pod is shutting down", retry_after_s=1)
            await self._refuse(ending, _Started(send))
            return
        if scope["type"] == "http" and scope["path"] == _HEALTH_PATH:
            await self._app(scope, receive, self._telling_in_flight(send))
            return
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        tag = self._tag_of(scope)
        send = _unbuffered(send)
        try:
            with self._admission.request(tag) if tag else nullcontext():
                await self._answer_counted(scope, receive, send, is_counted=bool(tag))
        except TooManyInFlight as exc:
            await self._refuse(exc, _Started(send))

    async def _answer_counted(self, scope: Scope, receive: Receive, send: Send, *, is_counted: bool) -> None:
        if not self._may_concern_us(scope):
            await self._app(scope, self._in_turn(scope, receive), send)
            return
        raw = scope["headers"]
        headers = joined_headers((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw)
        token = headers.get(IDENTITY_HEADER)
        is_unrouted = token is None and UNROUTED_HEADER in headers
        may_be_turn = scope["path"] in _PATHS
        is_signed = token is not None and may_be_turn
        if not is_unrouted and not is_signed and not self._settings.single_tenant:
            await self._app(scope, self._in_turn(scope, receive), send)
            return
        started = _Started(send)
        try:
            client = _client_of(scope["path"], headers, receive, started)
            if is_unrouted:
                await self._pass_unrouted(scope, headers, client)
            elif not may_be_turn:
                await self._pass_without_context(scope, headers, client)
            else:
                parent = headers.get(TRACEPARENT, "")
                with self._story.tracer.span(f"turn {scope['path']}", kind=SpanKind.SERVER, parent=parent):
                    await self._turn(scope, headers, token, client, is_counted=is_counted)
        except ContextCacheError as exc:
            if scope["path"] == RESPONSES_PATH and (exc.param or "").startswith("messages"):
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

    def _tag_of(self, scope: Scope) -> str:
        """Return the tag of the request's tenant; empty: the gateway sent none."""
        if self._settings.single_tenant:
            return tenant_tag(self._settings.single_tenant, self._secret)
        headers = {name.lower(): value for name, value in scope["headers"]}
        return "" if _UNROUTED in headers else read_tag(headers.get(_TENANT, b"").decode("latin-1"))

    def _telling_in_flight(self, send: Send) -> Send:
        """Return a `send` that adds the requests in flight by tenant, for the gateway's probe."""

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                counts = in_flight_header(self._admission.in_flight()).encode()
                message = {**message, "headers": [*message.get("headers", ()), (_IN_FLIGHT, counts)]}
            await send(message)

        return told

    def _may_concern_us(self, scope: Scope) -> bool:
        if scope["path"] in _PATHS or self._settings.single_tenant:
            return True
        return any(name.lower() == _UNROUTED for name, _ in scope["headers"])

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

    async def _turn(
        self, scope: Scope, headers: dict[str, str], token: str | None, client: Client, *, is_counted: bool
    ) -> None:
        identity = None if token is None else self._signed(token, may_create=scope["path"] == CONTEXT_PATH)
        tenant = self._settings.single_tenant if identity is None else identity.tenant
        # A gateway that is older than this pod sends no tag.
        counted = nullcontext() if is_counted else self._admission.request(tenant_tag(tenant, self._secret))
        branch = identity.session_id if identity is not None and identity.is_branch else None
        try:
            with counted, self._admission.body(tenant) as held:
                raw = await read_body(client.receive, limit_bytes=self._settings.max_body_bytes, held=held)
                await self._answer(scope, headers, identity, raw, client)
        finally:
            if branch is not None:
                await self._story.drop_branch(tenant, branch)

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
        since_ms, event = (
            identity.issued_at_ms or identity.expires_at_ms,
            "signed" if identity.issued_at_ms else "ended",
        )
        raise NoReadyEndpoint(
            "the clocks of this pod and of the gateway differ: by this pod's clock the request's identity was "
            f"{event} {(now_ms - since_ms) / 1000:.0f} s ago",
            retry_after_s=_SKEW_RETRY_S,
        )

    async def _answer(
        self, scope: Scope, headers: dict[str, str], identity: Identity | None, raw: bytes, client: Client
    ) -> None:
        """Run the turn a whole request is, or pass it."""
        create, path = scope["path"] == CONTEXT_PATH, scope["path"]
        if identity is not None and not create and identity.session_id is None:
            await self._pass_plain(scope, identity, raw, client)
            return
        named: SessionId | None = None
        if identity is None:
            identity = self._single_tenant(headers)
            if not create:
                claims = await self._large_bodies.read(partial(read_claims, path=path), raw)
                header = headers.get(SESSION_HEADER)
                asked = await self._story.labels.continued_by(identity.tenant, path, claims, header)
                named = None if asked is None else asked.session_id or self._new_name(identity.tenant, headers)
        elif not create:
            named = identity.session_id
        if not create and named is None:
            await self._pass(scope, raw, client)
            return
        _check_content_type(headers)
        client = replace(client, words=await _words_of(scope))
        words = client.words
        body, request = await self._large_bodies.read(
            lambda whole: _read_turn(path, headers, whole, named, words),
            raw,
            objects_max=_ITEMS_AT_ONCE if path == RESPONSES_PATH else None,
        )
        named_or_new = named or self._name_of_repeated(identity.tenant, body, request)
        new: NewSession | None = None
        if named is None or request.creates_if_missing:
            new = read_new_session(body, tenant=identity.tenant, model=request.model, session_id=named_or_new)
        try:
            with telling_what_is_missing(request.said):
                await self._run(Engine(self._app, scope), request, named, new, identity, client)
        except (AlreadyAnswered, ContextQuotaExceeded):  # who is over a quota now was not, perhaps, the first time
            session_id, said = named if new is None else new.session_id, request.repeatable
            if said is None or session_id is None:
                raise
            if not await self._story.answer_again(identity.tenant, session_id, said, client):
                raise

    async def _run(
        self,
        engine: Engine,
        request: TurnRequest,
        named: SessionId | None,
        new: NewSession | None,
        identity: Identity,
        client: Client,
    ) -> None:
        """Run a create (`new` alone), a turn (`named` alone), or whichever it turns out to be (both)."""
        if named is None:
            assert new is not None
            await self._admission.check_quota(identity.tenant)
            await self._story.create(engine, request, new, identity, client)
        elif new is None:
            await self._story.continue_turn(engine, request, named, identity, client)
        else:
            await self._story.continue_or_create(engine, request, new, identity, client, self._admission.check_quota)

    def _name_of_repeated(self, tenant: TenantId, body: dict[str, Any], request: TurnRequest) -> SessionId | None:
        """Return the id of what a create makes that names nothing and may come again; None: any."""
        if request.repeatable is None or body.get("session_id") is not None:
            return None
        return session_id_of(tenant, request.repeatable.key, self._secret)

    def _new_name(self, tenant: TenantId, headers: dict[str, str]) -> SessionId:
        """Return the id of what a response creates, as the gateway chooses it."""
        said = read_repeatable(headers.get(IDEMPOTENCY_HEADER), ())
        return new_session_id() if said is None else session_id_of(tenant, said.key, self._secret)

    def _single_tenant(self, headers: dict[str, str]) -> Identity:
        request_id = headers.get("x-request-id", "direct")
        return Identity(self._settings.single_tenant, request_id, expires_at_ms=self._clock.now_ms())

    async def _pass_without_context(self, scope: Scope, headers: dict[str, str], client: Client) -> None:
        """Let a call through that cannot carry a context; refuse it when it names one."""
        if is_opaque(headers.get("content-type", "")):
            await self._app(scope, client.receive, client.send)
            return
        with self._admission.body(self._settings.single_tenant) as held:
            raw = await read_body(client.receive, limit_bytes=self._settings.max_body_bytes, held=held)
            refuse_session(await self._large_bodies.read(partial(read_claims, path=scope["path"]), raw))
            await self._pass(scope, raw, client)

    async def _pass_unrouted(self, scope: Scope, headers: dict[str, str], client: Client) -> None:
        """Let a stateless request through without what a client may not say; refuse a context's."""
        if is_opaque(headers.get("content-type", "")) and scope["path"] not in _PATHS:
            await self._app(scope, client.receive, client.send)
            return
        path, raw = scope["path"], await read_body(client.receive, limit_bytes=self._settings.max_body_bytes)
        body = await self._large_bodies.read(lambda whole: stateless_body(path, headers, whole), raw)
        await self._pass(scope if body is raw else _with_length(scope, body), body, client)

    async def _pass_plain(self, scope: Scope, identity: Identity, raw: bytes, client: Client) -> None:
        """Let a request without a context through, with an order to keep its KV if its key asks for that."""
        claims = None
        if identity.kept and self._kept is not None:
            claims = await self._large_bodies.read(partial(read_claims, path=scope["path"]), raw)
        if claims is None or self._kept is None:
            await self._pass(scope, raw, client)
            return
        body, send = self._kept.begin(scope["path"], identity, claims, client.send)
        await self._pass(_with_length(scope, body), body, replace(client, send=send))

    async def _pass(self, scope: Scope, raw: bytes, client: Client) -> None:
        """Give the engine the request with its whole body."""
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                return await client.receive()
            sent = True
            return {"type": "http.request", "body": raw, "more_body": False}

        is_stream = client.keep_alive is not None and await self._large_bodies.read(_asks_for_stream, raw)
        async with client.filling(stream=is_stream):
            await self._app(scope, self._in_turn(scope, receive), client.send)

    def _in_turn(self, scope: Scope, receive: Receive) -> Receive:
        return self._body_queue.receive(self._tag_of(scope), receive)

    async def _refuse(self, error: ContextCacheError, started: _Started) -> None:
        self._story.metrics.refused_requests.labels(code=error.code).inc()
        if error.http_status >= 500:
            # The engine's words are for the client alone: they may quote the prompt.
            told = "" if isinstance(error, EngineFailed) else error.message
            log.warning("turn refused", extra={"code": error.code, "error": told, "cause": cause_of(error)})
        if started.value:
            return  # the answer has begun; it ends without its end
        await send_error(started, error)


def _unbuffered(send: Send) -> Send:
    """Return a `send` that tells proxies not to hold a stream back, be it a turn's or the engine's own."""

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start" and begins_stream(message):
            headers = list(message["headers"])
            said = {name.lower() for name, _ in headers}
            message = {**message, "headers": headers + [told for told in _UNBUFFERED if told[0] not in said]}
        await send(message)

    return told


class _Started:
    """The client's send, remembering whether an answer has begun."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.value = False

    async def __call__(self, message: Message) -> None:
        self.value = self.value or message["type"] == "http.response.start"
        await self.send(message)


def _client_of(path: str, headers: dict[str, str], receive: Receive, started: _Started) -> Client:
    """Return the client's connection, kept alive where it asks for that. Raises InvalidRequest."""
    silence_s = read_keep_alive(headers)
    if silence_s is None:
        return Client(receive, started)
    started.send = keep_alive = KeepAlive(started.send, path, silence_s)
    return Client(receive, started, keep_alive=keep_alive)


def _asks_for_stream(raw: bytes) -> bool:
    try:
        return read_object(raw).get("stream") is True
    except InvalidRequest:
        return False  # the engine refuses it with the reason


def _with_length(scope: Scope, body: bytes) -> Scope:
    """Return the scope of a request whose body is another now."""
    others = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    return {**scope, "headers": [*others, (b"content-length", str(len(body)).encode())]}


def _check_content_type(headers: Mapping[str, str]) -> None:
    """Raise InvalidRequest for a body that is not declared as JSON: the engine refuses such a body without a context.

    A page of another origin can send no such header without being asked for permission first.
    """
    if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise InvalidRequest("Content-Type must be application/json", param="Content-Type")


def _needs_engine(scope: Scope) -> bool:
    return bool(scope["type"] == "http" and (scope["method"] == "POST" or scope["path"] == _HEALTH_PATH))


async def _words_of(scope: Scope) -> Words | None:
    """Return whose words a turn is in; None: a completion's or a chat's."""
    if scope["path"] == RESPONSES_PATH:
        return Responses.of(scope)
    return await Anthropic.of(scope) if scope["path"] == MESSAGES_PATH else None


def _read_turn(
    path: str, headers: dict[str, str], raw: bytes, named: SessionId | None, words: Words | None
) -> tuple[dict[str, Any], TurnRequest]:
    """Return a turn's body, and what it asks for; `named`: the context it was routed for, None: it creates one.

    `words`: those of a turn that is not in a completion's or a chat's own.
    """
    body = read_object(raw)
    refuse_misspelt(body, OUR_FIELDS | RESPONSE_FIELDS if path == RESPONSES_PATH else OUR_FIELDS)
    remove_forbidden_keys(body)
    if named is not None and body.get("session_id") not in (None, named):
        # Signed by the head alone, perhaps: then nobody has read yet whether the body names another context.
        raise InvalidRequest("the body and the X-Session-ID header name different contexts", param="session_id")
    request = read_turn(path, body, headers) if words is None else words.turn(body, headers, raw, named)
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
