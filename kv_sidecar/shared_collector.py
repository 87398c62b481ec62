"""What leaves the shared store by itself: expired KV, KV that no session names, and what a crash has left there.

One pod of all does it, once an interval: who finds the collector's object old enough writes it anew and begins. Two
that find it at the same moment both do, which is harmless.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, CorruptBlock, KeyNotAtHand
from contextcache.model import HeldCacheRef, SessionId, TenantId
from kv_sidecar.object_store import ObjectStore, StoredObject
from kv_sidecar.orphans import QUESTION_REFS
from kv_sidecar.shared_tier import SharedTier, each, ref_of

COLLECTOR = "collector"
"""The object whose age says when somebody last collected."""
_NEVER_MS = 1 << 62
_AGAIN_MS = -1
"""When no manifest was written: it is read again in the next pass."""
Orphans: TypeAlias = Callable[[Sequence[HeldCacheRef]], Awaitable[Sequence[int]]]
"""Return the positions of those that no session names. Raises ContextCacheError where nobody says."""


class SharedCollector:
    """Used from one event loop."""

    def __init__(
        self, shared: SharedTier, objects: ObjectStore, *, grace_s: float, interval_s: float, clock: Clock
    ) -> None:
        """`grace_s`: age from which what nothing names is removed, longer than any context takes to be written."""
        self._shared = shared
        self._objects = objects
        self._grace_ms = round(grace_s * 1000)
        self._interval_ms = round(interval_s * 1000)
        self._clock = clock
        self._seen: dict[str, tuple[int, SessionId, int]] = {}
        """Of manifests, by name: when it was written, whose it is, when it expires."""

    async def collect(self, orphans: Orphans | None) -> int:
        """Remove what has expired, what no session names and what no manifest names; return how many manifests.

        One pod of all does it, once an interval. Raises SidecarUnavailable.
        """
        now_ms = self._clock.now_ms()
        last = await self._objects.head(COLLECTOR)
        if last is not None and now_ms - last.modified_at_ms < self._interval_ms:
            return 0
        await self._objects.put(COLLECTOR, b"")
        removed = 0
        for tenant in await self._objects.directories():
            removed += await self._collect(tenant, orphans)
        return removed

    async def _collect(self, tenant: TenantId, orphans: Orphans | None) -> int:
        # In this order: what is written meanwhile is named by what is listed later.
        before_ms = self._clock.now_ms() - self._grace_ms
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
        there = {it.name for it in manifests}
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
        unheld = [name for name, it in blocks.items() if name not in held and is_old(it)]
        await each([*left, *stale], lambda it: self._objects.delete(it.name))
        await each(unheld, lambda name: self._shared.delete_unheld(tenant, name))
        return len(doomed)

    async def _see(self, stored: StoredObject, owner: SessionId) -> None:
        """Read a manifest of the store, unless it was since it was written; one that is none goes.

        One that does not open stays until the manager says that no session, and not `owner`, names it.
        """
        known = self._seen.get(stored.name)
        if known is not None and known[0] == stored.modified_at_ms:
            return
        try:
            found = await self._shared.read(stored.name)
        except KeyNotAtHand:
            self._seen[stored.name] = (_AGAIN_MS, owner, _NEVER_MS)
            return
        except CorruptBlock:
            await self._objects.delete(stored.name)
            found = None
        if found is None:
            self._seen.pop(stored.name, None)
        else:
            self._seen[stored.name] = (stored.modified_at_ms, found.session_id, found.expires_at_ms)

    async def _overdue(
        self, tenant: TenantId, manifests: Sequence[StoredObject], before_ms: int, orphans: Orphans | None
    ) -> list[tuple[str, SessionId]]:
        """Return the names of manifests that have expired, or that no session names, and whose they are."""
        now_ms = self._clock.now_ms()
        doomed, asked = [], []
        for stored in manifests:
            if stored.name in self._seen:
                _, owner, expires_at_ms = self._seen[stored.name]
                if expires_at_ms <= now_ms:
                    doomed.append((stored.name, owner))
                elif owner and stored.modified_at_ms < before_ms:
                    asked.append((stored.name, owner))
        for start in range(0, len(asked) if orphans is not None else 0, QUESTION_REFS):
            part = asked[start : start + QUESTION_REFS]
            held = [HeldCacheRef(tenant, owner, ref_of(name)) for name, owner in part]
            with suppress(ContextCacheError):
                assert orphans is not None
                doomed += [part[position] for position in await orphans(held) if 0 <= position < len(part)]
        return doomed
