"""A tenant gets its burst and its rate, and never pays for another's."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contextcache.clock import ManualClock
from contextcache.errors import TenantRateExceeded
from gateway.tenants.limits import TenantLimits

START_MS = 1_700_000_000_000


def is_taken(rates, tenant="demo"):
    try:
        rates.ask(tenant)
    except TenantRateExceeded:
        return False
    return True


def test_an_idle_tenant_has_its_burst_then_its_rate():
    clock = ManualClock()
    rates = TenantLimits(clock=clock, rate_per_s=2, burst=3)

    assert [is_taken(rates) for _ in range(4)] == [True, True, True, False]
    clock.advance(ms=499)
    assert not is_taken(rates)
    clock.advance(ms=1)
    assert [is_taken(rates) for _ in range(2)] == [True, False]
    clock.advance(s=3600)
    assert [is_taken(rates) for _ in range(4)] == [True, True, True, False]


def test_one_tenants_flood_costs_another_nothing():
    rates = TenantLimits(clock=ManualClock(), rate_per_s=1, burst=1)
    for _ in range(100):
        is_taken(rates, "flood")

    assert is_taken(rates, "calm")


def test_a_refusal_says_when_one_is_welcome():
    clock = ManualClock()
    rates = TenantLimits(clock=clock, rate_per_s=0.25, burst=1)
    rates.ask("demo")
    with pytest.raises(TenantRateExceeded) as caught:
        rates.ask("demo")

    assert (caught.value.http_status, caught.value.code) == (429, "rate_limit_exceeded")
    assert caught.value.retry_after_s == 4
    clock.advance(s=4)
    assert is_taken(rates)


def test_a_rate_of_zero_is_no_limit():
    rates = TenantLimits(clock=ManualClock(), rate_per_s=0, burst=1)

    assert all(is_taken(rates) for _ in range(1000))


def test_a_clock_set_back_locks_nobody_out():
    clock = ManualClock()
    rates = TenantLimits(clock=clock, rate_per_s=1, burst=2)
    for _ in range(2):
        rates.ask("demo")
    clock.advance(s=-3600)

    assert not is_taken(rates)
    clock.advance(s=1)
    assert is_taken(rates)


def test_tenants_that_asked_longest_ago_are_forgotten_first():
    rates = TenantLimits(clock=ManualClock(), rate_per_s=0.001, burst=2)
    for tenant in ("first", "again", "again", "first-but-again"):
        rates.ask(tenant)
    for number in range(65_533):
        rates.ask(f"tenant-{number}")
    rates.ask("first-but-again")
    for number in range(65_533, 65_536):
        rates.ask(f"tenant-{number}")

    assert not is_taken(rates, "first-but-again")
    assert [is_taken(rates, "first") for _ in range(3)] == [True, True, False]


gaps_ms = st.lists(st.integers(0, 3000), max_size=80)


@settings(deadline=None)
@given(st.floats(0.5, 200), st.integers(1, 20), gaps_ms)
def test_never_more_than_the_burst_and_the_rate_over_any_stretch_of_time(rate_per_s, burst, gaps):
    clock = ManualClock(START_MS)
    rates = TenantLimits(clock=clock, rate_per_s=rate_per_s, burst=burst)
    taken_ms = []
    for gap in gaps:
        clock.advance(ms=gap)
        if is_taken(rates):
            taken_ms.append(clock.now_ms())

    for first, start_ms in enumerate(taken_ms):
        for last in range(first, len(taken_ms)):
            allowed = burst + rate_per_s * (taken_ms[last] - start_ms) / 1000
            assert last - first + 1 <= allowed + 1e-6


@settings(deadline=None)
@given(st.floats(0.5, 200), st.integers(1, 20), gaps_ms)
def test_a_tenant_within_its_rate_is_never_refused(rate_per_s, burst, gaps):
    clock = ManualClock(START_MS)
    rates = TenantLimits(clock=clock, rate_per_s=rate_per_s, burst=burst)
    interval_ms = int(1000 / rate_per_s) + 1
    for gap in gaps:
        clock.advance(ms=interval_ms + gap)

        assert is_taken(rates)


@settings(deadline=None)
@given(st.floats(0.5, 200), st.integers(1, 20), st.lists(st.integers(-5000, 5000), max_size=80))
def test_whatever_the_clock_does_a_tenant_waits_no_longer_than_one_request_takes(rate_per_s, burst, jumps):
    clock = ManualClock(START_MS)
    rates = TenantLimits(clock=clock, rate_per_s=rate_per_s, burst=burst)
    for jump in jumps:
        clock.advance(ms=jump)
        while is_taken(rates):
            pass
    clock.advance(ms=int(1000 / rate_per_s) + 1)

    assert is_taken(rates)
