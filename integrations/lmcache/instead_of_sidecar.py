"""LMCache in the place of connector and kv-sidecar, for deployments that run it already (ADR 0064).

LMCache knows whole chunks of tokens (256 by default) under a salt, and no contexts. Each context has a salt of its own
in all its turns, so KV under a salt belongs to one context. The engine's LMCache connector saves and loads. This
module prefetches, pins and deletes.

Limits: less than a chunk is never saved, so each turn computes the tail of its context again. LMCache does not report
when a save is durable, or the tier of a load. Contexts share no KV; a fork computes its own. A delete is not verified,
and a turn in flight may save after it.

Rules: token ids of a salt are remembered until their context ends, because LMCache deletes by tokens. LMCache counts
pins, so each is taken back once.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

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
_SEQUENCES_MAX = 8
"""Sequences of one context, one more at each resend that differs. The oldest is forgotten first."""
_ROUNDS = 3
_PAUSE_S = 0.1
"""Between rounds of a delete: a lock of LMCache's is held for one load or one write."""
_RETRY_MS = 60_000
_SWEEP_S = 5.0
"""Time between two looks for expired contexts."""


@dataclass(slots=True)
class _Held:
    """Tokens of one context that LMCache has."""

    tenant: TenantId
    expires_at_ms: int
    sequences: list[array[int]] = field(default_factory=list)
    """Token ids, oldest first; none begins another."""
    pinned: array[int] | None = None
    is_committed: bool = False
    is_whole: bool = False
    """All sequences are here. Else LMCache may have more: of another process, or of one that was forgotten."""

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
        self._held: OrderedDict[SessionId, _Held] = OrderedDict()
        self._num_tokens = 0
        self._uncommitted: OrderedDict[CacheRef, SessionId] = OrderedDict()
        """Sessions by the name that a turn saves under."""
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
            self._uncommitted[order.save] = session.session_id
            if len(self._uncommitted) > _UNCOMMITTED_MAX:
                self._uncommitted.popitem(last=False)
        return {"cached_token_stats": True, "num_lmcache_extra_cached_tokens": True}, self._salt(session)

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
        await self._api.prefetch(SaltedTokens(self._salt(session), token_ids))

    async def committed(
        self, before: CacheSessionMetadata, after: CacheSessionMetadata, ids: Sequence[Sequence[int]]
    ) -> None:
        """See KVStore. The new pin is there before the old one goes."""
        self._uncommitted.pop(after.cache_ref, None)
        now = array("I", chain.from_iterable(ids))
        held, salt = self._hold(after, now), self._salt(before)
        held.is_committed = True
        old = held.pinned
        await self._api.pin(SaltedTokens(salt, now))
        if self._held.get(after.session_id) is not held:  # deleted meanwhile
            await self._api.unpin(SaltedTokens(salt, now))
            return
        held.pinned = now
        if old is not None:
            await self._api.unpin(SaltedTokens(salt, old))

    async def wait_sealed(self, tenant: TenantId, cache_ref: CacheRef, *, timeout_ms: int) -> SaveOutcome:  # noqa: ARG002  # the port's
        """See KVStore. Return at once: LMCache does not say when a save is durable."""
        return SaveOutcome(is_sealed=False, reason=UNTOLD)

    async def drop(self, tenant: TenantId, save: CacheRef) -> None:
        """See KVStore."""
        await self.delete_context(tenant, cache_refs=(save,))

    async def touch_context(self, tenant: TenantId, session_id: SessionId, expires_at_ms: int) -> int:
        """Keep a context's pins until then; return 0 for a context that this process does not know, else 1."""
        held = self._of(tenant, session_id)
        if held is None:
            return 0
        held.expires_at_ms = expires_at_ms
        return 1

    async def delete_context(
        self, tenant: TenantId, *, session_id: SessionId = "", cache_refs: tuple[CacheRef, ...] = ()
    ) -> int:
        """Take a context's pins back and delete it in all tiers of all servers; return the bytes that it had there.

        Refs name generations, whose chunks are the context's: they are deleted with it, unless it was never committed.
        Raises SidecarUnavailable when a part is still there. Of a context that this process knows, it is tried again
        later, also when the caller was cancelled.
        """
        freed_bytes = 0
        for ref in cache_refs:
            made = self._uncommitted.pop(ref, "")
            held = self._held.get(made)
            if held is not None and not held.is_committed:
                freed_bytes += await self._delete(tenant, made)
        return freed_bytes + (await self._delete(tenant, session_id) if session_id else 0)

    async def expire(self) -> None:
        """Delete expired contexts."""
        now_ms = self._clock.now_ms()
        for session_id, held in [(key, held) for key, held in self._held.items() if held.expires_at_ms <= now_ms]:
            if held.expires_at_ms > self._clock.now_ms() or self._held.get(session_id) is not held:
                continue  # while others were deleted, a turn came, or a DELETE
            try:
                await self._delete(held.tenant, session_id)
            except ContextCacheError as exc:
                log.warning("expired KV not deleted", extra={"session_id": session_id, "reason": exc.code})

    async def close(self) -> None:
        """End the connections; pins stay, because other pods may serve the context."""
        task, self._expiry = self._expiry, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._api.close()

    async def _delete(self, tenant: TenantId, session_id: SessionId) -> int:
        salt, held = context_salt(tenant, session_id, self._secret), self._of(tenant, session_id)
        if held is None:
            return await self._delete_listed(salt, await self._api.instances())
        freed_bytes = 0
        try:
            instances = await self._api.instances()
            for number, token_ids in enumerate(list(held.sequences)):
                kv = SaltedTokens(salt, token_ids)
                # Later sequences may share the beginning of the first: bytes are counted once.
                freed_bytes += 0 if number else await self._api.size_bytes(kv)
                if held.pinned is not None:
                    await self._api.unpin(SaltedTokens(salt, held.pinned))
                    held.pinned = None
                await self._remove(kv, instances)
            if not held.is_whole:
                await self._delete_listed(salt, instances)
        except (ContextCacheError, asyncio.CancelledError):
            # The sweep finishes what the caller no longer waits for.
            held.expires_at_ms = self._clock.now_ms() + _RETRY_MS
            raise
        if self._held.get(session_id) is held:  # else another call has deleted it, and a turn may have added it anew
            self._forget(session_id)
        return freed_bytes

    async def _remove(self, kv: SaltedTokens, instances: Sequence[Instance]) -> None:
        """Delete at all servers, again while something is locked. Raises SidecarUnavailable when it still is."""
        if not instances:
            raise SidecarUnavailable("LMCache's coordinator lists no server")
        for left in reversed(range(_ROUNDS)):
            skipped = await asyncio.gather(*(self._api.delete(instance, kv) for instance in instances))
            if not any(skipped):
                return
            if left:
                # A pin of a process that is gone counts too: one goes with each round.
                await self._api.unpin(kv)
                await asyncio.sleep(_PAUSE_S)
        raise SidecarUnavailable("LMCache did not delete all KV of a context: some of it is locked")

    async def _delete_listed(self, salt: str, instances: Sequence[Instance]) -> int:
        """Delete the keys that the directory lists under a salt, when its tokens are of an earlier process."""
        keys = await self._api.keys_under(salt)
        skipped = await asyncio.gather(*(self._api.delete_keys(instance, keys) for instance in instances if keys))
        if any(skipped):
            raise SidecarUnavailable("LMCache did not delete all KV of a context: some of it is locked")
        return 0

    def _hold(self, session: CacheSessionMetadata, token_ids: Sequence[int]) -> _Held:
        is_new = session.generation == 0
        new = _Held(session.tenant, session.expires_at_ms, is_committed=not is_new, is_whole=is_new)
        held = self._held.setdefault(session.session_id, new)
        self._held.move_to_end(session.session_id)
        before = held.num_tokens
        held.add(token_ids)
        held.expires_at_ms = session.expires_at_ms
        self._num_tokens += held.num_tokens - before
        while self._num_tokens > _TOKENS_HELD_MAX and len(self._held) > 1:
            self._forget(next(iter(self._held)))
        return held

    def _salt(self, session: CacheSessionMetadata) -> str:
        return context_salt(session.tenant, session.session_id, self._secret)

    def _of(self, tenant: TenantId, session_id: SessionId) -> _Held | None:
        held = self._held.get(session_id)
        return held if held is not None and held.tenant == tenant else None

    def _forget(self, session_id: SessionId) -> None:
        self._num_tokens -= self._held.pop(session_id).num_tokens

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                await self.expire()
            except Exception:
                log.exception("sweep of expired KV failed")
