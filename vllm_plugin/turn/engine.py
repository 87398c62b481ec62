"""vLLM's own HTTP routes, called as an ASGI application: tokenise, detokenise, generate.

Only public routes are used (`/tokenize`, `/detokenize`, `/v1/completions`, `/v1/chat/completions`), so that nothing
here depends on vLLM's classes. A call starts from a copy of the client's scope: its headers reach vLLM too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from contextcache.errors import (
    ContextCacheError,
    EngineFailed,
    InvalidRequest,
    NoReadyEndpoint,
    error_body,
    error_headers,
)
from contextcache.wire.tracing import TRACEPARENT, trace_headers
from vllm_plugin.turn.refusals import engine_error

if TYPE_CHECKING:
    from vllm_plugin.turn.prompt.request import TurnRequest
    from vllm_plugin.turn.searching import EngineSearch

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_BODY_IDLE_S = 60.0
"""Seconds without a byte of a request's body. A gateway sends a body in one go."""
_TOKENIZE_DEADLINE_S = 30.0
"""A 32 MiB prompt takes seconds; anything longer is a stuck process."""
_HEALTH_DEADLINE_S = 2.0
_NOT_FORWARDED = frozenset(
    {
        b"content-length",
        b"content-type",
        b"content-encoding",
        b"transfer-encoding",
        b"x-context-identity",
        b"x-context-tenant",
        b"x-context-resume",
        b"if-match",
        b"idempotency-key",
    }
)


class Engine:
    """The engine as one request sees it."""

    def __init__(self, app: ASGIApp, scope: Scope) -> None:
        """Wrap the application behind us; `scope` is the client's request."""
        self._app = app
        self._scope = scope
        self.max_model_len: int | None = None
        """The model's window in tokens, as the last tokenise call told it."""
        self.search: EngineSearch | None = None
        """Finds another engine for a short call that this one does not answer; None: the call fails."""

    async def window(self, model: str) -> int:
        """Return the model's window in tokens. Raises ModelNotFound, EngineFailed."""
        if self.max_model_len is None:
            await self.tokenize(model, "", add_special_tokens=False)
        assert self.max_model_len is not None
        return self.max_model_len

    async def tokenize(self, model: str, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the ids of a text. Raises InvalidRequest with the engine's words, EngineFailed."""
        return await self._tokens({"model": model, "prompt": text, "add_special_tokens": add_special_tokens})

    async def tokenize_chat(
        self, request: TurnRequest, messages: Sequence[Mapping[str, Any]], *, continue_final_message: bool = False
    ) -> tuple[int, ...]:
        """Return the ids of messages under the chat template: with the generation prompt, or cut open at the end."""
        return await self._tokens(
            {
                **request.template_fields,
                "model": request.model,
                "messages": list(messages),
                "add_generation_prompt": not continue_final_message,
                "continue_final_message": continue_final_message,
            }
        )

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """Return the text of ids. Raises InvalidRequest for ids outside the vocabulary, EngineFailed."""
        answer = await self.ask("/detokenize", {"model": model, "tokens": list(token_ids)})
        return str(answer["prompt"])

    async def prefill(self, model: str, token_ids: Sequence[int], salt: str) -> int:
        """Compute a prompt into this engine's prefix cache; return how many tokens that had. Raises as `ask`."""
        body = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "cache_salt": salt}
        usage = (await self._answered("/v1/completions", body)).get("usage") or {}
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    async def generate(self, path: str, body: dict[str, Any] | bytes, receive: Receive, send: Send) -> None:
        """Run one completion; the answer goes to `send` as ASGI messages, `receive` reports the client's leaving."""
        raw = body if isinstance(body, bytes) else _encode(body)
        await self._app(self._scope_for(path, raw), body_then(raw, receive), send)

    async def _tokens(self, body: dict[str, Any]) -> tuple[int, ...]:
        answer = await self.ask("/tokenize", body)
        self.max_model_len = answer["max_model_len"]
        return tuple(answer["tokens"])

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make a short call and return its answer. Raises the engine's error as ours, EngineFailed at the deadline."""
        try:
            return await self._answered(path, body)
        except (EngineFailed, NoReadyEndpoint) as exc:
            if self.search is None:
                raise
            return await self.search.call(lambda engine: engine.ask(path, body), exc)

    async def _answered(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            status, told = await self._call("POST", path, _encode(body), deadline_s=_TOKENIZE_DEADLINE_S)
            answer = json.loads(told) if status == 200 else None
        except TimeoutError as exc:
            raise EngineFailed(f"{path} did not answer within {_TOKENIZE_DEADLINE_S:.0f} s") from exc
        except ValueError as exc:  # the engine ended in the middle
            raise EngineFailed(f"{path} broke off") from exc
        if status != 200:
            raise engine_error(status, told)
        assert isinstance(answer, dict)
        return answer

    async def is_ready(self) -> bool:
        """Return whether the engine says within a moment that it is healthy."""
        try:
            return (await self._call("GET", "/health", b"", deadline_s=_HEALTH_DEADLINE_S))[0] == 200
        except TimeoutError:
            return False

    async def tokenizes(self) -> bool:
        """Return whether the engine tokenises an empty text in time. vLLM that drains is healthy, and does not."""
        try:
            async with asyncio.timeout(_HEALTH_DEADLINE_S):
                await self._answered("/tokenize", {"prompt": "", "add_special_tokens": False})
        except (ContextCacheError, TimeoutError):
            return False
        return True

    async def _call(self, method: str, path: str, raw: bytes, *, deadline_s: float) -> tuple[int, bytes]:
        """Return status and body of a short call. Raises TimeoutError."""
        status, parts = 0, bytearray()

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.extend(message.get("body", b""))

        async with asyncio.timeout(deadline_s):
            receive = body_then(raw, asyncio.get_running_loop().create_future)
            await self._app({**self._scope_for(path, raw), "method": method}, receive, send)
        return status, bytes(parts)

    def _scope_for(self, path: str, body: bytes) -> Scope:
        headers = [(name, value) for name, value in self._scope["headers"] if name.lower() not in _NOT_FORWARDED]
        if traced := trace_headers():
            # vLLM's own spans, where it makes any, then lie below ours.
            headers = [(name, value) for name, value in headers if name.lower() != TRACEPARENT.encode()]
            headers += [(name.encode(), value.encode()) for name, value in traced.items()]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        return {
            **self._scope,
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }


async def ping(app: ASGIApp) -> None:
    """Have the engine's event loop answer a short request."""
    scope = {"type": "http", "method": "GET", "path": "/health", "query_string": b"", "headers": []}

    async def ignore(_message: Message) -> None: ...

    await app(scope, body_then(b"", asyncio.get_running_loop().create_future), ignore)


async def send_error(send: Send, error: ContextCacheError) -> None:
    """Send an error as a whole answer."""
    await send_whole(send, error.http_status, error_headers(error), error_body(error))


async def send_whole(send: Send, status: int, headers: Sequence[tuple[str, str]], body: bytes) -> None:
    """Send a whole answer. Its length is added to `headers`."""
    pairs = [(name.encode(), value.encode()) for name, value in (*headers, ("content-length", str(len(body))))]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def next_piece(receive: Receive) -> Message:
    """Return the next part of a request's body. Raises InvalidRequest when none comes in time, or the client left."""
    try:
        async with asyncio.timeout(_BODY_IDLE_S):
            message = await receive()
    except TimeoutError as exc:
        raise InvalidRequest(f"no byte of the body arrived for {_BODY_IDLE_S:.0f} s") from exc
    if message["type"] == "http.disconnect":
        raise InvalidRequest("the client closed the connection before its body was complete")
    return message


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def body_then(body: bytes, receive: Receive) -> Receive:
    """Return a receive that gives the body once and then whatever the client's connection says."""
    sent = False

    async def next_message() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
