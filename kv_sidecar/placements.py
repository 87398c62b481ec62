"""Placements: prefetches, demotions and shares of sealed KV, carried out as far as they cost no other tenant anything.

Prefetch: reads KV into memory behind the answer. All prefetches together read one file at a time, tenant by tenant, so
that loads keep the other threads. A tenant gets no more memory by it than its share: an equal part for each tenant with
KV there. It displaces KV of its own tenant, and KV of tenants above their share.

Demotion: frees the memory of KV at once. Every block in memory is also on disk. Blocks that another context, a save, a
load or a pin needs stay.

Share: moves nothing. Other contexts of the tenant, and only they, find all sealed KV here. The shared store, which gets
all of it, has it for other pods.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from contextcache.errors import SidecarUnavailable
from contextcache.hints import ACTIONS_MAX, PLACEMENTS
from contextcache.model import Placement, TenantId
from kv_sidecar.promises import NO_ROOM, TENANT_SHARE
from kv_sidecar.runtime import Runtime
from kv_sidecar.sealed.manifests import ManifestRecord, Manifests
from kv_sidecar.tiers.tiers import Tiers, WantedBlock

BUSY, IN_USE, NO_STORE, PINNED = "busy", "in_use", "no_store", "pinned"


@dataclass(eq=False)
class Placements:
    """Carries placements out. Used from one event loop."""

    runtime: Runtime
    manifests: Manifests
    tiers: Tiers
    is_published: Callable[[TenantId], bool] = lambda _tenant: False
    """Whether a tenant's sealed KV is written to the shared store."""
    _running: dict[TenantId, Sequence[WantedBlock]] = field(default_factory=dict)
    """Blocks of the prefetch of each tenant: it has one at a time."""
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The read of one file. Waiting tenants get it in turn."""

    async def carry_out(self, record: ManifestRecord, placements: Iterable[str]) -> list[Placement]:
        """Carry out the first 16 placements in order; return their answers. Returns before a prefetch has ended."""
        answers = []
        for name in list(placements)[:ACTIONS_MAX]:
            answer = Placement() if record.interrupted else await self._carry_out(record, name)
            answers.append(answer)
            if name in PLACEMENTS:
                self.runtime.metrics.placements.labels(name, answer.reason or answer.outcome).inc()
        return answers

    def stop(self) -> None:
        """End all prefetches after the file that is being read. Idempotent."""
        self._running.clear()

    async def _carry_out(self, record: ManifestRecord, name: str) -> Placement:
        match name:
            case "prefetch":
                return await self._prefetch(record)
            case "demote":
                return self._demote(record)
            case "share":
                if self.is_published(record.tenant):
                    return Placement("accepted", "", record.size_bytes, "object")
                return Placement("clipped", NO_STORE, record.size_bytes, "disk")
        return Placement(reason="unsupported")

    async def _prefetch(self, record: ManifestRecord) -> Placement:
        tenant, memory, blocks = record.tenant, self.tiers.memory, self.tiers.blocks
        manifest = None
        with suppress(SidecarUnavailable):
            manifest = await self.manifests.read(record, again=True)
        if manifest is None or not self.manifests.is_whole(record):
            return Placement()
        if all(blocks.get(key).in_memory for key in record.keys):
            return Placement("accepted", "", record.size_bytes, "host")
        if tenant in self._running:
            return Placement(reason=BUSY)
        bound_bytes = max(memory.share_bytes(tenant), memory.kept_by.get(tenant, 0))
        room_bytes = min(bound_bytes - blocks.promised_bytes("pin", tenant), memory.limit_bytes // 2)
        wanted = self.tiers.beginning(manifest, room_bytes)
        reason = TENANT_SHARE if room_bytes < memory.limit_bytes // 2 else NO_ROOM
        if not wanted:
            return Placement(reason=reason)
        self._running[tenant] = wanted
        self.runtime.threads.begin(self._read(record, wanted, bound_bytes))
        if len(wanted) == len(record.keys):
            return Placement("accepted", "", record.size_bytes, "host")
        return Placement("clipped", reason, sum(blocks.get(it.key).stored_bytes or 0 for it in wanted), "host")

    async def _read(self, record: ManifestRecord, wanted: Sequence[WantedBlock], bound_bytes: int) -> None:
        """Read files until one of them finds no room, or the prefetch is stopped."""
        tenant, memory, own = record.tenant, self.tiers.memory, set(record.keys)
        idle = iter([slot for slot in memory.idle() if slot.key not in own])
        allocate = partial(memory.allocate_fairly, tenant=tenant, bound_bytes=bound_bytes, idle=idle)
        try:
            for it in wanted:
                async with self._reading:
                    if self._running.get(tenant) is not wanted or not await self.tiers.prefetch(it, allocate):
                        return
        finally:
            if self._running.get(tenant) is wanted:
                del self._running[tenant]

    def _demote(self, record: ManifestRecord) -> Placement:
        session = self.manifests.of_session(record.tenant, record.session_id)
        own = Counter(key for it in session for key in it.keys)
        running = self._running.get(record.tenant)
        if running and running[0].key in own:
            del self._running[record.tenant]
        blocks = [block for key in record.keys if (block := self.tiers.blocks.get(key)).in_memory or block.over]
        leaving = []
        for block in blocks:
            refs, slot = block.refs, block.in_memory
            is_needed = refs.lease or refs.pin or refs.save or block.over or own[block.key] < refs.manifest + refs.kept
            if slot is not None and not is_needed:
                self.tiers.memory.evict(slot)
                leaving.append(slot.size_bytes)
        reason = PINNED if any(block.refs.pin for block in blocks) else IN_USE
        if blocks and not leaving:
            return Placement(reason=reason)
        is_all = len(leaving) == len(blocks)
        return Placement("accepted" if is_all else "clipped", "" if is_all else reason, sum(leaving), "disk")
