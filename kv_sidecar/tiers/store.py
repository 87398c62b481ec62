"""Bounds and threads that the tiers share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from typing_extensions import TypeVarTuple, Unpack

log = logging.getLogger(__name__)

BLOCK_BYTES_MAX = 256 << 20
"""Bytes of one block file: 256 tokens of 1 MiB. It bounds the memory of one frame stream."""
Buffer: TypeAlias = bytes | bytearray | memoryview

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class IoThreads:
    """Disk reads, hashing and fsync, off the event loop. Queued work is bounded by the calls a server admits.

    Writes have their own threads: a slow disk delays saves, not loads.
    """

    def __init__(self, num_threads: int) -> None:
        """As many threads to read with, and as many to write with."""
        self._readers = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-read")
        self._writers = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-write")
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Callable[[Unpack[Arguments]], Result], *args: *Arguments) -> Result:
        """Run `work` in a thread. A cancelled caller stops waiting: begun work goes on, queued work is dropped."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, *args)

    async def write(self, work: Callable[[Unpack[Arguments]], Result], *args: *Arguments) -> Result:
        """As `run`, for work that changes the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._writers, work, *args)

    async def finish(self, steps: Coroutine[Any, Any, Result]) -> Result:
        """Run `steps` to their end even if the caller is cancelled: memory and disk then still say the same."""
        return await asyncio.shield(self.begin(steps))

    def begin(self, steps: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run `steps` to their end; `close` waits for them."""
        task = asyncio.create_task(steps)
        self._tasks.add(task)
        task.add_done_callback(self._settle)
        return task

    async def close(self) -> None:
        """Wait for all steps, then end the threads."""
        await self.idle()
        await asyncio.to_thread(self._readers.shutdown)
        await asyncio.to_thread(self._writers.shutdown)

    async def idle(self) -> None:
        """Wait until everything that `finish` began has ended."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _settle(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # A caller that still waits gets it too; this line is for callers that were cancelled.
            log.debug("background step failed", exc_info=task.exception())
