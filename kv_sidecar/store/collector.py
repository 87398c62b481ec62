"""The collector of the shared store: removes expired and unnamed KV and leftovers of a crash, and evicts.

One pod makes each pass: a pod that finds the collector's object old enough writes it anew and begins. Two that find
it at the same moment both collect, which is harmless.

A full store evicts whole sessions, least recently used first: generations share blocks, so one alone frees little.
Kept conversations are evicted before contexts. An evicted session can be written again, and no save is refused.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from pydantic import TypeAdapter

from contextcache.errors import ContextCacheError, CorruptBlock, KeyNotAtHand
from contextcache.model import MAX_TTL_S, CacheRef, HeldCacheRef, SessionId, TenantId
from contextcache.names import CACHE_REF_PATTERN, KEPT_PREFIX, prompt_ref
from kv_sidecar.limits import Limits
from kv_sidecar.orphans import QUESTION_REFS
from kv_sidecar.runtime import Runtime
from kv_sidecar.store.objects import ListedObject, ObjectStore, each
from kv_sidecar.store.stored_kv import StoredSession, manifest_name, ref_of
from kv_sidecar.store.writer import SharedTier

_LISTS = ".hot"
"""Directory of lists that pods of release 0.1.0 write for the start of others: hints, which no pod reads any more."""
COLLECTOR = ".collector"
"""Object whose age is the time since the last pass. It holds the bytes that the pass left, by tenant."""
UPPER_MARK, LOWER_MARK = 0.95, 0.9
"""Shares of a limit: eviction begins above the first and ends at the second."""
_COUNTS, _COUNTS_BYTES_MAX = TypeAdapter(dict[str, int]), 16 << 20
_NEVER = 1 << 62
_UNREAD = -1
"""Time that no manifest was written at: it is read again in the next pass."""
_Live: TypeAlias = tuple[SessionId, CacheRef]
_Evicted: TypeAlias = tuple[TenantId, SessionId, StoredSession]
Orphans: TypeAlias = Callable[[Sequence[HeldCacheRef]], Awaitable[Sequence[int]]]
"""Returns the positions that no session names. Raises ContextCacheError without an answer."""


class _Seen(NamedTuple):
    """A manifest of the store, as it was read."""

    written_at_ms: int
    session_id: SessionId
    expires_at_ms: int


@dataclass(slots=True)
class SharedCollector:
    """Used from one event loop."""

    shared: SharedTier
    runtime: Runtime
    limits: Limits
    bytes_by_tenant: Mapping[TenantId, int] = field(default_factory=dict)
    """Bytes of blocks in the store, as the last pass of any pod left them."""
    _seen: dict[str, _Seen] = field(default_factory=dict)
    """Manifests by name."""
    _heard_at_ms: int = 0
    """Time of the pass whose bytes are shown."""
    _held_kib_s: Counter[TenantId] = field(default_factory=Counter)

    @property
    def objects(self) -> ObjectStore:
        """Objects of the shared store."""
        return self.shared.stored.objects

    async def collect(self, orphans: Orphans | None) -> int:
        """Make a pass, if it is time: remove expired, unnamed and unreferenced objects, then evict.

        Returns the number of removed manifests. Raises SidecarUnavailable.
        """
        now_ms = self.runtime.clock.now_ms()
        last = await self.objects.head(COLLECTOR)
        if last is not None:
            await self._hear(last)
            if now_ms - last.modified_at_ms < self.limits.store_interval_s * 1000:
                return 0
            self._count_held(now_ms - last.modified_at_ms)
        # Writes the former bytes: other pods see that a pass is in progress.
        await self.objects.put(COLLECTOR, json.dumps(dict(self.bytes_by_tenant)).encode())
        removed, shelves = 0, {}
        for tenant in await self.objects.directories():
            if tenant == _LISTS:
                await each([it.name async for it in self.objects.listed(f"{_LISTS}/")], self.objects.delete)
                continue
            num_doomed, shelves[tenant] = await self._collect(tenant, orphans)
            removed += num_doomed
        self._seen = {name: seen for name, seen in self._seen.items() if name.partition("/")[0] in shelves}
        for evicted in evictions(shelves, self.limits):
            if await self.shared.evict(*evicted):
                self.runtime.metrics.store_evicted.inc()
        self.bytes_by_tenant = {tenant: shelf.size_bytes for tenant, shelf in shelves.items() if shelf.size_bytes}
        await self.objects.put(COLLECTOR, json.dumps(self.bytes_by_tenant).encode())
        return removed

    def take_held(self) -> Mapping[TenantId, int]:
        """Return the KiB times seconds that tenants held in the store before this pod's passes, and begin anew."""
        held, self._held_kib_s = self._held_kib_s, Counter()
        return held

    def _count_held(self, since_ms: int) -> None:
        # After a longer pause the bytes in between are unknown.
        seconds = min(max(since_ms, 0) // 1000, 2 * self.limits.store_interval_s)
        for tenant, size_bytes in self.bytes_by_tenant.items():
            self._held_kib_s[tenant] += int(size_bytes // 1024 * seconds)

    async def _hear(self, last: ListedObject) -> None:
        """Read the bytes that the last pass counted."""
        if last.modified_at_ms == self._heard_at_ms:
            return
        self._heard_at_ms = last.modified_at_ms
        with suppress(CorruptBlock, ValueError):
            data = await self.objects.get(COLLECTOR, limit_bytes=_COUNTS_BYTES_MAX)
            self.bytes_by_tenant = {} if data is None else _COUNTS.validate_json(bytes(data))

    async def _collect(self, tenant: TenantId, orphans: Orphans | None) -> tuple[int, Shelf]:
        # In this order: a later list names whatever is written meanwhile.
        before_ms = self.runtime.clock.now_ms() - self.limits.store_grace_s * 1000
        listing = _Listing(
            tenant,
            blocks={ref_of(it.name): it async for it in self.objects.listed(f"{tenant}/blocks/")},
            holders=[it async for it in self.objects.listed(f"{tenant}/holders/")],
            sessions=[it async for it in self.objects.listed(f"{tenant}/sessions/")],
            manifests={it.name: it async for it in self.objects.listed(f"{tenant}/manifests/")},
        )
        owner_of = {ref_of(it.name): _second(it) for it in listing.sessions}
        for stored in listing.manifests.values():
            await self._see(tenant, stored, owner_of.get(ref_of(stored.name), ""))
        doomed = await self._overdue(listing, before_ms, orphans)
        for name, session_id in doomed.items():
            await self.shared.end_delete(self.shared.begin_delete(tenant, session_id, [ref_of(name)], is_whole=False))
            self._seen.pop(name, None)
        self._seen = {
            name: seen
            for name, seen in self._seen.items()
            if name in listing.manifests or not name.startswith(f"{tenant}/")
        }
        live = {(seen.session_id, ref_of(name)) for name, seen in self._seen.items() if name in listing.manifests}
        # In a thread, as a large tenant has millions of objects.
        unnamed, unheld = await asyncio.to_thread(listing.leftovers, live, before_ms)
        shelf = await asyncio.to_thread(listing.shelf, live, set(doomed.values()), before_ms)
        await each(unnamed, self.objects.delete)
        await each(unheld, lambda name: self.shared.stored.delete_unheld(tenant, name))
        return len(doomed), shelf

    async def _see(self, tenant: TenantId, stored: ListedObject, owner: SessionId) -> None:
        """Read a manifest of the store unless its last version was read. Remove a corrupt one.

        One that cannot be decrypted stays until the manager says that no session, and not `owner`, names it. A kept
        one, which no session names, stays as long as any KV may live.
        """
        known = self._seen.get(stored.name)
        if known is not None and known.written_at_ms == stored.modified_at_ms:
            return
        try:
            found = await self.shared.stored.manifest(tenant, ref_of(stored.name))
        except KeyNotAtHand:
            ends_at_ms = stored.modified_at_ms + MAX_TTL_S * 1000 if owner.startswith(KEPT_PREFIX) else _NEVER
            self._seen[stored.name] = _Seen(_UNREAD, owner, ends_at_ms)
            return
        except CorruptBlock:
            await self.objects.delete(stored.name)
            found = None
        if found is None:
            self._seen.pop(stored.name, None)
        else:
            self._seen[stored.name] = _Seen(stored.modified_at_ms, found.session_id, found.expires_at_ms)

    async def _overdue(self, listing: _Listing, before_ms: float, orphans: Orphans | None) -> dict[str, SessionId]:
        """Return the names of manifests that have expired, or that no session names, and whose they are.

        KV saved at the end of a context's prompt has no name of its own in a session: one name keeps both.
        """
        now_ms = self.runtime.clock.now_ms()
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
    """Objects of a tenant in the store."""

    tenant: TenantId
    blocks: Mapping[str, ListedObject]
    """By file name."""
    holders: Sequence[ListedObject]
    sessions: Sequence[ListedObject]
    manifests: Mapping[str, ListedObject]
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
        """Return the remaining sessions; `gone`: sessions that have just lost KV."""
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
        # A young block without a holder is being written.
        sizes = {
            name: it.size_bytes
            for name, it in self.blocks.items()
            if name in kept or not (it.modified_at_ms < before_ms or name in freed)
        }
        return Shelf(sizes, shelf)


class Shelf:
    """Sessions and bytes of a tenant in the store."""

    def __init__(self, sizes_bytes: Mapping[str, int], sessions: Mapping[SessionId, StoredSession]) -> None:
        """`sizes_bytes`: sizes of all its block files, held or not."""
        self.sessions = dict(sessions)
        self.size_bytes = sum(sizes_bytes.values())
        self._sizes_bytes = sizes_bytes
        self._num_holders = Counter(name for session in sessions.values() for name in session.files)

    def take(self, session_id: SessionId) -> StoredSession:
        """Remove a session and the bytes that only it held."""
        session = self.sessions.pop(session_id)
        for name in session.files:
            self._num_holders[name] -= 1
            if not self._num_holders[name]:
                self.size_bytes -= self._sizes_bytes.get(name, 0)
        return session


def evictions(shelves: Mapping[TenantId, Shelf], limits: Limits) -> list[_Evicted]:
    """Take the sessions to be evicted off the shelves: for each tenant's limit, then for the limit of all."""
    gone: list[_Evicted] = []
    for tenant, shelf in shelves.items():
        gone += _down_to({tenant: shelf}, limits.store_tenant_limit_bytes)
    return gone + _down_to(shelves, limits.store_limit_bytes)


def _down_to(shelves: Mapping[TenantId, Shelf], limit_bytes: int) -> list[_Evicted]:
    size_bytes = sum(shelf.size_bytes for shelf in shelves.values())
    if not limit_bytes or size_bytes <= limit_bytes * UPPER_MARK:
        return []
    by_use = sorted(
        (not session_id.startswith(KEPT_PREFIX), session.used_at_ms, tenant, session_id)
        for tenant, shelf in shelves.items()
        for session_id, session in shelf.sessions.items()
    )
    gone: list[_Evicted] = []
    for *_, tenant, session_id in by_use:
        if size_bytes <= limit_bytes * LOWER_MARK:
            break
        shelf = shelves[tenant]
        before_bytes = shelf.size_bytes
        gone.append((tenant, session_id, shelf.take(session_id)))
        size_bytes -= before_bytes - shelf.size_bytes
    return gone


def _second(stored: ListedObject) -> str:
    """Return the part of a name after its kind: whose it is, or the block's file name."""
    return stored.name.split("/")[2]
