"""What leaves the disk: what nobody can reach any more, and, when bytes or inodes run out, what was used longest ago.

Between two marks: from the upper one on contexts go until the lower one is reached, so that not every save waits for a
removal; nobody's guarantee goes for others. Kept KV goes before any context, and makes room for none: it is refused
when nothing kept is left to go. It also goes where its tenant has reached its limit. What goes costs its conversation
one computed turn. What is being loaded stays; blocks that others hold stay with them. What one pass of the collector
does is sidecar.py's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from contextcache.errors import StorageFull
from contextcache.model import TenantId
from kv_sidecar.blocks import Blocks, Shortage
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.sealed.index import ManifestRecord
from kv_sidecar.sealed.manifests import SealedManifests

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Removed:
    """What a delete or a collector pass removed."""

    num_manifests: int
    freed_bytes: int
    """Of block files on disk."""

    def __add__(self, other: Removed) -> Removed:
        """Return both together."""
        return Removed(self.num_manifests + other.num_manifests, self.freed_bytes + other.freed_bytes)


class Retention:
    """Makes room on the disk. Used from one event loop."""

    def __init__(
        self,
        *,
        blocks: Blocks,
        manifests: SealedManifests,
        metrics: SidecarMetrics,
        is_leased: Callable[[ManifestRecord], bool],
        is_named: Callable[[ManifestRecord], bool],
        free: Callable[[Sequence[BlockKey]], Awaitable[int]],
        guarantee_bytes: int,
    ) -> None:
        """`is_leased`: somebody is loading it; `is_named`: somebody may be about to.

        `free` removes those of the given blocks that nobody wants; `guarantee_bytes` 0: nobody has one.
        """
        self._blocks = blocks
        self._manifests = manifests
        self._metrics = metrics
        self._is_leased = is_leased
        self._is_named = is_named
        self._free = free
        self._guarantee_bytes = guarantee_bytes
        self._evicting = asyncio.Lock()

    async def make_room(self, tenant: TenantId, size_bytes: int, *, for_kept: bool = False) -> None:
        """Remove what may go until a file of this tenant fits below the mark, or until nothing may. Raises OSError.

        `for_kept`: only kept KV goes. Raises StorageFull when that is too little.
        """
        await self.make_share(tenant, size_bytes, for_kept=for_kept)
        await self._make(lambda: self._blocks.shortage(size_bytes), self._kept if for_kept else self._all, tenant)
        if for_kept and not self._blocks.shortage(size_bytes).is_over:
            raise StorageFull("contexts use all the room on this disk")

    async def make_share(self, tenant: TenantId, size_bytes: int, *, for_kept: bool = False) -> None:
        """Remove kept KV of a tenant until so much more is within its limit, or none is left. Raises OSError.

        `for_kept`: not what somebody may be about to load.
        """
        if not self._manifests.index.kept_bytes(tenant):
            return
        candidates = self._kept if for_kept else self._all
        await self._make(
            lambda: Shortage(self._over_limit(tenant, size_bytes)),
            lambda: [record for record in candidates() if record.tenant == tenant and record.is_kept],
            tenant,
        )

    async def _make(
        self, shortage: Callable[[], Shortage], records: Callable[[], list[ManifestRecord]], tenant: TenantId
    ) -> None:
        if shortage().is_over:
            return
        async with self._evicting:
            missing = shortage()
            if missing.is_over:
                return
            victims = await self._manifests.sweep(lambda: self._victims(missing, records(), tenant))
            if not victims:
                return
            freed = await self._free([key for record in victims for key in record.keys])
            self._metrics.evicted.inc(len(victims))
            log.info("contexts evicted", extra={"num_contexts": len(victims), "freed_bytes": freed})

    def _over_limit(self, tenant: TenantId, size_bytes: int) -> int:
        used, limit = self._blocks.tenant_bytes(tenant)
        return used + size_bytes - limit if limit else 0

    def _kept(self) -> list[ManifestRecord]:
        return [record for record in self._manifests.index.records() if record.is_kept and not self._is_named(record)]

    def _all(self) -> list[ManifestRecord]:
        """Return what may go for a context: kept KV first, and of both last what somebody may be about to load."""
        records = self._manifests.index.records()
        return sorted(records, key=lambda record: (not record.is_kept, self._is_named(record)))

    def _victims(self, missing: Shortage, records: Sequence[ManifestRecord], tenant: TenantId) -> list[ManifestRecord]:
        """Return which of these to remove, the first ones first."""
        index, used = self._manifests.index, Counter(self._blocks.bytes_by_tenant())
        gone: Counter[BlockKey] = Counter()
        victims: list[ManifestRecord] = []
        for record in records:
            if missing.is_over:
                break
            is_guaranteed = record.tenant != tenant and used[record.tenant] <= self._guarantee_bytes
            if is_guaranteed or self._is_leased(record):
                continue
            victims.append(record)
            gone.update(record.keys)
            free = [key for key in record.keys if gone[key] == index.num_holders(key)]
            freed = sum(self._blocks.stored_bytes(key) or 0 for key in free)
            used[record.tenant] -= freed
            missing = Shortage(missing.size_bytes - freed, missing.num_files - len(free) - 1)  # and its manifest
        return victims


class Collector:
    """Makes each pass every `interval_s` until `stop`, and waits for none with another; owns their tasks."""

    def __init__(self, *collect: Callable[[], Awaitable[Removed]], interval_s: float, metrics: SidecarMetrics) -> None:
        """`collect`: the passes; the first one's time is shown."""
        self._collect = collect
        self._interval_s = interval_s
        self._metrics = metrics
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin; the first passes come at once, for what the last process left."""
        self._tasks = [asyncio.create_task(self._run(collect)) for collect in self._collect]

    async def stop(self) -> None:
        """End the tasks and wait for them."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, collect: Callable[[], Awaitable[Removed]]) -> None:
        while True:
            began_s = time.time()
            try:
                removed = await collect()
            except Exception:
                # The loop must live: what failed now is tried again in the next pass.
                self._metrics.collector_failures.inc()
                log.exception("collector pass failed")
            else:
                if collect == self._collect[0]:
                    self._metrics.last_collect.set(began_s)
                if removed.num_manifests or removed.freed_bytes:
                    fields = {"num_contexts": removed.num_manifests, "freed_bytes": removed.freed_bytes}
                    log.info("collected", extra=fields)
            await asyncio.sleep(self._interval_s)
