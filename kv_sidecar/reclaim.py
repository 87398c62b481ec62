"""What leaves the disk: what nobody can reach any more, and, when it is nearly full, contexts used longest ago.

Between two marks: from the upper one on contexts go until the lower one is reached, so that not every save waits for a
removal; nobody's guarantee goes for others. What goes costs its session one computed turn. A context that is being
loaded stays; blocks that others hold stay with them. What one pass of the collector does is sidecar.py's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from contextcache.model import TenantId
from kv_sidecar.disk_store import DiskStore
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.index import ManifestRecord
from kv_sidecar.manifests import SealedManifests
from kv_sidecar.metrics import SidecarMetrics

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
        disk: DiskStore,
        manifests: SealedManifests,
        metrics: SidecarMetrics,
        is_leased: Callable[[BlockKey], bool],
        free: Callable[[Sequence[BlockKey]], Awaitable[int]],
        guarantee_bytes: int,
    ) -> None:
        """`free` removes those of the given blocks that nobody wants; `guarantee_bytes` 0: nobody has one."""
        self._disk = disk
        self._manifests = manifests
        self._metrics = metrics
        self._is_leased = is_leased
        self._free = free
        self._guarantee_bytes = guarantee_bytes
        self._evicting = asyncio.Lock()

    async def make_room(self, tenant: TenantId, size_bytes: int) -> None:
        """Remove contexts until a file of this tenant fits below the mark, or until none may go. Raises OSError."""
        if self._disk.missing_bytes(size_bytes) <= 0:
            return
        async with self._evicting:
            missing = self._disk.missing_bytes(size_bytes)
            if missing <= 0:
                return
            records = await self._manifests.sweep(lambda: self._victims(missing, tenant))
            if not records:
                return
            freed = await self._free([key for record in records for key in record.keys])
            self._metrics.evicted.inc(len(records))
            log.info("contexts evicted", extra={"num_contexts": len(records), "freed_bytes": freed})

    def _victims(self, missing_bytes: int, tenant: TenantId) -> list[ManifestRecord]:
        """Return the contexts to remove, those used longest ago first."""
        index, used = self._manifests.index, Counter(self._disk.bytes_by_tenant())
        gone: Counter[BlockKey] = Counter()
        victims: list[ManifestRecord] = []
        for record in index.records():
            if missing_bytes <= 0:
                break
            is_guaranteed = record.tenant != tenant and used[record.tenant] <= self._guarantee_bytes
            if is_guaranteed or any(self._is_leased(key) for key in record.keys):
                continue
            victims.append(record)
            gone.update(record.keys)
            free = [key for key in record.keys if gone[key] == index.num_holders(key)]
            freed = sum(self._disk.size_bytes(key) or 0 for key in free)
            used[record.tenant] -= freed
            missing_bytes -= freed
        return victims


class Collector:
    """Runs `collect` every `interval_s` until `stop`; owns its task."""

    def __init__(
        self, collect: Callable[[], Awaitable[Removed]], *, interval_s: float, metrics: SidecarMetrics
    ) -> None:
        self._collect = collect
        self._interval_s = interval_s
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; the first pass comes at once, for what the last process left."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the task and wait for it."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            began_s = time.time()
            try:
                removed = await self._collect()
            except Exception:
                # The loop must live: what failed now is tried again in the next pass.
                self._metrics.collector_failures.inc()
                log.exception("collector pass broke off")
            else:
                self._metrics.last_collect.set(began_s)
                if removed.num_manifests or removed.freed_bytes:
                    fields = {"num_contexts": removed.num_manifests, "freed_bytes": removed.freed_bytes}
                    log.info("collected", extra=fields)
            await asyncio.sleep(self._interval_s)
