"""Copies between pages and KV on a GPU: lists of addresses, carried out by its driver beside the engine's work.

Pages in registered memory (the arena) are copied to and from where they are; others go through pinned memory of ours.
Nothing is allocated on the device, and no kernel runs there. What follows from a GPU's being there is behind `Driver`;
a twin of it on the CPU passes the same tests, which is all that has been run so far: no GPU has.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from vllm_plugin.connector.engine_check import UncarriedEngine
from vllm_plugin.connector.pages import Copied, Fence, LayerShape, PageCopy, PagedLayers, Pages, split
from vllm_plugin.connector.registered_memory import RegisteredMemory, Registrar

_BATCH_BYTES = 8 << 20
"""Of whole layers, submitted together: what is copied is compared while the next ones are on their way."""
_COPIES_MAX = 4096
"""In one call of the driver: ROCm's faults above 8 192 (vLLM 0.32 v1/simple_kv_offload/cuda_mem_ops.py)."""

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
            for stretch, on_device, on_host in self._batches(copy, host):
                ends = (on_device.addresses, on_host) if from_device else (on_host, on_device.addresses)
                wait = self._driver.submit(*ends, on_device.sizes, after=copy.after, from_device=from_device)
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

    def _batches(self, copy: PageCopy, host: Pages) -> Iterator[tuple[Pages, _Chunks, Addresses]]:
        """Yield stretches of all pages, with the chunks of the blocks and where each one's bytes are in the stretch."""
        ids = np.asarray(copy.block_ids, dtype=np.int64)
        assert copy.first_page + len(ids) <= copy.num_pages, "pages of those blocks"
        start, end = 0, 0
        chunks: list[_Chunks] = []
        on_host: list[Addresses] = []
        layers = self._blocks[copy.group]
        rows = split(self.shapes[copy.group], host, copy.num_pages)
        for layer, own in zip(layers, rows, strict=True):
            chunks.append(layer.chunks(ids))
            first = own.ctypes.data + copy.first_page * own.shape[1]
            on_host.append(first + np.arange(len(chunks[-1].sizes)) * layer.chunk_bytes)
            end += own.nbytes
            if end - start >= _BATCH_BYTES or end == host.nbytes:
                yield host[start:end], _Chunks.all(chunks), np.concatenate(on_host)
                start, chunks, on_host = end, [], []


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Stretches of device memory, in the order of the bytes of pages."""

    addresses: Addresses
    sizes: Addresses

    @classmethod
    def all(cls, several: Sequence[_Chunks]) -> _Chunks:
        return cls(np.concatenate([one.addresses for one in several]), np.concatenate([one.sizes for one in several]))


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

    def chunks(self, ids: npt.NDArray[np.int64]) -> _Chunks:
        """Return those of some blocks. Raises IndexError for a block that is none: the driver would write anywhere."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.num_blocks:
            raise IndexError("no such block")
        addresses = (self.address + ids[:, None] * self.block_bytes + self.offsets).ravel()
        return _Chunks(addresses, np.full_like(addresses, self.chunk_bytes))


class CudaDriver(Driver):
    """CUDA, or ROCm by that name, through torch and vLLM's `swap_blocks_batch` (one call of cuMemcpyBatchAsync)."""

    def __init__(self, device: torch.device) -> None:
        """Load vLLM's kernels. Raises UncarriedEngine where it lacks what is needed."""
        try:
            from vllm._custom_ops import swap_blocks_batch  # loads vLLM's kernels: on a GPU only
            from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary  # as above

            self._take_error: Callable[[], int] = CudaRTLibrary().cudaGetLastError
        except (ImportError, AttributeError, AssertionError, OSError) as exc:
            raise UncarriedEngine("unsupported_layers", f"copies on a GPU need vLLM 0.32 or newer: {exc}") from exc
        self._swap = swap_blocks_batch
        self._device = device
        self._own = threading.local()

    @override
    def fence(self) -> Fence:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @override
    def submit(
        self, sources: Addresses, targets: Addresses, sizes: Addresses, *, after: Fence, from_device: bool
    ) -> Callable[[], None]:
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)
        stream: Any = self._own.stream
        if after is not None:
            stream.wait_event(after)
        lists = [torch.from_numpy(numbers) for numbers in (sources, targets, sizes)]
        done = torch.cuda.Event(blocking=True)  # else whoever waits keeps a core busy
        with torch.cuda.stream(stream):
            try:
                for start in range(0, len(sizes), _COPIES_MAX):
                    # Pages outside of the device stay as they are meanwhile, its own blocks change before the fence.
                    self._swap(*(numbers[start : start + _COPIES_MAX] for numbers in lists), not from_device)
                # With a driver older than CUDA 12.8 the op copies one by one, and does not say what was refused.
                self._require(self._take_error(), "copying")
                done.record(stream)
            except BaseException:
                stream.synchronize()
                raise

        def wait() -> None:
            done.synchronize()
            lists.clear()  # theirs until then

        return wait

    @override
    def register(self, address: int, size_bytes: int) -> None:
        with torch.cuda.device(self._device):  # else a thread's device is the first one
            self._require(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0), "cudaHostRegister")

    @override
    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            self._require(torch.cuda.cudart().cudaHostUnregister(address), "cudaHostUnregister")

    def _require(self, error: Any, what: str) -> None:
        if int(error):
            self._take_error()  # else the thread's next call is told of it
            raise RuntimeError(f"{what}: CUDA error {int(error)}")

    @override
    def staging(self, size_bytes: int) -> Pages:
        if not hasattr(self._own, "staging") or self._own.staging.numel() < size_bytes:
            with torch.cuda.device(self._device):
                self._own.staging = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        pages: Pages = self._own.staging[:size_bytes].numpy()
        return pages
