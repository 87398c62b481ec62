"""`SessionSweeper`: the one background task of a manager; it buries due sessions every few seconds.

Expiry does not depend on it: a session is expired when its time has come, swept or not. The sweep frees memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from contextcache.errors import StoreUnavailable

log = logging.getLogger(__name__)


class SessionSweeper:
    """Owns its task: `start` begins it, `stop` cancels and awaits it."""

    def __init__(
        self,
        manager: ContextCacheManager,
        *,
        metrics: ManagerMetrics,
        interval_s: float,
        limit: int,
        may_sweep: Callable[[], bool] = lambda: True,
    ) -> None:
        """`limit`: sessions in one call of `sweep`; a pass repeats it until none is due.

        `may_sweep` is asked before each call: another manager may have taken over in the middle of a pass.
        """
        self._manager = manager
        self._may_sweep = may_sweep
        self._metrics = metrics
        self._interval_s = interval_s
        self._limit = limit
        self._failing: type[Exception] | None = None
        """How the last sweep failed; None when it did not."""
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
        """Sweep until nothing is due, or another manager is to, and return how many sessions were buried."""
        total = 0
        while self._may_sweep():
            swept = await self._manager.sweep(self._limit)
            total += swept
            if swept < self._limit:
                break
        return total

    async def _sweep_for_ever(self) -> None:
        while True:
            if not self._may_sweep():
                await asyncio.sleep(self._interval_s)
                continue
            try:
                num_swept = await self.sweep_pass()
            except Exception as exc:
                # The loop must outlive a Redis that is away; the next interval tries again.
                self._metrics.sweep_failures.inc()
                if self._failing is not type(exc):
                    self._failing = type(exc)
                    log.exception("sweeps fail", exc_info=not isinstance(exc, StoreUnavailable))
            else:
                self._failing = None
                self._metrics.last_sweep.set_to_current_time()
                if num_swept:
                    log.info("sessions swept", extra={"num_sessions": num_swept})
            await asyncio.sleep(self._interval_s)
