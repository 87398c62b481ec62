"""Copies between pages and KV in host memory, with numpy: it lets other threads run and starts no team of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from kv_sidecar.client import new_checksum
from vllm_plugin.connector.copies.pages import Landed, LayerShape, PageCopy, PagedLayers, Pages, Spent, split

Blocks: TypeAlias = npt.NDArray[np.uint8]
"""`[blocks, …page] u8`"""


class HostLayers(PagedLayers):
    """KV in host memory."""

    def __init__(self, shapes: tuple[tuple[LayerShape, ...], ...], views: Sequence[Sequence[torch.Tensor]]) -> None:
        """Take the planes, by group, as uint8 `[B, …]`."""
        self.shapes = shapes
        self.planes = tuple(tuple(view[0].numel() for view in own) for own in views)
        self._planes = [[view.numpy() for view in own] for own in views]

    @override
    def gather(self, copies: Sequence[PageCopy]) -> list[tuple[int, ...]]:
        for copy in copies:
            ids = np.array(copy.block_ids, dtype=np.int64)
            for blocks, _, rows in self._of_planes(copy):
                if blocks.flags.c_contiguous:
                    # mode="clip" writes straight into `rows`; the default makes a copy first. Ids are in range.
                    np.take(blocks, ids, axis=0, out=rows, mode="clip")
                else:
                    rows[...] = blocks[ids]
        return [()] * len(copies)

    @override
    def scatter(self, copies: Sequence[PageCopy], spent: Spent | None = None) -> list[Landed]:
        """Make each plane's checksum behind its copy, while the core has the bytes in its cache."""
        spent = spent or Spent()
        began_s, landed = time.perf_counter(), list[Landed]()
        for copy in copies:
            ids, checksum = np.array(copy.block_ids, dtype=np.int64), new_checksum()
            for blocks, pages, rows in self._of_planes(copy):
                blocks[ids] = rows
                if copy.proof:
                    checked_s = time.perf_counter()
                    checksum.update(pages)
                    spent.verify_s += time.perf_counter() - checked_s
            landed.append(Landed(checksum.hexdigest() if copy.proof else ""))
        spent.copy_s += time.perf_counter() - began_s
        return landed

    def _of_planes(self, copy: PageCopy) -> Iterator[tuple[Blocks, Pages, Blocks]]:
        """Yield each plane's blocks, all its pages in the copy, and of those the ones that are copied."""
        end = copy.first_page + len(copy.block_ids)
        own = split(self.planes[copy.group], copy.pages, copy.num_pages)
        for blocks, pages in zip(self._planes[copy.group], own, strict=True):
            yield blocks, pages, pages[copy.first_page : end].reshape(-1, *blocks.shape[1:])
