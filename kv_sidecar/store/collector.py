"""What leaves the shared store by itself: expired KV, KV that no session names, and what a crash has left there.

One pod of all does it, once an interval: who finds the collector's object old enough writes it anew and begins. Two
that find it at the same moment both do, which is harmless.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from pydantic import TypeAdapter

from contextcache.errors import ContextCacheError, CorruptBlock, KeyNotAtHand
from contextcache.model import MAX_TTL_S, CacheRef, HeldCacheRef, SessionId, TenantId
from contextcache.names import CACHE_REF_PATTERN, KEPT_PREFIX, prompt_ref
from kv_sidecar.orphans import QUESTION_REFS
from kv_sidecar.runtime import Runtime
from kv_sidecar.store import hot_lists
from kv_sidecar.store.eviction import Shelf, StoredSession, leaving
from kv_sidecar.store.objects import ObjectStore, StoredObject
from kv_sidecar.store.stored_kv import each, manifest_name, ref_of
from kv_sidecar.store.writer import SharedTier

COLLECTOR = "collector"
"""The object whose age says when somebody last collected; it holds the bytes that were left, by tenant."""
_COUNTS, _COUNTS_BYTES_MAX = TypeAdapter(dict[str, int]), 16 << 20
_NEVER = 1 << 62
_UNREAD = -1
"""When no manifest was written: it is read again in the next pass."""
_Live: TypeAlias = tuple[SessionId, CacheRef]
Orphans: TypeAlias = Callable[[Sequence[HeldCacheRef]], Awaitable[Sequence[int]]]
"""Return the positions of those that no session names. Raises ContextCacheError where nobody says."""


@dataclass(frozen=True, slots=True)
class CollectorLimits:
    """When a pass is made, and what it leaves."""

    limit_bytes: int
    """Bytes of blocks in the store; the least recently used contexts are evicted first. 0: no limit."""
    tenant_limit_bytes: int
    """The same for each tenant."""
    grace_s: float = 3600
    """Age from which an unreferenced object is removed. Longer than the write of any context."""
    interval_s: float = 900
    """Time between two passes, over all pods together. A pass lists every object."""


class SharedCollector:
    """Used from one event loop."""

    def __init__(
        self,
        shared: SharedTier,
        objects: ObjectStore,
        runtime: Runtime,
        *,
        limits: CollectorLimits,
    ) -> None:
        self._shared = shared
        self._objects = objects
        self._limits = limits
        self._clock = runtime.clock
        self._metrics = runtime.metrics
        self._seen: dict[str, tuple[int, SessionId, int]] = {}
        """Of manifests, by name: when it was written, whose it is, when it expires."""
        self._heard_at_ms = 0
        """When the pass was made whose bytes are shown."""
        self.bytes_by_tenant: Mapping[TenantId, int] = {}
        """Of blocks in the store, as the last pass of any pod left them."""
        self._held_kib_s: Counter[TenantId] = Counter()

    async def collect(self, orphans: Orphans | None) -> int:
        """Remove what has expired, what no session names, what no manifest names, and what there is no room for.

        One pod of all does it, once an interval. Return how many manifests were not named. Raises SidecarUnavailable.
        """
        now_ms = self._clock.now_ms()
        last = await self._objects.head(COLLECTOR)
        if last is not None and now_ms - last.modified_at_ms < self._limits.interval_s * 1000:
            await self._hear(last)
            return 0
        if last is not None:
            await self._hear(last)
            self._count_held(now_ms - last.modified_at_ms)
        # As it was, so that who asks meanwhile learns that somebody collects.
        await self._objects.put(COLLECTOR, json.dumps(dict(self.bytes_by_tenant)).encode())
        removed, shelves = 0, {}
        for tenant in await self._objects.directories():
            if tenant == hot_lists.DIRECTORY:
                await self._remove_old_lists()
                continue
            num_doomed, shelves[tenant] = await self._collect(tenant, orphans)
            removed += num_doomed
        for it in leaving(
            shelves, limit_bytes=self._limits.limit_bytes, tenant_limit_bytes=self._limits.tenant_limit_bytes
        ):
            if await self._shared.evict(it.tenant, it.session_id, it.session):
                self._metrics.store_evicted.inc()
        self.bytes_by_tenant = {tenant: shelf.size_bytes for tenant, shelf in shelves.items() if shelf.size_bytes}
        await self._objects.put(COLLECTOR, json.dumps(self.bytes_by_tenant).encode())
        return removed

    def take_held(self) -> Mapping[TenantId, int]:
        """Return the KiB times seconds that tenants held in the store between this pod's passes and those before."""
        held, self._held_kib_s = self._held_kib_s, Counter()
        return held

    def _count_held(self, since_ms: int) -> None:
        # Nobody collected for longer: then nobody knows what was there.
        seconds = min(max(since_ms, 0) // 1000, 2 * self._limits.interval_s)
        for tenant, size_bytes in self.bytes_by_tenant.items():
            self._held_kib_s[tenant] += int(size_bytes // 1024 * seconds)

    async def _remove_old_lists(self) -> None:
        """Remove lists of hot contexts that nobody has taken over, and what a crash has left beside them."""
        before_ms = self._clock.now_ms() - self._limits.grace_s * 1000
        found = [it async for it in self._objects.listed(f"{hot_lists.DIRECTORY}/")]
        old = [it.name for it in found if it.modified_at_ms < before_ms]
        await each(old, self._objects.delete)

    async def _hear(self, last: StoredObject) -> None:
        """Read what the pod that collected last has counted."""
        if last.modified_at_ms == self._heard_at_ms:
            return
        self._heard_at_ms = last.modified_at_ms
        with suppress(CorruptBlock, ValueError):
            data = await self._objects.get(COLLECTOR, limit_bytes=_COUNTS_BYTES_MAX)
            self.bytes_by_tenant = {} if data is None else _COUNTS.validate_json(bytes(data))

    async def _collect(self, tenant: TenantId, orphans: Orphans | None) -> tuple[int, Shelf]:
        # In this order: what is written meanwhile is named by what is listed later.
        before_ms = self._clock.now_ms() - self._limits.grace_s * 1000
        listing = _Listing(
            tenant,
            blocks={ref_of(it.name): it async for it in self._objects.listed(f"{tenant}/blocks/")},
            holders=[it async for it in self._objects.listed(f"{tenant}/holders/")],
            sessions=[it async for it in self._objects.listed(f"{tenant}/sessions/")],
            manifests={it.name: it async for it in self._objects.listed(f"{tenant}/manifests/")},
        )
        owner_of = {ref_of(it.name): _second(it) for it in listing.sessions}
        for stored in listing.manifests.values():
            await self._see(stored, owner_of.get(ref_of(stored.name), ""))
        doomed = await self._overdue(listing, before_ms, orphans)
        for name, session_id in doomed.items():
            await self._shared.delete(tenant, session_id, [ref_of(name)], is_whole=False)
            self._seen.pop(name, None)
        self._seen = {
            name: seen
            for name, seen in self._seen.items()
            if name in listing.manifests or not name.startswith(f"{tenant}/")
        }
        live = {(seen[1], ref_of(name)) for name, seen in self._seen.items() if name in listing.manifests}
        # In a thread, as a large tenant has millions of objects.
        unnamed, unheld = await asyncio.to_thread(listing.leftovers, live, before_ms)
        shelf = await asyncio.to_thread(listing.shelf, live, set(doomed.values()), before_ms)
        await each(unnamed, self._objects.delete)
        await each(unheld, lambda name: self._shared.removals.delete_unheld(tenant, name))
        return len(doomed), shelf

    async def _see(self, stored: StoredObject, owner: SessionId) -> None:
        """Read a manifest of the store, unless it was since it was written; one that is none goes.

        One that does not open stays until the manager says that no session, and not `owner`, names it; of what is kept
        nobody does, and it stays as long as anything may live.
        """
        known = self._seen.get(stored.name)
        if known is not None and known[0] == stored.modified_at_ms:
            return
        try:
            found = await self._shared.stored.read(stored.name)
        except KeyNotAtHand:
            ends_at_ms = stored.modified_at_ms + MAX_TTL_S * 1000 if owner.startswith(KEPT_PREFIX) else _NEVER
            self._seen[stored.name] = (_UNREAD, owner, ends_at_ms)
            return
        except CorruptBlock:
            await self._objects.delete(stored.name)
            found = None
        if found is None:
            self._seen.pop(stored.name, None)
        else:
            self._seen[stored.name] = (stored.modified_at_ms, found.session_id, found.expires_at_ms)

    async def _overdue(self, listing: _Listing, before_ms: float, orphans: Orphans | None) -> dict[str, SessionId]:
        """Return the names of manifests that have expired, or that no session names, and whose they are.

        What was saved at the end of a context's prompt has no name of its own in a session: one name keeps both.
        """
        now_ms = self._clock.now_ms()
        doomed: dict[str, SessionId] = {}
        asked: list[HeldCacheRef] = []
        for stored in listing.manifests.values():
            if stored.name in self._seen:
                _, owner, expires_at_ms = self._seen[stored.name]
                if expires_at_ms <= now_ms:
                    doomed[stored.name] = owner
                elif owner and not owner.startswith(KEPT_PREFIX) and stored.modified_at_ms < before_ms:
                    asked.append(HeldCacheRef(listing.tenant, owner, ref_of(stored.name)))
        if orphans is not None:
            unnamed = await _unnamed([it for it in asked if CACHE_REF_PATTERN.fullmatch(it.cache_ref)], orphans)
            found = {manifest_name(listing.tenant, it.cache_ref) for it in unnamed}
            kept = listing.manifests.keys() - doomed.keys() - found
            for it in unnamed:
                if manifest_name(listing.tenant, prompt_ref(it.cache_ref)) not in kept:
                    doomed[manifest_name(listing.tenant, it.cache_ref)] = it.session_id
        return doomed


async def _unnamed(asked: Sequence[HeldCacheRef], orphans: Orphans) -> list[HeldCacheRef]:
    """Return those that no session names, as far as the manager says so."""
    found: list[HeldCacheRef] = []
    for start in range(0, len(asked), QUESTION_REFS):
        part = asked[start : start + QUESTION_REFS]
        with suppress(ContextCacheError):
            found += [part[position] for position in await orphans(part) if 0 <= position < len(part)]
    return found


@dataclass(frozen=True, slots=True)
class _Listing:
    """What a tenant has in the store."""

    tenant: TenantId
    blocks: Mapping[str, StoredObject]
    """By file name."""
    holders: Sequence[StoredObject]
    sessions: Sequence[StoredObject]
    manifests: Mapping[str, StoredObject]
    """By name."""

    def leftovers(self, live: Set[_Live], before_ms: float) -> tuple[list[str], list[str]]:
        """Return the old objects that no live manifest needs, and the file names of old blocks that nothing holds."""
        left = {
            it.name
            for it in self.sessions
            if it.modified_at_ms < before_ms and (_second(it), ref_of(it.name)) not in live
        }
        owners = {_second(it) for it in self.sessions if it.name not in left}
        stale = {it.name for it in self.holders if it.modified_at_ms < before_ms and ref_of(it.name) not in owners}
        held = {_second(it) for it in self.holders if it.name not in stale}
        unheld = [name for name, it in self.blocks.items() if name not in held and it.modified_at_ms < before_ms]
        return [*left, *stale], unheld

    def shelf(self, live: Set[_Live], gone: Set[SessionId], before_ms: float) -> Shelf:
        """Return what stays and could leave; `gone`: sessions of which KV has just been removed."""
        shelf: dict[SessionId, StoredSession] = defaultdict(StoredSession)
        for it in self.sessions:
            if (named := (_second(it), ref_of(it.name))) in live:
                session = shelf[named[0]]
                session.cache_refs.add(named[1])
                manifest = self.manifests[manifest_name(self.tenant, named[1])]
                session.used_at_ms = max(session.used_at_ms, it.modified_at_ms, manifest.modified_at_ms)
        for it in self.holders:
            if ref_of(it.name) in shelf:
                shelf[ref_of(it.name)].files.add(_second(it))
        kept = {name for session in shelf.values() for name in session.files}
        freed = {_second(it) for it in self.holders if ref_of(it.name) in gone}
        # Of the rest what is young is being written.
        sizes = {
            name: it.size_bytes
            for name, it in self.blocks.items()
            if name in kept or not (it.modified_at_ms < before_ms or name in freed)
        }
        return Shelf(sizes, shelf)


def _second(stored: StoredObject) -> str:
    """Return the part of a name after its kind: whose it is, or the block's file name."""
    return stored.name.split("/")[2]
