"""Bytes of request bodies in hand: each tenant's part of what there is, whatever the others do."""

from __future__ import annotations

import pytest

from contextcache.clock import ManualClock
from contextcache.errors import ContextCacheError, NoReadyEndpoint, TooManyInFlight
from gateway.tenants.limits import FrontLimits, HeldBody, TenantLimits

TOTAL_BYTES = 1200


def filled(limits: TenantLimits, tenant: str) -> int:
    """Return the bytes that a tenant gets who takes all it may."""
    before = limits.held_by(tenant)[1]
    while True:
        try:
            limits.take_bytes(tenant, 1)
        except ContextCacheError:
            return limits.held_by(tenant)[1] - before


def test_a_tenant_may_hold_as_much_as_it_leaves_free_and_one_that_holds_nothing_finds_room():
    """Seen failing before: the first took everything, and all others were 503."""
    limits = TenantLimits(clock=ManualClock(), total_bytes_max=TOTAL_BYTES)

    assert [filled(limits, name) for name in "abcde"] == [600, 300, 150, 75, 38]


def test_tenants_that_come_together_share_alike():
    limits = TenantLimits(clock=ManualClock(), total_bytes_max=TOTAL_BYTES)
    for _ in range(300):
        for name in "abc":
            limits.take_bytes(name, 1)

    for name in "abc":
        with pytest.raises(TooManyInFlight):
            limits.take_bytes(name, 1)
    limits.take_bytes("d", 300)
    with pytest.raises(NoReadyEndpoint):
        limits.take_bytes("e", 1)


def test_a_tenant_s_own_limit_is_below_its_share():
    limits = TenantLimits(clock=ManualClock(), bytes_max=100, total_bytes_max=TOTAL_BYTES)

    assert [filled(limits, name) for name in "ab"] == [100, 100]


async def test_a_body_that_announces_its_size_is_counted_once():
    limits = TenantLimits(clock=ManualClock(), total_bytes_max=TOTAL_BYTES)
    counts = []
    with held_body(limits) as held:
        held.reserve(100)
        for piece in (b"x" * 60, b"x" * 40, b"x" * 7):
            held.add(piece)
            counts.append(limits.held_bytes)

    assert counts == [100, 100, 107]
    assert (limits.held_bytes, limits.is_empty()) == (0, True)


async def test_a_body_that_does_not_fit_is_refused_when_it_is_announced():
    limits = TenantLimits(clock=ManualClock(), bytes_max=100, total_bytes_max=TOTAL_BYTES)
    with held_body(limits) as first, held_body(limits) as second:
        first.reserve(60)
        with pytest.raises(TooManyInFlight):
            second.reserve(60)

        assert limits.held_bytes == 60
    assert limits.is_empty()


def held_body(limits: TenantLimits) -> HeldBody:
    return HeldBody(limits, "demo", FrontLimits())
