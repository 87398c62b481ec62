"""Tasks of a manager process: `sweep_forever` takes due sessions, `count_forever` feeds a gauge.

Expiry does not depend on the sweep: a session is expired when its time has come, swept or not. A sweep frees memory.
One manager makes the pass of an interval: the one whose claim in Redis came first (ADR 0029).
"""

from __future__ import annotations

import asyncio
import logging
import math

from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from contextcache.errors import ContextCacheError
from contextcache.names import NUM_SHARDS

log = logging.getLogger(__name__)

_COUNT_INTERVAL_S = 30.0
"""Seconds between two counts of all sessions: one cheap read each."""


class SessionSweeper:
    """Sweeps all shards, again and again. A shard that fails waits for the next pass."""

    def __init__(self, manager: ContextCacheManager, *, metrics: ManagerMetrics, interval_s: float) -> None:
        self._manager = manager
        self._metrics = metrics
        self._interval_s = interval_s
        self._told: set[type[Exception]] = set()
        """Errors that were logged since the last complete pass."""

    async def sweep_forever(self) -> None:
        """Sweep at once and then every interval, until cancelled."""
        while True:
            if await self._has_claim() and (num_swept := await self.sweep_pass()):
                log.info("sessions swept", extra={"num_sessions": num_swept})
            await asyncio.sleep(self._interval_s)

    async def sweep_pass(self) -> int:
        """Sweep every shard until nothing is due; return the number of sessions taken."""
        total = num_failed = 0
        for shard in range(NUM_SHARDS):
            try:
                while taken := await self._manager.sweep(shard):
                    total += taken
            except Exception as exc:
                # The other shards outlive a damaged one, and the loop outlives an outage of Redis.
                num_failed += 1
                if type(exc) not in self._told:
                    self._told.add(type(exc))
                    log.exception("sweep failed", exc_info=not isinstance(exc, ContextCacheError))
        if num_failed:
            self._metrics.sweep_failures.inc()
        else:
            self._told.clear()
            self._metrics.last_sweep.set_to_current_time()
        return total

    async def _has_claim(self) -> bool:
        try:
            return await self._manager.claim_sweep(for_ms=math.ceil(self._interval_s * 1000))
        except Exception:
            # The pass reports the error. Two sweeps are as right as one.
            log.debug("sweep leader unknown", exc_info=True)
            return True


async def count_forever(manager: ContextCacheManager, *, metrics: ManagerMetrics) -> None:
    """Set the gauge of live sessions at once and then every interval, until cancelled. Nothing depends on it."""
    while True:
        try:
            metrics.sessions.set(await manager.count_sessions())
        except Exception as exc:
            # NaN: an old number would look like a true one.
            metrics.sessions.set(math.nan)
            if not isinstance(exc, ContextCacheError):
                log.exception("sessions not counted")
        await asyncio.sleep(_COUNT_INTERVAL_S)
