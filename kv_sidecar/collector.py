"""The task that frees, again and again, what nobody can reach any more. What one pass does is sidecar.py's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from kv_sidecar.catalog import Removed
from kv_sidecar.metrics import SidecarMetrics

log = logging.getLogger(__name__)


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
