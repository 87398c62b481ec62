"""Objects of the client: the client, its contexts, one context, one streamed answer.

deploy/client_sources.py generates `_sync` from this package.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import httpx
from typing_extensions import override

from contextcache.client import calls
from contextcache.client._async.transport import AsyncTransport
from contextcache.client.calls import Call, Page
from contextcache.client.events import Event, Finished, StreamReader
from contextcache.client.failures import NotUnderstood
from contextcache.client.proxies import connection_options, proxy_of
from contextcache.client.retries import Place, Retries, named
from contextcache.client.types import (
    Changes,
    CompactFields,
    ContextInfo,
    CreateFields,
    KeptInfo,
    Message,
    Prompt,
    Reply,
    TtlPolicy,
    TurnFields,
)

if TYPE_CHECKING:
    import openai

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 300.0


class AsyncContextCache(AbstractAsyncContextManager["AsyncContextCache", None]):
    """A client of one deployment, with one API key. Tasks and threads may share it."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: Retries | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        """Default of `base_url` and `api_key`: `CONTEXT_CACHE_URL` and `CONTEXT_CACHE_API_KEY`.

        Raises ValueError without a URL or key, and for a proxy of the environment that cannot be used. A server on
        loopback is reached without a proxy.

        `timeout_s`: the longest silence of the server, and the longest time of an answer that does not stream. `http`:
        your own httpx client, which this client closes.
        """
        place = Place.of(base_url, api_key)
        self.transport = AsyncTransport(place, retries or Retries(), timeout_s, http)
        self.contexts = AsyncContexts(self)

    async def models(self) -> list[str]:
        """Return the names of the served models."""
        return await self.transport.send(calls.models())

    async def usage(
        self, *, first_day: str | None = None, last_day: str | None = None, tenant: str | None = None
    ) -> dict[str, Any]:
        """Return the usage of some days (`2026-11-25`, UTC). Default: today.

        `tenant`: another tenant, for operators' keys.
        """
        return await self.transport.send(calls.usage(first_day, last_day, tenant))

    async def deployment(self, *, after: str | None = None, limit: int | None = None) -> dict[str, Any]:
        """Return pods, limits and a page of tenants, for operators' keys. Raises OperatorOnly."""
        return await self.transport.send(calls.deployment(after, limit))

    async def close(self) -> None:
        """Close all connections."""
        await self.transport.close()

    @override
    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self.close()


class AsyncContexts:
    """The contexts of the key's tenant."""

    def __init__(self, client: AsyncContextCache) -> None:
        self._client, self._transport = client, client.transport

    async def create(
        self,
        model: str,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        delete_at_end: bool = False,
        **fields: Unpack[CreateFields],
    ) -> AsyncContext:
        """Create a context and answer its first prompt. `.reply` has the answer.

        `delete_at_end`: delete it at the end of its `with` block. Raises ApiError, ConnectionFailed, NotCreated.
        """
        reply = calls.created(await self._transport.send(calls.create(model, prompt, messages, fields)))
        return AsyncContext(self._client, reply.session_id, model, reply=reply, delete_at_end=delete_at_end)

    def create_stream(
        self,
        model: str,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **fields: Unpack[CreateFields],
    ) -> AsyncReplyStream:
        """Create a context and stream the answer. `.context` is set before the first event.

        The end of the stream raises NotCreated if the server stored no context.
        """
        return AsyncReplyStream(self._client, calls.create(model, prompt, messages, fields), model)

    async def get(self, session_id: str) -> AsyncContext:
        """Return an existing context. Raises ContextNotFound, ContextExpired."""
        return self._context(await self._transport.send(calls.get(session_id)))

    def list(self, *, model: str | None = None) -> AsyncIterator[ContextInfo]:
        """Yield all contexts, newest first, and read each page on demand. Contexts created meanwhile are not listed.

        Raises NotUnderstood if a page repeats.
        """
        return self._all(partial(calls.page, model=model))

    def list_kept(self) -> AsyncIterator[KeptInfo]:
        """Yield the kept KV of requests without a context, the last used first. Raises as `list`."""
        return self._all(calls.kept_page)

    async def update(self, session_id: str, **changes: Unpack[Changes]) -> ContextInfo:
        """Change the ttl (counted from now), its policy, or the metadata, which are replaced as a whole."""
        return await self._transport.send(calls.update(session_id, changes))

    async def delete(self, session_id: str) -> None:
        """Delete a context and its KV. Raises ContextNotFound."""
        await self._transport.send(calls.delete(session_id))

    async def fork(
        self,
        session_id: str,
        *,
        generation: int | None = None,
        name: str | None = None,
        ttl: int | None = None,
        ttl_policy: TtlPolicy | None = None,
    ) -> AsyncContext:
        """Return a new context with the turns of another, up to a generation. `name`: its `session_id`."""
        fields = {"generation": generation, "session_id": name, "ttl": ttl, "ttl_policy": ttl_policy}
        return self._context(await self._transport.send(calls.branch(session_id, "fork", fields)))

    async def compact(
        self,
        session_id: str,
        *,
        messages: Sequence[Message] | None = None,
        prompt: Prompt | None = None,
        name: str | None = None,
        **fields: Unpack[CompactFields],
    ) -> AsyncContext:
        """Return a short context that continues another: with these messages or text, or a summary by the model.

        `name`: its `session_id`.
        """
        said = {"messages": messages, "prompt": prompt, "session_id": name, **fields}
        return self._context(await self._transport.send(calls.branch(session_id, "compact", said)))

    async def rewind(self, session_id: str, generation: int, *, if_match: int | None = None) -> ContextInfo:
        """Rewind a context to a generation. Raises GenerationGone."""
        return await self._transport.send(calls.rewind(session_id, generation, if_match))

    def _context(self, info: ContextInfo) -> AsyncContext:
        return AsyncContext(self._client, info.session_id, info.model, info=info)

    async def _all(self, page_after: Callable[[str | None], Call[Page[T]]]) -> AsyncIterator[T]:
        after: str | None = None
        asked: set[str | None] = set()
        while after not in asked:
            asked.add(after)
            page = await self._transport.send(page_after(after))
            for one in page.data:
                yield one
            if (after := page.after) is None:
                return
        raise NotUnderstood(f"the server's list repeats itself: cursor {after!r} came twice")


class AsyncContext(AbstractAsyncContextManager["AsyncContext", None]):
    """One context. A turn sends only its new text."""

    def __init__(
        self,
        client: AsyncContextCache,
        session_id: str,
        model: str,
        *,
        reply: Reply | None = None,
        info: ContextInfo | None = None,
        delete_at_end: bool = False,
    ) -> None:
        self._client, self._transport = client, client.transport
        self.session_id, self.model = session_id, model
        self.last_reply = reply
        """The last answer that this object received; None before the first one."""
        self.info = info
        """The context at its last read; None before the first one."""
        self.delete_at_end = delete_at_end

    @override
    def __repr__(self) -> str:
        """Return the id and the model."""
        return f"{type(self).__name__}({self.session_id!r}, model={self.model!r})"

    @property
    def reply(self) -> Reply:
        """The last answer that this object received. Raises ValueError before the first one."""
        if self.last_reply is None:
            raise ValueError(f"{self.session_id!r} has answered nothing here: ask or chat first")
        return self.last_reply

    @property
    def generation(self) -> int | None:
        """Generation of the last commit that this object saw."""
        if self.last_reply is not None and self.last_reply.generation is not None:
            return self.last_reply.generation
        return None if self.info is None else self.info.generation

    async def ask(self, prompt: Prompt, **fields: Unpack[TurnFields]) -> Reply:
        """Continue with text, or token ids."""
        self.last_reply = await self._transport.send(calls.ask(self.model, self.session_id, prompt, fields))
        return self.last_reply

    async def chat(self, said: str | Sequence[Message], **fields: Unpack[TurnFields]) -> Reply:
        """Continue with a user's message, or with messages."""
        self.last_reply = await self._transport.send(calls.chat(self.model, self.session_id, said, fields))
        return self.last_reply

    def ask_stream(self, prompt: Prompt, **fields: Unpack[TurnFields]) -> AsyncReplyStream:
        """Continue as `ask` does, and stream the answer."""
        return AsyncReplyStream(self._client, calls.ask(self.model, self.session_id, prompt, fields), self.model, self)

    def chat_stream(self, said: str | Sequence[Message], **fields: Unpack[TurnFields]) -> AsyncReplyStream:
        """Continue as `chat` does, and stream the answer."""
        return AsyncReplyStream(self._client, calls.chat(self.model, self.session_id, said, fields), self.model, self)

    async def refresh(self) -> ContextInfo:
        """Read the context: turns, tokens, bytes, location of its KV."""
        self.info = await self._transport.send(calls.get(self.session_id))
        return self.info

    async def update(self, **changes: Unpack[Changes]) -> ContextInfo:
        """Change ttl, policy or metadata."""
        self.info = await self._client.contexts.update(self.session_id, **changes)
        return self.info

    async def fork(
        self, *, generation: int | None = None, name: str | None = None, ttl: int | None = None
    ) -> AsyncContext:
        """Return a new context with the turns of this one."""
        return await self._client.contexts.fork(self.session_id, generation=generation, name=name, ttl=ttl)

    async def rewind(self, generation: int, *, if_match: int | None = None) -> ContextInfo:
        """Rewind the context to a generation."""
        self.info = await self._client.contexts.rewind(self.session_id, generation, if_match=if_match)
        self.last_reply = None
        return self.info

    async def delete(self) -> None:
        """Delete the context and its KV."""
        await self._client.contexts.delete(self.session_id)

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        """Return an `openai` client whose calls continue this context. Raises ImportError without the package."""
        said = self._transport.place.openai_options(self.session_id, options)
        import openai

        if "http_client" not in said:
            said["http_client"] = openai.DefaultAsyncHttpxClient(**connection_options(proxy_of(said["base_url"])))
        return openai.AsyncOpenAI(**said)

    @override
    async def __aexit__(self, *_: object) -> None:
        """Delete the context if it was created with `delete_at_end`."""
        if self.delete_at_end:
            await self.delete()


class AsyncReplyStream(AbstractAsyncContextManager["AsyncReplyStream", None]):
    """A streamed answer: iterate once, or take `reply()`.

    Leave the `with` block, or without one the loop, to close the stream. A turn that is left early is not committed.
    """

    def __init__(
        self, client: AsyncContextCache, call: Call[Reply], model: str, context: AsyncContext | None = None
    ) -> None:
        self._client, self._call, self._model = client, call, model
        self.context = context
        """The context; for a create None before the first event."""
        self._events = self._read()
        self._is_entered = False
        self._reply: Reply | None = None

    def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events; the last one is `Finished`. Raises ApiError, BrokenStream, ConnectionFailed, NotCreated."""
        return self._events if self._is_entered else self._until_left()

    async def reply(self) -> Reply:
        """Read to the end and return the whole answer."""
        async for _ in self._events:
            pass
        if self._reply is None:
            raise ValueError("the stream was closed before the answer ended")
        return self._reply

    async def close(self) -> None:
        """Close the stream."""
        await self._events.aclose()

    @override
    async def __aenter__(self) -> AsyncReplyStream:
        """Close the stream at the end of the block, not at the end of the loop."""
        self._is_entered = True
        return self

    @override
    async def __aexit__(self, *_: object) -> None:
        """Close the stream."""
        await self.close()

    async def _until_left(self) -> AsyncGenerator[Event, None]:
        try:
            async for event in self._events:
                yield event
        finally:
            # The frame of `_events` and this object refer to each other: only a garbage collection would close them.
            await self.close()

    async def _read(self) -> AsyncGenerator[Event, None]:
        is_create = self.context is None
        async with self._client.transport.stream(self._call) as response:
            reader = StreamReader(named(response))
            session_id = reader.headers.get("x-session-id", "")
            if self.context is None and session_id:
                self.context = AsyncContext(self._client, session_id, self._model)
            async for data in response.aiter_bytes():
                for event in reader.feed(data):
                    if isinstance(event, Finished):
                        if is_create and event.reply.raw.get("session_id") is None:
                            self.context = None
                        self._reply = calls.created(event.reply) if is_create else event.reply
                        if self.context is not None:
                            self.context.last_reply = event.reply
                    yield event
                if reader.is_finished:
                    return  # bytes after the end do not belong to the answer
            reader.end()
