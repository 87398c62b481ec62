"""Paged KV tensors to pages and back: every shape that the connector knows is here. Knows no sidecar and no request.

vLLM registers one tensor a layer, a strided view that is logically `[B, H, N, C]`: block, kv head, token in block,
K then V content; its physical order may differ. When the attention kernel wants smaller blocks than the engine
allocates, dimension 0 is `num_blocks * ratio` kernel blocks and N is the kernel's block.

Layers of different groups may be views of the same memory: their pages differ by block ids alone, so a page is named by
a layer and an id of that layer's group, and nothing is left out for having somebody else's address.

A *page* is the bytes of one engine block of one layer in logical order, `[ratio, H, N, C]` flattened, without padding.
It is opaque: the CPU backend packs tokens by instruction set inside a page, so a page is copied whole and never sliced
by token. Pages of k engine blocks travel flat, as uint8 `[bytes]`: layer after layer of the group, of each its k pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from vllm_plugin.connector.engine_check import UncarriedEngine

Pages: TypeAlias = npt.NDArray[np.uint8]
"""uint8 `[bytes]`: layer after layer of a group, of each the pages of k engine blocks."""
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
    """All KV layers of one rank, by group. Calls for disjoint block ids may run in different threads at once."""

    shapes: tuple[tuple[LayerShape, ...], ...]
    """Of each group."""

    def fence(self) -> Fence:
        """Mark, in the engine's thread, the point after which blocks named now may be read or overwritten."""
        ...

    def gather(self, group: int, block_ids: Sequence[int], out: Pages, *, after: Fence) -> None:
        """Copy the pages of `block_ids` into `out`, which has their size."""
        ...

    def scatter(  # by name
        self,
        group: int,
        block_ids: Sequence[int],
        pages: Pages,
        *,
        num_pages: int,
        first_page: int,
        after: Fence,
        copied: Callable[[Pages], object] = lambda _: None,
    ) -> None:
        """Copy pages over those blocks, which are in place on return.

        `pages` are of `num_pages` engine blocks; those of `block_ids` begin at `first_page`. `copied` gets all of
        `pages`, a stretch at a time and in order, each once it has been copied from, while it is still in a cache.
        """
        ...


def page_bytes(shapes: Sequence[LayerShape]) -> int:
    """Return the bytes of one engine block in all layers of a group."""
    return sum(shape.page_bytes for shape in shapes)


def open_layers(kv_caches: Mapping[str, torch.Tensor], num_blocks: int, groups: Sequence[Sequence[str]]) -> PagedLayers:
    """Return the layers of `register_kv_caches`; `groups` are the names of their layers.

    Raises UncarriedEngine for what has no pages. Layers of a group that share another's tensor (cross-layer sharing)
    are left out: their bytes are already there.
    """
    views: list[dict[str, torch.Tensor]] = []
    for names in groups:
        own: dict[str, torch.Tensor] = {}
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for name in names:
            tensor = kv_caches.get(name)
            if not isinstance(tensor, torch.Tensor):
                raise UncarriedEngine("unsupported_layers", f"layer {name} has no tensor of its own")
            key = (tensor.data_ptr(), tuple(tensor.shape))
            if key not in seen:
                seen.add(key)
                own[name] = _as_bytes(name, tensor, num_blocks)
        if not own:
            raise UncarriedEngine("no_layers", "the engine registered no KV layers")
        views.append(own)
    shapes = tuple(tuple(_shape(name, view) for name, view in own.items()) for own in views)
    on_host = all(view.device.type == "cpu" for own in views for view in own.values())
    kind = HostLayers if on_host else StagedLayers
    return kind(shapes, [list(own.values()) for own in views])


def _split(shapes: Sequence[LayerShape], pages: Pages, num_pages: int) -> Iterator[Pages]:
    """Yield each layer's part of flat pages, `[num_pages, page_bytes] u8`."""
    start = 0
    for shape in shapes:
        end = start + num_pages * shape.page_bytes
        yield pages[start:end].reshape(num_pages, shape.page_bytes)
        start = end


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

    def __init__(self, shapes: tuple[tuple[LayerShape, ...], ...], views: Sequence[Sequence[torch.Tensor]]) -> None:
        self.shapes = shapes
        self._views: list[list[npt.NDArray[np.uint8]]] = [[view.numpy() for view in own] for own in views]

    @override
    def fence(self) -> Fence:
        return None

    @override
    def gather(self, group: int, block_ids: Sequence[int], out: Pages, *, after: Fence) -> None:
        parts, ids = runs(block_ids), np.asarray(block_ids)
        for view, page_rows in zip(self._views[group], _split(self.shapes[group], out, len(ids)), strict=True):
            rows = page_rows.reshape(len(ids), *view.shape[1:])
            if len(parts) > _RUNS_MAX and view.flags.c_contiguous:
                # mode="clip" writes straight into `out`; the default makes a copy first. The ids are in range.
                np.take(view, ids, axis=0, out=rows, mode="clip")
                continue
            for start, length, step in parts:
                rows[start : start + length] = view[_span(block_ids[start], length, step)]

    @override
    def scatter(  # by name
        self,
        group: int,
        block_ids: Sequence[int],
        pages: Pages,
        *,
        num_pages: int,
        first_page: int,
        after: Fence,
        copied: Callable[[Pages], object] = lambda _: None,
    ) -> None:
        parts, ids = runs(block_ids), np.asarray(block_ids)
        for view, page_rows in zip(self._views[group], _split(self.shapes[group], pages, num_pages), strict=True):
            rows = page_rows[first_page : first_page + len(ids)].reshape(len(ids), *view.shape[1:])
            if len(parts) > _RUNS_MAX:
                view[ids] = rows
            else:
                for start, length, step in parts:
                    view[_span(block_ids[start], length, step)] = rows[start : start + length]
            copied(page_rows)


def _span(first: int, length: int, step: int) -> slice:
    end = first + length * step
    return slice(first, end if end >= 0 else None, step)


class StagedLayers(PagedLayers):
    """KV on a device, copied through pinned host memory on a stream beside the engine's.

    Written for CUDA; so far it has been run on CPU tensors only (where the streams fall away), never on a GPU.
    The staging buffer of a thread is as large as the largest block file it has moved.
    """

    def __init__(self, shapes: tuple[tuple[LayerShape, ...], ...], views: Sequence[Sequence[torch.Tensor]]) -> None:
        self.shapes = shapes
        self._views = [list(own) for own in views]
        self._device = views[0][0].device
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
    def gather(self, group: int, block_ids: Sequence[int], out: Pages, *, after: Fence) -> None:
        staging = self._staging(out.nbytes)
        with torch.inference_mode(), self._begin(after):
            ids = torch.tensor(block_ids, dtype=torch.int64, device=self._device)
            for rows, view in zip(self._rows(group, staging, len(block_ids)), self._views[group], strict=True):
                rows.copy_(view.index_select(0, ids).reshape(len(block_ids), -1), non_blocking=True)
            self._end()
        np.copyto(out, staging.numpy())

    @override
    def scatter(  # by name
        self,
        group: int,
        block_ids: Sequence[int],
        pages: Pages,
        *,
        num_pages: int,
        first_page: int,
        after: Fence,
        copied: Callable[[Pages], object] = lambda _: None,
    ) -> None:
        staging = self._staging(pages.nbytes)
        np.copyto(staging.numpy(), pages)
        copied(pages)
        with torch.inference_mode(), self._begin(after):
            ids = torch.tensor(block_ids, dtype=torch.int64, device=self._device)
            for rows, view in zip(self._rows(group, staging, num_pages), self._views[group], strict=True):
                wanted = rows[first_page : first_page + len(block_ids)]
                moved = wanted.to(self._device, non_blocking=True).reshape(len(block_ids), *view.shape[1:])
                view.index_copy_(0, ids, moved)
            self._end()

    def _rows(self, group: int, flat: torch.Tensor, num_pages: int) -> Iterator[torch.Tensor]:
        sizes = [num_pages * shape.page_bytes for shape in self.shapes[group]]
        return (part.view(num_pages, -1) for part in flat.split(sizes))

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

    def _staging(self, size_bytes: int) -> torch.Tensor:
        """Return this thread's pinned uint8 `[bytes]`."""
        buffer: torch.Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.numel() < size_bytes:
            buffer = self._own.buffer = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._cuda)
        return buffer[:size_bytes]
