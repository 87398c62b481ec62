"""What a manager does by itself: `SessionSweeper` buries due sessions, `SessionCount` feeds a gauge.

Expiry does not depend on the sweep: a session is expired when its time has come, swept or not. It frees memory. Of all
managers one makes the pass of an interval: whose key in Redis came first (ADR 0029).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial

from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from contextcache.errors import ContextCacheError
from contextcache.names import NUM_SHARDS

log = logging.getLogger(__name__)


class SessionSweeper:
    """Owns its task: `start` begins it, `stop` cancels and awaits it."""

    def __init__(
        self,
        manager: ContextCacheManager,
        *,
        metrics: ManagerMetrics,
        interval_s: float,
    ) -> None:
        self._manager = manager
        self._metrics = metrics
        self._interval_s = interval_s
        self._told: set[type[Exception]] = set()
        """How sweeps have failed since the last whole one."""
        self._num_failed = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin sweeping, at once and then every interval."""
        assert self._task is None, "a sweeper is started once"
        self._task = asyncio.create_task(self._sweep_for_ever(), name="session-sweeper")

    async def stop(self) -> None:
        """End the task and wait for its end; harmless when it never began."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])

    async def sweep_pass(self) -> int:
        """Sweep every shard until nothing is due; return how many sessions were taken.

        A shard that fails is left for the next pass, and counted.
        """
        self._num_failed = 0
        total = await self._taken_by(self._manager.review)
        for shard in range(NUM_SHARDS):
            total += await self._taken_by(partial(self._sweep_shard, shard))
        if self._num_failed:
            self._metrics.sweep_failures.inc()
        else:
            self._told.clear()
            self._metrics.last_sweep.set_to_current_time()
        return total

    async def _taken_by(self, sweep: Callable[[], Awaitable[int]]) -> int:
        try:
            return await sweep()
        except Exception as exc:
            # The rest must outlive a shard that is damaged, and the loop a Redis that is away.
            self._num_failed += 1
            if type(exc) not in self._told:
                self._told.add(type(exc))
                log.exception("sweep failed", exc_info=not isinstance(exc, ContextCacheError))
            return 0

    async def _sweep_shard(self, shard: int) -> int:
        total = 0
        while taken := await self._manager.sweep(shard):
            total += taken
        return total

    async def _sweep_for_ever(self) -> None:
        while True:
            if await self._is_to_sweep() and (num_swept := await self.sweep_pass()):
                log.info("sessions swept", extra={"num_sessions": num_swept})
            await asyncio.sleep(self._interval_s)

    async def _is_to_sweep(self) -> bool:
        try:
            return await self._manager.claim_sweep(for_ms=math.ceil(self._interval_s * 1000))
        except Exception:
            # Whatever it is, the pass says it: sweeping twice is as right as once.
            log.debug("sweep leader unknown", exc_info=True)
            return True


class SessionCount:
    """Asks the store now and then how many sessions live. Nothing depends on it.

    Owns its task: `start` begins it, `stop` cancels and awaits it. One cheap read a round, at most each 30 s.
    """

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
