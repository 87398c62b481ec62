from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_sidecar.block_key import BlockKey
from kv_sidecar.eviction import ByteLru


def key(number: int) -> BlockKey:
    return BlockKey("block", f"{number:064x}", 0)


def filled(*sizes: int, limit_bytes: int = 10) -> ByteLru:
    lru = ByteLru(limit_bytes)
    for number, size in enumerate(sizes):
        assert lru.reserve(size) == []
        lru.add(key(number), size)
    return lru


def test_the_least_recently_used_leave_first_and_no_more_than_needed() -> None:
    lru = filled(4, 3, 3)
    lru.touch(key(0))

    assert lru.reserve(4) == [key(1), key(2)]
    assert list(lru) == [key(0)]


def test_pinned_blocks_stay_and_can_be_in_the_way() -> None:
    lru = filled(4, 3, 3)
    lru.pin(key(0))
    lru.pin(key(1))

    assert lru.reserve(4) is None
    assert list(lru) == [key(0), key(1), key(2)]
    lru.unpin(key(1))
    assert lru.reserve(4) == [key(1), key(2)]


def test_pins_count() -> None:
    lru = filled(10)
    lru.pin(key(0))
    lru.pin(key(0))
    lru.unpin(key(0))

    assert lru.reserve(1) is None


@pytest.mark.parametrize("size", [11, 1 << 40])
def test_what_never_fits_makes_nobody_leave(size: int) -> None:
    lru = filled(5, 5)

    assert lru.reserve(size) is None
    assert len(lru) == 2


def test_a_replaced_block_is_counted_once() -> None:
    lru = filled(4)
    lru.reserve(5)
    lru.add(key(0), 5)

    assert (lru.size_bytes, lru.used_bytes, len(lru)) == (5, 5, 1)


class LruMachine(RuleBasedStateMachine):
    """Any order of calls keeps the limit, keeps pinned blocks, and counts right."""

    def __init__(self) -> None:
        super().__init__()
        self.lru = ByteLru(100)
        self.sizes: dict[BlockKey, int] = {}
        self.reserved: list[int] = []
        self.pinned: list[BlockKey] = []

    @rule(size=st.integers(0, 120))
    def reserve(self, size: int) -> None:
        victims = self.lru.reserve(size)
        if victims is not None:
            self.reserved.append(size)
            assert not set(victims) & set(self.pinned)
            for victim in victims:
                del self.sizes[victim]

    @precondition(lambda self: self.reserved)
    @rule(number=st.integers(0, 5))
    def add(self, number: int) -> None:
        size = self.reserved.pop()
        self.lru.add(key(number), size)
        self.sizes[key(number)] = size

    @precondition(lambda self: self.reserved)
    @rule()
    def cancel(self) -> None:
        self.lru.cancel(self.reserved.pop())

    @rule(number=st.integers(0, 5))
    def remove(self, number: int) -> None:
        assert self.lru.remove(key(number)) == self.sizes.pop(key(number), 0)

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.sizes, key=lambda k: k.name)))
        self.lru.pin(chosen)
        self.pinned.append(chosen)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.lru.unpin(self.pinned.pop())

    @invariant()
    def limit_and_counts_hold(self) -> None:
        assert self.lru.size_bytes == sum(self.sizes.values())
        assert self.lru.used_bytes == self.lru.size_bytes + sum(self.reserved)
        assert self.lru.used_bytes <= 100
        assert set(self.lru) == set(self.sizes)


LruMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLruMachine = LruMachine.TestCase
