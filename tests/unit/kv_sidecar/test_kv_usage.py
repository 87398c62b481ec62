"""What tenants hold over time: the mean between two looks, told once whatever fails, nothing lost to rounding."""

from __future__ import annotations

from collections import Counter

import pytest

from contextcache.errors import InvalidRequest, StoreUnavailable
from kv_sidecar.accounts import UsageMeter
from kv_sidecar.format.ids import BlockKey
from tests.kit.block_tiers import MemoryBlocks

MIB = 1 << 20


class Sink:
    """Counts batches once, as a manager does; fails as often as it is told."""

    def __init__(self):
        self.last, self.sums, self.failures, self.calls = {}, Counter(), 0, 0

    async def add_usage(self, tenant, usage, *, sender, number):
        self.calls += 1
        if number > self.last.get((tenant, sender), 0):
            self.last[tenant, sender] = number
            for what, number in usage[0].counts.items():
                self.sums[tenant, what] += number
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("its answer was lost")


@pytest.fixture
def sink():
    return Sink()


@pytest.fixture
def meter(sink, clock):
    return UsageMeter(sink, clock)


async def test_between_two_looks_the_mean_was_held(meter, sink, clock):
    await meter.look({"disk": {"a": 2 * MIB}, "memory": {"a": MIB}})
    clock.advance(ms=60_000)
    await meter.look({"disk": {"a": 4 * MIB, "b": 2 * MIB}, "memory": {}})

    assert sink.sums == {
        ("a", "disk_kib_s"): 3 * 1024 * 60,
        ("a", "memory_kib_s"): 512 * 60,
        ("b", "disk_kib_s"): 1024 * 60,
    }


async def test_a_batch_whose_answer_was_lost_counts_once_and_what_came_since_is_not_lost(meter, sink, clock):
    held = {"disk": {"a": MIB}}
    await meter.look(held)
    for failures in (1, 1, 0, 0):
        sink.failures = failures
        clock.advance(ms=10_000)
        await meter.look(held)

    assert sink.sums == {("a", "disk_kib_s"): 1024 * 40}


async def test_a_thousand_looks_of_a_millisecond_are_a_second(meter, sink, clock):
    held = {"disk": {"a": 3 * 1024}}
    await meter.look(held)
    for _ in range(1000):
        clock.advance(ms=1)
        await meter.look(held)

    assert sink.sums == {("a", "disk_kib_s"): 3}


async def test_a_clock_that_was_set_counts_ten_minutes_at_most_and_never_less_than_nothing(meter, sink, clock):
    held = {"disk": {"a": MIB}}
    await meter.look(held)
    clock.advance(ms=86_400_000)
    await meter.look(held)
    clock.advance(ms=-3_600_000)
    await meter.look(held)

    assert sink.sums == {("a", "disk_kib_s"): 1024 * 600}


async def test_what_the_collector_of_the_store_counted_is_told_too(meter, sink):
    await meter.look({}, store_kib_s={"a": 7})

    assert sink.sums == {("a", "store_kib_s"): 7}


def test_copies_in_memory_are_of_the_tenant_whose_file_they_are():
    store = MemoryBlocks(1024)
    ours, foreign = (BlockKey("block", digit * 64, 0) for digit in "ab")
    store.blocks.open({ours: 4, foreign: 9}, None)
    store.blocks.vouch(ours, "a", None)
    store.put(ours, bytes(4))
    store.put(foreign, bytes(9))

    assert store.blocks.memory_by_tenant() == {"a": 4}


@pytest.mark.parametrize("num_lost", [1, 2])
async def test_a_tenant_whose_shard_is_away_keeps_no_other_s_waiting_for_ever(meter, sink, monkeypatch, num_lost):
    """Seen failing: the one that was first stayed first, and nobody was counted until its shard was back."""
    add_usage, tenants = sink.add_usage, "abcd"

    async def lose(tenant, usage, **which):
        if tenant in tenants[:num_lost]:
            raise StoreUnavailable("its shard is away")
        await add_usage(tenant, usage, **which)

    monkeypatch.setattr(sink, "add_usage", lose)
    await meter.look({}, store_kib_s=dict.fromkeys(tenants, 7))
    for _ in range(num_lost):
        await meter.look({})
    monkeypatch.setattr(sink, "add_usage", add_usage)
    without = {tenant for tenant, _ in sink.sums}
    await meter.look({})

    assert without == set(tenants[num_lost:])
    assert sink.sums == {(tenant, "store_kib_s"): 7 for tenant in tenants}


async def test_a_batch_that_is_refused_keeps_no_other_tenant_s_waiting(meter, sink, clock, monkeypatch):
    """Seen failing: one tenant with too much to be counted, and nobody behind it was counted again."""
    add_usage = sink.add_usage

    async def refuse(tenant, usage, **which):
        if tenant == "a":
            raise InvalidRequest("too much")
        await add_usage(tenant, usage, **which)

    monkeypatch.setattr(sink, "add_usage", refuse)
    for _ in range(2):
        clock.advance(s=10)
        await meter.look({"memory": {"a": MIB, "b": MIB}})

    assert {tenant for tenant, _ in sink.sums} == {"b"}
