"""Copies between pages and KV in host memory, with numpy: it lets other threads run and starts no team of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided
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
)

Blocks: TypeAlias = npt.NDArray[np.uint8]
"""`[layers, blocks, …page] u8`"""

_RUNS_MAX = 8
"""Above so many runs of neighbouring blocks, one indexed copy a layer is cheaper than one slice a run."""
_AT_ONCE_BYTES = 1 << 20
"""Bytes of one copy: its checksum is made while the bytes are in the core's cache."""


class HostLayers(PagedLayers):
    """KV in host memory."""

    def __init__(self, shapes: tuple[tuple[LayerShape, ...], ...], views: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take the planes, by group, as uint8 `[B, …]`."""
        self.shapes = shapes
        self.planes = tuple(tuple(view[0].numel() for view in own) for own in views)
        self._held = views
        """A band keeps the memory of its first layer alone from being freed."""
        self._bands = [_bands([view.numpy() for view in own]) for own in views]

    @override
    def fence(self) -> Fence:
        return None

    @override
    def reach(self, memory: memoryview, *, owner: object) -> None:
        return

    @override
    def gather(self, copies: Sequence[PageCopy]) -> list[tuple[int, ...]]:
        for copy in copies:
            parts, ids = runs(copy.block_ids), np.asarray(copy.block_ids, dtype=np.int64)
            for blocks, _, rows in self._stretches(copy):
                if len(parts) > _RUNS_MAX:
                    for layer, into in zip(blocks, rows, strict=True):
                        # mode="clip" writes straight into `into`; the default makes a copy first. Ids are in range.
                        np.take(layer, ids, axis=0, out=into, mode="clip")
                    continue
                for start, length, step in parts:
                    rows[:, start : start + length] = blocks[:, _span(copy.block_ids[start], length, step)]
        return [()] * len(copies)

    @override
    def scatter(self, copies: Sequence[PageCopy], spent: Spent | None = None) -> list[Landed]:
        """Make each stretch's checksum behind its copy, while the core has the bytes in its cache."""
        spent = spent or Spent()
        began_s, landed = time.perf_counter(), list[Landed]()
        for copy in copies:
            parts, ids, checksum = runs(copy.block_ids), np.asarray(copy.block_ids, dtype=np.int64), new_checksum()
            for blocks, pages, rows in self._stretches(copy):
                if len(parts) > _RUNS_MAX:
                    for layer, of_layer in zip(blocks, rows, strict=True):
                        layer[ids] = of_layer
                else:
                    for start, length, step in parts:
                        blocks[:, _span(copy.block_ids[start], length, step)] = rows[:, start : start + length]
                if copy.proof:
                    checked_s = time.perf_counter()
                    checksum.update(pages)
                    spent.verify_s += time.perf_counter() - checked_s
            landed.append(Landed(checksum.hexdigest() if copy.proof else ""))
        spent.copy_s += time.perf_counter() - began_s
        return landed

    def _stretches(self, copy: PageCopy) -> Iterator[tuple[Blocks, Pages, Blocks]]:
        """Yield some layers' blocks, all their pages in the copy, and of those the ones that are copied."""
        assert len(copy.pages) == copy.num_pages * sum(self.planes[copy.group]), "pages of all layers"
        start = 0
        for band in self._bands[copy.group]:
            layer_bytes = copy.num_pages * math.prod(band.shape[2:])
            num_layers = max(_AT_ONCE_BYTES // layer_bytes, 1)
            for first in range(0, len(band), num_layers):
                blocks = band[first : first + num_layers]
                end = start + len(blocks) * layer_bytes
                pages = copy.pages[start:end]
                rows = pages.reshape(len(blocks), copy.num_pages, *band.shape[2:])
                yield blocks, pages, rows[:, copy.first_page :][:, : len(copy.block_ids)]
                start = end


def _bands(views: Sequence[Blocks]) -> list[Blocks]:
    """Return `[layers, B, …]` of each run of layers that lie at equal distances in memory, as an allocator puts them.

    One copy then moves a block of all of them. A copy for each layer would take Python's lock each time.
    """
    bands: list[Blocks] = []
    first = 0
    while first < len(views):
        view, last = views[first], first + 1
        distance = _address(views[last]) - _address(view) if last < len(views) else 0
        while (
            last < len(views)
            and _is_like(views[last], view)
            and _address(views[last]) - _address(views[last - 1]) == distance
        ):
            last += 1
        # The addresses in it are those of the layers' own blocks, and no others.
        bands.append(as_strided(view, (last - first, *view.shape), (distance, *view.strides)))
        first = last
    return bands


def _address(view: Blocks) -> int:
    return view.__array_interface__["data"][0]  # type: ignore[no-any-return]  # (address, is read-only)


def _is_like(view: Blocks, other: Blocks) -> bool:
    return view.shape == other.shape and view.strides == other.strides


def runs(block_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Split ids into runs of neighbours, as (first index, length, step) with step 1 or -1.

    The engine frees a request's blocks last first, so the next request often gets a descending run.
    """
    found: list[tuple[int, int, int]] = []
    start = 0
    while start < len(block_ids):
        step, length = 1, 1
        if start + 1 < len(block_ids) and abs(block_ids[start + 1] - block_ids[start]) == 1:
            step = block_ids[start + 1] - block_ids[start]
        while start + length < len(block_ids) and block_ids[start + length] == block_ids[start] + length * step:
            length += 1
        found.append((start, length, step))
        start += length
    return found


def _span(first: int, length: int, step: int) -> slice:
    end = first + length * step
    return slice(first, end if end >= 0 else None, step)
