"""What leaves the shared store by itself: expired KV, KV that no session names, and what a crash has left there.

One pod of all does it, once an interval: who finds the collector's object old enough writes it anew and begins. Two
that find it at the same moment both do, which is harmless.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from pydantic import TypeAdapter

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, CorruptBlock, KeyNotAtHand
from contextcache.model import KEPT_PREFIX, MAX_TTL_S, HeldCacheRef, SessionId, TenantId
from kv_sidecar import hot_lists
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.object_store import ObjectStore, StoredObject
from kv_sidecar.orphans import QUESTION_REFS
from kv_sidecar.shared_eviction import Shelf, StoredSession, leaving
from kv_sidecar.shared_tier import SharedTier, each, ref_of

COLLECTOR = "collector"
"""The object whose age says when somebody last collected; it holds the bytes that were left, by tenant."""
_COUNTS, _COUNTS_BYTES_MAX = TypeAdapter(dict[str, int]), 16 << 20
_NEVER = 1 << 62
_UNREAD = -1
"""When no manifest was written: it is read again in the next pass."""
Orphans: TypeAlias = Callable[[Sequence[HeldCacheRef]], Awaitable[Sequence[int]]]
"""Return the positions of those that no session names. Raises ContextCacheError where nobody says."""


@dataclass(frozen=True, slots=True)
class CollectorLimits:
    """When a pass is made, and what it leaves."""

    grace_s: float
    """Age from which what nothing names is removed, longer than any context takes to be written."""
    interval_s: float
    limit_bytes: int
    """Of blocks in the store; what was used longest ago leaves first. 0: no limit."""
    tenant_limit_bytes: int
    """The same of each tenant."""


class SharedCollector:
    """Used from one event loop."""

    def __init__(
        self,
        shared: SharedTier,
        objects: ObjectStore,
        *,
        limits: CollectorLimits,
        clock: Clock,
        metrics: SidecarMetrics,
    ) -> None:
        self._shared = shared
        self._objects = objects
        self._limits = limits
        self._clock = clock
        self._metrics = metrics
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
            await self._shared.evict(it.tenant, it.session_id, it.session)
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
        blocks = {ref_of(it.name): it async for it in self._objects.listed(f"{tenant}/blocks/")}
        holders = [it async for it in self._objects.listed(f"{tenant}/holders/")]
        sessions = [it async for it in self._objects.listed(f"{tenant}/sessions/")]
        manifests = [it async for it in self._objects.listed(f"{tenant}/manifests/")]
        owner_of = {ref_of(it.name): it.name.split("/")[2] for it in sessions}
        for stored in manifests:
            await self._see(stored, owner_of.get(ref_of(stored.name), ""))
        doomed = await self._overdue(tenant, manifests, before_ms, orphans)
        for name, session_id in doomed:
            await self._shared.delete(tenant, session_id, [ref_of(name)], is_whole=False)
            self._seen.pop(name, None)
        there = {it.name: it for it in manifests}
        self._seen = {
            name: seen for name, seen in self._seen.items() if name in there or not name.startswith(f"{tenant}/")
        }

        def is_old(stored: StoredObject) -> bool:
            return stored.modified_at_ms < before_ms

        live = {(seen[1], ref_of(name)) for name, seen in self._seen.items() if name in there}
        left = [it for it in sessions if is_old(it) and (it.name.split("/")[2], ref_of(it.name)) not in live]
        owners = {it.name.split("/")[2] for it in sessions if it not in left}
        stale = [it for it in holders if is_old(it) and ref_of(it.name) not in owners]
        held = {it.name.split("/")[2] for it in holders if it not in stale}
        unheld = {name for name, it in blocks.items() if name not in held and is_old(it)}
        await each([*left, *stale], lambda it: self._objects.delete(it.name))
        await each(unheld, lambda name: self._shared.delete_unheld(tenant, name))
        shelf: dict[SessionId, StoredSession] = defaultdict(StoredSession)
        for it in sessions:
            if (session := (it.name.split("/")[2], ref_of(it.name))) in live:
                shelf[session[0]].cache_refs.add(session[1])
                used_at_ms = max(it.modified_at_ms, there[f"{tenant}/manifests/{session[1]}"].modified_at_ms)
                shelf[session[0]].used_at_ms = max(shelf[session[0]].used_at_ms, used_at_ms)
        for it in holders:
            if ref_of(it.name) in shelf:
                shelf[ref_of(it.name)].files.add(it.name.split("/")[2])
        kept = {name for session in shelf.values() for name in session.files}
        gone = {owner for _, owner in doomed}
        freed = {it.name.split("/")[2] for it in holders if ref_of(it.name) in gone}
        # Of the rest what is young is being written.
        sizes = {
            name: it.size_bytes for name, it in blocks.items() if name in kept or not (is_old(it) or name in freed)
        }
        return len(doomed), Shelf(sizes, shelf)

    async def _see(self, stored: StoredObject, owner: SessionId) -> None:
        """Read a manifest of the store, unless it was since it was written; one that is none goes.

        One that does not open stays until the manager says that no session, and not `owner`, names it; of what is kept
        nobody does, and it stays as long as anything may live.
        """
        known = self._seen.get(stored.name)
        if known is not None and known[0] == stored.modified_at_ms:
            return
        try:
            found = await self._shared.read(stored.name)
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

    async def _overdue(
        self, tenant: TenantId, manifests: Sequence[StoredObject], before_ms: float, orphans: Orphans | None
    ) -> list[tuple[str, SessionId]]:
        """Return the names of manifests that have expired, or that no session names, and whose they are."""
        now_ms = self._clock.now_ms()
        doomed, asked = [], []
        for stored in manifests:
            if stored.name in self._seen:
                _, owner, expires_at_ms = self._seen[stored.name]
                if expires_at_ms <= now_ms:
                    doomed.append((stored.name, owner))
                elif owner and not owner.startswith(KEPT_PREFIX) and stored.modified_at_ms < before_ms:
                    asked.append((stored.name, owner))
        for start in range(0, len(asked) if orphans is not None else 0, QUESTION_REFS):
            part = asked[start : start + QUESTION_REFS]
            held = [HeldCacheRef(tenant, owner, ref_of(name)) for name, owner in part]
            with suppress(ContextCacheError):
                assert orphans is not None
                doomed += [part[position] for position in await orphans(held) if 0 <= position < len(part)]
        return doomed
