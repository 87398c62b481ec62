"""`SessionCount`: asks the store now and then how many sessions live, for the gauge. Nothing depends on it."""

from __future__ import annotations

import asyncio
import logging
import math

from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from contextcache.errors import ContextCacheError

log = logging.getLogger(__name__)


class SessionCount:
    """Owns its task: `start` begins it, `stop` cancels and awaits it. One cheap read a round, at most each 30 s."""

    def __init__(self, manager: ContextCacheManager, *, metrics: ManagerMetrics, interval_s: float = 30.0) -> None:
        self._manager = manager
        self._metrics = metrics
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin counting, at once and then every interval."""
        assert self._task is None, "a count is started once"
        self._task = asyncio.create_task(self._count_for_ever(), name="session-count")

    async def stop(self) -> None:
        """End the task and wait for its end; harmless when it never began."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def count(self) -> None:
        """Count once. A store that does not answer makes the gauge NaN: an old number would look like a true one."""
        try:
            self._metrics.sessions.set(await self._manager.count_sessions())
        except ContextCacheError:
            self._metrics.sessions.set(math.nan)

    async def _count_for_ever(self) -> None:
        while True:
            try:
                await self.count()
            except Exception:
                # A gauge is no reason to end; the next round tries again.
                log.exception("sessions not counted")
            await asyncio.sleep(self._interval_s)
