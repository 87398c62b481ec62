"""The ASGI middleware around the engine: it runs turns and passes other requests. Thin.

It acts on requests with a valid `x-context-identity` header, and on those that passed a gateway that was away. Every
other request is counted for its tenant and passes without being looked at. `/health` tells the gateway's probe the
requests in flight of each tenant.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from opentelemetry.trace import SpanKind

from contextcache.claim import (
    RESPONSES_PATH,
    TURN_PATHS,
    is_opaque,
    read_claims,
    read_object,
    remove_forbidden_keys,
)
from contextcache.errors import (
    BodyTooLarge,
    ContextCacheError,
    EngineFailed,
    InvalidRequest,
    NoReadyEndpoint,
    TooManyInFlight,
)
from contextcache.fields import OUR_FIELDS, refuse_misspelt
from contextcache.hints import Hints, marked_ms, read_hints
from contextcache.identity import (
    IDENTITY_HEADER,
    IN_FLIGHT_HEADER,
    LIMITS_HEADER,
    TENANT_HEADER,
    UNROUTED_HEADER,
    Identity,
    in_flight_header,
    read_identity,
    read_tag,
    tenant_tag,
)
from contextcache.model import NewSession, SessionId
from contextcache.process.logs import traceback_without_messages
from contextcache.process.settings import read_secret
from contextcache.requests import LargeBodies, TakeBytes, joined_headers
from contextcache.responses import RESPONSE_FIELDS, telling_what_is_missing
from contextcache.terms import IDEMPOTENCY_HEADER, read_repeatable, session_id_of
from contextcache.wire.rpc import cause_of
from contextcache.wire.tracing import TRACEPARENT
from vllm_plugin.turn.admission import BodyQueue
from vllm_plugin.turn.answer.anthropic import Anthropic
from vllm_plugin.turn.answer.chat import Dialect
from vllm_plugin.turn.answer.keep_alive import KeepAlive, read_keep_alive
from vllm_plugin.turn.answer.plain_diagnostics import read_asked
from vllm_plugin.turn.answer.responses import Responses
from vllm_plugin.turn.engine import (
    ASGIApp,
    Engine,
    Message,
    Receive,
    Scope,
    Send,
    body_then,
    next_piece,
    ping,
    send_error,
)
from vllm_plugin.turn.kept import KeptRequests, read_kept
from vllm_plugin.turn.prompt.request import CONTEXT_PATH, MESSAGES_PATH, TurnRequest, read_new_session
from vllm_plugin.turn.story import TurnStory
from vllm_plugin.turn.turn import Client
from vllm_plugin.turn.unrouted import stateless_body, without_strangers
from vllm_plugin.turn.waiting import Draining

log = logging.getLogger(__name__)

_PATHS = TURN_PATHS | {CONTEXT_PATH}
_IN_FLIGHT, _LIMITS = IN_FLIGHT_HEADER.encode(), LIMITS_HEADER.encode()
_HEALTH_PATH = "/health"
_SKEW_RETRY_S = 5
"""Another pod's clock may be right, and NTP takes longer."""


class TurnMiddleware:
    """Pure ASGI, for HTTP alone. One per turn process; connects on the first turn."""

    def __init__(self, app: ASGIApp, *, story: TurnStory) -> None:
        """`app`: the engine. Raises OSError, ValueError: the secret cannot serve."""
        self._app = without_strangers(app)
        self._story = story
        self._settings, self._clock = story.settings, story.clock
        self._secret = read_secret(self._settings.secret_file)
        self._kept: KeptRequests | None = None
        if not self._settings.lmcache_url:  # LMCache keeps plain requests itself
            self._kept = KeptRequests(self._secret, self._settings, story.kv, story.clock, story.metrics)
        self._dialects: Mapping[str, Dialect] = {MESSAGES_PATH: Anthropic(), RESPONSES_PATH: Responses()}
        """Dialects of their own; other routes have the engine's."""
        self._large_bodies = LargeBodies()
        self._body_queue = BodyQueue(partial(ping, self._app))
        self.draining = Draining(timeout_s=self._settings.drain_timeout_s, give_up=story.give_up)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or run its turn."""
        is_post, is_health = scope["method"] == "POST", scope["path"] == _HEALTH_PATH
        if self.draining.value and (is_post or is_health):
            # vLLM, which drains too, would answer 500, and 200 for its health.
            stopping = NoReadyEndpoint("this pod is shutting down", retry_after_s=1)
            await self._refuse(stopping, KeepAlive(send, scope["path"]))
        elif is_post and not is_health:
            await self._answer_counted(scope, receive, KeepAlive(send, scope["path"]))
        else:
            await self._app(scope, receive, self._telling_in_flight(send) if is_health else send)

    async def _answer_counted(self, scope: Scope, receive: Receive, answering: KeepAlive) -> None:
        raw = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"])
        headers = joined_headers(raw)
        engine = Engine(self._app, scope)
        tag = "" if UNROUTED_HEADER in headers else read_tag(headers.get(TENANT_HEADER, ""))
        client = Client(scope, headers, tag, receive, answering, answering, engine)
        token = headers.get(IDENTITY_HEADER)
        is_signed = token is not None and client.path in _PATHS
        try:
            with self._story.admission.request(client.tag) if client.tag else nullcontext():
                if is_signed or (token is None and UNROUTED_HEADER in headers):
                    await self._answer_client(client, token)
                else:
                    await self._hand_over(client.tag, scope, receive, answering)
        except TooManyInFlight as exc:
            await self._refuse(exc, answering)

    async def _answer_client(self, client: Client, token: str | None) -> None:
        """Run a request's turn, or pass it; errors are told here. `token`: signed identity; None: it is unrouted."""
        answering = client.keep_alive
        try:
            answering.silence_s = read_keep_alive(client.headers)
            if token is None:
                await self._pass_unrouted(client)
            else:
                parent = client.headers.get(TRACEPARENT, "")
                with self._story.tracer.span(f"turn {client.path}", kind=SpanKind.SERVER, parent=parent):
                    await self._turn(client, token)
        except ContextCacheError as exc:
            exc.param = exc.param and client.dialect.client_field(exc.param)
            await self._refuse(exc, answering)
        except Exception as exc:  # noqa: BLE001  # the boundary of a request
            raised = traceback_without_messages(exc)
            log.error("turn failed", extra={"exception": raised})  # noqa: TRY400  # its message may quote the request
            failed = EngineFailed("the turn failed")
            if answering.has_begun:
                # The server then closes the connection: an answer without its end must not look whole. It logs the
                # exception. Ours quotes no request, as another might.
                raise failed from None
            await self._refuse(failed, answering)

    def _telling_in_flight(self, send: Send) -> Send:
        """Return a `send` that adds the requests in flight by tenant, for the gateway's probe."""

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                admission = self._story.admission
                added = [(_IN_FLIGHT, in_flight_header(admission.requests_of_all()).encode())]
                if any(admission.limits):
                    added.append((_LIMITS, b"1"))
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        return told

    async def _turn(self, client: Client, token: str) -> None:
        client.identity = identity = self._signed(token, may_create=client.path == CONTEXT_PATH)
        client.search = client.engine.search = self._story.search(client, self._app, self.draining)
        tenant = identity.tenant
        # A gateway that is older than this pod sends no tag.
        admission = self._story.admission
        counted = nullcontext() if client.tag else admission.request(tenant_tag(tenant, self._secret))
        try:
            with counted, admission.body(tenant) as held:
                raw = await self._body_of(client, held)
                if client.path == CONTEXT_PATH or identity.session_id is not None:
                    await self._answer(client, raw)
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
        metrics, age_s = self._story.metrics, (now_ms - identity.issued_at_ms) / 1000
        metrics.gateway_clock_skew.set(age_s)
        if now_ms < identity.expires_at_ms:
            return identity
        metrics.expired_identities.inc()
        if not may_create and identity.session_id is None:
            return replace(identity, kept="")
        raise NoReadyEndpoint(
            "the clocks of this pod and of the gateway differ: by this pod's clock the request's identity was "
            f"signed {age_s:.0f} s ago",
            retry_after_s=_SKEW_RETRY_S,
        )

    async def _answer(self, client: Client, raw: bytes) -> None:
        """Run the turn of a whole request."""
        path = client.path
        named = None if path == CONTEXT_PATH else client.identity.session_id
        # The engine refuses other types without a context. A page of another origin needs permission to send this one.
        if not _is_json(client):
            raise InvalidRequest("Content-Type must be application/json", param="Content-Type")
        client.dialect = self._dialects.get(path, client.dialect)
        await client.dialect.prepare(client.engine)
        request, new = await self._large_bodies.read(lambda whole: self._read_turn(client, whole, named), raw)
        with telling_what_is_missing(request.said):
            await self._story.run(client, request, named, new)

    def _read_turn(self, client: Client, raw: bytes, named: SessionId | None) -> tuple[TurnRequest, NewSession | None]:
        """Return a turn's request, and the context it may create. `named`: the context it was routed for."""
        path, headers, tenant = client.path, client.headers, client.identity.tenant
        body = read_object(raw)
        refuse_misspelt(body, OUR_FIELDS | RESPONSE_FIELDS if path == RESPONSES_PATH else OUR_FIELDS)
        remove_forbidden_keys(body)
        if named is not None and body.get("session_id") not in (None, named):
            # The gateway may have signed by the head alone, without reading the name in the body.
            raise InvalidRequest("the body and the X-Session-ID header name different contexts", param="session_id")
        request, session_id = client.dialect.turn(client, body, raw, named), named
        request = replace(request, hints=Hints(read_hints(body.get("kv_hints")), marked_ms(raw)))
        if IDEMPOTENCY_HEADER in headers:
            told = (path, named or "", headers.get("if-match", ""), headers.get("x-usage-format", ""))
            said = read_repeatable(headers[IDEMPOTENCY_HEADER], (*(text.encode() for text in told), raw))
            request = replace(request, repeatable=said)
            if said is not None and named is None and body.get("session_id") is None:
                session_id = session_id_of(tenant, said.key, self._secret)
        if named is not None and not request.creates_if_missing:
            return request, None
        parent = client.identity.parent
        return request, read_new_session(body, tenant=tenant, model=request.model, session_id=session_id, parent=parent)

    async def _pass_unrouted(self, client: Client) -> None:
        """Let a stateless request through without forbidden keys; refuse one that names a context."""
        path, headers = client.path, client.headers
        if is_opaque(headers.get("content-type", "")) and path not in _PATHS:
            await self._app(client.scope, client.receive, client.send)
            return
        raw = await self._body_of(client, None)
        await self._pass(client, await self._large_bodies.read(partial(stateless_body, path, headers), raw))

    async def _pass_plain(self, client: Client, raw: bytes) -> None:
        """Let a request without a context through, with an order to keep its KV if its key asks for that."""
        if client.identity.kept and self._kept is not None and _is_json(client):
            claims = await self._large_bodies.read(partial(read_claims, path=client.path), raw)
            if claims is not None:
                asked = await self._large_bodies.read(partial(read_asked, client.path), raw)
                read = await self._large_bodies.read(partial(read_kept, client.path, headers=client.headers), raw)
                client.search.app = partial(self._hand_over, client.tag)
                client.engine = Engine(client.search.app, client.scope)
                await self._kept.answer(client, claims, read, asked)
                return
        await self._pass(client, raw)

    async def _hand_over(self, tag: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the engine a request, one large body after the other."""
        with self._body_queue.receive(tag, receive) as handed:
            await self._app(scope, handed, send)

    async def _pass(self, client: Client, body: bytes) -> None:
        """Give the engine the request with its whole body."""
        others = [(name, value) for name, value in client.scope["headers"] if name.lower() != b"content-length"]
        headers = [*others, (b"content-length", str(len(body)).encode())]
        answering = client.keep_alive
        is_stream = answering.silence_s is not None and await self._large_bodies.read(_asks_for_stream, body)
        receive = body_then(body, client.receive)
        async with answering.filling(stream=is_stream):
            await self._hand_over(client.tag, {**client.scope, "headers": headers}, receive, client.send)

    async def _body_of(self, client: Client, held: TakeBytes | None) -> bytes:
        """Return the whole request body, counted in `held`.

        Raises BodyTooLarge, TooManyInFlight, InvalidRequest when the client left before its end.
        """
        body, limit_bytes = bytearray(), self._settings.max_body_bytes
        while True:
            message = await next_piece(client.receive)
            chunk = message.get("body", b"")
            if len(body) + len(chunk) > limit_bytes:
                raise BodyTooLarge(f"the body is over {limit_bytes} bytes")
            if held is not None:
                held(len(chunk))
            body += chunk
            if not message.get("more_body", False):
                return bytes(body)

    async def _refuse(self, error: ContextCacheError, answering: KeepAlive) -> None:
        self._story.metrics.refused_requests.labels(code=error.code).inc()
        if error.http_status >= 500:
            # The engine's words are for the client alone: they may quote the prompt.
            told = "" if isinstance(error, EngineFailed) else error.message
            log.warning("turn refused", extra={"code": error.code, "error": told, "cause": cause_of(error)})
        if not answering.has_begun:  # else the answer has begun; it ends without its end
            await send_error(answering, error)


def _is_json(client: Client) -> bool:
    return client.headers.get("content-type", "").split(";")[0].strip().lower() == "application/json"


def _asks_for_stream(raw: bytes) -> bool:
    try:
        return read_object(raw).get("stream") is True
    except InvalidRequest:
        return False  # the engine refuses it with the reason
