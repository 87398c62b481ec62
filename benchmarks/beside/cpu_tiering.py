"""vLLM's tiering on a CPU: its own scheduler, memory tier and files, with a worker of ours that copies.

Upstream has workers for CUDA, ROCm and XPU only. This one copies page by page inside the step, as a memory of the
same machine allows: nothing waits for a device.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostCopyWorker(OffloadingWorker):
    """Copies between the engine's pages and the chunks of the shared region."""

    def __init__(self, kv: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._groups, self._blocks_per_chunk, self._region = kv.group_data_refs, blocks_per_chunk, region
        self._pages = [tensor.tensor.view(torch.int8).view(-1, tensor.page_size_bytes) for tensor in kv.tensors]
        sizes = (tensor.page_size_bytes * blocks_per_chunk for tensor in kv.tensors)
        self._chunks = [region.create_next_worker_view(size) for size in sizes]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy pages of the engine into chunks."""
        return self._copy(job_id, src_spec, dst_spec, stores=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy chunks into pages of the engine."""
        return self._copy(job_id, dst_spec, src_spec, stores=False)

    def get_finished(self) -> list[TransferResult]:
        """Return what was copied since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: a copy is done when it was submitted."""

    def shutdown(self) -> None:
        """Give the region back."""
        self._pages.clear()
        self._chunks.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, engine: Any, host: Any, *, stores: bool) -> bool:
        began_s, size_bytes, page_at, chunk_at = time.monotonic(), 0, 0, 0
        for refs, count, first in zip(self._groups, engine.group_sizes, engine.block_indices, strict=True):
            skipped = first % self._blocks_per_chunk
            num_chunks = cdiv(count + skipped, self._blocks_per_chunk) if count else 0
            pages = engine.block_ids[page_at : page_at + count].tolist()
            chunks = host.block_ids[chunk_at : chunk_at + num_chunks, None].astype(np.int64)
            slots = (chunks * self._blocks_per_chunk + np.arange(self._blocks_per_chunk)).ravel()[skipped:][:count]
            page_at, chunk_at = page_at + count, chunk_at + num_chunks
            for ref in refs:
                self._copy_pages(ref, pages, slots.tolist(), stores=stores)
                size_bytes += count * ref.page_size_bytes
        self._done.append(TransferResult(job_id, True, size_bytes, time.monotonic() - began_s))
        return True

    def _copy_pages(self, ref: Any, pages: list[int], slots: list[int], *, stores: bool) -> None:
        of_engine, of_host = self._pages[ref.tensor_idx], self._chunks[ref.tensor_idx]
        stride, size = of_engine.shape[1], ref.page_size_bytes
        for page, slot in zip(pages, slots, strict=True):
            chunk, place = divmod(slot, self._blocks_per_chunk)
            there, here = of_host[chunk, place * stride : place * stride + size], of_engine[page, :size]
            _ = there.copy_(here) if stores else here.copy_(there)


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's spec with that worker."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return the one worker."""
        if not self._worker:
            self._worker = HostCopyWorker(
                kv_caches,
                self.blocks_per_chunk,
                SharedOffloadRegion(
                    engine_id=self.config.engine_id,
                    num_chunks=self.num_chunks,
                    rank=0 if self.replicated_layout else self.config.parallel.rank,
                    kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                    cpu_page_size=self.cpu_page_size_per_worker,
                ),
            )
        return self._worker
