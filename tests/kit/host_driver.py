"""The twin of a GPU's driver: the same lists of addresses, on the CPU, in no memory but what it was told of."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from typing_extensions import override

from vllm_plugin.connector.copies.cuda_copies import Block, Chunks, Driver, Numbers
from vllm_plugin.connector.copies.digest import page_digests
from vllm_plugin.connector.copies.pages import Fence, Pages


class HostDriver(Driver):
    """Copies when it is waited for, as late as a device may."""

    def __init__(self, device: Iterable[torch.Tensor], *, refuses: str = "") -> None:
        """`device`: tensors that stand for its memory; `refuses`: why nothing can be registered."""
        storages = [tensor.untyped_storage() for tensor in device]
        self._device = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self._host: dict[int, int] = {}
        self._refuses = refuses
        self._own = threading.local()
        self.submitted: list[tuple[Fence, int]] = []
        """What each batch waits for, and its bytes."""
        self.num_copies = 0
        self.num_waits = 0
        self.num_digest_calls = 0
        self.num_staged = 0
        self.num_going = 0
        """Batches that are not waited for."""
        self.fails_at = -1
        """Batch that cannot be submitted."""

    @override
    def fence(self) -> Fence:
        return object()

    @override
    def submit(self, chunks: Chunks, *, after: Fence, from_device: bool) -> Callable[[], None]:
        sources, targets, sizes = chunks
        if len(self.submitted) == self.fails_at:
            raise RuntimeError("the driver refused a copy")
        on_device, on_host = (sources, targets) if from_device else (targets, sources)
        for addresses, known in ((on_device, self._device), (on_host, self._host)):
            assert addresses.dtype == sizes.dtype == np.int64
            assert len(addresses) == len(sizes)
            for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
                assert any(at <= address and address + size <= at + held for at, held in known.items()), "wild"
        self.submitted.append((after, int(sizes.sum())))
        self.num_copies += len(sizes)
        self.num_going += 1
        is_done = False

        def wait() -> None:
            nonlocal is_done
            self.num_waits += 1
            if is_done:
                return
            is_done = True
            for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
                self.copy(target, source, size)
            self.num_going -= 1

        return wait

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Copy one stretch; tests of a bad link replace this."""
        ctypes.memmove(target, source, size_bytes)

    @override
    def digest(self, blocks: Sequence[Block]) -> Callable[[], Numbers]:
        self.num_digest_calls += 1

        def wait() -> Numbers:
            self.num_waits += 1
            return torch.cat([page_digests(planes, torch.tensor(ids)) for planes, ids in blocks]).numpy()

        return wait

    @override
    def register(self, address: int, size_bytes: int) -> None:
        if self._refuses:
            raise RuntimeError(self._refuses)
        self._host[address] = size_bytes

    @override
    def unregister(self, address: int) -> None:
        del self._host[address]

    @override
    def staging(self, size_bytes: int) -> Pages:
        self.num_staged += 1
        self._own.staging = np.zeros(size_bytes, dtype=np.uint8)
        self._host[self._own.staging.ctypes.data] = size_bytes
        pages: Pages = self._own.staging
        return pages
