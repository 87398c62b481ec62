"""`StoreClock`: the one clock of all managers is Redis's (ADR 0021). Owns the task that reads it.

Leases and lives are compared with `now_ms` of whichever manager is asked. If each took its machine's clock, one that is
an hour ahead would give away leases that live and bury sessions an hour early. So a manager counts from the last times
that Redis told, on a clock that nobody sets; what its own machine believes the time to be plays no part.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from typing_extensions import override

from context_manager import refusals
from context_manager.metrics import ManagerMetrics
from contextcache.clock import Clock, SystemClock
from contextcache.errors import ContextCacheError, StoreUnavailable

log = logging.getLogger(__name__)

_INTERVAL_S = 5.0
"""Two machines' quartzes drift apart by far less than a ms in it."""
_UNKNOWN_INTERVAL_S = 0.2
_REFUSED_INTERVAL_S = 300.0
"""Where Redis keeps its time to itself: each question is an error in the log, until the ACL is right."""
_SKEW_TOLD_MS = 1000
"""From here on the machine's clock is called wrong in the log."""


def uptime_s() -> float:
    """Return a clock that nobody sets, and that goes on while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class StoreClock(Clock):
    """Redis's time. `start` begins to follow it, `stop` ends that; both reading and asking are safe before."""

    def __init__(
        self,
        read_ms: Callable[[], Awaitable[int]],
        *,
        metrics: ManagerMetrics,
        wall: Clock | None = None,
        uptime_s: Callable[[], float] = uptime_s,
    ) -> None:
        """`read_ms` asks the store; `wall` is the machine's own clock, used alone where the store may not be asked."""
        self._read_ms = read_ms
        self._metrics = metrics
        self._wall = wall or SystemClock()
        self._uptime_s = uptime_s
        self._offset_ms: float | None = None
        """Redis's time less the uptime."""
        self._told_skew = False
        self._own = False
        """True: Redis does not let us read its clock, and never told it."""
        self._task: asyncio.Task[None] | None = None

    @override
    def now_ms(self) -> int:
        """Return Redis's time. Raises StoreUnavailable until it was read once: a wrong one would end others' leases."""
        if self._own:
            return self._wall.now_ms()
        if self._offset_ms is None:
            raise refusals.unavailable()
        return round(self._uptime_s() * 1000 + self._offset_ms)

    async def measure(self) -> None:
        """Read the clock once. Silent when Redis does not answer: the last offset goes on."""
        sent_ms = self._uptime_s() * 1000
        try:
            told_ms = await self._read_ms()
        except StoreUnavailable:
            return
        except ContextCacheError:
            self._do_without()
            return
        self._own = False
        self._take(told_ms, sent_ms=sent_ms, got_ms=self._uptime_s() * 1000)

    def start(self) -> None:
        """Begin to follow Redis's clock."""
        assert self._task is None, "a clock is started once"
        self._task = asyncio.create_task(self._follow(), name="store-clock")

    async def stop(self) -> None:
        """End the task and wait for its end; harmless when it never began."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _do_without(self) -> None:
        """Go on where Redis refuses: with what it told before, else with this machine's clock (ADR 0021).

        Mostly an ACL of before this release. It is asked on: a manager that kept its own clock for good would differ
        from those that start once the ACL is right.
        """
        if self._offset_ms is None and not self._own:
            self._own = True
            log.warning("redis clock unreadable, this machine's clock counts: the ACL user needs +time")

    def _take(self, told_ms: int, *, sent_ms: float, got_ms: float) -> None:
        # The time was told somewhen between question and answer. An offset that agrees with that is left as it is: a
        # slow answer knows less than the fast ones before.
        least, most = told_ms - got_ms, told_ms + 1 - sent_ms
        before = self._offset_ms
        self._offset_ms = (least + most) / 2 if before is None else min(max(before, least), most)
        if before is not None and abs(self._offset_ms - before) >= _SKEW_TOLD_MS:
            log.warning("redis' clock jumped", extra={"jump_ms": round(self._offset_ms - before)})
        skew_ms = self._wall.now_ms() - self.now_ms()
        self._metrics.clock_skew.set(skew_ms / 1000)
        is_wrong = abs(skew_ms) >= _SKEW_TOLD_MS
        if is_wrong and not self._told_skew:
            log.warning("this machine's clock differs from redis' clock, which counts", extra={"skew_ms": skew_ms})
        self._told_skew = is_wrong

    async def _follow(self) -> None:
        while True:
            try:
                await self.measure()
            except Exception:
                # Without this loop the clock would drift for good.
                log.exception("redis clock check failed by an internal fault")
            await asyncio.sleep(self._interval_s())

    def _interval_s(self) -> float:
        if self._own:
            return _REFUSED_INTERVAL_S
        return _UNKNOWN_INTERVAL_S if self._offset_ms is None else _INTERVAL_S
