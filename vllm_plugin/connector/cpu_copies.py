"""Copies between pages and KV in host memory, with numpy: it lets other threads run and starts no team of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from vllm_plugin.connector.pages import Copied, Fence, LayerShape, PageCopy, PagedLayers, split

_RUNS_MAX = 8
"""Above so many runs of neighbouring blocks, one indexed copy a layer is cheaper than one slice a run."""


class HostLayers(PagedLayers):
    """KV in host memory."""

    def __init__(self, shapes: tuple[tuple[LayerShape, ...], ...], views: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take the layers' tensors, by group, as uint8 `[B, …]`."""
        self.shapes = shapes
        self._views: list[list[npt.NDArray[np.uint8]]] = [[view.numpy() for view in own] for own in views]

    @override
    def fence(self) -> Fence:
        return None

    @override
    def reach(self, memory: memoryview, *, owner: object) -> None:
        return

    @override
    def gather(self, copy: PageCopy) -> None:
        parts, ids = runs(copy.block_ids), np.asarray(copy.block_ids, dtype=np.int64)
        shapes, num_pages = self.shapes[copy.group], copy.num_pages
        for view, page_rows in zip(self._views[copy.group], split(shapes, copy.pages, num_pages), strict=True):
            rows = page_rows[copy.first_page :][: len(ids)].reshape(len(ids), *view.shape[1:])
            if len(parts) > _RUNS_MAX and view.flags.c_contiguous:
                # mode="clip" writes straight into `rows`; the default makes a copy first. The ids are in range.
                np.take(view, ids, axis=0, out=rows, mode="clip")
                continue
            for start, length, step in parts:
                rows[start : start + length] = view[_span(copy.block_ids[start], length, step)]

    @override
    def scatter(self, copy: PageCopy, *, copied: Copied = lambda _: None) -> None:
        parts, ids = runs(copy.block_ids), np.asarray(copy.block_ids, dtype=np.int64)
        shapes, num_pages = self.shapes[copy.group], copy.num_pages
        for view, page_rows in zip(self._views[copy.group], split(shapes, copy.pages, num_pages), strict=True):
            rows = page_rows[copy.first_page :][: len(ids)].reshape(len(ids), *view.shape[1:])
            if len(parts) > _RUNS_MAX:
                view[ids] = rows
            else:
                for start, length, step in parts:
                    view[_span(copy.block_ids[start], length, step)] = rows[start : start + length]
            copied(page_rows)


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
