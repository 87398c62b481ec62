"""The memory tier over the disk tier: taking block files in, handing them out verified, freeing them.

Knows bytes and what they must be, not who holds them: that is the catalog's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from contextcache.errors import CacheRefNotFound, CorruptBlock, SidecarUnavailable, StorageFull
from contextcache.model import Manifest
from kv_sidecar.block_file import BlockFile, BlockMeta, open_block_file, parse_block_file
from kv_sidecar.block_key import BlockKey
from kv_sidecar.disk_store import DiskStore
from kv_sidecar.io_threads import IoThreads
from kv_sidecar.manifest import block_meta
from kv_sidecar.memory_store import MemoryStore, Pins
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.store import Buffer

log = logging.getLogger(__name__)

TierName: TypeAlias = Literal["host", "disk", "peer"]


@dataclass(frozen=True, slots=True)
class FetchedBlock:
    """One verified block on its way out."""

    block_index: int
    tier: TierName
    """Where it was found."""
    shared_name: str = ""
    """Its path relative to the shared directory; with neither name: take `data`."""
    disk_name: str = ""
    """Its path relative to the data directory, for an engine that reads it there."""
    data: Buffer = b""


class Tiers:
    """Memory over disk. Every file on disk was verified when it came, and is again at every read."""

    def __init__(
        self, *, disk: DiskStore, memory: MemoryStore, threads: IoThreads, metrics: SidecarMetrics, prefetch_blocks: int
    ) -> None:
        """`prefetch_blocks`: how many blocks are read ahead of the one being copied by the engine."""
        self.disk = disk
        self.memory = memory
        self._threads = threads
        self._metrics = metrics
        self._prefetch_blocks = prefetch_blocks
        self._removing: dict[BlockKey, asyncio.Event] = {}
        """Blocks being freed: no longer stored, and not yet to be written again."""
        self._in_use: dict[BlockKey, set[asyncio.Event]] = {}
        """Blocks being written or read: not to be freed before that is over, or what it leaves would stay."""

    def is_stored(self, key: BlockKey) -> bool:
        """Return whether the block is on disk and stays there."""
        return self.stored_bytes(key) is not None

    def stored_bytes(self, key: BlockKey) -> int | None:
        """Return the size of a stored block, None when it is not stored."""
        return None if key in self._removing else self.disk.size_bytes(key)

    def all_keys(self) -> list[BlockKey]:
        """Return the keys of all files of both tiers."""
        return list(dict.fromkeys([*self.disk.keys(), *self.memory.keys()]))

    async def take_file(self, path: Path, expected: BlockMeta) -> int:
        """Verify a file in the shared directory, copy it to disk and move it into memory; return its bytes.

        The file is gone afterwards, whatever happens. Raises CorruptBlock, StorageFull.
        """
        async with self._use_of(expected.key):
            return await self._threads.run(self._take_file, path, expected)

    async def take_bytes(self, data: Buffer, expected: BlockMeta) -> int:
        """Verify a block file that came in frames and keep it; return its bytes. Raises CorruptBlock, StorageFull."""
        async with self._use_of(expected.key):
            return await self._threads.run(self._take, lambda: parse_block_file(data), None, expected)

    async def fetch(
        self, manifest: Manifest, rank: int, block_indices: Sequence[int], *, shared: bool, disk_files: bool = False
    ) -> AsyncGenerator[FetchedBlock, None]:
        """Yield blocks in order, reading ahead; they stay in memory until the generator is closed.

        `disk_files`: what is only on disk is verified and named there, not copied into memory: the operating system's
        page cache has it already, and fresh pages cost more than reading them.

        Raises CacheRefNotFound when a block has gone, CorruptBlock when its bytes are wrong.
        """
        pins = self.memory.pins()
        ahead: list[asyncio.Task[FetchedBlock]] = []
        waiting = list(reversed(block_indices))
        try:
            while waiting or ahead:
                while waiting and len(ahead) <= self._prefetch_blocks:
                    index = waiting.pop()
                    expected = block_meta(manifest, index, rank)
                    ahead.append(
                        asyncio.create_task(self._fetch(index, expected, pins, shared=shared, disk_files=disk_files))
                    )
                yield await ahead.pop(0)
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)
            pins.close()

    async def free(self, keys: Iterable[BlockKey], *, wanted: Callable[[BlockKey], bool]) -> int:
        """Remove from both tiers every block that is not `wanted`; return the bytes freed on disk.

        What is still being written, or removed by another call, is gone too when this returns.
        """
        keys = list(dict.fromkeys(keys))
        leaving = {self._removing[key] for key in keys if key in self._removing}
        doomed = [key for key in keys if key not in self._removing and not wanted(key)]
        freed_bytes = await self._free(doomed) if doomed else 0
        for gone in leaving:
            await gone.wait()
        return freed_bytes

    async def _free(self, doomed: list[BlockKey]) -> int:
        gone = asyncio.Event()
        self._removing |= dict.fromkeys(doomed, gone)
        try:
            for over in [event for key in doomed for event in self._in_use.get(key, ())]:
                await over.wait()
            freed_bytes = await self._threads.run(self._remove, doomed)
        finally:
            for key in doomed:
                del self._removing[key]
            gone.set()
        self._metrics.freed_bytes.inc(freed_bytes)
        return freed_bytes

    async def put_aside(self, key: BlockKey) -> None:
        """Quarantine a block whose bytes are wrong."""
        await self._threads.run(self._put_aside, key)
        self._metrics.quarantined.inc()
        log.warning("block put aside", extra={"block": key.file_name})

    @asynccontextmanager
    async def _use_of(self, key: BlockKey) -> AsyncGenerator[None, None]:
        while (removing := self._removing.get(key)) is not None:
            await removing.wait()
        over = asyncio.Event()
        uses = self._in_use.setdefault(key, set())
        uses.add(over)
        try:
            yield
        finally:
            uses.discard(over)
            if not uses:
                del self._in_use[key]
            over.set()

    async def _fetch(
        self, block_index: int, expected: BlockMeta, pins: Pins, *, shared: bool, disk_files: bool
    ) -> FetchedBlock:
        """Read one block to the end, whoever still waits: what lands in memory must be looked at again afterwards."""
        reading = self._read_checked(block_index, expected, pins, shared=shared, disk_files=disk_files)
        return await self._threads.finish(reading)

    async def _read_checked(
        self, block_index: int, expected: BlockMeta, pins: Pins, *, shared: bool, disk_files: bool
    ) -> FetchedBlock:
        if not self.is_stored(expected.key):
            raise CacheRefNotFound("a block of this cache_ref is gone")
        # As a write: what is freed meanwhile is freed after this, with what this puts into memory.
        async with self._use_of(expected.key):
            try:
                fetched = await self._threads.run(
                    self._read, block_index, expected, pins, shared=shared, disk_files=disk_files
                )
            except OSError as exc:
                raise SidecarUnavailable("the disk cannot be read") from exc
            if not self.is_stored(expected.key):
                raise CacheRefNotFound("a block of this cache_ref is gone")
        self._metrics.hits.labels(fetched.tier).inc()
        return fetched

    def _read(
        self, block_index: int, expected: BlockMeta, pins: Pins, *, shared: bool, disk_files: bool
    ) -> FetchedBlock:
        """Serve one block from memory, or from disk by way of memory. Runs in a thread."""
        key = expected.key
        by_name = shared and self.memory.shared_directory is not None
        if pins.take(key):
            if by_name:
                return FetchedBlock(block_index, "host", shared_name=self.memory.shared_name(key))
            with self._metrics.io("read", "host") as count_bytes:
                kept = self.memory.read(key)
                count_bytes(len(kept or b""))
            if kept is not None:
                return FetchedBlock(block_index, "host", data=kept)
        with self._metrics.io("read", "disk") as count_bytes:
            data = self.disk.read(key)
            count_bytes(len(data or b""))
        if data is None:
            raise CacheRefNotFound("a block of this cache_ref is gone")
        with self._metrics.io("check", "disk") as count_bytes:
            parse_block_file(data).verify(expected)
            count_bytes(len(data))
        if disk_files:
            return FetchedBlock(block_index, "disk", disk_name=self.disk.relative_name(key))
        try:
            with self._metrics.io("write", "host") as count_bytes:
                self.memory.put(key, data)
                count_bytes(len(data))
        except StorageFull:
            return FetchedBlock(block_index, "disk", data=bytes(data))
        if by_name and pins.take(key):
            return FetchedBlock(block_index, "disk", shared_name=self.memory.shared_name(key))
        return FetchedBlock(block_index, "disk", data=bytes(data))

    def _take_file(self, path: Path, expected: BlockMeta) -> int:
        try:
            return self._take(lambda: open_block_file(path), path, expected)
        except FileNotFoundError as exc:
            raise CorruptBlock("there is no such file in the shared directory") from exc
        finally:
            path.unlink(missing_ok=True)

    def _take(self, open_file: Callable[[], BlockFile], path: Path | None, expected: BlockMeta) -> int:
        file = open_file()
        try:
            with self._metrics.io("check", "host") as count_bytes:
                file.verify(expected)
                count_bytes(file.size_bytes)
            with self._metrics.io("write", "disk") as count_bytes:
                self.disk.put(expected.key, file.data, tenant=expected.tenant)
                count_bytes(file.size_bytes)
            self._keep_in_memory(expected.key, file, path)
            return file.size_bytes
        finally:
            file.close()

    def _keep_in_memory(self, key: BlockKey, file: BlockFile, path: Path | None) -> None:
        try:
            if path is None:
                self.memory.put(key, file.data)
            else:
                self.memory.adopt(key, path)
        except StorageFull:
            # It is on disk; memory is only faster.
            log.debug("block not admitted to memory", extra={"block": key.file_name})

    def _remove(self, keys: list[BlockKey]) -> int:
        freed_bytes = 0
        for key in keys:
            self.memory.delete(key)
            freed_bytes += self.disk.delete(key)
        return freed_bytes

    def _put_aside(self, key: BlockKey) -> None:
        self.memory.delete(key)
        self.disk.put_aside(key)
