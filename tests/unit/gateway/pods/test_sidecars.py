"""Doors to sidecars follow the endpoints; what the sidecars say is told to them."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from contextcache.clock import ManualClock
from gateway.metrics import Metrics
from gateway.pods.endpoints import WatchedEndpoints
from gateway.pods.sidecars import Holders
from gateway.pods.state import Endpoint
from kv_sidecar.recent import Beginnings
from tests.kit.gateway_parts import Pods, settings_of
from tests.kit.memory_sidecar import MemorySidecar

A = Endpoint("a", "http://a", "a:9001")
B = Endpoint("b", "http://b", "b:9001")
BARE = Endpoint("bare", "http://bare")


@pytest.fixture
def metrics():
    return Metrics(CollectorRegistry())


@pytest.fixture
def endpoints(metrics):
    return WatchedEndpoints([A, B, BARE], Pods(), metrics=metrics)


@pytest.fixture
def opened():
    return {}


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def sidecars(endpoints, opened, metrics, clock):
    def connect(address):
        assert address not in opened
        opened[address] = MemorySidecar(clock)
        opened[address].fingerprints = [f"f-{address}", "f-1"]
        return opened[address]

    return Holders(endpoints, None, connect, clock=clock, metrics=metrics, settings=settings_of([A]))


async def test_a_pod_with_a_sidecar_has_one_client_and_others_have_none(sidecars, opened):
    assert sidecars.names() == ["a", "b"]
    assert opened == {}

    assert await sidecars.kept("demo") == ({"a": [], "b": []}, [])
    assert await sidecars.kept("demo") == ({"a": [], "b": []}, [])
    assert list(opened) == ["a:9001", "b:9001"]


async def test_a_sidecar_that_fails_or_takes_too_long_counts_as_unreachable(endpoints, metrics, clock, caplog):
    class Silent(MemorySidecar):
        async def delete_context(self, tenant, **which):
            await asyncio.Event().wait()

    made = {"a:9001": Silent(), "b:9001": MemorySidecar()}
    made["b:9001"].down = True
    sidecars = Holders(
        endpoints,
        None,
        made.__getitem__,
        clock=clock,
        metrics=metrics,
        settings=settings_of([A], delete_timeout_s=0.001),
    )

    assert await sidecars.delete_kept("demo", "kept_1") == ["a", "b"]
    assert [(record.message, record.endpoint, record.session_id, record.error) for record in caplog.records] == [
        ("KV not deleted, expires at its TTL", "b", "kept_1", "SidecarUnavailable"),
        ("KV not deleted, expires at its TTL", "a", "kept_1", "TimeoutError"),
    ]


async def test_what_a_sidecar_says_is_told_to_the_endpoints(sidecars, endpoints, opened):
    await sidecars.ask_all()
    opened["b:9001"].down = True
    await sidecars.ask_all()
    states = endpoints.states()

    assert [state.fingerprint for state in states] == ["f-a:9001,f-1", "f-b:9001,f-1", ""]
    assert [state.tiers for state in states] == [{"host": 0.0, "disk": 0.0}, {}, {}]


async def test_what_was_asked_for_at_a_pod_is_known_and_a_sidecar_that_starts_again_adds_to_it(
    sidecars, endpoints, opened, clock
):
    await sidecars.ask_all()
    opened["a:9001"].beginnings.note("x")
    opened["a:9001"].beginnings.note("y")
    await sidecars.ask_all()
    assert [set(endpoints.roster().knowing(name)) for name in "xyz"] == [{"a"}, {"a"}, set()]

    for begun_at_ms, name in ((clock.now_ms() + 1000, "z"), (0, "clock put back")):
        opened["a:9001"].beginnings = Beginnings(ManualClock(begun_at_ms))
        opened["a:9001"].beginnings.note(name)
        await sidecars.ask_all()
    assert all(set(endpoints.roster().knowing(name)) == {"a"} for name in ("x", "y", "z", "clock put back"))


async def test_of_two_pods_that_were_asked_for_the_same_the_later_is_known_however_seldom_they_are_heard(
    sidecars, endpoints, opened, clock
):
    await sidecars.ask_all()
    opened["a:9001"].beginnings.note("x")
    opened["b:9001"].beginnings.note("y")
    clock.advance(s=1)
    opened["b:9001"].beginnings.note("x")
    opened["a:9001"].beginnings.note("y")
    clock.advance(s=3)
    await sidecars.ask_all()

    x, y = (endpoints.roster().knowing(name) for name in "xy")
    assert x["b"] > x["a"]
    assert y["a"] > y["b"]


async def test_a_sidecar_that_does_not_answer_is_waited_for_a_bounded_time(endpoints, metrics, clock):
    class Silent(MemorySidecar):
        async def stats(self, *, beginnings_after=0):
            await asyncio.Event().wait()

    sidecars = Holders(
        endpoints,
        None,
        lambda _: Silent(),
        clock=clock,
        metrics=metrics,
        settings=settings_of([A], probe_timeout_s=0.001),
    )
    await sidecars.ask_all()

    assert [state.tiers for state in endpoints.states()] == [{}, {}, {}]


async def test_doors_to_pods_that_are_gone_are_closed(sidecars, endpoints, opened):
    await sidecars.ask_all()
    endpoints.follow([A, Endpoint("c", "http://c", "c:9001")])

    assert sidecars.names() == ["a", "c"]
    await sidecars.ask_all()
    assert {address: door.closed for address, door in opened.items()} == {
        "a:9001": False,
        "b:9001": True,
        "c:9001": False,
    }
    await sidecars.close()
    assert all(door.closed for door in opened.values())


async def test_the_asking_goes_on_after_a_fault_of_its_own(metrics, clock):
    endpoints = WatchedEndpoints([A], Pods(), metrics=metrics)
    asked = asyncio.Event()
    faults = [RuntimeError("a fault")]

    def connect(address):
        if faults:
            raise faults.pop()
        asked.set()
        return MemorySidecar()

    task = asyncio.create_task(
        Holders(
            endpoints, None, connect, clock=clock, metrics=metrics, settings=settings_of([A], probe_interval_s=1e-6)
        ).run()
    )
    await asked.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert metrics.registry.get_sample_value("contextcache_gateway_probe_failures_total") == 1
    assert task.cancelled()
