"""How fast KV comes that nobody waits for: one file at a time, so many bytes a second, never beside what is waited for.

A turn that asks for it meanwhile hurries it: from then on it comes as fast as if the turn had asked first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

_BYTES_PER_S = 100_000_000
FILES_AT_ONCE = 4
"""Of a pull from the store that somebody waits for."""


class Pace:
    """Of one pull after the other. Used from one event loop."""

    def __init__(self) -> None:
        self._is_in_the_way = False
        self.begin()

    def begin(self) -> None:
        """Let the next pull be one that nobody waits for."""
        self._paced_until_s = 0.0
        self._files = asyncio.Semaphore(1)
        self._hurried = asyncio.Event()
        self._may_go = asyncio.Event()
        self._look()

    @property
    def is_hurried(self) -> bool:
        """Whether somebody waits for it by now."""
        return self._hurried.is_set()

    def hurry(self) -> None:
        """Let it come as fast as it can. Idempotent."""
        if not self.is_hurried:
            self._hurried.set()
            for _ in range(FILES_AT_ONCE - 1):
                self._files.release()
            self._look()

    def give_way(self, *, is_needed: bool) -> None:
        """Let no file begin while others come that somebody waits for."""
        self._is_in_the_way = is_needed
        self._look()

    async def may_go(self) -> None:
        """Return when nothing comes that somebody waits for, or somebody waits for this."""
        await self._may_go.wait()

    def took(self, size_bytes: int) -> None:
        """Count what came, while nobody waits for it."""
        if self.is_hurried:
            return
        self._paced_until_s = max(self._paced_until_s, _now_s()) + size_bytes / _BYTES_PER_S

    @asynccontextmanager
    async def file(self) -> AsyncGenerator[None, None]:
        """Enclose the fetch of a file, which begins when it may."""
        async with self._files:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._paced_until_s):
                    await self._hurried.wait()
            await self._may_go.wait()
            yield

    def _look(self) -> None:
        if self.is_hurried or not self._is_in_the_way:
            self._may_go.set()
        else:
            self._may_go.clear()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
