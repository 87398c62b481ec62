"""A tenant that has as much in hand as it may gets 429, whatever the front; others do not notice."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from contextcache.clock import SystemClock
from contextcache.errors import ContextQuotaExceeded
from gateway.tenants.limits import FrontLimits, HeldBody, TenantLimits
from tests.kit.ext_proc import BUFFERED, DUPLEX, Answer, ExtProcClient, body, head
from tests.kit.fronts import FRONTS, code_of, running_front
from tests.kit.gateway_parts import OTHER_KEY
from tests.kit.gateway_server import running_gateway, settings_for
from tests.kit.turn_pod import MODEL, running_turn_pod
from tests.kit.until import until

OTHER = {"authorization": f"Bearer {OTHER_KEY}"}
STREAM = {"prompt": "x", "stream": True}
BODY_BYTES = 4096


@pytest.fixture
async def gateway(tmp_path, engine, manager):
    settings = settings_for(
        tmp_path,
        {"pod-a": engine},
        manager_port=manager.port,
        tenant_in_flight_max=2,
        tenant_buffered_bytes_max=BODY_BYTES,
        max_body_bytes=BODY_BYTES,
        ext_proc_listen="127.0.0.1:0",
    )
    async with running_gateway(settings, num_ready=1) as gateway:
        yield gateway


@pytest.fixture
async def envoy(gateway):
    client = ExtProcClient(gateway.ext_proc_port)
    yield client
    await client.close()


async def until_in_flight(gateway, number: int) -> None:
    await until(
        lambda: gateway.metric("contextcache_gateway_requests_in_flight", '{endpoint="pod-a"}'),
        is_so=lambda seen: seen == number,
        what=f"{number} requests in flight",
    )


async def refusals(gateway, limit: str) -> float:
    return await gateway.metric("contextcache_gateway_tenant_refusals_total", f'{{limit="{limit}"}}')


async def test_a_third_stream_of_a_tenant_is_429_until_one_has_ended_or_its_client_has_left(gateway, engine):
    """Seen failing without `self._tenants.request(...)` in the HTTP front: the third stream hangs like the others."""
    first = await gateway.post("/v1/completions", STREAM)
    second = await gateway.post("/v1/completions", STREAM)
    async with gateway.post("/v1/completions", {"prompt": "x"}) as answer:
        assert await code_of(answer) == (429, "too_many_in_flight")
        assert answer.headers["retry-after"] == "1"
    async with gateway.post("/v1/completions", {"prompt": "x"}, headers=OTHER) as answer:
        assert answer.status == 200
    first.close()
    await until_in_flight(gateway, 1)
    async with gateway.post("/v1/completions", {"prompt": "x"}) as answer:
        assert answer.status == 200
    engine.finish()
    await second.read()

    assert await refusals(gateway, "requests") == 1


async def test_control_calls_count_as_requests_in_flight(gateway, manager):
    """Seen failing before: slow control calls of one tenant were as many as the gateway carries of all."""
    await manager.add("ctx_1")
    streams = [await gateway.post("/v1/completions", STREAM) for _ in range(2)]
    async with gateway.get("/v1/context/ctx_1") as answer:
        assert await code_of(answer) == (429, "too_many_in_flight")
    async with gateway.post("/v1/context/ctx_1/fork", {}, headers=OTHER) as answer:
        assert await code_of(answer) == (404, "context_not_found")
    for stream in streams:
        stream.close()


async def test_a_refused_or_failed_request_leaves_nothing_in_hand(gateway, engine):
    for _ in range(5):
        async with gateway.post("/v1/completions", {"prompt": "x", "session_id": "nobodys"}) as answer:
            assert answer.status == 404
        async with gateway.post("/v1/completions", b"x" * (BODY_BYTES + 1)) as answer:
            assert answer.status == 413
        engine.break_next = "headers"
        async with gateway.post("/v1/completions", {"prompt": "y" * 2000}) as answer:
            assert answer.status == 502
        engine.break_next = "body"
        engine.finish()
        answer = await gateway.post("/v1/completions", {"prompt": "y" * 2000})
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
        async with gateway.post("/v1/completions", {"prompt": "y" * 3000}) as answer:
            assert answer.status == 200


async def test_bodies_of_a_tenant_are_bounded_over_both_fronts(gateway, engine, envoy):
    """Seen failing without `take_bytes` in `TenantLimits.take_bytes`: both are let in."""
    stream = await gateway.post("/v1/completions", {**STREAM, "prompt": "x" * 2500})
    large = {"prompt": "x" * 2500}
    async with gateway.post("/v1/completions", large) as answer:
        assert await code_of(answer) == (429, "too_many_in_flight")
        assert answer.headers["retry-after"] == "1"
    for mode in (BUFFERED, DUPLEX):
        refused = await _ask(envoy, mode, large)

        assert refused.error == (429, "too_many_in_flight")
        assert refused.set_headers["retry-after"] == "1"
        assert (await _ask(envoy, mode, large, key=OTHER_KEY)).phase == "request_body"
    stream.close()
    await until_in_flight(gateway, 0)
    for mode in (BUFFERED, DUPLEX):
        assert (await _ask(envoy, mode, large)).phase == "request_body"
    async with gateway.post("/v1/completions", large) as answer:
        assert answer.status == 200

    assert await refusals(gateway, "bytes") == 3


async def _ask(envoy, mode, asked, **more):
    first = head(headers={"content-type": "application/json"}, mode=mode, **more)
    if mode == BUFFERED:
        return (await envoy.ask(first, body(asked)))[-1]
    call = envoy.open()
    await call.write(first)
    await call.write(body(asked))
    answers = [found async for found in _answers(call)]
    return answers[-1]


async def _answers(call):
    while hasattr(found := await call.read(), "WhichOneof"):
        yield Answer(found)


@pytest.mark.parametrize("front_kind", FRONTS)
async def test_what_pod_and_manager_refuse_reaches_the_client_as_429(front_kind, tmp_path, manager):
    """Through both fronts: the pod's own limit, and the manager's quota of contexts."""
    async with running_turn_pod(tmp_path, manager_port=manager.port, tenant_turns_max=1) as pod:
        settings = settings_for(tmp_path, {"pod-a": pod}, manager_port=manager.port)
        async with running_front(front_kind, settings, num_ready=1) as front:
            pod.engine.pause = asyncio.Event()
            running = await front.post("/v1/context", {"model": MODEL, "prompt": "x", "stream": True})
            async with front.post("/v1/context", {"model": MODEL, "prompt": "y"}) as answer:
                assert await code_of(answer) == (429, "too_many_in_flight")
                assert answer.headers["retry-after"] == "1"
            pod.engine.pause.set()
            await running.read()
            manager.manager.reserve = _over_quota
            async with front.post("/v1/context", {"model": MODEL, "prompt": "y"}) as answer:
                assert await code_of(answer) == (429, "context_quota_exceeded")


async def _over_quota(*args, **kwargs):
    raise ContextQuotaExceeded("this tenant has as many contexts as it may")


async def test_a_limit_below_one_body_is_refused_at_the_start(tmp_path, engine):
    with pytest.raises(ValueError, match="GATEWAY_TENANT_BUFFERED_BYTES_MAX"):
        settings_for(tmp_path, {"pod-a": engine}, max_body_bytes=100, tenant_buffered_bytes_max=99)


async def test_limits_that_refuse_have_counted_nothing():
    tenants = TenantLimits(clock=SystemClock(), bytes_max=10, total_bytes_max=15)
    limits = FrontLimits(max_body_bytes=100)
    with HeldBody(tenants, "a", limits) as first, HeldBody(tenants, "b", limits) as second:
        first.add(b"x" * 10)
        for held, size in ((second, 6), (first, 1), (second, 11)):
            with pytest.raises(Exception, match=r"fair share|reached the limit|reached its limit"):
                held.add(b"y" * size)
        second.add(b"z" * 5)

        assert (tenants.held_bytes, tenants.held_by("a")[1], tenants.held_by("b")[1]) == (15, 10, 5)
    assert (tenants.held_bytes, tenants.is_empty()) == (0, True)
