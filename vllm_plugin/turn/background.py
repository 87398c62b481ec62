"""Work beside an answer: bounded, with a deadline, owned."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from contextcache.errors import ContextCacheError

log = logging.getLogger(__name__)


class Background:
    """Runs small calls that outlive whoever began them. What does not fit or fails is logged: leases and KV expire."""

    def __init__(self, *, limit: int, deadline_s: float) -> None:
        """Run at most `limit` calls at once, each for at most `deadline_s`."""
        self._limit = limit
        self._deadline_s = deadline_s
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, call: Coroutine[Any, Any, object]) -> asyncio.Task[None] | None:
        """Run `call` and return its task, which raises nothing; None: there are too many already."""
        if len(self._tasks) >= self._limit:
            call.close()
            log.warning("background call dropped")
            return None
        task = asyncio.create_task(self._bounded(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, call: Coroutine[Any, Any, object], *, within_s: float | None = None) -> None:
        """Run `call` and wait for it, for `within_s` at most; it goes on when the caller is cancelled or goes on."""
        task = self.start(call)
        if task is not None:
            await asyncio.wait([task], timeout=within_s)

    async def drain(self) -> None:
        """Wait for everything that runs now."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """Let everything end within its deadline."""
        await self.drain()

    async def _bounded(self, call: Coroutine[Any, Any, object]) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await call
        except (ContextCacheError, TimeoutError) as exc:
            log.warning("background call failed", extra={"reason": type(exc).__name__})
