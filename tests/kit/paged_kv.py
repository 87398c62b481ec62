"""KV as vLLM registers it, in each of its physical orders, on any device, and what has its pages copied there."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from tests.kit.host_driver import HostDriver
from tests.kit.until import wait_until
from vllm_plugin.connector.copies.cpu_copies import HostLayers
from vllm_plugin.connector.copies.cuda_copies import DeviceLayers
from vllm_plugin.connector.copies.layout import layer_views
from vllm_plugin.connector.copies.pages import PagedLayers, Pages, page_bytes

ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""vLLM 0.32 v1/kv_cache_layout.py: logical [L, B, H, N, C] in physical order."""
NUM_BLOCKS, HEADS, TOKENS, CONTENT = 12, 2, 8, 6
ARENA_BYTES = 1 << 20
PIECE_BYTES = ARENA_BYTES // 4

Place = Callable[[torch.Tensor], torch.Tensor]
"""Where a tensor goes; views of it are made afterwards."""


def paged(
    order: str, ratio: int = 1, dtype: torch.dtype = torch.float32, *, layers: int = 3, seed: int = 0, place: Place
) -> dict[str, torch.Tensor]:
    """Return layers: logical [B * ratio, H, N / ratio, C] over one storage in `order`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, NUM_BLOCKS * ratio, HEADS, TOKENS // ratio, CONTENT)
    axes = ORDERS[order]
    storage = place(torch.randint(0, 200, [shape[axis] for axis in axes], generator=generator).to(dtype))
    logical = storage.permute([axes.index(axis) for axis in range(5)])
    return {f"layer{number}": logical[number] for number in range(layers)}


def empty_pages(layers: PagedLayers, num_blocks: int, group: int = 0) -> Pages:
    """Return room for pages, in memory of the test's own."""
    return np.zeros(num_blocks * page_bytes(layers.shapes[group]), dtype=np.uint8)


class Kind(Protocol):
    """One kind of layers."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring a tensor to where its KV is."""
        ...

    def open(self, kv: Mapping[str, torch.Tensor], num_blocks: int, groups: Sequence[Sequence[str]]) -> PagedLayers:
        """Return the layers over it."""
        ...

    def room(self, size_bytes: int) -> Pages:
        """Return memory for pages, with bytes before and behind it that are others'."""
        ...


class HostKind:
    """KV in host memory."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def open(self, kv: Mapping[str, torch.Tensor], num_blocks: int, groups: Sequence[Sequence[str]]) -> PagedLayers:
        return HostLayers(*layer_views(kv, num_blocks, groups))

    def room(self, size_bytes: int) -> Pages:
        return room_in(np.zeros(size_bytes + 128, dtype=np.uint8), size_bytes)


def room_in(memory: Pages, size_bytes: int) -> Pages:
    """Return a stretch that begins where no page of memory does, as behind the head of a file."""
    return memory[72 : 72 + size_bytes]


class Owner:
    """Stands for an arena."""


@dataclass
class TwinKind(HostKind):
    """The device's way, over a driver that copies on the CPU; pages are staged unless memory is registered."""

    registered: bool
    arena: Pages = field(default_factory=lambda: np.frombuffer(mmap.mmap(-1, ARENA_BYTES), dtype=np.uint8))
    owners: list[Owner] = field(default_factory=list)

    def open(self, kv: Mapping[str, torch.Tensor], num_blocks: int, groups: Sequence[Sequence[str]]) -> DeviceLayers:
        driver = HostDriver(kv.values(), refuses="" if self.registered else "no more memory can be locked")
        layers = DeviceLayers(*layer_views(kv, num_blocks, groups), driver)
        if self.registered:
            self.arena[:] = 0  # resident
            register(layers, self.arena, self.owners)
        return layers

    def room(self, size_bytes: int) -> Pages:
        self.arena[:] = 0
        return room_in(self.arena, size_bytes)


def register(layers: DeviceLayers, memory: Pages, owners: list[Owner]) -> None:
    """Have `layers` reach `memory` and wait for it; those before let go of it."""
    owners[:] = [Owner()]
    layers.reach(memory.data, owner=owners[0])
    wait_until(lambda: layers._registered.holds(memory), what="the memory is registered", interval_s=0.001)


def equal(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Return whether tensors hold the same, wherever they are."""
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(some, others, strict=True))
