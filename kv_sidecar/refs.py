"""One record and one state machine per tenant and cache_ref: expected, being saved, sealed, failed or deleted.

No I/O; used from one event loop. Records of ended saves and of deletes (tombstones) are bounded by number and age.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from contextcache.clock import Clock
from contextcache.errors import ContextDeleted
from contextcache.model import CacheRef, SessionId, TenantId
from contextcache.phases import Phases
from kv_sidecar.limits import Limits
from kv_sidecar.saves import INTERRUPTED, Save, Source


class Phase(Enum):
    """State of a cache_ref."""

    ABSENT = "absent"
    EXPECTED = "expected"
    """A pull looks for it."""
    OPEN = "open"
    """A save is in flight."""
    PUBLISHING = "publishing"
    """Its manifest is being written: all ranks have sealed, or it is a fork."""
    SEALED = "sealed"
    FAILED = "failed"
    """Its save ended without a manifest; the record keeps the reason for a while."""
    DELETED = "deleted"
    """Later saves are refused for a while."""


_NOT_HERE = (Phase.ABSENT, Phase.EXPECTED, Phase.FAILED)
PHASES = Phases[Phase](
    [
        ((Phase.ABSENT, Phase.FAILED), "pull begins", Phase.EXPECTED),
        ((Phase.EXPECTED,), "pull ends", Phase.ABSENT),
        ((Phase.EXPECTED,), "pull ends after a failure", Phase.FAILED),
        (_NOT_HERE, "announced", Phase.OPEN),
        ((Phase.OPEN,), "last rank seals", Phase.PUBLISHING),
        (_NOT_HERE, "fork begins", Phase.PUBLISHING),
        ((*_NOT_HERE, Phase.PUBLISHING, Phase.SEALED), "manifest durable", Phase.SEALED),
        ((Phase.DELETED,), "manifest durable", Phase.DELETED),
        ((Phase.OPEN,), "early files end", Phase.ABSENT),
        ((*_NOT_HERE, Phase.OPEN, Phase.PUBLISHING), "save ends", Phase.FAILED),
        (tuple(Phase), "delete", Phase.DELETED),
        ((Phase.SEALED,), "manifest gone", Phase.ABSENT),
        ((Phase.DELETED,), "manifest gone", Phase.DELETED),
        ((Phase.FAILED, Phase.DELETED), "forgotten", Phase.ABSENT),
        ((Phase.FAILED, Phase.DELETED), "forgotten with its manifest", Phase.SEALED),
    ]
)
"""`manifest durable` comes from a seal, a fork and the start of the sidecar. A delete overtakes a seal: the manifest
that is being written is removed right after. A manifest that the disk did not let go of is served again once its delete
is forgotten."""

PENDING = frozenset({Phase.EXPECTED, Phase.OPEN, Phase.PUBLISHING})
"""Phases in which a reader waits for a change."""


@dataclass(slots=True, eq=False)
class Ref:
    """Everything that the sidecar knows of one cache_ref beside its manifest. `Refs` alone changes the phase."""

    tenant: TenantId
    cache_ref: CacheRef
    phase: Phase = Phase.ABSENT
    save: Save | None = None
    """Its save while OPEN or PUBLISHING. A fork has none."""
    has_manifest: bool = False
    """Whether its manifest is on disk. A DELETED ref may have one until the delete ends."""
    reason: str = ""
    """Reason of FAILED or DELETED, a short fixed phrase. A pull keeps that of FAILED, in case it brings nothing."""
    started_at_ms: int = 0
    """Unix time in ms when the turn of the save that failed began; 0: unknown."""
    ended_at_ms: int = 0
    """Unix time in ms of the latest failure or delete."""
    source: Source = ""
    fresh_ranks: frozenset[int] = frozenset()
    """Ranks that a pull brought and no load has asked for."""
    fresh_until_ms: int = 0
    named_until_ms: int = 0
    """Unix time in ms until which a load may follow: an answer to an engine named this KV."""
    used_until_ms: int = 0
    """Expiry that a use of kept KV gives it; the collector writes it to the manifest. 0: nothing to write."""
    is_replaced: bool = False
    """Whether longer KV of its conversation has replaced it; the collector removes it once no load needs it."""
    waiters: tuple[asyncio.Future[None], ...] = ()

    @property
    def failure(self) -> str:
        """Reason why there is no KV; empty: unknown, or there may be some."""
        is_known = self.phase in (Phase.FAILED, Phase.DELETED) and self.reason != INTERRUPTED
        return self.reason if is_known else ""


class Refs:
    """All records. An ABSENT ref has a record only while something waits for it."""

    def __init__(self, clock: Clock, limits: Limits) -> None:
        self._clock = clock
        self._limits = limits
        self._refs: dict[tuple[TenantId, str], Ref] = {}
        self._ended: dict[Phase, OrderedDict[tuple[TenantId, str], Ref]] = {
            Phase.FAILED: OrderedDict(),
            Phase.DELETED: OrderedDict(),
        }
        """Records of both phases, the oldest first. Each phase has its own bound: no failure displaces a delete."""
        self.forgotten_until_ms = 0
        """Latest begin of a turn whose failure the bound has displaced, Unix time in ms."""
        self._saving: dict[tuple[TenantId, str], Ref] = {}
        """OPEN and PUBLISHING records."""
        self._owners: dict[CacheRef, Ref] = {}
        """Latest record whose files had this name: file names and seals do not name the tenant."""

    def __iter__(self) -> Iterator[Ref]:
        """Iterate over a snapshot of all records."""
        return iter(list(self._refs.values()))

    def __len__(self) -> int:
        return len(self._refs)

    def get(self, tenant: TenantId, cache_ref: CacheRef) -> Ref:
        """Return the record; a new ABSENT one is stored once its phase changes."""
        self._forget_old()
        return self._refs.get((tenant, cache_ref)) or Ref(tenant, cache_ref)

    def owner(self, cache_ref: CacheRef) -> Ref | None:
        """Return the record whose save or manifest has the files of this name, or had them last."""
        self._forget_old()
        return self._owners.get(cache_ref)

    def saves(self) -> list[tuple[Ref, Save]]:
        """Return all saves in flight."""
        return [(ref, ref.save) for ref in self._saving.values() if ref.save is not None]

    def expect(self, tenant: TenantId, cache_refs: Iterable[CacheRef]) -> None:
        """Make absent refs pending: a pull looks for them."""
        for ref in (self.get(tenant, cache_ref) for cache_ref in cache_refs):
            if PHASES.allows(ref.phase, "pull begins"):
                self._move(ref, "pull begins")

    def expect_no_more(self, tenant: TenantId, cache_refs: Iterable[CacheRef]) -> None:
        """Take `expect` back. Idempotent."""
        for ref in (self.get(tenant, cache_ref) for cache_ref in cache_refs):
            if ref.phase is Phase.EXPECTED:
                self._move(ref, "pull ends after a failure" if ref.reason else "pull ends")

    def open(self, ref: Ref, save: Save) -> None:
        """Begin a save."""
        self._move(ref, "announced")
        self._owners[ref.cache_ref] = ref
        ref.save = save
        if not save.new.source:
            ref.reason, ref.started_at_ms = "", 0

    def publish(self, ref: Ref) -> None:
        """Note that all ranks have sealed: from here on no deadline ends the save."""
        self._move(ref, "last rank seals")

    def begin_fork(self, ref: Ref) -> None:
        """Take the name of a fork while its manifest is written. It ends with the manifest, or by `end_save`."""
        self._move(ref, "fork begins")
        self._owners[ref.cache_ref] = ref

    def end_save(self, ref: Ref, reason: str, *, started_at_ms: int | None) -> None:
        """Note that no manifest comes of a save, of a save that has not begun, or of a fork.

        The first reason of an attempt stays: later failures follow from it. `started_at_ms`: begin of its turn; 0:
        unknown; None: a pull, which replaces no reason of an engine.
        """
        is_known = ref.phase is Phase.FAILED and started_at_ms and ref.started_at_ms == started_at_ms
        if not is_known and PHASES.allows(ref.phase, "save ends"):
            if started_at_ms is not None or not ref.reason:
                ref.reason, ref.started_at_ms = reason, started_at_ms or 0
            self._move(ref, "save ends")

    def end_early(self, ref: Ref) -> None:
        """Note that files ahead of a save are given up; the save itself may still come."""
        self._move(ref, "early files end")

    def delete(self, ref: Ref) -> None:
        """Refuse saves under this name from now on.

        Only a save in flight gets a reason: a deleted ref without one is answered as an absent one.
        """
        reason = ContextDeleted.code if ref.phase in (Phase.OPEN, Phase.PUBLISHING) else ref.failure
        self._move(ref, "delete")
        ref.reason = reason

    def delete_session(self, tenant: TenantId, session_id: SessionId) -> None:
        """Refuse saves of this session whose turns have begun."""
        self.delete(self.get(tenant, _session(session_id)))

    def check_not_deleted(
        self, tenant: TenantId, session_id: SessionId, cache_ref: CacheRef, *, started_at_ms: int
    ) -> None:
        """Raise ContextDeleted for a name that was deleted, or its session at `started_at_ms` or later; 0: unknown."""
        session = self.get(tenant, _session(session_id))
        is_old = session.phase is Phase.DELETED and started_at_ms <= session.ended_at_ms
        if is_old or self.get(tenant, cache_ref).phase is Phase.DELETED:
            raise ContextDeleted("the context was deleted")

    def sealed(self, tenant: TenantId, cache_ref: CacheRef) -> None:
        """Note that a manifest is durable."""
        ref = self.get(tenant, cache_ref)
        ref.has_manifest = True
        self._move(ref, "manifest durable")
        self._owners[cache_ref] = ref

    def unsealed(self, tenant: TenantId, cache_ref: CacheRef) -> None:
        """Note that a manifest is gone."""
        ref = self.get(tenant, cache_ref)
        ref.has_manifest = False
        self._move(ref, "manifest gone")

    def name(self, tenant: TenantId, cache_ref: CacheRef, *, for_ms: int) -> None:
        """Note that an engine was told of sealed KV: a load may follow for so long."""
        self.get(tenant, cache_ref).named_until_ms = self._clock.now_ms() + for_ms

    def is_named(self, tenant: TenantId, cache_ref: CacheRef) -> bool:
        """Return whether an engine was told of this KV not long ago."""
        return self._clock.now_ms() < self.get(tenant, cache_ref).named_until_ms

    async def wait(self, tenant: TenantId, cache_refs: Iterable[CacheRef], *, timeout_s: float) -> bool:
        """Return True once the phase of one of these refs changes; False after `timeout_s`."""
        if timeout_s <= 0:
            return False
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        refs = [self.get(tenant, cache_ref) for cache_ref in cache_refs]
        for ref in refs:
            self._refs[ref.tenant, ref.cache_ref] = ref
            ref.waiters += (waiter,)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            for ref in refs:
                ref.waiters = tuple(other for other in ref.waiters if other is not waiter)
                self._drop_absent(ref)
        return True

    def _move(self, ref: Ref, event: str) -> None:
        """Change a phase: the only place. Wakes the waiters."""
        before, ref.phase = ref.phase, PHASES.after(ref.phase, event)
        key = (ref.tenant, ref.cache_ref)
        self._refs[key] = ref
        if ref.phase in (Phase.OPEN, Phase.PUBLISHING):
            self._saving[key] = ref
        else:
            self._saving.pop(key, None)
            ref.save = None
        if ref.phase in (Phase.ABSENT, Phase.SEALED, Phase.DELETED):
            ref.reason, ref.started_at_ms = "", 0
        if ref.phase not in (Phase.EXPECTED, Phase.OPEN, Phase.PUBLISHING, Phase.SEALED):
            ref.source, ref.named_until_ms, ref.used_until_ms, ref.is_replaced = "", 0, 0, False
            ref.fresh_ranks = frozenset()
        if before in self._ended and ref.phase is not before:
            self._ended[before].pop(key, None)
        if event in ("save ends", "pull ends after a failure", "delete"):
            ref.ended_at_ms = self._clock.now_ms()
            ended = self._ended[ref.phase]
            ended[key] = ref
            ended.move_to_end(key)
            while len(ended) > self._limits.max_tombstones:
                oldest = next(iter(ended.values()))
                began_ms = min(oldest.started_at_ms, ref.ended_at_ms)  # a turn of the future says nothing of others
                self.forgotten_until_ms = max(self.forgotten_until_ms, began_ms)
                self._forget(oldest)
        if ref.phase is not before:
            for waiter in ref.waiters:
                if not waiter.done():
                    waiter.set_result(None)
        self._drop_absent(ref)

    def _drop_absent(self, ref: Ref) -> None:
        if ref.phase is Phase.ABSENT:
            if self._owners.get(ref.cache_ref) is ref:
                del self._owners[ref.cache_ref]
            if not ref.waiters:
                self._refs.pop((ref.tenant, ref.cache_ref), None)

    def _forget_old(self) -> None:
        oldest_ms = self._clock.now_ms() - self._limits.tombstone_ms
        for ended in self._ended.values():
            while ended and (ref := next(iter(ended.values()))).ended_at_ms <= oldest_ms:
                self._forget(ref)

    def _forget(self, ref: Ref) -> None:
        self._move(ref, "forgotten with its manifest" if ref.has_manifest else "forgotten")


def _session(session_id: SessionId) -> str:
    """Return a session's name among the refs; no cache_ref has a slash."""
    return f"session/{session_id}"
