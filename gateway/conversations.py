"""Conversations and stored responses: contexts, read and changed as OpenAI's items. Asks no engine.

An item is a view of the transcript in the store, so engines and sidecars may be away. Items that a client adds, and
items behind one that it deletes, are messages that the next turn tokenises. A response is a generation that ends with
an answer.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from contextcache.errors import (
    ContextBusy,
    ContextCacheError,
    ContextExpired,
    ContextNotFound,
    GenerationGone,
    InvalidRequest,
    StoreUnavailable,
)
from contextcache.input_items import check_items_of_input
from contextcache.items import (
    PlacedItem,
    instructions_of,
    items_of,
    messages_of,
    pending_segment,
    response_record,
    stored_messages,
    untokenised,
    with_new_ids,
)
from contextcache.model import (
    CacheSessionMetadata,
    NewSession,
    Segment,
    SegmentKind,
    SessionId,
    SessionMode,
    TenantId,
    TtlPolicy,
    TurnCommit,
    TurnReceipt,
    Usage,
)
from contextcache.requests import TenantsInHand
from contextcache.responses import generation_named, response_object, usage_of_response
from contextcache.terms import Terms
from gateway.contexts import Contexts, check_id
from gateway.parts import Parts

PREFIX = "conv_"
"""Prefix of the ids of conversations."""
TTL_S = 24 * 3600
"""Life of a conversation after its last use: OpenAI's never ends, and a client may come back the next day."""
_NEW_ITEMS_MAX = 20
"""OpenAI's limit of the items in one call."""
_UNREAD_CHARS_MAX = 8 << 20
"""Characters of JSON of the items that wait for a turn: twice what a window of a million tokens holds. A list of them
takes ten times as much memory."""
_LEASE_MS = 10_000
"""Lease of a change until its commit. If this process dies in between, the conversation is free after it."""
_READS_MAX = 4
"""Concurrent calls of one tenant that read a transcript, which may have megabytes."""

Json = dict[str, Any]
T = TypeVar("T")
Segments = tuple[Segment, ...]


class Conversations:
    """Calls on the conversations and responses of a tenant. Raise as those on contexts."""

    def __init__(self, parts: Parts, contexts: Contexts) -> None:
        self._manager, self._contexts = parts.manager, contexts
        self._reads = TenantsInHand(requests_max=_READS_MAX)

    async def create(self, tenant: TenantId, items: Any, terms: Terms, *, key: str) -> CacheSessionMetadata:
        """Create a conversation that belongs to no model before its first response. `key`: of the usage."""
        first, lease_id = await asyncio.to_thread(_pending, items), secrets.token_hex(16)
        reserved = await self._manager.reserve(
            NewSession(
                tenant=tenant,
                session_id=f"{PREFIX}{secrets.token_hex(16)}",
                model_id="",
                ttl_s=TTL_S if terms.ttl_s is None else terms.ttl_s,
                ttl_policy=terms.ttl_policy or TtlPolicy.SLIDING,
                metadata=terms.metadata or {},
            ),
            lease_id=lease_id,
            lease_ttl_ms=_LEASE_MS,
        )
        async with self._freeing(tenant, reserved.session_id, lease_id):
            return await self._commit(reserved, lease_id, 0, first, usage=Usage(key, {"contexts": 1}))

    async def read(self, tenant: TenantId, name: SessionId) -> CacheSessionMetadata:
        """Return a conversation."""
        check_id(name)
        return await self._manager.get_session_metadata(tenant, name)

    async def update(
        self, tenant: TenantId, name: SessionId, metadata: Mapping[str, str] | None
    ) -> CacheSessionMetadata:
        """Replace the metadata of a conversation; None: they stay."""
        check_id(name)
        return await self._manager.touch(tenant, name, Terms(metadata=metadata))

    async def items(self, tenant: TenantId, name: SessionId) -> list[Json]:
        """Return all items, oldest first. A sliding life starts again."""
        check_id(name)
        return await self.reading(tenant, name, partial(_plain_items, name=name))

    async def reading(self, tenant: TenantId, name: SessionId, view: Callable[[Segments], T]) -> T:
        """Return a view of a context's transcript, made in a thread. Raises TooManyInFlight."""
        with self._reads.request(tenant):
            _, segments = await self._manager.read_transcript(tenant, name)
            return await asyncio.to_thread(view, segments)

    async def item(self, tenant: TenantId, name: SessionId, item_id: str) -> Json:
        """Return an item. Raises ContextNotFound for an absent one, too."""
        item = next((one for one in await self.items(tenant, name) if one["id"] == item_id), None)
        if item is None:
            raise _no_item()
        return item

    async def add(self, tenant: TenantId, name: SessionId, items: Any) -> list[Json]:
        """Add items at the end, and return them. Raises ContextBusy while a response is made."""
        new = await asyncio.to_thread(_pending, items)

        def grown(segments: Segments) -> tuple[int, Segments]:
            unread = [segment for segment in (*segments, *new) if not segment.num_tokens]
            if sum(len(segment.messages_json) for segment in unread) > _UNREAD_CHARS_MAX:
                told = f"over {_UNREAD_CHARS_MAX >> 20} MiB of items would wait for a response: create one first"
                raise InvalidRequest(told, param="items")
            return len(segments), new

        await self._change(tenant, name, grown)
        return await asyncio.to_thread(_plain_items, new, name)

    async def remove(self, tenant: TenantId, name: SessionId, item_id: str) -> CacheSessionMetadata:
        """Delete an item. The next turn computes the items behind it again. Raises as `add`."""

        def removed(segments: Segments) -> tuple[int, Segments]:
            placed = items_of(segments, name=name)
            gone = next((one for one in placed if one.item["id"] == item_id), None)
            if gone is None:
                raise _no_item()
            return gone.segment, untokenised(segments, placed, gone.segment, gone=gone)

        return await self._change(tenant, name, removed)

    async def response(self, tenant: TenantId, response: str) -> Json:
        """Return a stored response. Its tools are not stored, and its usage for as long as its receipt is."""
        session, segments, items, generation = await self.stored_response(tenant, response)
        _, turns = await self._manager.get_with_turns(tenant, session.session_id)
        receipt = next((turn for turn in turns if turn.generation == generation), None)
        return await asyncio.to_thread(_response, response, session, segments, items, receipt)

    async def input_items(self, tenant: TenantId, response: str) -> list[Json]:
        """Return the items that a response was made from, oldest first: the conversation before its answer."""
        _, segments, items, _ = await self.stored_response(tenant, response)
        return [one.item for one in items if one.segment < len(segments) - 1]

    async def delete_response(self, tenant: TenantId, response: str) -> None:
        """Delete the last response; of a conversation its items stay, of another context its input goes, too.

        A context without anything left is deleted. Raises InvalidRequest for a response that later items follow.
        """
        session, last, placed, _ = await self.stored_response(tenant, response)
        name = session.session_id
        record = response_record(stored_messages(last[-1])[-1])
        items_stay = bool(record.get("in_conversation")) or name.startswith(PREFIX)

        def cut(segments: Segments) -> tuple[int, Segments]:
            if segments != last:
                told = "later items follow this response: delete those first, or the conversation"
                raise InvalidRequest(told, param="response_id")
            before = segments[:-1]
            answers = [at for at, segment in enumerate(before) if segment.kind is SegmentKind.ANSWER]
            keep = answers[-1] + 1 if answers else 0
            return keep, untokenised(segments, placed, keep) if items_stay else ()

        with _telling_no_response(response):
            left = await self._change(tenant, name, cut)
            if not left.num_tokens and not items_stay:
                await self._contexts.delete(tenant, name)

    async def stored_response(
        self, tenant: TenantId, response: str
    ) -> tuple[CacheSessionMetadata, Segments, list[PlacedItem], int]:
        """Return a response's context, its transcript up to the answer, the items of that, and its generation.

        Raises ContextNotFound, TooManyInFlight.
        """
        named = generation_named(response)
        if named is None:
            raise _no_response(response)
        name, generation = named
        with _telling_no_response(response), self._reads.request(tenant):
            try:
                session, segments = await self._manager.read_transcript(tenant, name, generation=generation)
            except ContextBusy as exc:  # its first turn has not ended
                raise _no_response(response) from exc
            if not segments or segments[-1].kind is not SegmentKind.ANSWER:
                raise _no_response(response)
            return session, segments, await asyncio.to_thread(items_of, segments, name=name), generation

    async def _change(
        self,
        tenant: TenantId,
        name: SessionId,
        change: Callable[[Segments], tuple[int, Segments]],
    ) -> CacheSessionMetadata:
        """Replace the segments behind those that stay. `change` returns how many do, and the new ones."""
        check_id(name)
        lease_id = secrets.token_hex(16)
        with self._reads.request(tenant):
            async with self._freeing(tenant, name, lease_id):
                session, segments = await self._manager.begin_turn(
                    tenant, name, lease_id=lease_id, lease_ttl_ms=_LEASE_MS
                )
                if session.mode is SessionMode.PREFIX:
                    raise InvalidRequest("a context of mode prefix does not change", param="conversation_id")
                keep, new = await asyncio.to_thread(change, segments)
                return await self._commit(session, lease_id, keep, new)

    @asynccontextmanager
    async def _freeing(self, tenant: TenantId, name: SessionId, lease_id: str) -> AsyncIterator[None]:
        """Give a lease back after a failure. A call without a reply may have taken it."""
        try:
            yield
        except BaseException:
            with suppress(ContextCacheError):
                await self._manager.abort_turn(tenant, name, lease_id=lease_id)
            raise

    async def _commit(
        self, session: CacheSessionMetadata, lease_id: str, keep: int, new: Segments, *, usage: Usage | None = None
    ) -> CacheSessionMetadata:
        """Commit, twice if no answer came. The named KV stays: of a longer conversation, it serves the beginning."""
        commit = TurnCommit(
            tenant=session.tenant,
            session_id=session.session_id,
            lease_id=lease_id,
            expected_generation=session.generation,
            keep_segments=keep,
            segments=new,
            cache_ref=session.cache_ref,
            holder=session.holder,
            usage=usage,
        )
        try:
            return await self._manager.commit_turn(commit)
        except StoreUnavailable:
            return await self._manager.commit_turn(commit)


def _no_item() -> ContextNotFound:
    return ContextNotFound("the conversation has no item with this id", param="item_id")


def _plain_items(segments: Segments, name: SessionId) -> list[Json]:
    return [one.item for one in items_of(segments, name=name)]


def _pending(items: Any) -> Segments:
    """Return items of a client's body as messages with new ids, which no turn has read. Raises InvalidRequest."""
    if not isinstance(items, list) or len(items) > _NEW_ITEMS_MAX:
        raise InvalidRequest(f"items must be a list of at most {_NEW_ITEMS_MAX} items", param="items")
    check_items_of_input(msgspec.json.encode(items), param="items")
    return pending_segment(with_new_ids(messages_of(items, param="items"), items))


def _response(
    response: str,
    session: CacheSessionMetadata,
    segments: Segments,
    items: Sequence[PlacedItem],
    receipt: TurnReceipt | None,
) -> Json:
    record = response_record(stored_messages(segments[-1])[-1])
    told = response_object(
        response,
        said={**record, "instructions": instructions_of(segments)},
        status=record.get("status", "completed"),
        created_at=record.get("created_at") or session.created_at_ms // 1000,
        model=session.model_id,
        output=[one.item for one in items if one.segment == len(segments) - 1],
        conversation=session.session_id if record.get("in_conversation") else None,
    )
    if receipt is not None:
        told["usage"] = usage_of_response(
            receipt.computed_tokens + receipt.cached_tokens,
            receipt.cached_tokens,
            receipt.completion_tokens,
            reasoning=record.get("reasoning_tokens", 0),
        )
    return told


@contextmanager
def _telling_no_response(response: str) -> Iterator[None]:
    """Raise the one error for an absent response, whatever is missing."""
    try:
        yield
    except (ContextNotFound, ContextExpired, GenerationGone) as exc:
        raise _no_response(response) from exc


def _no_response(response: str) -> ContextNotFound:
    shown = response if generation_named(response) else "…"
    return ContextNotFound(f"Response with id '{shown}' not found.", param="response_id")
