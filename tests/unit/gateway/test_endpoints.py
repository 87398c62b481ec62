"""A pod is ready when it says so, and stays ready through a short silence."""

import asyncio
import contextlib

import pytest
from prometheus_client import CollectorRegistry

from gateway.endpoints import Health, StaticEndpoints
from gateway.metrics import Metrics
from gateway.ports import Endpoint
from tests.helpers.gateway_parts import Pods

SILENT = Health(healthy=False, certain=False)
DOWN = Health(healthy=False)


@pytest.fixture
def pods():
    return Pods()


@pytest.fixture
def endpoints(pods):
    return StaticEndpoints(
        [Endpoint("a", "http://a"), Endpoint("b", "http://b")], pods, metrics=Metrics(CollectorRegistry())
    )


def ready(endpoints):
    return [state.endpoint.name for state in endpoints.states() if state.ready]


async def test_no_pod_is_ready_before_it_was_asked(endpoints):
    assert ready(endpoints) == []

    await endpoints.probe_all()

    assert ready(endpoints) == ["a", "b"]
    assert endpoints.states()[0].models == {"stub-model"}


async def test_a_pod_that_says_no_is_out_at_once_and_back_at_once(endpoints, pods):
    await endpoints.probe_all()
    pods.health["a"] = DOWN
    await endpoints.probe_all()

    assert ready(endpoints) == ["b"]
    del pods.health["a"]
    await endpoints.probe_all()
    assert ready(endpoints) == ["a", "b"]


async def test_a_silent_pod_is_out_after_three_probes(endpoints, pods):
    await endpoints.probe_all()
    pods.health["a"] = SILENT
    await endpoints.probe_all()
    await endpoints.probe_all()

    assert ready(endpoints) == ["a", "b"]
    await endpoints.probe_all()
    assert ready(endpoints) == ["b"]


async def test_an_answer_in_between_starts_the_count_again(endpoints, pods):
    await endpoints.probe_all()
    for health in (SILENT, SILENT, None, SILENT, SILENT):
        pods.health.pop("a", None) if health is None else pods.health.update(a=health)
        await endpoints.probe_all()

    assert ready(endpoints) == ["a", "b"]


async def test_a_pod_that_refused_a_connection_is_out_until_probed(endpoints):
    await endpoints.probe_all()
    endpoints.mark_unreachable("a")

    assert ready(endpoints) == ["b"]
    await endpoints.probe_all()
    assert ready(endpoints) == ["a", "b"]


async def test_a_carried_request_counts_until_it_ends_however_it_ends(endpoints):
    with contextlib.suppress(KeyError), endpoints.carrying("b"):
        assert [state.in_flight for state in endpoints.states()] == [0, 1]
        raise KeyError

    assert [state.in_flight for state in endpoints.states()] == [0, 0]
    assert [state.num_routed for state in endpoints.states()] == [0, 1]


async def test_the_probing_goes_on_after_a_fault_of_its_own():
    metrics = Metrics(CollectorRegistry())
    asked = asyncio.Event()
    faults = [RuntimeError("a fault")]

    async def probe(endpoint):
        if faults:
            raise faults.pop()
        asked.set()
        return Health(healthy=True)

    endpoints = StaticEndpoints([Endpoint("a", "http://a")], probe, metrics=metrics, interval_s=0)
    task = asyncio.create_task(endpoints.run())
    await asked.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert metrics.registry.get_sample_value("contextcache_gateway_probe_failures_total") == 1
    assert task.cancelled()
