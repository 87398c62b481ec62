"""Paged KV tensors to pages and back: every shape that the connector knows is here. Knows no sidecar and no request.

vLLM registers one tensor a layer, a strided view that is logically `[B, H, N, C]`: block, kv head, token in block,
K then V content; its physical order may differ. When the attention kernel wants smaller blocks than the engine
allocates, dimension 0 is `num_blocks * ratio` kernel blocks and N is the kernel's block.

A *page* is the bytes of one engine block of one layer in logical order, `[ratio, H, N, C]` flattened. It is opaque:
the CPU backend packs tokens by instruction set inside a page, so a page is copied whole and never sliced by token.
Pages travel as uint8 `[layers, k, page_bytes]` for k engine blocks, which is the tensor inside a block file.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from vllm_plugin.connector.engine_check import UncarriedEngine

Pages: TypeAlias = npt.NDArray[np.uint8]
"""uint8 `[layers, k, page_bytes]`: layer, engine block, bytes of one page."""
Fence: TypeAlias = Any
"""A point in the engine's stream of work after which its blocks may be read; None on the CPU, where it is now."""

_RUNS_MAX = 8
"""Above so many runs of neighbouring blocks, one indexed copy a layer is cheaper than one slice a run."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer's pages look like; part of the fingerprint."""

    name: str
    ratio: int
    """Kernel blocks in one engine block."""
    heads: int
    kernel_block_tokens: int
    content_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.ratio * self.heads * self.kernel_block_tokens * self.content_bytes


class PagedLayers(Protocol):
    """All KV layers of one rank. Calls for disjoint block ids may run in different threads at once."""

    shapes: tuple[LayerShape, ...]
    page_bytes: int

    def fence(self) -> Fence:
        """Mark, in the engine's thread, the point after which blocks named now may be read or overwritten."""
        ...

    def gather(self, block_ids: Sequence[int], out: Pages, *, after: Fence) -> None:
        """Copy the pages of `block_ids` into `out` `[layers, len(block_ids), page_bytes]`."""
        ...

    def scatter(self, block_ids: Sequence[int], pages: Pages, *, after: Fence) -> None:
        """Copy `pages` `[layers, len(block_ids), page_bytes]` over those blocks; they are in place on return."""
        ...


def open_layers(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> PagedLayers:
    """Return the layers of `register_kv_caches`. Raises UncarriedEngine when their pages are not of one size.

    Layers that share another's tensor (cross-layer sharing) are left out: their bytes are already there.
    """
    views: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in kv_caches.items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key not in seen:
            seen.add(key)
            views[name] = _as_bytes(name, tensor, num_blocks)
    if not views:
        raise UncarriedEngine("no_layers", "the engine registered no KV layers")
    shapes = tuple(_shape(name, view) for name, view in views.items())
    if len({shape.page_bytes for shape in shapes}) != 1:
        raise UncarriedEngine("unequal_pages", "the layers' pages are not of one size")
    on_host = all(view.device.type == "cpu" for view in views.values())
    kind = HostLayers if on_host else StagedLayers
    return kind(shapes, list(views.values()))


def _as_bytes(name: str, tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """View `[num_blocks * ratio, H, N, C]` of any dtype as uint8 `[num_blocks, ratio, H, N, C bytes]`."""
    if tensor.dim() != 4 or tensor.shape[0] % num_blocks or tensor.stride(-1) != 1:
        raise UncarriedEngine("unsupported_layers", f"layer {name} is not a [B, H, N, C] view of {num_blocks} blocks")
    return tensor.unflatten(0, (num_blocks, -1)).view(torch.uint8)


def _shape(name: str, view: torch.Tensor) -> LayerShape:
    _, ratio, heads, tokens, content = view.shape
    return LayerShape(name, ratio, heads, tokens, content)


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


class HostLayers(PagedLayers):
    """KV in host memory. Copies with numpy, which lets other threads run and starts no thread team of its own."""

    def __init__(self, shapes: tuple[LayerShape, ...], views: Sequence[torch.Tensor]) -> None:
        self.shapes = shapes
        self.page_bytes = shapes[0].page_bytes
        self._views: list[npt.NDArray[np.uint8]] = [view.numpy() for view in views]

    @override
    def fence(self) -> Fence:
        return None

    @override
    def gather(self, block_ids: Sequence[int], out: Pages, *, after: Fence) -> None:
        parts, ids = runs(block_ids), np.asarray(block_ids)
        for view, page_rows in zip(self._views, out, strict=True):
            rows = page_rows.reshape(len(ids), *view.shape[1:])
            if len(parts) > _RUNS_MAX and view.flags.c_contiguous:
                # mode="clip" writes straight into `out`; the default makes a copy first. The ids are in range.
                np.take(view, ids, axis=0, out=rows, mode="clip")
                continue
            for start, length, step in parts:
                rows[start : start + length] = view[_span(block_ids[start], length, step)]

    @override
    def scatter(self, block_ids: Sequence[int], pages: Pages, *, after: Fence) -> None:
        parts, ids = runs(block_ids), np.asarray(block_ids)
        for view, page_rows in zip(self._views, pages, strict=True):
            rows = page_rows.reshape(len(ids), *view.shape[1:])
            if len(parts) > _RUNS_MAX:
                view[ids] = rows
                continue
            for start, length, step in parts:
                view[_span(block_ids[start], length, step)] = rows[start : start + length]


def _span(first: int, length: int, step: int) -> slice:
    end = first + length * step
    return slice(first, end if end >= 0 else None, step)


class StagedLayers(PagedLayers):
    """KV on a device, copied through pinned host memory on a stream beside the engine's.

    Written for CUDA; so far it has been run on CPU tensors only (where the streams fall away), never on a GPU.
    The staging buffer of a thread is as large as the largest block file it has moved.
    """

    def __init__(self, shapes: tuple[LayerShape, ...], views: Sequence[torch.Tensor]) -> None:
        self.shapes = shapes
        self.page_bytes = shapes[0].page_bytes
        self._views = list(views)
        self._device = views[0].device
        self._cuda = self._device.type == "cuda"
        self._own = threading.local()

    @override
    def fence(self) -> Fence:
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @override
    def gather(self, block_ids: Sequence[int], out: Pages, *, after: Fence) -> None:
        staging = self._staging(len(block_ids))
        with torch.inference_mode(), self._begin(after):
            ids = torch.tensor(block_ids, device=self._device)
            for row, view in zip(staging, self._views, strict=True):
                row.copy_(view.index_select(0, ids).reshape(len(block_ids), -1), non_blocking=True)
            self._end()
        np.copyto(out, staging.numpy())

    @override
    def scatter(self, block_ids: Sequence[int], pages: Pages, *, after: Fence) -> None:
        staging = self._staging(len(block_ids))
        np.copyto(staging.numpy(), pages)
        with torch.inference_mode(), self._begin(after):
            ids = torch.tensor(block_ids, device=self._device)
            for row, view in zip(staging, self._views, strict=True):
                rows = row.to(self._device, non_blocking=True).reshape(len(block_ids), *view.shape[1:])
                view.index_copy_(0, ids, rows)
            self._end()

    def _begin(self, after: Fence) -> AbstractContextManager[Any]:
        """Enter this thread's stream, made to wait for `after`; nothing off CUDA."""
        if not self._cuda:
            return nullcontext()
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)
        if after is not None:
            self._own.stream.wait_event(after)
        return torch.cuda.stream(self._own.stream)  # type: ignore[no-any-return]  # torch is not followed by mypy

    def _end(self) -> None:
        if self._cuda:
            self._own.stream.synchronize()

    def _staging(self, num_blocks: int) -> torch.Tensor:
        """Return this thread's pinned uint8 `[layers, num_blocks, page_bytes]`."""
        shape = (len(self._views), num_blocks, self.page_bytes)
        size = math.prod(shape)
        buffer: torch.Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.numel() < size:
            buffer = self._own.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda)
        return buffer[:size].view(shape)
