"""A GPU's driver, as the copies need it: CUDA, or ROCm by that name, through torch and vLLM's kernels.

A copy engine takes some 3.5 µs for any copy up to 64 KiB (measured on an H200). Small ones are therefore brought
together on the device, a batch at a time, by a kernel of vLLM's, and cross the link as one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from vllm_plugin.connector.copies.cuda_copies import Block, Chunks, Driver, Numbers, joined
from vllm_plugin.connector.copies.digest import page_digests
from vllm_plugin.connector.copies.pages import Fence, Pages
from vllm_plugin.connector.engine_check import UncarriedEngine

log = logging.getLogger(__name__)

_COPIES_MAX = 4096 if torch.version.hip else 1 << 30
"""Copies in one call of the driver: ROCm's faults above 8 192 (vLLM 0.32 v1/simple_kv_offload/cuda_mem_ops.py)."""
_ROOM_BYTES = 32 << 20
"""Bytes of small copies that are brought together at once: the room is taken from the engine's device."""

_SMALL_BYTES = 28 << 10
"""Copies of less, on the average, are brought together on the device (THRESHOLD_BYTES of vLLM 0.32
v1/kv_offload/cpu/swap_blocks_triton.py). Measured on an H200: those of 64 KiB are faster one by one."""
_WORD_BYTES, _CHUNK_BYTES, _JOBS = 8, 8192, 16
"""Constants of vLLM's kernel: size of a word, bytes at a time, and a number of jobs for which it is compiled once."""
_PROGRAMS_MAX = 1024


class CudaDriver(Driver):
    """Copies with vLLM's `swap_blocks_batch`: one call of cuMemcpyBatchAsync."""

    def __init__(self, device: torch.device) -> None:
        """Load vLLM's kernels. Raises UncarriedEngine where vLLM lacks one."""
        try:
            from vllm._custom_ops import swap_blocks_batch  # loads vLLM's kernels: on a GPU only
            from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary  # as above

            self._take_error: Callable[[], int] = CudaRTLibrary().cudaGetLastError
        except (ImportError, AttributeError, AssertionError, OSError) as exc:
            raise UncarriedEngine("unsupported_layers", f"copies on a GPU need at least vLLM 0.32: {exc}") from exc
        self._swap = swap_blocks_batch
        self._device = device
        self._own = threading.local()
        self._kernel = self._tried(
            self._copying_kernel, None, "no kernel on the GPU, KV of small blocks is copied slowly"
        )
        self._digests = self._tried(
            self._digest_kernel, page_digests, "no digest kernel on the GPU, torch makes the digests"
        )

    @override
    def fence(self) -> Fence:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @override
    def submit(self, chunks: Chunks, *, after: Fence, from_device: bool) -> Callable[[], None]:
        held: list[torch.Tensor] = []
        with self._queued(after) as done:
            self._copy(chunks, held, from_device=from_device)
            # A driver older than CUDA 12.8 the op copies one by one, and hides a refusal.
            self._require(self._take_error(), "copying")

        def wait() -> None:
            done.synchronize()
            held.clear()  # the device's until then

        return wait

    @override
    def digest(self, blocks: Sequence[Block]) -> Callable[[], Numbers]:
        with self._queued() as done:
            found = [self._digests(planes, self._on_device(ids)) for planes, ids in blocks]
            together = torch.cat(found).to("cpu", non_blocking=True) if found else torch.empty(0, dtype=torch.int64)

        def wait() -> Numbers:
            done.synchronize()
            digests: Numbers = together.numpy()
            found.clear()
            return digests

        return wait

    @contextmanager
    def _queued(self, after: Fence = None) -> Iterator[Any]:
        """Give the thread's stream the block's work, behind `after`; yield the event of its end."""
        stream = self._stream()
        if after is not None:
            stream.wait_event(after)
        done = torch.cuda.Event(blocking=True)  # else a thread that waits keeps a core busy
        with torch.cuda.stream(stream):
            try:
                yield done
                done.record(stream)
            except BaseException:
                stream.synchronize()
                raise

    def _on_device(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)

    def _stream(self) -> Any:
        """Return this thread's stream: its copies and digests are carried out in order."""
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)
        return self._own.stream

    def _copy(self, chunks: Chunks, held: list[torch.Tensor], *, from_device: bool) -> None:
        """Give the current stream copies, directly or by way of room on the device; `held` lives until they are done.

        The next part of the thread's copies uses the room again, behind this one in the stream.
        """
        if not self._are_small(chunks):
            self._cross(chunks, held, from_device=from_device)
            return
        part = max(_ROOM_BYTES // int(chunks[2].max()), 1)
        for start in range(0, chunks.shape[1], part):
            self._copy_small(chunks[:, start : start + part], held, from_device=from_device)

    def _copy_small(self, chunks: Chunks, held: list[torch.Tensor], *, from_device: bool) -> None:
        sources, targets, sizes = chunks
        room = self._room(int(sizes.sum()))
        if room is None:
            self._cross(chunks, held, from_device=from_device)
            return
        between = room.data_ptr() + np.cumsum(sizes) - sizes
        first, second = np.stack([sources, between, sizes]), np.stack([between, targets, sizes])
        if from_device:
            self._bring_together(first, held)
            self._cross(joined(second), held, from_device=True)
        else:
            self._cross(joined(first), held, from_device=False)
            self._bring_together(second, held)

    def _cross(self, chunks: Chunks, held: list[torch.Tensor], *, from_device: bool) -> None:
        lists = torch.from_numpy(np.ascontiguousarray(chunks))
        held.append(lists)
        for part in lists.split(_COPIES_MAX, dim=1):
            # Pages outside of the device stay as they are meanwhile, its own blocks change before the fence.
            self._swap(*part.unbind(0), not from_device)

    def _bring_together(self, chunks: Chunks, held: list[torch.Tensor]) -> None:
        """Have vLLM's kernel copy on the device (0.32 v1/kv_offload/cpu/swap_blocks_triton.py)."""
        num_jobs = -(-chunks.shape[1] // _JOBS) * _JOBS
        jobs = np.zeros((3, num_jobs), dtype=np.int64)  # those of no bytes touch nothing
        jobs[:, : chunks.shape[1]] = chunks
        pinned = torch.from_numpy(jobs).pin_memory()
        lists = pinned.to(self._device, non_blocking=True)
        held += [pinned, lists]
        self._kernel[(min(num_jobs, _PROGRAMS_MAX),)](*lists, num_jobs, BYTES_PER_CHUNK=_CHUNK_BYTES)

    def _are_small(self, chunks: Chunks) -> bool:
        if self._kernel is None or int(chunks[2].sum()) >= _SMALL_BYTES * chunks.shape[1]:
            return False
        return not int(np.bitwise_or.reduce(chunks, axis=None)) % _WORD_BYTES

    def _room(self, size_bytes: int) -> torch.Tensor | None:
        """Return memory of the device, this thread's until it asks again; None where there is none."""
        if getattr(self._own, "is_refused", False):
            return None
        if not hasattr(self._own, "room") or self._own.room.numel() < size_bytes:
            try:
                self._own.room = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:
                log.warning("GPU memory too small to gather KV", extra={"size_bytes": size_bytes})
                self._own.is_refused = True  # by thread: another may be about to use the kernel
                return None
        room: torch.Tensor = self._own.room
        return room

    def _tried(self, kernel: Callable[[], Any], otherwise: Any, loss: str) -> Any:
        """Return a kernel that was compiled and tried; else `otherwise`, and log the loss."""
        try:
            with torch.cuda.device(self._device):
                return kernel()
        except Exception as exc:  # noqa: BLE001  # any error of a compiler and its cache
            log.warning(loss, extra={"reason": f"{type(exc).__name__}: {exc}"})
            return otherwise

    def _copying_kernel(self) -> Any:
        from vllm.v1.kv_offload.cpu.swap_blocks_triton import _swap_blocks_kernel  # it imports Triton

        self._kernel = _swap_blocks_kernel
        two = torch.arange(2, dtype=torch.int64, device=self._device)
        first = two.data_ptr()
        self._bring_together(np.array([[first], [first + _WORD_BYTES], [_WORD_BYTES]], dtype=np.int64), [])
        if two.tolist() != [0, 0]:
            raise ValueError("the copy differs from its source")
        return _swap_blocks_kernel

    def _digest_kernel(self) -> Any:
        from vllm_plugin.connector.copies.digest_kernel import page_digests_by_kernel  # it imports Triton

        plane = torch.arange(1 << 14, dtype=torch.int64, device=self._device).view(torch.uint8).view(2, -1)
        ids = torch.tensor([1, 0], device=self._device)
        if not torch.equal(page_digests_by_kernel([plane], ids), page_digests([plane], ids)):
            raise ValueError("the digests differ")
        return page_digests_by_kernel

    @override
    def register(self, address: int, size_bytes: int) -> None:
        with torch.cuda.device(self._device):  # else a thread's device is the first one
            self._require(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0), "cudaHostRegister")

    @override
    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            self._require(torch.cuda.cudart().cudaHostUnregister(address), "cudaHostUnregister")

    def _require(self, error: Any, call: str) -> None:
        if int(error):
            self._take_error()  # else the thread's next call is told of it
            raise RuntimeError(f"{call}: CUDA error {int(error)}")

    @override
    def staging(self, size_bytes: int) -> Pages:
        if not hasattr(self._own, "staging") or self._own.staging.numel() < size_bytes:
            with torch.cuda.device(self._device):
                self._own.staging = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        pages: Pages = self._own.staging[:size_bytes].numpy()
        return pages
