"""Copies between pages and KV on a GPU: lists of addresses, carried out by its driver beside the engine's work.

All files of a call are one list. It goes to the driver in few *waves*, on one stream, and the digests of the blocks are
made behind them. Pages in registered memory (the arena) are copied to and from where they are, and the host reads none
of their bytes. Other pages go file by file through pinned memory. `Driver` is all that needs a GPU; a twin of it on the
CPU passes the same tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, pairwise
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from kv_sidecar.client import new_checksum
from vllm_plugin.connector.copies.pages import (
    Fence,
    Landed,
    LayerShape,
    PageCopy,
    PagedLayers,
    Pages,
    Spent,
    split,
)
from vllm_plugin.connector.copies.registered_memory import RegisteredMemory, Registrar

WAVE_BYTES = 256 << 20
"""Bytes of one call of the driver: a link needs 5 ms for them, so the cost of a call does not count."""

Addresses: TypeAlias = npt.NDArray[np.int64]
Block: TypeAlias = tuple[Sequence[torch.Tensor], Sequence[int]]
"""Planes of a group, uint8 `[blocks, …]`, and the ids of blocks in them."""


class Driver(Registrar, Protocol):
    """Calls of a device. Faults of the driver are RuntimeErrors. A thread's calls are carried out in order."""

    def fence(self) -> Fence:
        """Return a point in the stream of the calling thread, behind all that it has been given."""
        ...

    def submit(
        self, sources: Addresses, targets: Addresses, sizes: Addresses, *, after: Fence, from_device: bool
    ) -> Callable[[], None]:
        """Begin to copy so many bytes each, not before `after`; return a function that waits for the end.

        Raises RuntimeError when it cannot; then nothing is being copied any more.
        """
        ...

    def digest(self, blocks: Sequence[Block]) -> Callable[[], Addresses]:
        """Begin to make the digests of blocks behind the thread's copies; return a function that waits for them."""
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
        self._alike = [_alike([_Blocks.of(view) for view in own]) for own in views]
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
        if all(self._registered.holds(copy.pages) for copy in asked):
            return [landed.digests for landed in self._moved(asked, Spent(), from_device=True)]
        digests = []
        for copy in asked:
            staging = self._driver.staging(copy.pages.nbytes)
            digests += [
                landed.digests for landed in self._moved([replace(copy, pages=staging)], Spent(), from_device=True)
            ]
            filled, planes = slice(copy.first_page, copy.first_page + len(copy.block_ids)), self.planes[copy.group]
            for rows, staged in zip(
                *(split(planes, flat, copy.num_pages) for flat in (copy.pages, staging)), strict=True
            ):
                rows[filled] = staged[filled]
        return digests

    @override
    def scatter(self, copies: Sequence[PageCopy], spent: Spent | None = None) -> list[Landed]:
        spent = spent or Spent()
        if all(self._registered.holds(copy.pages) for copy in copies):
            return self._moved(copies, spent, from_device=False)
        landed: list[Landed] = []
        for copy in copies:
            staging = self._driver.staging(copy.pages.nbytes)
            np.copyto(staging, copy.pages)
            landed += self._moved([replace(copy, pages=staging)], spent, from_device=False)
        return landed

    def _moved(self, copies: Sequence[PageCopy], spent: Spent, *, from_device: bool) -> list[Landed]:
        """Copy in waves; return proofs, made behind the device's reading."""
        began_s, worked_s = time.perf_counter(), time.thread_time()
        digested = [copy for copy in _by_group(copies) if copy.proof == "digests"]
        blocks = [(self._views[group], _ids(several)) for group, several in groupby(digested, key=_group)]
        waits: list[Callable[[], object]] = []
        try:
            for wave in self._chunks(_by_group(copies)).waves():
                ends = (wave.on_device, wave.on_host) if from_device else (wave.on_host, wave.on_device)
                waits.append(self._driver.submit(*ends, wave.sizes, after=copies[0].after, from_device=from_device))
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

    def _chunks(self, copies: Sequence[PageCopy]) -> _Chunks:
        """Return the chunks of all blocks of all files, plane by plane; copies are in the order of their groups."""
        found = []
        for group, several in groupby(copies, key=_group):
            own = list(several)
            assert all(copy.first_page + len(copy.block_ids) <= copy.num_pages for copy in own), "pages of those blocks"
            assert all(copy.pages.nbytes == copy.num_pages * sum(self.planes[group]) for copy in own), "all planes"
            lengths = [len(copy.block_ids) for copy in own]
            pages = _Pages(
                ids=np.array(_ids(own), dtype=np.int64),
                base=np.repeat([copy.pages.ctypes.data for copy in own], lengths),
                count=np.repeat([copy.num_pages for copy in own], lengths),
                position=np.concatenate([copy.first_page + np.arange(len(copy.block_ids)) for copy in own]),
            )
            start = 0
            for alike in self._alike[group]:
                found.append(alike.chunks(pages, start))
                start += len(alike.addresses) * alike.page_bytes
        return _Chunks(*(np.concatenate(lists) for lists in zip(*(each.lists for each in found), strict=True)))


def _group(copy: PageCopy) -> int:
    return copy.group


def _by_group(copies: Sequence[PageCopy]) -> list[PageCopy]:
    return sorted(copies, key=_group)


def _ids(copies: Iterable[PageCopy]) -> list[int]:
    return [block for copy in copies for block in copy.block_ids]


def _checksum(copy: PageCopy) -> str:
    checksum = new_checksum()
    checksum.update(copy.pages)
    digest: str = checksum.hexdigest()
    return digest


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages of one group, one entry for each: block id, start of the file's pages, their number, place among them."""

    ids: Addresses
    base: Addresses
    count: Addresses
    position: Addresses


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Stretches of device memory, and the stretches of host memory that belong to them."""

    on_device: Addresses
    on_host: Addresses
    sizes: Addresses

    @property
    def lists(self) -> tuple[Addresses, Addresses, Addresses]:
        """The three lists."""
        return self.on_device, self.on_host, self.sizes

    def waves(self) -> Iterator[_Chunks]:
        """Yield parts of `WAVE_BYTES` or a chunk more."""
        ends = np.cumsum(self.sizes)
        inner = np.searchsorted(ends, np.arange(WAVE_BYTES, ends[-1] if len(ends) else 0, WAVE_BYTES)) + 1
        for first, last in pairwise([0, *inner.tolist(), len(ends)]):
            if first < last:
                yield _Chunks(*(numbers[first:last] for numbers in self.lists))


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Places of the blocks of planes that differ in nothing but their addresses."""

    addresses: Addresses
    """Address of each plane."""
    num_blocks: int
    block_bytes: int
    """Distance from one block to the next, with padding and other planes."""
    page_bytes: int
    offsets: tuple[int, ...]
    """Offsets of a block's chunks."""
    chunk_bytes: int

    @classmethod
    def of(cls, view: torch.Tensor) -> _Blocks:
        axes = [axis for axis in range(1, view.dim()) if view.shape[axis] > 1]
        chunk_bytes, offsets = 1, np.zeros(1, dtype=np.int64)
        while axes and view.stride(axes[-1]) == chunk_bytes:
            chunk_bytes *= view.shape[axes.pop()]
        for axis in axes:
            offsets = (offsets[:, None] + np.arange(view.shape[axis]) * view.stride(axis)).ravel()
        address = np.array([view.data_ptr()], dtype=np.int64)
        return cls(address, view.shape[0], view.stride(0), view[0].numel(), tuple(offsets.tolist()), chunk_bytes)

    @property
    def geometry(self) -> tuple[object, ...]:
        """Values that are equal in planes that are treated as one."""
        return self.num_blocks, self.block_bytes, self.page_bytes, self.offsets, self.chunk_bytes

    def chunks(self, pages: _Pages, start: int) -> _Chunks:
        """Return the chunks of pages in all planes; `start`: bytes of a page in the planes before. Neighbours are one.

        Raises IndexError for a block that is none: the driver would write anywhere.
        """
        if len(pages.ids) and not 0 <= pages.ids.min() <= pages.ids.max() < self.num_blocks:
            raise IndexError("block id out of range")
        of_block = pages.ids[:, None] * self.block_bytes + np.array(self.offsets, dtype=np.int64)
        of_page = (pages.base + pages.position * self.page_bytes)[:, None] + np.arange(
            len(self.offsets)
        ) * self.chunk_bytes
        before = (start + np.arange(len(self.addresses)) * self.page_bytes)[:, None] * pages.count
        on_device = self.addresses[:, None, None] + of_block
        on_host = of_page + before[:, :, None]
        return _Chunks(*joined(on_device.ravel(), on_host.ravel(), np.full(on_device.size, self.chunk_bytes)))


def _alike(layers: Sequence[_Blocks]) -> list[_Blocks]:
    """Put together neighbours of one geometry: their addresses are found by one sum, not layer by layer."""
    found: list[_Blocks] = []
    for _, several in groupby(layers, key=lambda layer: layer.geometry):
        own = list(several)
        found.append(replace(own[0], addresses=np.concatenate([layer.addresses for layer in own])))
    return found


def joined(sources: Addresses, targets: Addresses, sizes: Addresses) -> tuple[Addresses, Addresses, Addresses]:
    """Return the same copies, those as one that go on in both places where the one before ends."""
    goes_on = (sources[:-1] + sizes[:-1] == sources[1:]) & (targets[:-1] + sizes[:-1] == targets[1:])
    if not goes_on.any():
        return sources, targets, sizes
    starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    return sources[starts], targets[starts], np.add.reduceat(sizes, starts)
