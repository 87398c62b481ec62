"""Copies between pages and KV on a GPU: lists of addresses, carried out by its driver beside the engine's work.

All files of a call are one list. It goes to the driver in few *waves*, on one stream, and the digests of the blocks are
made behind them. Pages in registered memory (the arena) are copied to and from where they are, and the host reads none
of their bytes. Other pages go file by file through pinned memory. `Driver` is all that needs a GPU; a twin of it on the
CPU passes the same tests.

Host memory is registered with the driver piece by piece, in the background. A piece is registered once there is memory
behind all of it: registering would put it there, and it would count to this process's container instead of to its
owner's. Until then, and for good where the driver refuses, copies to it go by way of pinned memory.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import attrgetter
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from kv_sidecar.client import new_checksum
from vllm_plugin.connector.copies.pages import Fence, Landed, LayerShape, PageCopy, PagedLayers, Pages, Spent

log = logging.getLogger(__name__)

WAVE_BYTES = 256 << 20
"""Bytes of one call of the driver: a link needs 5 ms for them, so the cost of a call does not count."""

PIECE_BYTES = 1 << 30
"""Registered in one call: the driver holds locks meanwhile that the engine may want."""
_LOOK_AGAIN_S = 0.2
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

Numbers: TypeAlias = npt.NDArray[np.int64]
Chunks: TypeAlias = npt.NDArray[np.int64]
"""`[3, chunks]`: address that is read, address that is written, bytes."""
Block: TypeAlias = tuple[Sequence[torch.Tensor], Sequence[int]]
"""Planes of a group, uint8 `[blocks, …]`, and the ids of blocks in them."""


class Driver(Protocol):
    """Calls of a device. Faults of the driver are RuntimeErrors. A thread's calls are carried out in order."""

    def fence(self) -> Fence:
        """Return a point in the stream of the calling thread, behind all that it has been given."""
        ...

    def submit(self, chunks: Chunks, *, after: Fence, from_device: bool) -> Callable[[], None]:
        """Begin to copy, not before `after`; return a function that waits for the end.

        Raises RuntimeError when it cannot; then nothing is being copied any more.
        """
        ...

    def digest(self, blocks: Sequence[Block]) -> Callable[[], Numbers]:
        """Begin to make the digests of blocks behind the thread's copies; return a function that waits for them."""
        ...

    def register(self, address: int, size_bytes: int) -> None:
        """Pin memory and make it known to the device. Raises RuntimeError with the driver's reason."""
        ...

    def unregister(self, address: int) -> None:
        """Unpin the memory that begins at this address. Raises RuntimeError."""
        ...

    def staging(self, size_bytes: int) -> Pages:
        """Return memory that the device can reach, this thread's until it asks again."""
        ...


class DeviceLayers(PagedLayers):
    """KV on a device."""

    files_at_once = 1 << 20
    makes_digests = True

    def __init__(
        self, shapes: tuple[tuple[LayerShape, ...], ...], views: Sequence[Sequence[torch.Tensor]], driver: Driver
    ) -> None:
        """Take the planes, by group, as uint8 `[B, …]` with axes in the order of their strides."""
        self.shapes = shapes
        self.planes = tuple(tuple(view[0].numel() for view in own) for own in views)
        self._views = views  # held: their addresses are used
        self._planes = [[_Plane.of(view) for view in own] for own in views]
        self._driver = driver
        self._registered = RegisteredMemory(driver)

    @override
    def fence(self) -> Fence:
        return self._driver.fence()

    @override
    def reach(self, memory: memoryview, *, owner: object) -> None:
        self._registered.add(memory, owner=owner)

    @override
    def gather(self, copies: Sequence[PageCopy]) -> list[tuple[int, ...]]:
        asked = [replace(copy, proof="digests") for copy in copies]
        return [landed.digests for landed in self._moved(asked, Spent(), from_device=True)]

    @override
    def scatter(self, copies: Sequence[PageCopy], spent: Spent | None = None) -> list[Landed]:
        return self._moved(copies, spent or Spent(), from_device=False)

    def _moved(self, copies: Sequence[PageCopy], spent: Spent, *, from_device: bool) -> list[Landed]:
        """Copy where the pages are, or file by file through pinned memory; return proofs."""
        if all(self._registered.holds(copy.pages) for copy in copies):
            return self._in_waves(copies, spent, from_device=from_device)
        landed: list[Landed] = []
        for copy in copies:
            staging = self._driver.staging(copy.pages.nbytes)
            np.copyto(staging, copy.pages)
            landed += self._in_waves([replace(copy, pages=staging)], spent, from_device=from_device)
            if from_device:
                np.copyto(copy.pages, staging)
        return landed

    def _in_waves(self, copies: Sequence[PageCopy], spent: Spent, *, from_device: bool) -> list[Landed]:
        """Copy in waves; return proofs, made behind the device's reading."""
        began_s, worked_s = time.perf_counter(), time.thread_time()
        by_group = sorted(copies, key=_GROUP)
        digested = [copy for copy in by_group if copy.proof == "digests"]
        blocks = [(self._views[group], _ids(several)) for group, several in groupby(digested, key=_GROUP)]
        waits: list[Callable[[], None]] = []
        try:
            chunks = self._chunks(by_group)
            for wave in _waves(chunks if from_device else chunks[[1, 0, 2]]):
                wait = self._driver.submit(wave, after=copies[0].after, from_device=from_device)
                waits.append(wait)
            take_digests = self._driver.digest(blocks) if blocks else None
            submitted_s = time.perf_counter()
            spent.submit_s += submitted_s - began_s
            spent.gil_s += max(submitted_s - began_s - (time.thread_time() - worked_s), 0)
        finally:
            # In every case the blocks are the caller's again only when nothing touches them any more.
            for wait in waits:
                wait()
        made = iter(take_digests().view(np.uint64).tolist() if take_digests is not None else ())
        digests = {id(copy): tuple(islice(made, len(copy.block_ids))) for copy in digested}
        copied_s = time.perf_counter()
        spent.copy_s += copied_s - submitted_s
        landed = [
            Landed(_checksum(copy) if copy.proof == "checksum" else "", digests.get(id(copy), ())) for copy in copies
        ]
        spent.verify_s += time.perf_counter() - copied_s
        return landed

    def _chunks(self, copies: Sequence[PageCopy]) -> Chunks:
        """Return the chunks of all blocks of all files, plane by plane, read from the device. Copies are by group."""
        found = [np.empty((3, 0), dtype=np.int64)]
        for group, several in groupby(copies, key=_GROUP):
            own = list(several)
            assert all(copy.first_page + len(copy.block_ids) <= copy.num_pages for copy in own), "pages of those blocks"
            assert all(copy.pages.nbytes == copy.num_pages * sum(self.planes[group]) for copy in own), "all planes"
            ids, lengths = np.array(_ids(own), dtype=np.int64), [len(copy.block_ids) for copy in own]
            start = np.repeat([copy.pages.ctypes.data for copy in own], lengths)
            count = np.repeat([copy.num_pages for copy in own], lengths)
            position = np.concatenate([copy.first_page + np.arange(len(copy.block_ids)) for copy in own])
            for plane in self._planes[group]:
                found.append(plane.chunks(ids, start + position * plane.page_bytes))
                start = start + count * plane.page_bytes
        return np.concatenate(found, axis=1)


_GROUP = attrgetter("group")


def _ids(copies: Iterable[PageCopy]) -> list[int]:
    return [block for copy in copies for block in copy.block_ids]


def _checksum(copy: PageCopy) -> str:
    checksum = new_checksum()
    checksum.update(copy.pages)
    digest: str = checksum.hexdigest()
    return digest


def _waves(chunks: Chunks) -> list[Chunks]:
    """Return parts of `WAVE_BYTES` or a chunk more."""
    ends = np.cumsum(chunks[2])
    inner = np.searchsorted(ends, np.arange(WAVE_BYTES, ends[-1] if len(ends) else 0, WAVE_BYTES)) + 1
    return [wave for wave in np.split(chunks, np.unique(inner), axis=1) if wave.size]


@dataclass(frozen=True, slots=True)
class _Plane:
    """Places of one plane's blocks."""

    address: int
    num_blocks: int
    block_bytes: int
    """Distance from one block to the next, with padding and other planes."""
    page_bytes: int
    offsets: Numbers
    """Offsets of a block's chunks."""
    chunk_bytes: int

    @classmethod
    def of(cls, view: torch.Tensor) -> _Plane:
        axes = [axis for axis in range(1, view.dim()) if view.shape[axis] > 1]
        chunk_bytes, offsets = 1, np.zeros(1, dtype=np.int64)
        while axes and view.stride(axes[-1]) == chunk_bytes:
            chunk_bytes *= view.shape[axes.pop()]
        for axis in axes:
            offsets = (offsets[:, None] + np.arange(view.shape[axis]) * view.stride(axis)).ravel()
        return cls(view.data_ptr(), view.shape[0], view.stride(0), view[0].numel(), offsets, chunk_bytes)

    def chunks(self, ids: Numbers, pages: Numbers) -> Chunks:
        """Return the chunks of blocks, and of their pages at these addresses. Neighbours are one.

        Raises IndexError for a block that is none: the driver would write anywhere.
        """
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.num_blocks:
            raise IndexError("block id out of range")
        of_block = self.address + ids[:, None] * self.block_bytes + self.offsets
        of_page = pages[:, None] + np.arange(len(self.offsets)) * self.chunk_bytes
        return joined(np.stack([of_block.ravel(), of_page.ravel(), np.full(of_block.size, self.chunk_bytes)]))


def joined(chunks: Chunks) -> Chunks:
    """Return the same copies, those as one that go on in both places where the one before ends."""
    sources, targets, sizes = chunks
    goes_on = (sources[:-1] + sizes[:-1] == sources[1:]) & (targets[:-1] + sizes[:-1] == targets[1:])
    starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))[: len(sizes)]
    return np.stack([sources[starts], targets[starts], np.add.reduceat(sizes, starts)]) if len(starts) else chunks


class RegisteredMemory:
    """All memory that one rank's device can reach now."""

    def __init__(self, driver: Driver, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._driver = driver
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._pieces: frozenset[tuple[int, int]] = frozenset()
        """Addresses of the first byte and behind the last. Replaced under the lock, read without."""

    def add(self, memory: memoryview, *, owner: object) -> None:
        """Begin to register page-aligned memory; it is let go of, and kept mapped until then, when `owner` has gone.

        A thread that copies holds `owner`: nothing is unregistered under a copy. Raises RuntimeError without a thread.
        """
        gone = threading.Event()
        weakref.finalize(owner, gone.set).atexit = False
        name = "context-cache-registration"
        threading.Thread(target=self._attend, args=(memory, gone), name=name, daemon=True).start()

    def holds(self, pages: Pages) -> bool:
        """Return whether all of it is in one piece: no copy may cross from one into another."""
        start = pages.ctypes.data
        return any(first <= start and start + pages.nbytes <= end for first, end in self._pieces)

    def _attend(self, memory: memoryview, gone: threading.Event) -> None:
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        mine: set[tuple[int, int]] = set()
        try:
            for start in range(address, address + len(memory), self._piece_bytes):
                size_bytes = min(self._piece_bytes, address + len(memory) - start)
                while not _is_resident(start, size_bytes):
                    if gone.wait(_LOOK_AGAIN_S):
                        return
                if gone.is_set():
                    return
                self._driver.register(start, size_bytes)
                mine.add((start, start + size_bytes))
                with self._lock:
                    self._pieces |= mine
            log.info("arena registered with the GPU driver", extra={"size_bytes": len(memory)})
        except RuntimeError as exc:
            registered_bytes = sum(end - first for first, end in mine)
            fields = {"size_bytes": len(memory), "registered_bytes": registered_bytes, "reason": str(exc)}
            log.warning("arena not registered with the GPU driver, KV is staged", extra=fields)
        finally:
            gone.wait()
            with self._lock:
                self._pieces -= mine
            self._unregister(mine)

    def _unregister(self, pieces: set[tuple[int, int]]) -> None:
        try:
            for first, _ in sorted(pieces):
                self._driver.unregister(first)
        except RuntimeError:
            log.warning("arena not unregistered", exc_info=True)


def _is_resident(address: int, size_bytes: int) -> bool:
    pages = np.zeros(-(-size_bytes // mmap.PAGESIZE), dtype=np.uint8)
    return not _LIBC.mincore(address, size_bytes, pages.ctypes.data) and bool((pages & 1).all())
