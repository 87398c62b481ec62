"""The memory tier over the disk tier: takes block files in, hands them out verified, frees them.

Knows bytes and their expected head; references are in `kv_sidecar/blocks.py`. A stored file whose checksum is unknown
may be replaced, every other file stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import Any, Literal, TypeAlias

from contextcache.errors import CacheRefNotFound, CorruptBlock, SidecarUnavailable, StorageFull
from contextcache.model import Manifest
from kv_sidecar.blocks import Block, Blocks
from kv_sidecar.format.block_file import BlockMeta, check_head, parse_block_file, parse_head
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import block_key, block_meta, num_files
from kv_sidecar.runtime import Runtime
from kv_sidecar.tiers.disk import Disk
from kv_sidecar.tiers.memory import Memory, Slot
from kv_sidecar.tiers.store import Buffer

log = logging.getLogger(__name__)

_TOGETHER_BYTES, _TOGETHER_FILES = 4 << 20, 64
"""Bytes and files that one thread reads in one go."""
_READS_AHEAD = 16
"""Files that the disk reads at the same time: fewer do not fill the queue of an NVMe drive."""
_GROUPS_AHEAD = 1
"""Groups read ahead of the group that the engine copies."""
_WAITING_MAX = 64
"""Loads that wait for room at once, a quarter of all calls: two for each of 32 ranks."""
_MISSING = "a block of this cache_ref is missing"

Inodes: TypeAlias = tuple[int, int] | None
"""Free inodes and all inodes of the filesystem; None: unknown."""
TierName: TypeAlias = Literal["host", "disk", "peer", "object"]


class DamagedBlock(CorruptBlock):
    """A stored block with wrong bytes."""

    key: BlockKey


@dataclass(frozen=True, slots=True)
class FetchedBlock:
    """One block on its way out."""

    block_index: int
    tier: TierName
    """Where it was found."""
    vouched: str
    """Checksum the manifest vouches for; empty: it vouches for none."""
    slot: Slot | None = None
    """Slot in the arena, its bytes not compared unless asked for; None: take `data`."""
    data: Buffer = b""


@dataclass(frozen=True, slots=True)
class WantedBlock:
    """A block of a manifest: its position, its expected head and checksum."""

    key: BlockKey
    manifest: Manifest
    block_index: int
    vouched: str

    @property
    def expected(self) -> BlockMeta:
        """Head that its file must have."""
        return block_meta(self.manifest, self.block_index, self.key.rank)


def _wanted(manifest: Manifest, rank: int, block_indices: Iterable[int]) -> list[WantedBlock]:
    first, vouched = rank * num_files(manifest), manifest.block_checksums
    return [
        WantedBlock(block_key(manifest, index, rank), manifest, index, vouched[first + index] if vouched else "")
        for index in block_indices
    ]


@dataclass(slots=True, eq=False)
class _Incoming:
    """A file on its way in."""

    key: BlockKey
    expected: BlockMeta
    data: Buffer
    slot: Slot | None = None
    """The slot that becomes the block's copy in memory, until it is the block's."""
    is_in_slot: bool = False
    """Whether `data` is in the slot; else it came in frames."""
    vouched: str = ""
    is_new: bool = False
    """Whether no file of the block is stored yet."""
    checksum: str = ""
    """Set once it is on disk."""
    disk_bytes: int | None = None
    """Size of the block's file after the attempt; None: there is none."""


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Tiers:
    """Memory over disk. Every file on disk was verified when it came, and is again at every read."""

    def __init__(self, *, blocks: Blocks, disk: Disk, memory: Memory, runtime: Runtime) -> None:
        self.blocks = blocks
        self.disk = disk
        self.memory = memory
        self._threads = runtime.threads
        self._metrics = runtime.metrics
        self._clock = runtime.clock
        self._num_waiting = 0
        """Loads that wait for room."""

    async def take_slots(self, files: Sequence[tuple[Slot, BlockMeta]], room: Awaitable[None]) -> int:
        """Verify files in slots that were handed over, copy them to disk and keep them in memory; return their bytes.

        A slot is its block's afterwards, or free. `room`: awaited first, evicts for them. Raises its errors, and
        CorruptBlock, StorageFull, ContextQuotaExceeded, OSError for the first file that cannot be kept; the files after
        it are not written.
        """
        view = self.memory.view
        await self._take([_Incoming(expected.key, expected, view(slot), slot, True) for slot, expected in files], room)
        return sum(slot.size_bytes for slot, _ in files)

    async def take_bytes(self, data: Buffer, expected: BlockMeta, room: Awaitable[None], *, vouched: str = "") -> int:
        """Verify a block file that came in frames and keep it; return its bytes.

        `vouched`: the checksum it must have; empty: any. Raises as `take_slots`.
        """
        await self._take([_Incoming(expected.key, expected, data, vouched=vouched)], room)
        return len(data)

    async def _take(self, files: Sequence[_Incoming], room: Awaitable[None]) -> None:
        """Take files together, except those with a step of another call: they are taken when it has ended."""
        left = files
        try:
            await room
            while left:
                ready = {it.key: it for it in left if self.blocks.get(it.key).over is None}
                if ready:
                    await self._take_ready(list(ready.values()))
                else:
                    await self.blocks.settled(left[0].key)
                left = [it for it in left if ready.get(it.key) is not it]
        finally:
            for it in files:
                if it.slot is not None:
                    self.memory.free(it.slot)

    async def _take_ready(self, files: Sequence[_Incoming]) -> None:
        # The file of another save of the same block stays: its bytes are vouched for. The new file is dropped.
        found = [(it, self.blocks.get(it.key)) for it in files]
        new = [(it, block) for it, block in found if not block.vouched]
        tenant, size_bytes = files[0].expected.tenant, sum([len(it.data) for it, _ in new])
        with self.blocks.reserved(tenant, size_bytes), self.blocks.step("write", *[block for _, block in new]):
            for it, block in new:
                it.is_new, it.disk_bytes = True, block.disk_bytes
                it.slot = it.slot or self.memory.allocate(len(it.data))
            error, self.blocks.inodes = await self._threads.write(self._store, files)
            for it, block in new:
                self.blocks.found(block, it.disk_bytes, tenant=tenant if it.checksum else None)
                if it.checksum:
                    block.checksum = it.checksum
                    if it.slot is not None:
                        self.blocks.keep_copy(block, it.slot)
                    it.slot = None
        if error is not None:
            raise error

    async def fetch(
        self,
        manifest: Manifest,
        rank: int,
        block_indices: Sequence[int],
        *,
        in_slots: bool,
        verify: bool = False,
        room_wait_s: float = 0,
    ) -> AsyncGenerator[Sequence[FetchedBlock], None]:
        """Yield blocks, some at a time: with `in_slots` all that are in memory at once, then the others as they come.

        `in_slots`: slots are named without a look at their bytes: the engine compares the bytes that it copied, and
        asks with `verify` when they are wrong. The caller holds the blocks, or a slot may be evicted meanwhile.
        `room_wait_s`: longest wait for a slot of the first block. Later blocks wait for none, because this call's
        own slots may have taken the room.

        Raises CacheRefNotFound when a block has gone, DamagedBlock when its bytes are wrong, StorageFull when the
        memory tier has no room for a slot.
        """
        wanted = _wanted(manifest, rank, block_indices)
        if in_slots and not verify:
            async with aclosing(self._bring(wanted)) as groups:
                async for group in groups:
                    found = [(it, self._at_hand(it)) for it in group]
                    if at_hand := [fetched for _, fetched in found if fetched is not None]:
                        room_wait_s = 0
                        yield self._counted(at_hand)
                    for it in [it for it, fetched in found if fetched is None]:
                        yield self._counted([await self._look_patiently(it, room_wait_s, in_slots=True)])
                        room_wait_s = 0
            return
        waiting, ahead = deque(wanted), deque[asyncio.Task[FetchedBlock]]()
        try:
            while waiting or ahead:
                while waiting and len(ahead) <= _GROUPS_AHEAD:
                    look = self._look_patiently(waiting.popleft(), room_wait_s, in_slots=in_slots)
                    ahead.append(asyncio.create_task(look))
                    room_wait_s = 0
                yield self._counted([await ahead.popleft()])
        finally:
            await _end(ahead)

    async def _look_patiently(self, it: WantedBlock, room_wait_s: float, *, in_slots: bool) -> FetchedBlock:
        """Serve one block; wait for a slot unless many loads wait already. Raises as `fetch`."""
        ends_s = asyncio.get_running_loop().time() + room_wait_s
        while True:
            room = self.memory.next_room()
            try:
                # Goes on when the caller is cancelled: a step ends with the state of the disk.
                return await self._threads.finish(self._look(it, in_slots=in_slots))
            except StorageFull:
                if not room_wait_s or self._num_waiting >= _WAITING_MAX:
                    raise
                self._num_waiting += 1
                try:
                    async with asyncio.timeout_at(ends_s):
                        await room.wait()
                except TimeoutError:
                    room_wait_s = 0  # a last look: a slot may have been freed at the deadline
                finally:
                    self._num_waiting -= 1

    def _counted(self, group: Sequence[FetchedBlock]) -> Sequence[FetchedBlock]:
        for tier, num_blocks in Counter([block.tier for block in group]).items():
            self._metrics.hits.labels(tier).inc(num_blocks)
        return group

    async def copy(self, manifest: Manifest, rank: int, block_index: int) -> Buffer | None:
        """Return a copy of a stored file that has its manifest's checksum; None: there is none."""
        [it] = _wanted(manifest, rank, [block_index])
        if it.vouched:
            with suppress(CorruptBlock, CacheRefNotFound, SidecarUnavailable):
                return (await self._threads.finish(self._look(it, in_slots=False, is_kept=False))).data
        return None

    async def read_ahead(self, manifest: Manifest) -> None:
        """Bring the blocks that loads of a context will ask for from disk into memory, up to half of its size."""
        async with aclosing(self._bring(self.beginning(manifest, self.memory.limit_bytes // 2))) as groups:
            async for _ in groups:
                pass

    def beginning(self, manifest: Manifest, bytes_max: int) -> list[WantedBlock]:
        """Return the blocks of all ranks, those of the first tokens first, as many as have at most so many bytes."""
        ranks = [_wanted(manifest, rank, range(num_files(manifest))) for rank in range(manifest.world_size)]
        blocks = [it for one in zip(*ranks, strict=True) for it in one]
        ends = accumulate(self.blocks.get(it.key).stored_bytes or 0 for it in blocks)
        return [it for it, end in zip(blocks, ends, strict=True) if end <= bytes_max]

    async def prefetch(self, it: WantedBlock, allocate: Callable[[int], Slot | None]) -> bool:
        """Read a block from disk into a slot of `allocate`; return whether it is in memory."""
        await self._read_group([it], allocate)
        block = self.blocks.get(it.key)
        block.is_from_disk = False  # its load finds it in memory
        return block.in_memory is not None

    async def free(self, keys: Iterable[BlockKey]) -> int:
        """Remove from both tiers every block that may go; return the bytes freed on disk.

        A block that is being written, read, or removed by another call is waited for, and is gone too, unless
        something refers to it.
        """
        freed_bytes, waiting = 0, dict.fromkeys(keys)
        while waiting:
            now_ms = self._clock.now_ms()
            blocks = [self.blocks.get(key) for key in waiting]
            doomed = [block for block in blocks if block.may_go(now_ms)]
            # This stands before the removal. A step may end during it, and its block must be looked at again.
            waiting = {block.key: None for block in blocks if block.over is not None and not block.refs}
            freed_bytes += await self._remove(doomed) if doomed else 0
            if waiting:
                await self.blocks.settled(next(iter(waiting)))
        self._metrics.freed_bytes.inc(freed_bytes)
        return freed_bytes

    async def _remove(self, doomed: Sequence[Block]) -> int:
        with self.blocks.step("leave", *doomed):
            for block in doomed:
                self.blocks.drop_copy(block)
            sizes, self.blocks.inodes = await self._threads.write(self._delete, doomed)
            return sum(map(self.blocks.found, doomed, sizes))

    async def put_aside(self, key: BlockKey) -> None:
        """Quarantine a block with wrong bytes. A file that cannot be moved loses its checksum."""
        block = await self.blocks.settled(key)
        if not block.is_stored:
            return
        block.checksum = None
        with self.blocks.step("condemn", block):
            self.blocks.drop_copy(block)
            try:
                self.blocks.found(block, await self._threads.write(self.disk.put_aside, key))
            except OSError:
                log.warning("block quarantine failed", extra={"block": key.file_name}, exc_info=True)
                return
        log.warning("block in quarantine", extra={"block": key.file_name})

    async def _bring(self, wanted: Sequence[WantedBlock]) -> AsyncGenerator[Sequence[WantedBlock], None]:
        """Yield blocks, some at a time, once their files are in memory as far as they can be; reads ahead.

        Blocks in memory are the first group. Several files a thread: each is small, and to begin a thread for it takes
        as long as to read it.
        """
        if here := [it for it in wanted if self.blocks.get(it.key).in_memory is not None]:
            yield here
            wanted = [it for it in wanted if self.blocks.get(it.key).in_memory is None]
        groups, num_begun, num_prefetched = self._groups(wanted), 0, 0
        ahead, prefetches = deque[tuple[Sequence[WantedBlock], asyncio.Task[None]]](), list[asyncio.Task[None]]()
        try:
            while True:
                while len(ahead) <= _GROUPS_AHEAD and (group := next(groups, None)) is not None:
                    ahead.append((group, asyncio.create_task(self._threads.finish(self._read_group(group)))))
                    num_begun += len(group)
                    keys = [it.key for it in wanted[num_prefetched : num_begun + _READS_AHEAD]]
                    if keys:
                        num_prefetched += len(keys)
                        prefetches.append(asyncio.create_task(self._threads.run(self.disk.prefetch, keys)))
                if not ahead:
                    return
                group, task = ahead.popleft()
                await task
                yield group
        finally:
            await _end([*prefetches, *(task for _, task in ahead)])

    def _groups(self, wanted: Sequence[WantedBlock]) -> Iterator[Sequence[WantedBlock]]:
        """Yield files that are read together: one, or some MiB of them."""
        group: list[WantedBlock] = []
        size_bytes = 0
        for it in wanted:
            file_bytes = self.blocks.get(it.key).stored_bytes or 0
            if group and (size_bytes + file_bytes > _TOGETHER_BYTES or len(group) >= _TOGETHER_FILES):
                yield group
                group, size_bytes = [], 0
            group.append(it)
            size_bytes += file_bytes
        if group:
            yield group

    async def _read_group(
        self, wanted: Sequence[WantedBlock], allocate: Callable[[int], Slot | None] | None = None
    ) -> None:
        """Read files from disk straight into memory; a block with a step of another call is waited for.

        Says nothing of files that cannot be read: the load that asks for them finds out.
        """
        allocate = allocate or self.memory.allocate
        others, mine = [], []
        for it in wanted:
            block = self.blocks.get(it.key)
            if not block.is_stored or block.in_memory is not None:
                continue
            if block.over is not None:
                others.append(block.over)
            elif (slot := allocate(block.disk_bytes or 0)) is not None:
                mine.append((it, block, slot))
        with self.blocks.step("read", *[block for _, block, _ in mine]):
            are_read = await self._threads.run(lambda: [self._read_file(*it) for it in mine]) if mine else []
            for (_, block, slot), is_read in zip(mine, are_read, strict=True):
                if is_read:
                    self.blocks.keep_copy(block, slot, is_from_disk=True)
                else:
                    self.memory.free(slot)
        for other in others:
            await other.wait()

    def _read_file(self, it: WantedBlock, block: Block, slot: Slot) -> bool:
        """Read a file into a slot by the word of its head; return whether it was. Runs in a thread."""
        room, began_s = self.memory.view(slot), perf_counter()
        try:
            self.disk.read_into(block.key, room)
            self._metrics.io("read", "disk", slot.size_bytes, began_s)
            check_head(*parse_head(room), it.expected, vouched=it.vouched)
        except (CorruptBlock, SidecarUnavailable, OSError):
            return False
        return True

    def _at_hand(self, it: WantedBlock) -> FetchedBlock | None:
        """Return a block that is in memory; None: it is not, or it is stored no more."""
        block = self.blocks.get(it.key)
        slot = block.in_memory if block.is_stored else None
        return None if slot is None else self._served(it, block, slot=slot)

    def _served(self, it: WantedBlock, block: Block, *, slot: Slot | None, data: Buffer = b"") -> FetchedBlock:
        tier: TierName = "disk" if block.is_from_disk or block.in_memory is None else "host"
        block.is_from_disk = False
        return FetchedBlock(it.block_index, tier, it.vouched, slot, data)

    async def _look(self, it: WantedBlock, *, in_slots: bool, is_kept: bool = True) -> FetchedBlock:
        """Serve one block, every byte compared: from memory, else from disk by way of memory if it `is_kept` there."""
        block = await self.blocks.settled(it.key)
        if not block.is_stored:
            raise CacheRefNotFound(_MISSING)
        with self.blocks.step("read", block):
            if (slot := block.in_memory) is not None:
                self.memory.pin(slot)
                try:
                    data = await self._threads.run(self._read_memory, it, slot, in_slots)
                    return self._served(it, block, slot=slot if in_slots else None, data=data)
                except CorruptBlock:
                    self._metrics.bad_copies.inc()
                    log.warning("damaged copy in memory dropped", extra={"block": it.key.file_name})
                    self.blocks.drop_copy(block)
                finally:
                    self.memory.unpin(slot)
            return await self._look_on_disk(it, block, in_slots=in_slots, is_kept=is_kept)

    async def _look_on_disk(self, it: WantedBlock, block: Block, *, in_slots: bool, is_kept: bool) -> FetchedBlock:
        slot = self.memory.allocate(block.disk_bytes or 0) if is_kept else None
        if slot is None and in_slots:
            raise StorageFull("leased and lent slots leave no room in the memory tier")
        room = memoryview(bytearray(block.disk_bytes or 0)) if slot is None else self.memory.view(slot)
        try:
            await self._threads.run(self._read_disk, it, room)
        except FileNotFoundError as exc:
            self.blocks.found(block, None)
            raise CacheRefNotFound(_MISSING) from exc
        except CorruptBlock as exc:
            damaged = DamagedBlock(str(exc))
            damaged.key = it.key
            raise damaged from exc
        else:
            data = b"" if in_slots else room if slot is None else bytes(room)
            fetched = self._served(it, block, slot=slot if in_slots else None, data=data)
            if slot is not None:
                self.blocks.keep_copy(block, slot)
            return fetched
        finally:
            if slot is not None and not slot.is_kept:
                self.memory.free(slot)

    def _read_memory(self, it: WantedBlock, slot: Slot, in_slots: bool) -> Buffer:  # noqa: FBT001  # run in a thread
        view, began_s = self.memory.view(slot), perf_counter()
        data: Buffer = view if in_slots else bytes(view)
        parse_block_file(data).verify(it.expected, vouched=it.vouched)
        self._metrics.io("read", "host", len(data), began_s)
        return b"" if in_slots else data

    def _read_disk(self, it: WantedBlock, room: memoryview) -> None:
        began_s = perf_counter()
        self.disk.read_into(it.key, room)
        self._metrics.io("read", "disk", len(room), began_s)
        self._verified(room, it.expected, it.vouched, tier="disk")

    def _store(self, files: Sequence[_Incoming]) -> tuple[Exception | None, Inodes]:
        """Verify all files and write the new ones; return the first error and the inodes. Runs in a thread."""
        error: Exception | None = None
        for it in files:
            try:
                if error is None:
                    self._store_one(it)
                    continue
            except Exception as exc:  # noqa: BLE001  # raised in the event loop, once the records are right
                error = exc
            with suppress(OSError):
                it.disk_bytes = self.disk.size_bytes(it.key)
        return error, self.disk.directory.inodes()

    def _store_one(self, it: _Incoming) -> None:
        checksum = self._verified(it.data, it.expected, it.vouched)
        if not it.is_new:
            return
        began_s = perf_counter()
        self.disk.put(it.key, it.data)
        it.disk_bytes = len(it.data)
        self._metrics.io("write", "disk", len(it.data), began_s)
        if it.slot is not None and not it.is_in_slot:
            began_s = perf_counter()
            self.memory.view(it.slot)[:] = it.data
            self._metrics.io("write", "host", len(it.data), began_s)
        it.checksum = checksum

    def _verified(self, data: Buffer, expected: BlockMeta, vouched: str, *, tier: str = "host") -> str:
        """Compare every byte of a file; return its checksum. Raises CorruptBlock."""
        began_s, file = perf_counter(), parse_block_file(data)
        file.verify(expected, vouched=vouched)
        self._metrics.io("check", tier, len(data), began_s)
        return file.checksum

    def _delete(self, doomed: Sequence[Block]) -> tuple[list[int | None], Inodes]:
        """Remove files; return the sizes of those that stay, and the inodes. Runs in a thread."""
        return [self._delete_one(block) for block in doomed], self.disk.directory.inodes()

    def _delete_one(self, block: Block) -> int | None:
        try:
            return self.disk.delete(block.key)
        except OSError:
            # It stays counted, and the collector's next pass tries again.
            log.warning("block not removed", extra={"block": block.key.file_name}, exc_info=True)
            return block.disk_bytes
