"""The arena's memory: counters that the engine reads, huge pages and placement where the machine has them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_sidecar.tiers import arena
from kv_sidecar.tiers.arena import MappedArena, Region, gpu_node
from kv_sidecar.tiers.memory import Memory


@pytest.fixture(params=[1 << 20, 65 << 20], ids=["fine", "coarse"])
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    memory = Memory(limit_bytes=request.param)
    memory.open()
    yield memory
    memory.close()


@pytest.fixture
def engine(memory: Memory) -> Iterator[MappedArena]:
    assert memory.region is not None
    ours, theirs = socket.socketpair()
    descriptors = [os.dup(memory.region.descriptor), os.dup(memory.region.table)]
    yield MappedArena(ours, descriptors, "engine", on_gone=lambda: None)
    theirs.close()


def test_the_engine_sees_that_a_slot_was_freed_before_it_is_lent_again(memory: Memory, engine: MappedArena) -> None:
    """Seen failing without `retire`: the engine takes the next block's bytes for the first one's."""
    first, other = memory.allocate(300_000), memory.allocate(300_000)
    assert first is not None
    assert other is not None
    memory.keep(first)
    memory.keep(other)
    assert engine.generation(first.offset) == first.generation
    memory.free(first)

    assert engine.generation(first.offset) != first.generation
    assert engine.generation(other.offset) == other.generation
    again = memory.allocate(300_000)
    assert again is not None
    assert again.offset == first.offset
    assert engine.generation(again.offset) == again.generation


def test_an_evicted_slot_is_seen_too(memory: Memory, engine: MappedArena) -> None:
    slot = memory.allocate(memory.limit_bytes)
    assert slot is not None
    memory.keep(slot)
    assert memory.allocate(64) is not None

    assert engine.generation(slot.offset) != slot.generation


def test_the_engine_cannot_change_a_counter(memory: Memory, engine: MappedArena) -> None:
    with pytest.raises(ValueError, match="read-only"):
        engine.generations[0] = 7
    with pytest.raises(PermissionError):
        os.pwrite(memory.region.table, b"1", 0)  # type: ignore[union-attr]  # it is open


def test_an_answer_without_descriptors_is_an_error(memory: Memory) -> None:
    ours, theirs = socket.socketpair()

    with pytest.raises(OSError, match="no arena"):
        MappedArena(ours, [], "engine", on_gone=lambda: None)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("limit", ["0", "4096", "max", ""])
def test_without_huge_pages_the_region_has_normal_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    if limit:
        (tmp_path / "limit").write_text(f"{limit}\n")
    monkeypatch.setattr(arena, "_HUGE_LIMIT", tmp_path / "limit")
    region = Region(100_000)

    region.view[:3] = b"abc"
    assert region.size_bytes >= 100_000
    region.close()


def devices(root: Path, *found: tuple[str, str, str]) -> Path:
    for number, (vendor, kind, node) in enumerate(found):
        device = root / f"0000:00:0{number}.0"
        device.mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
        (device / "numa_node").write_text(f"{node}\n")
    return root


NIC, GPU_0, GPU_1 = ("0x8086", "0x020000", "1"), ("0x10de", "0x030200", "0"), ("0x10de", "0x030200", "1")


@pytest.mark.parametrize(
    ("found", "node"),
    [
        ([NIC, GPU_1, GPU_1], 1),
        ([GPU_0], 0),
        ([GPU_0, GPU_1], None),
        ([NIC], None),
        ([("0x10de", "0x030200", "-1")], None),
        ([("0x10de", "0x030200", "x")], None),
    ],
    ids=["one node", "node 0", "two nodes", "no GPU", "no NUMA", "unreadable"],
)
def test_the_node_is_known_when_all_gpus_are_on_it(
    tmp_path: Path, found: list[tuple[str, str, str]], node: int
) -> None:
    assert gpu_node(devices(tmp_path, *found)) == node
    assert gpu_node(tmp_path / "absent") is None


def test_memory_is_placed_where_that_is_allowed_and_works_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in ("0", "63"):
        root = tmp_path / node
        root.mkdir()
        monkeypatch.setattr(arena, "_PCI_DEVICES", devices(root, ("0x10de", "0x030200", node)))
        region = Region(100_000)
        region.view[:3] = b"abc"
        region.close()
