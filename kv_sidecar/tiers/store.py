"""What a tier of block files must do. The two shipped ones (memory, disk) pass the same tests; bytes only, no meaning.

Rules for every implementation:
- Calls block and may come from several threads at once.
- `put` is atomic: a reader sees the whole file or none, also after a crash. It is idempotent; a second file under
  the same key replaces the first, which those who read it still see whole.
- `delete` is idempotent and frees the bytes before it returns.
- The limit holds at every moment, also while a file is being written.
- StorageFull is permanent for the file at hand: trying again without freeing anything fails again. OSError is a fault
  of the device and may pass.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

from kv_sidecar.format.ids import BlockKey

log = logging.getLogger(__name__)

BLOCK_BYTES_MAX = 256 << 20
"""Bytes of one block file: 256 tokens of 1 MiB. It bounds the memory of one frame stream."""
Buffer: TypeAlias = bytes | bytearray | memoryview


class Room:
    """Memory for one file at a time: faulted in once, not at every read."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def of(self, size_bytes: int) -> memoryview:
        """Return so many bytes, which may have those of before; they are the next caller's too."""
        if len(self._buffer) < size_bytes:
            self._buffer = bytearray(size_bytes)
        return memoryview(self._buffer)[:size_bytes]


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is."""

    num_blocks: int
    size_bytes: int
    limit_bytes: int
    """0: no limit."""


class BlockStore(Protocol):
    """One tier of block files."""

    def put(self, key: BlockKey, data: Buffer) -> None:
        """Keep a whole block file. Raises StorageFull, and then nothing has changed but that others may have left."""
        ...

    def read(self, key: BlockKey) -> memoryview | None:
        """Return the bytes as they were put, unverified, or None. Valid until the same thread's next `read`."""
        ...

    def delete(self, key: BlockKey) -> int:
        """Remove a file; return the bytes freed, 0 when there was none."""
        ...

    def size_bytes(self, key: BlockKey) -> int | None:
        """Return a file's size, or None when there is none. Does not touch the device."""
        ...

    def keys(self) -> list[BlockKey]:
        """Return the keys of all files."""
        ...

    def usage(self) -> TierUsage:
        """Return how full the tier is."""
        ...


Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class IoThreads:
    """Disk reads, hashing and fsync, off the event loop. Queued work is bounded by the calls a server admits.

    What is written has threads of its own: a disk that takes its time holds up saves, not loads.
    """

    def __init__(self, num_threads: int) -> None:
        """As many threads to read with, and as many to write with."""
        self._readers = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-read")
        self._writers = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-write")
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Run `work` in a thread. A cancelled caller stops waiting: begun work goes on, queued work is dropped."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, lambda: work(*args, **kwargs))

    async def write(
        self, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """As `run`, for what changes the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._writers, lambda: work(*args, **kwargs))

    async def finish(self, steps: Coroutine[Any, Any, Result]) -> Result:
        """Run `steps` to their end even if the caller is cancelled: memory and disk then still say the same."""
        task = asyncio.create_task(steps)
        self._tasks.add(task)
        task.add_done_callback(self._settle)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for what was begun, then end the threads."""
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
            # Whoever still waits gets it too; this line is for those who left.
            log.debug("background step failed", exc_info=task.exception())
