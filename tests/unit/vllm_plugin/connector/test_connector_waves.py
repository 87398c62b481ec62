"""Bars of the copy path, counted for 2 GB of an 8B model's KV over a driver that only counts.

No byte is there: KV and arena are address space. A page of the arena that the host reads would become resident.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from contextcache.clock import ManualClock
from contextcache.model import KVFile
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import BlockFileWriter
from tests.kit.host_driver import HostDriver
from vllm_plugin.connector.copies.cuda_copies import Block, Chunks, DeviceLayers, Numbers
from vllm_plugin.connector.copies.layout import layer_views
from vllm_plugin.connector.copies.pages import PageCopy, page_bytes
from vllm_plugin.connector.loads.loading import Loader, LoadPhase
from vllm_plugin.connector.metadata import LoadPlan, Piece
from vllm_plugin.connector.telemetry import Counters
from vllm_plugin.connector.transfer import ResultBox

LAYERS, HEADS, BLOCK_TOKENS, CONTENT_BYTES = 32, 8, 16, 2 * 128 * 2
"""Llama 3 8B in bfloat16: 128 KiB a token."""
FILE_TOKENS, NUM_TOKENS = 256, 16_160
NUM_BLOCKS = 2 * NUM_TOKENS // BLOCK_TOKENS
LIB = ctypes.CDLL(None)
ORDERS = {"LBHNC": (0, 1, 2, 3, 4), "BLNHC": (1, 0, 3, 2, 4)}


class EmptyDriver(HostDriver):
    """Counts, and copies nothing."""

    def __init__(self, device: Sequence[torch.Tensor]) -> None:
        super().__init__(device)
        self.num_descriptors = 0
        self.digests: list[int] = []
        """Answer of `digest`."""

    def submit(self, chunks: Chunks, **how: Any) -> Callable[[], None]:
        self.submitted.append((how["after"], int(chunks[2].sum())))
        self.num_descriptors += chunks.shape[1]
        return self._wait

    def _wait(self) -> None:
        self.num_waits += 1

    def digest(self, blocks: Sequence[Block]) -> Callable[[], Numbers]:
        self.num_digest_calls += 1
        count = sum(len(ids) for _, ids in blocks)

        def wait() -> Numbers:
            self.num_waits += 1
            return np.array(self.digests[:count], dtype=np.uint64).view(np.int64)

        return wait


def address_space(size_bytes: int) -> tuple[memoryview, int]:
    """Return shared memory with nothing behind it, and its descriptor."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, size_bytes)
    return memoryview(mmap.mmap(descriptor, size_bytes)), descriptor


@dataclass
class World:
    """A loader over an arena whose slots have heads and no pages, and all that is counted."""

    layers: DeviceLayers
    driver: EmptyDriver
    files: list[tuple[Piece, pb.LoadBlocksResponse]]
    plan: LoadPlan
    arena: SimpleNamespace
    descriptor: int
    results: ResultBox = field(default_factory=ResultBox)
    num_answers: int = 0
    lent_again: set[int] = field(default_factory=set)
    """Slots that are lent again while they are copied."""

    def load_blocks(self, request: pb.LoadBlocksRequest, timeout_s: float) -> Iterator[pb.LoadBlocksResponse]:
        """Name all slots in one answer."""
        assert list(request.block_indices) == [piece.block_index for piece, _ in self.files]
        answer = pb.LoadBlocksResponse()
        answer.CopyFrom(self.files[0][1])
        answer.more.extend(slot for _, slot in self.files[1:])
        self.num_answers += 1
        yield answer

    def resident_bytes(self) -> int:
        """Return the arena's bytes that have been touched by anybody."""
        return os.fstat(self.descriptor).st_blocks * 512

    def run(self) -> LoadPhase:
        """Load it."""
        counters, ignored = Counters(), SimpleNamespace(end_load=lambda *_: None, send=lambda *_, **__: None)
        link = SimpleNamespace(
            facts=SimpleNamespace(rank=0, world_size=1),
            terms=lambda: SimpleNamespace(arena=self.arena),
            sidecar=self,
            doubt=lambda *_: None,
        )
        settings = SimpleNamespace(load_deadline_ms=5_000, load_bytes_per_ms_min=100_000)
        loader = Loader(
            settings=settings,
            link=link,
            layers=self.layers,
            results=self.results,
            reporter=ignored,
            counters=counters,
            clock=ManualClock(),
        )
        load = loader.open(self.plan, self.layers.fence())
        loader.run(load)
        loader.close()
        assert load.reason == "", load.reason
        return load.phase


@pytest.fixture(params=["BLNHC", "LBHNC"])
def world(request: pytest.FixtureRequest) -> World:
    axes = ORDERS[request.param]
    shape = (LAYERS, NUM_BLOCKS, HEADS, BLOCK_TOKENS, CONTENT_BYTES)
    room, _ = address_space(int(np.prod(shape, dtype=np.int64)))
    storage = torch.frombuffer(room, dtype=torch.uint8).view([shape[axis] for axis in axes])
    logical = storage.permute([axes.index(axis) for axis in range(5)])
    kv = {f"layer.{number}": logical[number] for number in range(LAYERS)}
    driver = EmptyDriver(list(kv.values()))
    layers = DeviceLayers(*layer_views(kv, NUM_BLOCKS, [list(kv)]), driver)
    shuffled = np.random.default_rng(3).permutation(NUM_BLOCKS)
    file_bytes = FILE_TOKENS // BLOCK_TOKENS * page_bytes(layers.shapes[0])
    slot_bytes = -(-(file_bytes + (16 << 10)) // 4096) * 4096
    arena_bytes = -(-NUM_TOKENS // FILE_TOKENS) * slot_bytes
    memory, descriptor = address_space(arena_bytes)
    files, pieces = [], []
    for index, first in enumerate(range(0, NUM_TOKENS, FILE_TOKENS)):
        end = min(first + FILE_TOKENS, NUM_TOKENS)
        num_pages = (end - first) // BLOCK_TOKENS
        ids = tuple(shuffled[first // BLOCK_TOKENS : end // BLOCK_TOKENS].tolist())
        file = KVFile(0, "block", f"{index:064x}", "", first, end)
        pieces.append(Piece(index, file, tuple(range(first, end)), num_pages, 0, ids, num_pages))
    plan = LoadPlan(
        engine_request_id="request",
        request_id="request",
        tenant="demo",
        cache_ref=f"ref_{1:032x}",
        fingerprint="f" * 64,
        digests=("",),
        pieces=tuple(pieces),
        device_tokens=0,
        loaded_tokens=NUM_TOKENS,
        asked_at_s=0.0,
    )
    for index, piece in enumerate(pieces):
        digests = tuple(range(len(driver.digests) + 1, len(driver.digests) + 1 + piece.num_pages))
        driver.digests += digests
        size = piece.num_pages * page_bytes(layers.shapes[0])
        writer = BlockFileWriter(plan.meta(piece, 0), pages_bytes=size, num_digests=piece.num_pages)
        writer._set("digests", "".join(f"{digest:016x}" for digest in digests))
        writer._set("checksum", "c" * 32)
        head = writer._head
        start = index * slot_bytes
        memory[start : start + len(head)] = head
        slot = pb.Slot(offset=start, size_bytes=writer.size_bytes)
        files.append((piece, pb.LoadBlocksResponse(block_index=index, tier=pb.TIER_HOST, slot=slot, checksum="c" * 32)))
    layers._registered._pieces = ((np.frombuffer(memory, np.uint8).ctypes.data, 1 << 62),)
    arena = SimpleNamespace(
        borrower="engine",
        size_bytes=arena_bytes,
        view=lambda offset, size: memory[offset : offset + size],
        generation=lambda offset: 0,
    )
    return World(layers, driver, files, plan, arena, descriptor)


def test_a_load_of_two_gigabytes_takes_few_calls_few_waits_one_answer_and_no_byte_read_by_the_host(
    world: World,
) -> None:
    """Seen failing with a call and a checksum for each file: 253 driver calls, 253 waits, every byte read."""
    before = world.resident_bytes()
    phase = world.run()

    assert phase is LoadPhase.ENDED
    assert world.results.take().received == {"request"}
    assert sum(size for _, size in world.driver.submitted) == NUM_TOKENS * 128 << 10
    assert len(world.driver.submitted) + world.driver.num_digest_calls <= 16
    assert world.driver.num_waits <= 16
    assert world.num_answers == 1
    assert world.resident_bytes() == before


def test_a_block_of_all_layers_is_one_descriptor_where_blocks_are_outermost(world: World) -> None:
    world.run()
    is_one_plane = len(world.layers.planes[0]) == 1

    assert world.driver.num_descriptors <= NUM_TOKENS // BLOCK_TOKENS * (1 if is_one_plane else LAYERS)


def test_a_save_of_two_gigabytes_is_as_few_waves(world: World) -> None:
    copies, before = [], world.resident_bytes()
    for piece, answer in world.files:
        size = piece.num_pages * page_bytes(world.layers.shapes[0])
        end = answer.slot.offset + answer.slot.size_bytes
        pages = np.frombuffer(world.arena.view(end - size, size), dtype=np.uint8)
        copies.append(PageCopy(0, piece.block_ids, pages, piece.num_pages, after=world.layers.fence()))
    digests = world.layers.gather(copies)

    assert [len(own) for own in digests] == [piece.num_pages for piece, _ in world.files]
    assert len(world.driver.submitted) + world.driver.num_digest_calls <= 16
    assert world.driver.num_waits <= 16
    assert world.resident_bytes() == before
