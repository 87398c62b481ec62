"""Room in a region: which stretches are free, and which blocks leave for a new one."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_sidecar.format.ids import BlockKey
from kv_sidecar.tiers.eviction import Extents, Slot, SlotLru, rounded

LIMIT_BYTES = 640
"""Ten cache lines."""


def key(number: int) -> BlockKey:
    return BlockKey("block", f"{number:064x}", 0)


def filled(*sizes: int, limit_bytes: int = LIMIT_BYTES) -> tuple[SlotLru, list[Slot]]:
    lru, slots = SlotLru(limit_bytes), []
    for number, size in enumerate(sizes):
        slot = lru.allocate(size)
        assert slot is not None
        lru.install(key(number), slot)
        slots.append(slot)
    return lru, slots


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
            offset = extents.take(step)

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
def test_what_never_fits_gets_no_room_and_makes_nobody_leave(limit_bytes: int, size_bytes: int) -> None:
    lru, _ = filled(*[64] * (limit_bytes // 64), limit_bytes=limit_bytes)

    assert lru.allocate(size_bytes) is None
    assert len(lru) == limit_bytes // 64


def test_the_least_recently_used_leave_first_and_no_more_than_needed() -> None:
    lru, slots = filled(256, 192, 192)
    lru.pin(slots[0])
    lru.unpin(slots[0])

    slot = lru.allocate(300)

    assert slot is not None
    assert (slot.offset, list(lru)) == (256, [key(0)])


@pytest.mark.parametrize("ended_by", ["", "delete", "replace"])
def test_a_pinned_slot_is_nobody_elses_until_its_last_pin(ended_by: str) -> None:
    """Seen failing: with `remove` freeing at once, and with `unpin` freeing at the first of two."""
    lru, (slot,) = filled(LIMIT_BYTES // 2)
    lru.pin(slot)
    lru.pin(slot)
    if ended_by == "delete":
        lru.remove(slot)
    elif ended_by == "replace":
        other = lru.allocate(LIMIT_BYTES // 2)
        assert other is not None
        lru.install(key(0), other)
        assert lru.get(key(0)) is other
        lru.remove(other)
    lru.unpin(slot)

    assert lru.allocate(LIMIT_BYTES) is None
    assert (slot.key is None) == bool(ended_by)
    lru.unpin(slot)
    assert lru.allocate(LIMIT_BYTES) is not None


def test_a_block_replaced_under_its_name_is_counted_once_and_its_slot_is_free() -> None:
    lru, _ = filled(192)
    slot = lru.allocate(320)
    assert slot is not None
    lru.install(key(0), slot)

    assert (lru.held_bytes, len(lru), lru.free_bytes) == (320, 1, 320)
    assert lru.get(key(0)) is slot


class LruMachine(RuleBasedStateMachine):
    """Any order of calls: no two slots overlap, what is pinned stays, the least recently used leave, bytes add up."""

    def __init__(self) -> None:
        super().__init__()
        self.lru = SlotLru(LIMIT_BYTES)
        self.found: dict[BlockKey, Slot] = {}
        """Least recently used first."""
        self.loose: list[Slot] = []
        """Allocated, under no name."""
        self.pinned: list[Slot] = []

    def occupied(self) -> list[Slot]:
        return list({id(slot): slot for slot in [*self.found.values(), *self.loose, *self.pinned]}.values())

    @rule(size=st.integers(0, LIMIT_BYTES + 64))
    def allocate(self, size: int) -> None:
        may_leave = [name for name, slot in self.found.items() if not slot.pins]
        room = self.lru.free_bytes + sum(rounded(self.found[name].size_bytes) for name in may_leave)
        slot = self.lru.allocate(size)
        left = [name for name in self.found if name not in self.lru]

        assert left == may_leave[: len(left)]
        for name in left:
            del self.found[name]
        if slot is not None:
            self.loose.append(slot)
        else:
            assert left == (may_leave if rounded(size) <= room else [])

    @precondition(lambda self: self.loose)
    @rule(number=st.integers(0, 5))
    def install(self, number: int) -> None:
        self.found.pop(key(number), None)
        self.found[key(number)] = self.loose.pop()
        self.lru.install(key(number), self.found[key(number)])

    @precondition(lambda self: self.loose)
    @rule()
    def give_back(self) -> None:
        self.lru.remove(self.loose.pop())

    @precondition(lambda self: self.found)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.lru.remove(self.found.pop(data.draw(st.sampled_from(list(self.found)))))

    @precondition(lambda self: self.found)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.found)))
        slot = self.found[name] = self.found.pop(name)
        self.lru.pin(slot)
        self.pinned.append(slot)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.lru.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @invariant()
    def slots_are_apart_and_bytes_add_up(self) -> None:
        occupied = sorted(self.occupied(), key=lambda slot: slot.offset)

        assert all(a.offset + rounded(a.size_bytes) <= b.offset for a, b in pairwise(occupied))
        assert all(slot.offset + slot.size_bytes <= LIMIT_BYTES for slot in occupied)
        assert self.lru.free_bytes == LIMIT_BYTES - sum(rounded(slot.size_bytes) for slot in occupied)
        assert self.lru.held_bytes == sum(slot.size_bytes for slot in self.found.values())
        assert self.lru.num_pins == len(self.pinned)
        assert [(name, self.lru.get(name)) for name in self.lru] == list(self.found.items())


LruMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLruMachine = LruMachine.TestCase
