"""LMCache in the place of connector and kv-sidecar, for deployments that run it already (ADR 0064).

LMCache knows whole chunks of tokens (256 by default) under a salt, and no contexts. Each context has a salt of its own
in all its turns, so KV under a salt belongs to one context. The engine's LMCache connector saves and loads. This
module prefetches, pins and deletes.

Limits: less than a chunk is never saved, so each turn computes the tail of its context again. LMCache does not report
when a save is durable, or the tier of a load. Contexts share no KV; a fork computes its own. A delete is not verified,
and a turn in flight may save after it.

Rules: token ids of a salt are remembered until their KV is deleted, because LMCache deletes by tokens. LMCache counts
pins, so each is taken back once. A context that ends moves from the contexts to the deletions, and only a deletion that
succeeds, or its last attempt, ends it there.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, SidecarUnavailable
from contextcache.identity import KVTransfer, context_salt
from contextcache.model import CacheRef, CacheSessionMetadata, LoadedKV, SaveOutcome, SessionId, TenantId
from integrations.lmcache.api import Instance, LMCacheApi, SaltedTokens

log = logging.getLogger(__name__)

UNTOLD = "durability_unknown"
"""Reason in a create's answer: LMCache does not report durability."""
_TOKENS_HELD_MAX = 32 << 20
"""In one API server process, at 4 bytes each. A context that does not fit is deleted by the directory's list."""
_UNCOMMITTED_MAX = 4_096
_DELETIONS_MAX = 4_096
"""Deletions that wait for another attempt. The oldest is forgotten first, and LMCache's eviction ends its KV."""
_SEQUENCES_MAX = 8
"""Sequences of one context, one more at each resend that differs. The oldest is forgotten first."""
_ROUNDS = 3
_PAUSE_S = 0.1
"""Between rounds of a delete: a lock of LMCache's is held for one load or one write."""
_RETRY_MS = 60_000
"""Pause after the first attempt of a deletion. Each pause is twice the one before."""
_ATTEMPTS_MAX = 8
"""Attempts of the sweep for one deletion, over two hours and more. Clients may ask as often as they like."""
_SWEEP_S = 5.0
"""Time between two looks for expired contexts."""
_LOCKED = "LMCache did not delete all KV of a context: some of it is locked"

Context: TypeAlias = tuple[TenantId, SessionId]


@dataclass(slots=True, eq=False)
class _Held:
    """Tokens of one context that LMCache has."""

    context: Context
    expires_at_ms: int = 0
    sequences: list[array[int]] = field(default_factory=list)
    """Token ids, oldest first; none begins another."""
    pinned: array[int] | None = None
    is_committed: bool = False
    is_whole: bool = False
    """All sequences are here. Else LMCache may have more: of another process, or of one that was forgotten."""
    num_attempts: int = 0
    """Attempts of the sweep to delete it."""
    retry_at_ms: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    def add(self, token_ids: Sequence[int]) -> None:
        """Remember a sequence instead of those that it goes on from."""
        new = array("I", token_ids)
        others = [old for old in self.sequences if new[: len(old)] != old]
        if any(old[: len(new)] == new for old in others):
            return
        self.sequences = [*others, new]
        if len(self.sequences) > _SEQUENCES_MAX:
            del self.sequences[0]
            self.is_whole = False


class LMCacheKV:
    """See vllm_plugin.turn.ports.KVStore. One per API server process."""

    def __init__(self, api: LMCacheApi, *, secret: bytes, clock: Clock) -> None:
        """Take everything from outside; nothing is connected yet."""
        self._api = api
        self._secret = secret
        self._clock = clock
        self._held: OrderedDict[Context, _Held] = OrderedDict()
        self._deletions: list[_Held] = []
        """Contexts that have ended and may have KV, oldest first."""
        self._num_tokens = 0
        """Tokens of contexts and deletions."""
        self._uncommitted: OrderedDict[CacheRef, Context] = OrderedDict()
        """Contexts by the name that a turn saves under."""
        self._expiry: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to delete KV at its expiry. Without it, LMCache's own eviction does."""
        if self._expiry is None:
            self._expiry = asyncio.create_task(self._expire_forever())

    def order(
        self, session: CacheSessionMetadata, order: KVTransfer, token_ids: Sequence[int]
    ) -> tuple[dict[str, Any], str]:
        """See KVStore. The keys are both connectors' for one thing: LMCache's own, and the one of vLLM 0.32."""
        self._hold(session, token_ids)
        if order.save is not None:
            self._uncommitted[order.save] = _context(session)
            if len(self._uncommitted) > _UNCOMMITTED_MAX:
                self._uncommitted.popitem(last=False)
        return {"cached_token_stats": True, "num_lmcache_extra_cached_tokens": True}, self._salt(_context(session))

    def expect_load(self, request_id: str) -> None:
        """See KVStore. The engine's answer alone tells of a load."""

    async def loaded(self, request_id: str, told: Mapping[str, Any], *, is_whole: bool) -> LoadedKV | None:  # noqa: ARG002  # the port's
        """See KVStore. The tier is `host`: a load ends in LMCache's memory."""
        stats = told.get("cached_token_stats")
        if isinstance(stats, Mapping):
            device, loaded = stats.get("num_vllm_cached_tokens"), stats.get("num_lmcache_extra_cached_tokens")
        else:
            device, loaded = 0, told.get("num_lmcache_extra_cached_tokens")
        if type(device) is not int or type(loaded) is not int:
            return None
        return LoadedKV(False, device, loaded, "host" if loaded else "", restore_ms=None)

    async def forget_load(self, request_id: str) -> None:
        """See KVStore."""

    async def read_ahead(self, session: CacheSessionMetadata, token_ids: Sequence[int]) -> None:
        """See KVStore."""
        await self._api.prefetch(SaltedTokens(self._salt(_context(session)), token_ids))

    async def committed(
        self, before: CacheSessionMetadata, after: CacheSessionMetadata, ids: Sequence[Sequence[int]]
    ) -> None:
        """See KVStore. The new pin is there before the old one goes."""
        self._uncommitted.pop(after.cache_ref, None)
        now = array("I", chain.from_iterable(ids))
        held, salt = self._hold(after, now), self._salt(_context(before))
        held.is_committed = True
        old = held.pinned
        await self._api.pin(SaltedTokens(salt, now))
        if self._held.get(held.context) is not held:  # deleted meanwhile
            await self._api.unpin(SaltedTokens(salt, now))
            return
        held.pinned = now
        if old is not None:
            await self._api.unpin(SaltedTokens(salt, old))

    async def wait_sealed(self, *_asked: object, **_more: object) -> SaveOutcome:
        """See KVStore. Return at once: LMCache does not say when a save is durable."""
        return SaveOutcome(is_sealed=False, reason=UNTOLD)

    async def interrupt(self, tenant: TenantId, save: CacheRef) -> None:
        """See KVStore. Delete it: LMCache would keep it until the context expires."""
        await self.drop(tenant, save)

    async def drop(self, tenant: TenantId, save: CacheRef) -> None:
        """See KVStore."""
        await self.delete_context(tenant, cache_refs=(save,))

    async def touch_context(self, tenant: TenantId, session_id: SessionId, expires_at_ms: int) -> int:
        """Keep a context's pins until then; return 0 for a context that this process does not know, else 1."""
        held = self._held.get((tenant, session_id))
        if held is None:
            return 0
        held.expires_at_ms = expires_at_ms
        return 1

    async def delete_context(
        self, tenant: TenantId, *, session_id: SessionId = "", cache_refs: tuple[CacheRef, ...] = ()
    ) -> int:
        """Take a context's pins back and delete it in all tiers of all servers; return the bytes that it had there.

        Refs name generations, whose chunks are the context's: they are deleted with it, unless it was never committed.
        Raises SidecarUnavailable when a part is still there. The sweep then tries again, also for a caller that was
        cancelled.
        """
        ended = [(tenant, session_id)] if session_id else []
        for ref in cache_refs:
            held = self._held.get(self._uncommitted.pop(ref, ("", "")))
            if held is not None and not held.is_committed and held.context[0] == tenant:
                ended.append(held.context)
        freed_bytes = 0
        for context in dict.fromkeys(ended):
            self._end(context)
            for gone in [gone for gone in self._deletions if gone.context == context]:
                freed_bytes += await self._delete(gone)
        return freed_bytes

    async def expire(self) -> None:
        """End expired contexts, and make the attempts of deletions that are due."""
        now_ms = self._clock.now_ms()
        for context in [context for context, held in self._held.items() if held.expires_at_ms <= now_ms]:
            self._end(context)
        for gone in [gone for gone in self._deletions if gone.retry_at_ms <= now_ms]:
            if gone not in self._deletions or gone.retry_at_ms > now_ms:
                continue  # a DELETE came while others were deleted
            about = {"session_id": gone.context[1]}
            if gone.num_attempts >= _ATTEMPTS_MAX:
                log.error("KV of an ended context stays in LMCache", extra=about)
                self._forget(gone)
                continue
            gone.num_attempts += 1
            try:
                await self._delete(gone)
            except ContextCacheError as exc:
                log.warning("KV of an ended context not deleted", extra={**about, "reason": exc.code})

    async def close(self) -> None:
        """End the connections; pins stay, because other pods may serve the context."""
        task, self._expiry = self._expiry, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._api.close()

    def _end(self, context: Context) -> None:
        """Move a context to the deletions. One that is not known here may have KV of another process."""
        held = self._held.pop(context, None)
        if held is not None or all(gone.context != context for gone in self._deletions):
            self._deletions.append(held or _Held(context))
            self._bound()

    async def _delete(self, gone: _Held) -> int:
        """Make one attempt; return the bytes that were there. The next one is due later, however this one ends."""
        gone.retry_at_ms = self._clock.now_ms() + (_RETRY_MS << gone.num_attempts)
        salt, instances = self._salt(gone.context), await self._api.instances()
        # The directory lists keys of an earlier process, and of sequences that were forgotten.
        listed = [] if gone.is_whole else await self._api.keys_under(salt)
        freed_bytes = sum(key.size_bytes for key in listed)
        if not instances and (listed or gone.sequences):
            raise SidecarUnavailable("LMCache's coordinator lists no server")
        for number, token_ids in enumerate(list(gone.sequences)):
            kv = SaltedTokens(salt, token_ids)
            # Later sequences may share the beginning of the first: bytes are counted once.
            freed_bytes += await self._api.size_bytes(kv) if gone.is_whole and not number else 0
            if gone.pinned is not None:
                await self._api.unpin(SaltedTokens(salt, gone.pinned))
                gone.pinned = None
            await self._remove(kv, instances)
        skipped = await asyncio.gather(*(self._api.delete_keys(instance, listed) for instance in instances if listed))
        if any(skipped):
            raise SidecarUnavailable(_LOCKED)
        self._forget(gone)
        return freed_bytes

    async def _remove(self, kv: SaltedTokens, instances: Sequence[Instance]) -> None:
        """Delete at all servers, again while something is locked. Raises SidecarUnavailable when it still is."""
        for left in reversed(range(_ROUNDS)):
            skipped = await asyncio.gather(*(self._api.delete(instance, kv) for instance in instances))
            if not any(skipped):
                return
            if left:
                # A pin of a process that is gone counts too: one goes with each round.
                await self._api.unpin(kv)
                await asyncio.sleep(_PAUSE_S)
        raise SidecarUnavailable(_LOCKED)

    def _hold(self, session: CacheSessionMetadata, token_ids: Sequence[int]) -> _Held:
        context, is_new = _context(session), session.generation == 0
        held = self._held.setdefault(context, _Held(context, is_committed=not is_new, is_whole=is_new))
        self._held.move_to_end(context)
        before = held.num_tokens
        held.add(token_ids)
        held.expires_at_ms = session.expires_at_ms
        self._num_tokens += held.num_tokens - before
        self._bound()
        return held

    def _bound(self) -> None:
        """Forget the oldest deletions, then the oldest contexts, that do not fit."""
        while len(self._deletions) > _DELETIONS_MAX or (self._num_tokens > _TOKENS_HELD_MAX and self._deletions):
            self._forget(self._deletions[0])
        while self._num_tokens > _TOKENS_HELD_MAX and len(self._held) > 1:
            self._num_tokens -= self._held.popitem(last=False)[1].num_tokens

    def _forget(self, gone: _Held) -> None:
        if gone in self._deletions:
            self._deletions.remove(gone)
            self._num_tokens -= gone.num_tokens

    def _salt(self, context: Context) -> str:
        return context_salt(*context, self._secret)

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                await self.expire()
            except Exception:
                log.exception("sweep of expired KV failed")


def _context(session: CacheSessionMetadata) -> Context:
    return session.tenant, session.session_id
