"""Waiting, bounded, for something to be announced under a name: a seal, a load report. asyncio, one event loop."""

from __future__ import annotations

import asyncio


class Announcements:
    """Waiters by name. Past `max_waiters` nobody waits: the answer is then "not yet" at once."""

    def __init__(self, *, max_waiters: int) -> None:
        self._max_waiters = max_waiters
        self._num_waiters = 0
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}

    def announce(self, name: str) -> None:
        """Wake everyone who waits for the name now."""
        for waiter in self._waiters.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, name: str, *, timeout_s: float) -> bool:
        """Return True once the name is announced, False after `timeout_s` or when too many wait already."""
        if timeout_s <= 0 or self._num_waiters >= self._max_waiters:
            return False
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(name, set()).add(waiter)
        self._num_waiters += 1
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._num_waiters -= 1
            self._leave(name, waiter)
        return True

    def _leave(self, name: str, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiters.get(name)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[name]
