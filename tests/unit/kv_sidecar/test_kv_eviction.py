"""Room in a region: which stretches are free, and which blocks leave for a new one."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_sidecar.tiers.memory import Extents, Memory, Slot, rounded

LIMIT_BYTES = 640
"""Ten cache lines."""


def filled(*sizes: int, limit_bytes: int = LIMIT_BYTES) -> tuple[Memory, list[Slot]]:
    memory, slots = Memory(limit_bytes=limit_bytes), []
    for size in sizes:
        slot = memory.allocate(size)
        assert slot is not None
        memory.keep(slot)
        slots.append(slot)
    return memory, slots


def gaps(taken: dict[int, int]) -> list[tuple[int, int]]:
    """What is free beside stretches that are taken: (offset, length)."""
    edges = [0, *(edge for offset in sorted(taken) for edge in (offset, offset + taken[offset])), LIMIT_BYTES]
    return [(start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]


@settings(deadline=None)
@given(st.lists(st.integers(0, 200) | st.just("give back"), max_size=60), st.randoms())
def test_a_stretch_is_the_first_gap_that_is_long_enough_and_gaps_that_touch_are_one(
    steps: list[int | str], random: Random
) -> None:
    """Seen failing: with neighbours not joined on either side, a gap of two is not found."""
    extents, taken = Extents(LIMIT_BYTES), dict[int, int]()
    for step in steps:
        if isinstance(step, int):
            fitting = [offset for offset, length in gaps(taken) if length >= rounded(step)]
            offset = extents.take(rounded(step))

            assert offset == (fitting[0] if fitting else None)
            if offset is not None:
                taken[offset] = rounded(step)
        elif taken:
            offset = random.choice(sorted(taken))
            extents.give_back(offset, taken.pop(offset))
        assert extents.free_bytes == LIMIT_BYTES - sum(taken.values())
    for offset, length in taken.items():
        extents.give_back(offset, length)

    assert extents.take(LIMIT_BYTES) == 0


@pytest.mark.parametrize(
    ("limit_bytes", "size_bytes"), [(0, 1), (LIMIT_BYTES, LIMIT_BYTES + 1), (LIMIT_BYTES, 1 << 60)]
)
def test_what_never_fits_gets_no_room_and_evicts_nothing(limit_bytes: int, size_bytes: int) -> None:
    memory, slots = filled(*[64] * (limit_bytes // 64), limit_bytes=limit_bytes)

    assert memory.allocate(size_bytes) is None
    assert all(slot.is_kept for slot in slots)


def test_a_pinned_slot_is_evicted_after_its_last_pin() -> None:
    """Seen failing: with `unpin` making it idle at the first of two."""
    memory, (slot,) = filled(LIMIT_BYTES // 2)
    memory.pin(slot)
    memory.pin(slot)
    memory.unpin(slot)

    assert memory.allocate(LIMIT_BYTES) is None
    memory.unpin(slot)
    assert memory.allocate(LIMIT_BYTES) is not None


def test_a_slot_freed_under_a_pin_is_free_once() -> None:
    memory, (slot,) = filled(LIMIT_BYTES // 2)
    memory.pin(slot)
    memory.free(slot)
    memory.unpin(slot)

    assert (memory.free_bytes, memory.kept_by.total, memory.num_kept) == (LIMIT_BYTES, 0, 0)
    assert memory.allocate(LIMIT_BYTES) is not None


class MemoryMachine(RuleBasedStateMachine):
    """Any order of calls: no two slots overlap, pinned slots stay, the least recently used leave, bytes add up."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(limit_bytes=LIMIT_BYTES)
        self.idle: list[Slot] = []
        """Least recently used first."""
        self.loose: list[Slot] = []
        """Allocated and not kept."""
        self.pinned: list[Slot] = []

    @rule(size=st.integers(0, LIMIT_BYTES + 64))
    def allocate(self, size: int) -> None:
        room = self.memory.free_bytes + sum(rounded(slot.size_bytes) for slot in self.idle)
        slot = self.memory.allocate(size)
        left = [slot for slot in self.idle if not slot.is_kept]

        assert left == self.idle[: len(left)]
        if slot is not None:
            self.loose.append(slot)
        else:
            assert left == (self.idle if rounded(size) <= room else [])
        self.idle = self.idle[len(left) :]

    @precondition(lambda self: self.loose)
    @rule()
    def keep(self) -> None:
        self.idle.append(self.loose.pop())
        self.memory.keep(self.idle[-1])

    @precondition(lambda self: self.loose)
    @rule()
    def give_back(self) -> None:
        self.memory.free(self.loose.pop())

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.memory.free(self.idle.pop(data.draw(st.integers(0, len(self.idle) - 1))))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def free_pinned(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.pinned))
        self.memory.free(slot)
        self.pinned = [other for other in self.pinned if other is not slot]

    @precondition(lambda self: self.idle or self.pinned)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([*self.idle, *self.pinned]))
        self.idle = [other for other in self.idle if other is not slot]
        self.pinned.append(slot)
        self.memory.pin(slot)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        if slot not in self.pinned:
            self.idle.append(slot)
        self.memory.unpin(slot)

    @invariant()
    def slots_are_apart_and_bytes_add_up(self) -> None:
        kept = list({id(slot): slot for slot in [*self.idle, *self.pinned]}.values())
        occupied = sorted([*kept, *self.loose], key=lambda slot: slot.offset)

        assert all(a.offset + rounded(a.size_bytes) <= b.offset for a, b in pairwise(occupied))
        assert all(slot.offset + slot.size_bytes <= LIMIT_BYTES for slot in occupied)
        assert self.memory.free_bytes == LIMIT_BYTES - sum(rounded(slot.size_bytes) for slot in occupied)
        assert self.memory.kept_by.total == sum(slot.size_bytes for slot in kept)
        assert self.memory.num_kept == len(kept)
        assert all(slot.is_kept for slot in kept)


MemoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMemoryMachine = MemoryMachine.TestCase
