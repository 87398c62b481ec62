"""The memory tier over the disk tier: taking block files in, handing them out verified, freeing them.

Knows bytes and what they must be, not who holds them: that is the catalog's. Of every stored file it knows the
checksum, from the save that brought it or from a manifest; one it does not know may be replaced, others never are.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from contextcache.errors import CacheRefNotFound, CorruptBlock, SidecarUnavailable, StorageFull
from contextcache.model import Manifest
from kv_sidecar.format.block_file import BlockMeta, check_head, parse_block_file, parse_head
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import block_checksum, block_key, block_meta, num_files
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.tiers.disk_store import DiskStore
from kv_sidecar.tiers.eviction import Slot
from kv_sidecar.tiers.memory_store import MemoryStore, Pins
from kv_sidecar.tiers.store import Buffer, IoThreads, Room

log = logging.getLogger(__name__)

_TOGETHER_BYTES, _TOGETHER_FILES = 4 << 20, 64
"""What one thread reads in one go."""

TierName: TypeAlias = Literal["host", "disk", "peer", "object"]


@dataclass(frozen=True, slots=True)
class FetchedBlock:
    """One verified block on its way out."""

    block_index: int
    tier: TierName
    """Where it was found."""
    slot: Slot | None = None
    """Where it lies in the arena, its bytes not compared; None: take `data`."""
    data: Buffer = b""
    vouched: str = ""
    """Checksum the manifest vouches for; empty: it vouches for none."""
    is_followed: bool = False
    """Whether the next one is at hand."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A block of a manifest: where it is, and what it must be."""

    block_index: int
    expected: BlockMeta
    vouched: str


def _wanted(manifest: Manifest, block_index: int, rank: int) -> _Wanted:
    meta, vouched = block_meta(manifest, block_index, rank), block_checksum(manifest, block_index, rank)
    return _Wanted(block_index, meta, vouched)


async def _next(found: deque[FetchedBlock | asyncio.Task[FetchedBlock]]) -> FetchedBlock:
    """Take the first, once it is there."""
    first = found.popleft()
    fetched = first if isinstance(first, FetchedBlock) else await first
    return replace(fetched, is_followed=bool(found) and isinstance(found[0], FetchedBlock))


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Tiers:
    """Memory over disk. Every file on disk was verified when it came, and is again at every read."""

    def __init__(
        self,
        *,
        disk: DiskStore,
        memory: MemoryStore,
        threads: IoThreads,
        metrics: SidecarMetrics,
        prefetch_blocks: int = 1,
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
        self._taking: dict[BlockKey, asyncio.Event] = {}
        """Blocks being taken in: one writer at a time, so that the later one finds what the first has stored."""
        self._filling: dict[BlockKey, asyncio.Event] = {}
        """Blocks being read into memory: a load of them waits instead of reading them again."""
        self._brought: set[BlockKey] = set()
        """Blocks that were read into memory and not handed out since."""
        self._checksums: dict[BlockKey, str] = {}
        self._rooms: list[Room] = []
        """As many as there ever were copies at once; each as large as its largest block."""

    def is_stored(self, key: BlockKey) -> bool:
        """Return whether the block is on disk and stays there."""
        return self.stored_bytes(key) is not None

    def stored_bytes(self, key: BlockKey) -> int | None:
        """Return the size of a stored block, None when it is not stored."""
        return None if key in self._removing else self.disk.size_bytes(key)

    def checksum(self, key: BlockKey) -> str | None:
        """Return the checksum of a stored block; None when it is not stored, or nobody vouches for its bytes."""
        return self._checksums.get(key) if self.is_stored(key) else None

    def vouch(self, key: BlockKey, checksum: str) -> None:
        """Note what a manifest says of a stored block; two that differ vouch for nothing ("")."""
        if self._checksums.setdefault(key, checksum) != checksum:
            self._checksums[key] = ""

    def all_keys(self) -> list[BlockKey]:
        """Return the keys of all files of both tiers."""
        return list(dict.fromkeys([*self.disk.keys(), *self.memory.keys()]))

    async def take_slot(self, slot: Slot, expected: BlockMeta) -> int:
        """Verify a file in a slot that was handed over, copy it to disk and keep it in memory; return its bytes.

        The slot is the block's afterwards, or free. Raises CorruptBlock, StorageFull, ContextQuotaExceeded.
        """
        is_kept = False
        try:
            is_kept = await self._take(expected, self.memory.view(slot), slot)
        finally:
            if not is_kept:
                self.memory.drop(slot)
        return slot.size_bytes

    async def take_bytes(self, data: Buffer, expected: BlockMeta, *, vouched: str = "") -> int:
        """Verify a block file that came in frames and keep it; return its bytes.

        `vouched`: the checksum it must have; empty: any. Raises as `take_slot`.
        """
        await self._take(expected, data, None, vouched=vouched)
        return len(data)

    async def _take(self, expected: BlockMeta, data: Buffer, slot: Slot | None, *, vouched: str = "") -> bool:
        """Keep a file; return whether it is the one that is stored now, False when there was one already."""
        key = expected.key
        async with self._use_of(key), self._only_writer_of(key):
            if self.checksum(key):
                # Somebody else's save of the same block came first. Its bytes are vouched for; these are dropped.
                await self._threads.write(self._verified, data, expected, vouched)
                return False
            self._checksums[key] = await self._threads.write(self._store, data, slot, expected, vouched)
            return True

    async def fetch(
        self,
        manifest: Manifest,
        rank: int,
        block_indices: Sequence[int],
        *,
        in_slots: bool,
        leased: Pins | None = None,
        verify: bool = False,
    ) -> AsyncGenerator[FetchedBlock, None]:
        """Yield blocks in order, reading ahead; they stay in memory until the generator is closed.

        `leased`: where they are pinned instead, for as long as that is open.

        `in_slots`: slots are named where possible, without a look at what is in them: the engine compares heads and
        bytes of what it copies, and asks again with `verify` when they are wrong. Then every byte is compared before a
        slot is named, and a bad copy in memory is dropped.

        Raises CacheRefNotFound when a block has gone, CorruptBlock when its bytes are wrong.
        """
        pins = leased or self.memory.pins()
        served = self._in_slots if in_slots else self._in_frames
        try:
            if verify and in_slots:
                async with aclosing(self._in_frames(manifest, rank, block_indices, pins)) as compared:
                    async for _ in compared:
                        pass
            async with aclosing(served(manifest, rank, block_indices, pins)) as blocks:
                async for block in blocks:
                    yield block
        finally:
            if leased is None:
                pins.close()

    async def _in_slots(
        self, manifest: Manifest, rank: int, block_indices: Sequence[int], pins: Pins
    ) -> AsyncGenerator[FetchedBlock, None]:
        found: deque[FetchedBlock | asyncio.Task[FetchedBlock]] = deque()
        try:
            async with aclosing(self._bring(manifest, rank, block_indices)) as groups:
                async for group in groups:
                    for index in group:
                        at_hand = self._at_hand(manifest, index, rank, pins)
                        found.append(at_hand or self._begin(_wanted(manifest, index, rank), pins, in_slots=True))
                    # What there is no room for comes in frames, read while the next ones are brought.
                    while found and (isinstance(found[0], FetchedBlock) or len(found) > self._prefetch_blocks):
                        yield await _next(found)
            while found:
                yield await _next(found)
        finally:
            await _end([each for each in found if isinstance(each, asyncio.Task)])

    async def _in_frames(
        self, manifest: Manifest, rank: int, block_indices: Sequence[int], pins: Pins
    ) -> AsyncGenerator[FetchedBlock, None]:
        ahead: deque[asyncio.Task[FetchedBlock]] = deque()
        waiting = deque(block_indices)
        try:
            while waiting or ahead:
                while waiting and len(ahead) <= self._prefetch_blocks:
                    ahead.append(self._begin(_wanted(manifest, waiting.popleft(), rank), pins, in_slots=False))
                yield await ahead.popleft()
        finally:
            await _end(ahead)

    @asynccontextmanager
    async def copy(self, key: BlockKey) -> AsyncGenerator[memoryview | None, None]:
        """Lend a copy of a file of the disk whose checksum is what was vouched for; None when there is none."""
        room = self._rooms.pop() if self._rooms else Room()
        async with self._use_of(key):
            data = await self._threads.run(self._copy, key, self.checksum(key), room)
        yield data
        # Not of who fails or is cancelled: what it has begun may still read this.
        self._rooms.append(room)

    def _copy(self, key: BlockKey, vouched: str | None, room: Room) -> memoryview | None:
        try:
            if not vouched or (data := self.disk.read(key, room)) is None:
                return None
            file = parse_block_file(data)
            file.verify()
            return data if file.checksum == vouched else None
        except (CorruptBlock, SidecarUnavailable, OSError):
            return None

    async def read_ahead(self, manifest: Manifest) -> None:
        """Bring what loads of a context will ask for from disk into memory, as much as half of that holds.

        One group at a time: nobody waits for it yet, and others wait for the disk and the cores.
        """
        limit_bytes = self.memory.limit_bytes // 2
        for rank in range(manifest.world_size):
            indices = range(num_files(manifest))
            async with aclosing(self._bring(manifest, rank, indices, limit_bytes=limit_bytes)) as groups:
                async for group in groups:
                    limit_bytes -= sum(self.disk.size_bytes(block_key(manifest, index, rank)) or 0 for index in group)

    async def _bring(
        self, manifest: Manifest, rank: int, block_indices: Sequence[int], *, limit_bytes: int | None = None
    ) -> AsyncGenerator[Sequence[int], None]:
        """Yield indices in order, some at a time, once their files are in memory as far as they can be; read ahead.

        Several files a thread: each is small, and to begin a thread for it takes as long as to read it.
        """
        ahead: deque[tuple[Sequence[int], asyncio.Task[None] | None]] = deque()
        groups = self._groups(manifest, rank, block_indices, limit_bytes)
        most_ahead = self._prefetch_blocks if limit_bytes is None else 0
        try:
            while True:
                while len(ahead) <= most_ahead and (group := next(groups, None)) is not None:
                    missing = [i for i in group if self.memory.size_bytes(block_key(manifest, i, rank)) is None]
                    wanted = [_wanted(manifest, index, rank) for index in missing]
                    ahead.append((group, asyncio.create_task(self._read(wanted)) if wanted else None))
                if not ahead:
                    return
                group, task = ahead.popleft()
                if task is not None:
                    await task
                yield group
        finally:
            await _end([task for _, task in ahead if task is not None])

    def _groups(
        self, manifest: Manifest, rank: int, block_indices: Sequence[int], limit_bytes: int | None
    ) -> Iterator[Sequence[int]]:
        """Yield files that are read together: one, or some MiB of them; until there are more bytes than the limit."""
        group: list[int] = []
        size_bytes, all_bytes = 0, 0
        for index in block_indices:
            file_bytes = self.disk.size_bytes(block_key(manifest, index, rank)) or 0
            all_bytes += file_bytes
            if limit_bytes is not None and all_bytes > limit_bytes:
                break
            if group and (size_bytes + file_bytes > _TOGETHER_BYTES or len(group) >= _TOGETHER_FILES):
                yield group
                group, size_bytes = [], 0
            group.append(index)
            size_bytes += file_bytes
        if group:
            yield group

    async def _read(self, wanted: Sequence[_Wanted]) -> None:
        await self._threads.finish(self._read_group(wanted))

    async def _read_group(self, wanted: Sequence[_Wanted]) -> None:
        """Read files from disk straight into memory; those that somebody else is reading are waited for.

        Says nothing of what cannot be read: whoever asks for the file finds out.
        """
        others = [self._filling[it.expected.key] for it in wanted if it.expected.key in self._filling]
        mine = [it for it in wanted if it.expected.key not in self._filling and self.is_stored(it.expected.key)]
        over, keys = asyncio.Event(), {it.expected.key for it in mine}
        self._filling |= dict.fromkeys(keys, over)
        # Before they are read: a load that takes one from memory the moment after is to find it among these.
        self._brought |= keys
        try:
            async with AsyncExitStack() as uses:
                for it in mine:
                    await uses.enter_async_context(self._use_of(it.expected.key))
                self._brought -= keys.difference(await self._threads.run(self._read_files, mine))
        finally:
            over.set()
            for key in keys:
                self._filling.pop(key, None)
        for other in others:
            await other.wait()

    def _read_files(self, wanted: Sequence[_Wanted]) -> list[BlockKey]:
        """Read files into slots until one cannot be; return those that were. Runs in a thread."""
        brought = []
        with suppress(CorruptBlock, SidecarUnavailable, OSError):
            for it in wanted:
                if not self._read_into_slot(it):
                    break
                brought.append(it.expected.key)
        return brought

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
            freed_bytes = await self._threads.write(self._remove, doomed)
        finally:
            self._brought.difference_update(doomed)
            for key in doomed:
                self._checksums.pop(key, None)
                del self._removing[key]
            gone.set()
        self._metrics.freed_bytes.inc(freed_bytes)
        return freed_bytes

    async def put_aside(self, key: BlockKey) -> None:
        """Quarantine a block whose bytes are wrong. Raises OSError when it cannot be moved."""
        self._checksums.pop(key, None)
        await self._threads.write(self._put_aside, key)
        log.warning("block in quarantine", extra={"block": key.file_name})

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

    @asynccontextmanager
    async def _only_writer_of(self, key: BlockKey) -> AsyncGenerator[None, None]:
        while (taking := self._taking.get(key)) is not None:
            await taking.wait()
        over = self._taking[key] = asyncio.Event()
        try:
            yield
        finally:
            del self._taking[key]
            over.set()

    def _at_hand(self, manifest: Manifest, block_index: int, rank: int, pins: Pins) -> FetchedBlock | None:
        """Pin a block that is in memory; None: it is not, or it is stored no more."""
        key = block_key(manifest, block_index, rank)
        slot = pins.take(key) if self.is_stored(key) else None
        if slot is None:
            return None
        # What was read for this load, or ahead of it, comes from the disk.
        tier: TierName = "disk" if key in self._brought else "host"
        self._brought.discard(key)
        self._metrics.hits.labels(tier).inc()
        return FetchedBlock(block_index, tier, slot=slot, vouched=block_checksum(manifest, block_index, rank))

    def _begin(self, wanted: _Wanted, pins: Pins, *, in_slots: bool) -> asyncio.Task[FetchedBlock]:
        return asyncio.create_task(self._fetch(wanted, pins, in_slots=in_slots))

    async def _fetch(self, wanted: _Wanted, pins: Pins, *, in_slots: bool) -> FetchedBlock:
        """Read one block to the end, whoever still waits: what lands in memory must be looked at again afterwards."""
        return await self._threads.finish(self._read_checked(wanted, pins, in_slots=in_slots))

    async def _read_checked(self, wanted: _Wanted, pins: Pins, *, in_slots: bool) -> FetchedBlock:
        key = wanted.expected.key
        self._brought.discard(key)
        if not self.is_stored(key):
            raise CacheRefNotFound("a block of this cache_ref is missing")
        # As a write: what is freed meanwhile is freed after this, with what this puts into memory.
        async with self._use_of(key):
            try:
                fetched = await self._threads.run(self._read_one, wanted, pins, in_slots=in_slots)
            except OSError as exc:
                raise SidecarUnavailable("the disk cannot be read") from exc
            if not self.is_stored(key):
                raise CacheRefNotFound("a block of this cache_ref is missing")
        self._metrics.hits.labels(fetched.tier).inc()
        return replace(fetched, vouched=wanted.vouched)

    def _read_one(self, wanted: _Wanted, pins: Pins, *, in_slots: bool) -> FetchedBlock:
        """Serve one block from memory, or from disk by way of memory. Runs in a thread."""
        key = wanted.expected.key
        if in_slots:
            if self._read_into_slot(wanted) and (slot := pins.take(key)) is not None:
                return FetchedBlock(wanted.block_index, "disk", slot=slot)
        elif (slot := pins.take(key)) is not None and (kept := self._read_memory(wanted, slot)) is not None:
            return kept
        return self._read_disk(wanted)

    def _read_memory(self, wanted: _Wanted, slot: Slot) -> FetchedBlock | None:
        """Serve a block from memory in frames. None when its copy there is bad: that goes, and the disk's serves.

        It is compared here, or a bad copy would be served again at every load and pull.
        """
        with self._metrics.io("read", "host") as count_bytes:
            data = bytes(self.memory.view(slot))
            count_bytes(len(data))
            try:
                parse_block_file(data).verify(wanted.expected, vouched=wanted.vouched)
            except CorruptBlock:
                self._metrics.bad_copies.inc()
                log.warning("damaged copy in memory dropped", extra={"block": wanted.expected.key.file_name})
                self.memory.delete(wanted.expected.key)
                return None
        return FetchedBlock(wanted.block_index, "host", data=data)

    def _read_into_slot(self, wanted: _Wanted) -> bool:
        """Read a block from disk straight into memory, by the word of its head; False when there is no room for it.

        Raises CorruptBlock, SidecarUnavailable.
        """
        key = wanted.expected.key
        size_bytes = self.disk.size_bytes(key) or 0
        try:
            with self.memory.filling(key, size_bytes) as room, self._metrics.io("read", "disk") as count_bytes:
                self.disk.read_into(key, room)
                count_bytes(size_bytes)
                check_head(*parse_head(room), wanted.expected, vouched=wanted.vouched)
        except (StorageFull, FileNotFoundError):
            return False  # the slower way looks again, and says what is wrong
        return True

    def _read_disk(self, wanted: _Wanted) -> FetchedBlock:
        """Serve a block from disk, every byte compared, and keep it in memory when there is room."""
        key = wanted.expected.key
        with self._metrics.io("read", "disk") as count_bytes:
            data = self.disk.read(key)
            count_bytes(len(data or b""))
        if data is None:
            raise CacheRefNotFound("a block of this cache_ref is missing")
        self._verified(data, wanted.expected, wanted.vouched, tier="disk")
        self._keep_in_memory(key, data)
        return FetchedBlock(wanted.block_index, "disk", data=bytes(data))

    def _store(self, data: Buffer, slot: Slot | None, expected: BlockMeta, vouched: str) -> str:
        checksum = self._verified(data, expected, vouched)
        with self._metrics.io("write", "disk") as count_bytes:
            self.disk.put(expected.key, data, tenant=expected.tenant)
            count_bytes(len(data))
        if slot is None:
            self._keep_in_memory(expected.key, data)
        else:
            self.memory.keep(expected.key, slot)
        return checksum

    def _verified(self, data: Buffer, expected: BlockMeta, vouched: str, *, tier: str = "host") -> str:
        """Compare every byte of a file; return its checksum. Raises CorruptBlock."""
        with self._metrics.io("check", tier) as count_bytes:
            file = parse_block_file(data)
            file.verify(expected, vouched=vouched)
            count_bytes(len(data))
        return file.checksum

    def _keep_in_memory(self, key: BlockKey, data: Buffer) -> None:
        try:
            with self._metrics.io("write", "host") as count_bytes:
                self.memory.put(key, data)
                count_bytes(len(data))
        except StorageFull:
            # It is on disk; memory is only faster.
            log.debug("block not admitted to memory", extra={"block": key.file_name})

    def _remove(self, keys: list[BlockKey]) -> int:
        freed_bytes = 0
        for key in keys:
            try:
                self.memory.delete(key)
                freed_bytes += self.disk.delete(key)
            except OSError:
                # It stays counted, and the collector's next pass tries again.
                log.warning("block not removed", extra={"block": key.file_name}, exc_info=True)
        return freed_bytes

    def _put_aside(self, key: BlockKey) -> None:
        self.memory.delete(key)
        self.disk.put_aside(key)
