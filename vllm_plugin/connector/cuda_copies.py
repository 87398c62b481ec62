"""Copies between pages and KV on a GPU: lists of addresses, carried out by its driver beside the engine's work.

Pages in registered memory (the arena) are copied to and from where they are; others go through pinned memory of ours.
What follows from a GPU's being there is behind `Driver`; a twin of it on the CPU passes the same tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from vllm_plugin.connector.pages import Copied, Fence, LayerShape, PageCopy, PagedLayers, Pages, split
from vllm_plugin.connector.registered_memory import RegisteredMemory, Registrar

_BATCH_BYTES = 8 << 20
"""Of whole layers, submitted together: what is copied is compared while the next ones are on their way."""

Addresses: TypeAlias = npt.NDArray[np.int64]


class Driver(Registrar, Protocol):
    """What is asked of a device. Faults of the driver are RuntimeErrors."""

    def fence(self) -> Fence:
        """Return a point in the stream of the calling thread, behind all that it has been given."""
        ...

    def submit(
        self, sources: Addresses, targets: Addresses, sizes: Addresses, *, after: Fence, from_device: bool
    ) -> Callable[[], None]:
        """Begin to copy so many bytes each, not before `after`; return what waits for the end.

        Raises RuntimeError when it cannot; then nothing is being copied any more.
        """
        ...

    def staging(self, size_bytes: int) -> Pages:
        """Return memory that the device can reach, this thread's until it asks again."""
        ...


class DeviceLayers(PagedLayers):
    """KV on a device."""

    def __init__(
        self, shapes: tuple[tuple[LayerShape, ...], ...], views: Sequence[Sequence[torch.Tensor]], driver: Driver
    ) -> None:
        """Take the layers' tensors, by group, as uint8 `[B, …]` with axes in the order of their strides."""
        self.shapes = shapes
        self._views = views  # held: their addresses are used
        self._blocks = [[_Blocks.of(view) for view in own] for own in views]
        self._driver = driver
        self._registered = RegisteredMemory(driver)

    @override
    def fence(self) -> Fence:
        return self._driver.fence()

    @override
    def reach(self, memory: memoryview, *, owner: object) -> None:
        self._registered.add(memory, owner=owner)

    @override
    def gather(self, copy: PageCopy) -> None:
        if self._registered.holds(copy.pages):
            self._move(copy, copy.pages, from_device=True)
            return
        staging = self._driver.staging(copy.pages.nbytes)
        self._move(copy, staging, from_device=True)
        filled = slice(copy.first_page, copy.first_page + len(copy.block_ids))
        shapes = self.shapes[copy.group]
        for rows, staged in zip(*(split(shapes, flat, copy.num_pages) for flat in (copy.pages, staging)), strict=True):
            rows[filled] = staged[filled]

    @override
    def scatter(self, copy: PageCopy, *, copied: Copied = lambda _: None) -> None:
        host = copy.pages
        if not self._registered.holds(host):
            host = self._driver.staging(copy.pages.nbytes)
            np.copyto(host, copy.pages)
        self._move(copy, host, from_device=False, copied=copied)

    def _move(self, copy: PageCopy, host: Pages, *, from_device: bool, copied: Copied = lambda _: None) -> None:
        """Copy, and have `copied` called with what the device has read, behind its reading."""
        going = deque[tuple[Pages, Callable[[], None]]]()
        try:
            for stretch, chunks in self._batches(copy, host):
                ends = (chunks.on_device, chunks.on_host) if from_device else (chunks.on_host, chunks.on_device)
                wait = self._driver.submit(*ends, chunks.sizes, after=copy.after, from_device=from_device)
                going.append((stretch, wait))
            while going:
                stretch, wait = going[0]
                wait()
                going.popleft()
                copied(stretch)
        finally:
            # Whatever went wrong: the blocks are the caller's again when nobody touches them any more.
            for _, wait in going:
                wait()

    def _batches(self, copy: PageCopy, host: Pages) -> Iterator[tuple[Pages, _Chunks]]:
        """Yield stretches of all pages, with the chunks of the blocks that belong to them."""
        ids = np.asarray(copy.block_ids, dtype=np.int64)
        assert copy.first_page + len(ids) <= copy.num_pages, "pages of those blocks"
        start, end = 0, 0
        chunks: list[_Chunks] = []
        layers = self._blocks[copy.group]
        rows = split(self.shapes[copy.group], host, copy.num_pages)
        for layer, own in zip(layers, rows, strict=True):
            first = own.ctypes.data + copy.first_page * own.shape[1]
            chunks.append(layer.chunks(ids, first))
            end += own.nbytes
            if end - start >= _BATCH_BYTES or end == host.nbytes:
                yield host[start:end], _Chunks.all(chunks)
                start, chunks = end, []


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Stretches of device memory in the order of the bytes of pages, and where those are."""

    on_device: Addresses
    on_host: Addresses
    sizes: Addresses

    @classmethod
    def all(cls, several: Sequence[_Chunks]) -> _Chunks:
        fields = ("on_device", "on_host", "sizes")
        return cls(*(np.concatenate([getattr(one, name) for one in several]) for name in fields))


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Where one layer's blocks are."""

    address: int
    num_blocks: int
    block_bytes: int
    """From one to the next: padding and other layers included."""
    offsets: Addresses
    """Of a block's chunks."""
    chunk_bytes: int

    @classmethod
    def of(cls, view: torch.Tensor) -> _Blocks:
        axes = [axis for axis in range(1, view.dim()) if view.shape[axis] > 1]
        chunk_bytes, offsets = 1, np.zeros(1, dtype=np.int64)
        while axes and view.stride(axes[-1]) == chunk_bytes:
            chunk_bytes *= view.shape[axes.pop()]
        for axis in axes:
            offsets = (offsets[:, None] + np.arange(view.shape[axis]) * view.stride(axis)).ravel()
        return cls(view.data_ptr(), view.shape[0], view.stride(0), offsets, chunk_bytes)

    def chunks(self, ids: npt.NDArray[np.int64], host: int) -> _Chunks:
        """Return those of some blocks, whose pages are at `host`; what lies side by side in both places is one.

        Raises IndexError for a block that is none: the driver would write anywhere.
        """
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.num_blocks:
            raise IndexError("no such block")
        addresses = (self.address + ids[:, None] * self.block_bytes + self.offsets).ravel()
        sizes = np.full_like(addresses, self.chunk_bytes)
        return _Chunks(*joined(addresses, host + np.arange(len(sizes)) * self.chunk_bytes, sizes))


def joined(sources: Addresses, targets: Addresses, sizes: Addresses) -> tuple[Addresses, Addresses, Addresses]:
    """Return the same copies, those as one that go on in both places where the one before ends."""
    goes_on = (sources[:-1] + sizes[:-1] == sources[1:]) & (targets[:-1] + sizes[:-1] == targets[1:])
    if not goes_on.any():
        return sources, targets, sizes
    starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    return sources[starts], targets[starts], np.add.reduceat(sizes, starts)
