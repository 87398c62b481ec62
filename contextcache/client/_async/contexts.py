"""What one holds: a client, its contexts, one context, an answer that streams.

`contextcache/client/_sync` is made from `_async` by `python -m deploy.sync_client`: edit that one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import httpx
from typing_extensions import override

from contextcache.client import calls
from contextcache.client._async.transport import AsyncTransport
from contextcache.client.calls import Call, Page
from contextcache.client.events import Event, Finished, StreamReader
from contextcache.client.failures import NotUnderstood
from contextcache.client.openai_client import openai_options, require_openai
from contextcache.client.proxies import connection_options, proxy_of
from contextcache.client.retries import Place, Retries, named
from contextcache.client.types import (
    Changes,
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


class AsyncContextCache:
    """A client of one deployment, with one API key. It may be shared."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: Retries | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        """Without `base_url` and `api_key`: `CONTEXT_CACHE_URL`, `CONTEXT_CACHE_API_KEY`; ValueError without either.

        Raises ValueError for a proxy of the environment that cannot be used. A server on loopback is asked directly.

        `timeout_s`: the longest silence of the server, a whole answer's time where it does not stream. `http`: a client
        of yours, closed with this one.
        """
        place = Place.of(base_url, api_key)
        self.transport = AsyncTransport(place, retries or Retries(), timeout_s, http)
        self.contexts = AsyncContexts(self)

    async def models(self) -> list[str]:
        """Return the names of the models that are served."""
        return await self.transport.send(calls.models())

    async def usage(
        self, *, first_day: str | None = None, last_day: str | None = None, tenant: str | None = None
    ) -> dict[str, Any]:
        """Return what was used from one day to another (`2026-11-25`, UTC), today without either.

        `tenant`: another's, for operators' keys. Raises NotFound on older servers.
        """
        return await self.transport.send(calls.usage(first_day, last_day, tenant))

    async def deployment(self, *, after: str | None = None, limit: int | None = None) -> dict[str, Any]:
        """Return pods, limits and a page of tenants; for operators' keys. Raises OperatorOnly."""
        return await self.transport.send(calls.deployment(after, limit))

    async def close(self) -> None:
        """End all connections."""
        await self.transport.close()

    async def __aenter__(self) -> Self:
        """Close it at the end of the block."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
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
        """Create a context and answer its first prompt: `.reply` has the answer.

        `delete_at_end`: used in a `with`, it is deleted at its end. Raises ApiError, ConnectionFailed, NotCreated.
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
        """Create a context and stream the answer; `.context` is there once the head of the answer is.

        Its end raises NotCreated where no context was left.
        """
        return AsyncReplyStream(self._client, calls.create(model, prompt, messages, fields), model)

    async def get(self, session_id: str) -> AsyncContext:
        """Return a context that is there. Raises ContextNotFound, ContextExpired."""
        info = await self._transport.send(calls.get(session_id))
        return AsyncContext(self._client, info.session_id, info.model, info=info)

    def list(self, *, model: str | None = None) -> AsyncIterator[ContextInfo]:
        """Yield all, newest first, page by page as they are asked for; what is created meanwhile is not among them.

        Raises NotUnderstood where the pages go round in a circle.
        """
        return self._all(partial(calls.page, model=model))

    def list_kept(self) -> AsyncIterator[KeptInfo]:
        """Yield what is kept of requests without a context, what was used last first. Raises as `list`."""
        return self._all(calls.kept_page)

    async def update(self, session_id: str, **changes: Unpack[Changes]) -> ContextInfo:
        """Change ttl (counted from now), its policy or the metadata, which takes the place of all there was."""
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
        """Return a new context that begins as another does, up to a generation or whole. `name`: its `session_id`."""
        fields = {"generation": generation, "session_id": name, "ttl": ttl, "ttl_policy": ttl_policy}
        info = await self._transport.send(calls.fork(session_id, fields))
        return AsyncContext(self._client, info.session_id, info.model, info=info)

    async def rewind(self, session_id: str, generation: int, *, if_match: int | None = None) -> ContextInfo:
        """Take a context back to what it was at a generation. Raises GenerationGone."""
        return await self._transport.send(calls.rewind(session_id, generation, if_match))

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


class AsyncContext:
    """One context. A turn sends its new text alone."""

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
        self._client = client
        self.session_id, self.model = session_id, model
        self.last_reply = reply
        """The last answer that came through this object; None before the first one."""
        self.info = info
        """As it was last read."""
        self.delete_at_end = delete_at_end

    @override
    def __repr__(self) -> str:
        """Return what tells it from others."""
        return f"{type(self).__name__}({self.session_id!r}, model={self.model!r})"

    @property
    def reply(self) -> Reply:
        """The last answer that came through this object. Raises ValueError before the first one."""
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
        """Go on with text, or token ids."""
        return self._took(await self._client.transport.send(calls.ask(self.model, self.session_id, prompt, fields)))

    async def chat(self, said: str | Sequence[Message], **fields: Unpack[TurnFields]) -> Reply:
        """Go on with what the user says, or with messages."""
        return self._took(await self._client.transport.send(calls.chat(self.model, self.session_id, said, fields)))

    def ask_stream(self, prompt: Prompt, **fields: Unpack[TurnFields]) -> AsyncReplyStream:
        """Do the same as `ask`, and stream the answer."""
        return AsyncReplyStream(self._client, calls.ask(self.model, self.session_id, prompt, fields), self.model, self)

    def chat_stream(self, said: str | Sequence[Message], **fields: Unpack[TurnFields]) -> AsyncReplyStream:
        """Do the same as `chat`, and stream the answer."""
        return AsyncReplyStream(self._client, calls.chat(self.model, self.session_id, said, fields), self.model, self)

    async def refresh(self) -> ContextInfo:
        """Read it: turns, tokens, bytes, where its KV is."""
        self.info = await self._client.transport.send(calls.get(self.session_id))
        return self.info

    async def update(self, **changes: Unpack[Changes]) -> ContextInfo:
        """Change ttl, policy or metadata."""
        self.info = await self._client.contexts.update(self.session_id, **changes)
        return self.info

    async def fork(
        self, *, generation: int | None = None, name: str | None = None, ttl: int | None = None
    ) -> AsyncContext:
        """Return a new context that begins as this one does."""
        return await self._client.contexts.fork(self.session_id, generation=generation, name=name, ttl=ttl)

    async def rewind(self, generation: int, *, if_match: int | None = None) -> ContextInfo:
        """Take it back to a generation."""
        self.info = await self._client.contexts.rewind(self.session_id, generation, if_match=if_match)
        self.last_reply = None
        return self.info

    async def delete(self) -> None:
        """Delete it, and its KV."""
        await self._client.contexts.delete(self.session_id)

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        """Return an `openai` client whose calls carry this context. Raises ImportError where `openai` is missing."""
        require_openai()
        import openai

        said = openai_options(self._client.transport.place, self.session_id, options)
        if "http_client" not in said:
            said["http_client"] = openai.DefaultAsyncHttpxClient(**connection_options(proxy_of(said["base_url"])))
        return openai.AsyncOpenAI(**said)

    async def __aenter__(self) -> Self:
        """Delete it at the end of the block, if it was created so."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Delete it, if it was created so."""
        if self.delete_at_end:
            await self.delete()

    def _took(self, reply: Reply) -> Reply:
        self.last_reply = reply
        return reply


class AsyncReplyStream:
    """An answer that comes bit by bit: iterate once, or take `reply()`.

    Leaving the `with` ends it, without one leaving the loop. A turn left before its end is not committed.
    """

    def __init__(
        self, client: AsyncContextCache, call: Call[Reply], model: str, context: AsyncContext | None = None
    ) -> None:
        self._client, self._call, self._model = client, call, model
        self.context = context
        """Of a create: there once the first event is."""
        self._opened: AbstractAsyncContextManager[httpx.Response] | None = None
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
        """End it where it is."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        """End it at the end of the block."""
        self._is_entered = True
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        await self.close()

    async def _until_left(self) -> AsyncGenerator[Event, None]:
        try:
            async for event in self._events:
                yield event
        finally:
            # Else it stays open until the garbage is collected: its frame holds this object, and that the frame.
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
                    return  # whatever comes after the end is none of the answer
            reader.end()
