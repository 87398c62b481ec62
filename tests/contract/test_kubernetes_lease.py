"""The sweeper's Lease on API servers: managers with real clients, one of which holds it."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from context_manager.metrics import ManagerMetrics
from context_manager.sweep_lease import LeaseTerms, SweepLease
from contextcache.clock import SystemClock
from contextcache.kubernetes_objects import LEASES, KubernetesError
from tests.helpers.kube_servers import SERVERS, emptied_server

DEADLINE_S = 60


@pytest.fixture(params=SERVERS)
async def server(request, tmp_path, monkeypatch):
    async with emptied_server(request.param, tmp_path, monkeypatch) as (kube, admin):
        yield kube, admin


@pytest.fixture
def now():
    """Seconds that all candidates' clocks show."""
    return [0.0]


def candidate(admin, identity, now) -> SweepLease:
    # Long enough for calls on a busy machine; the clock is moved by hand.
    terms = LeaseTerms("cc-sweep", admin.namespace, identity, 600)
    metrics = ManagerMetrics(CollectorRegistry())
    return SweepLease(admin, terms, metrics=metrics, clock=SystemClock(), now_s=lambda: now[0])


async def test_of_many_that_ask_at_once_one_holds_it(server, now):
    _, admin = server
    candidates = [candidate(admin, f"m{number}", now) for number in range(6)]
    for _ in range(3):
        await asyncio.gather(*(each.look() for each in candidates))
        assert sum(each.is_held() for each in candidates) == 1

    found = await admin.read(LEASES, "cc-sweep")
    holder = next(number for number, each in enumerate(candidates) if each.is_held())
    assert found["spec"]["holderIdentity"] == f"m{holder}"
    assert found["spec"]["leaseTransitions"] == 0


async def test_a_holder_that_is_not_heard_of_is_succeeded_by_one(server, now):
    _, admin = server
    gone = candidate(admin, "gone", now)
    await gone.look()
    candidates = [candidate(admin, f"m{number}", now) for number in range(6)]
    await asyncio.gather(*(each.look() for each in candidates))
    now[0] = 599
    await asyncio.gather(*(each.look() for each in candidates))
    assert not any(each.is_held() for each in [gone, *candidates])
    now[0] = 600
    await asyncio.gather(*(each.look() for each in candidates))

    assert sum(each.is_held() for each in candidates) == 1
    assert (await admin.read(LEASES, "cc-sweep"))["spec"]["leaseTransitions"] == 1


async def test_one_that_ends_gives_it_back_and_the_next_look_takes_it(server, now):
    _, admin = server
    first, second = candidate(admin, "first", now), candidate(admin, "second", now)
    first.start()
    async with asyncio.timeout(DEADLINE_S):
        while not first.is_held():
            await asyncio.sleep(0.01)
    await second.look()
    assert not second.is_held()
    await first.stop()
    await second.look()

    assert (first.is_held(), second.is_held()) == (False, True)


async def test_without_the_role_nobody_holds_it_and_everyone_sweeps_in_the_end(server, now):
    kube, admin = server
    if kube is None:
        pytest.skip("the fake's roles can be changed")
    kube.allows = lambda _verb, plural, _namespace: plural != "leases"
    alone = candidate(admin, "alone", now)
    with pytest.raises(KubernetesError):
        await alone.look()
    assert not alone.may_sweep()
    now[0] = 4 * 600 + 1

    assert alone.may_sweep()
    assert not alone.is_held()
