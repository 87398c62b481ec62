"""Copies between pages and KV on a GPU: lists of addresses, carried out by its driver beside the engine's work.

Pages in registered memory (the arena) are copied to and from where they are; others go through pinned memory of ours.
What follows from a GPU's being there is behind `Driver`; a twin of it on the CPU passes the same tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from vllm_plugin.connector.copies.pages import Copied, Fence, LayerShape, PageCopy, PagedLayers, Pages, split
from vllm_plugin.connector.copies.registered_memory import RegisteredMemory, Registrar

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
        self._alike = [
            _alike([_Blocks.of(view, shape.page_bytes) for view, shape in zip(own, of, strict=True)])
            for own, of in zip(views, shapes, strict=True)
        ]
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
        start = 0
        for layers in self._alike[copy.group]:
            row_bytes = copy.num_pages * layers.page_bytes
            within = layers.within(ids)
            at_once = -(-_BATCH_BYTES // row_bytes)
            for first in range(0, len(layers.addresses), at_once):
                on_device = layers.addresses[first : first + at_once]
                on_host = host.ctypes.data + start + np.arange(len(on_device)) * row_bytes
                end = start + len(on_device) * row_bytes
                yield host[start:end], within.of(on_device, on_host + copy.first_page * layers.page_bytes)
                start = end


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Stretches of device memory in the order of the bytes of pages, and where those are."""

    on_device: Addresses
    on_host: Addresses
    sizes: Addresses

    def of(self, on_device: Addresses, on_host: Addresses) -> _Chunks:
        """Return those of several layers that begin there, where these are of one that begins at 0 in both places."""
        return _Chunks(
            (on_device[:, None] + self.on_device).ravel(),
            (on_host[:, None] + self.on_host).ravel(),
            np.tile(self.sizes, len(on_device)),
        )


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Where the blocks of layers are that differ in nothing but where they begin."""

    addresses: Addresses
    """One for each layer."""
    num_blocks: int
    block_bytes: int
    """From one to the next: padding and other layers included."""
    page_bytes: int
    offsets: tuple[int, ...]
    """Of a block's chunks."""
    chunk_bytes: int

    @classmethod
    def of(cls, view: torch.Tensor, page_bytes: int) -> _Blocks:
        axes = [axis for axis in range(1, view.dim()) if view.shape[axis] > 1]
        chunk_bytes, offsets = 1, np.zeros(1, dtype=np.int64)
        while axes and view.stride(axes[-1]) == chunk_bytes:
            chunk_bytes *= view.shape[axes.pop()]
        for axis in axes:
            offsets = (offsets[:, None] + np.arange(view.shape[axis]) * view.stride(axis)).ravel()
        address = np.array([view.data_ptr()], dtype=np.int64)
        return cls(address, view.shape[0], view.stride(0), page_bytes, tuple(offsets.tolist()), chunk_bytes)

    @property
    def geometry(self) -> tuple[object, ...]:
        """What layers have in common that are treated as one."""
        return self.num_blocks, self.block_bytes, self.page_bytes, self.offsets, self.chunk_bytes

    def within(self, ids: npt.NDArray[np.int64]) -> _Chunks:
        """Return the chunks of some blocks of a layer at 0, their pages from 0 on; neighbours in both are one.

        Raises IndexError for a block that is none: the driver would write anywhere.
        """
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.num_blocks:
            raise IndexError("block id out of range")
        addresses = (ids[:, None] * self.block_bytes + np.array(self.offsets, dtype=np.int64)).ravel()
        sizes = np.full_like(addresses, self.chunk_bytes)
        return _Chunks(*joined(addresses, np.arange(len(sizes)) * self.chunk_bytes, sizes))


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
