"""The gateway as a plugin dies, stops, and is replaced under load: what clients of Envoy notice."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.kit.envoy_names import GATEWAY_HTTP, PLUGIN, PODS
from tests.kit.envoy_process import envoy_settings, running_envoy
from tests.kit.fronts import Client, StreamingEngine, code_of, until_answered
from tests.kit.gateway_process import GatewayProcess
from tests.kit.gateway_server import settings_for
from tests.kit.traffic import BODILESS, CREATE, READ, STATELESS, STREAMED, TURN_BY_BODY, TURN_BY_HEADER, traffic

NUM_STREAMS = 56
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def engine():
    engine = StreamingEngine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
def open_envoy(tmp_path, engine, manager):
    """Return what opens an Envoy before so many gateway processes: `async with open_envoy(2) as (client, gateways)`."""

    @asynccontextmanager
    async def opened(num_gateways, *, drain_delay_s=0.0):
        await manager.add("ctx_1")
        settings = settings_for(tmp_path, {"pod-a": engine}, manager_port=manager.port)
        gateways = [GatewayProcess(tmp_path, settings, drain_delay_s=drain_delay_s) for _ in range(num_gateways)]
        async with AsyncExitStack() as stack:
            for gateway in gateways:
                stack.push_async_callback(gateway.stop)
            await asyncio.gather(*(gateway.start() for gateway in gateways))
            addresses = [(gateway.http_port, gateway.ext_proc_port) for gateway in gateways]
            envoy = await stack.enter_async_context(
                running_envoy(envoy_settings(pods=[engine.port], gateways=addresses))
            )
            for cluster, num_healthy in ((PODS, 1), (PLUGIN, num_gateways), (GATEWAY_HTTP, num_gateways)):
                await envoy.until_healthy(cluster, num_healthy)
            client = await stack.enter_async_context(Client.opened(envoy.port))
            yield envoy, client, gateways

    return opened


async def test_a_killed_plugin_breaks_no_stream_and_no_stateless_request_and_refuses_contexts(open_envoy, engine):
    async with open_envoy(1) as (envoy, client, gateways), AsyncExitStack() as stack:
        streams = []
        for number in range(NUM_STREAMS):
            body = {"prompt": str(number), "stream": True, **({"session_id": "ctx_1"} if number % 2 else {})}
            streams.append(await stack.enter_async_context(client.post("/v1/completions", body)))
        first = [await stream.content.readuntil(b"\n\n") for stream in streams]
        async with traffic(envoy.url, [STATELESS, BODILESS], num_clients=6) as stateless:
            await stateless.until(50)
            await gateways[0].kill()
            for path, headers in (("/v1/context", {}), ("/v1/completions", {"X-Session-ID": "ctx_1"})):
                async with client.post(path, {"prompt": "x"}, headers=headers) as answer:
                    assert await code_of(answer) == (503, "gateway_unavailable")
                    assert answer.headers["retry-after"]
            async with client.get("/v1/context/ctx_1") as answer:
                assert await code_of(answer) == (503, "gateway_unavailable")
            await stateless.until(stateless.num_answered + 100)
            await gateways[0].start()
            await until_answered(lambda: client.post("/v1/context", {"prompt": "x"}), 200)
            await until_answered(lambda: client.get("/v1/context/ctx_1"), 200)
            await stateless.until(stateless.num_answered + 50)
        engine.go_on.set()
        rest = [await stream.content.read() for stream in streams]

    assert first == [StreamingEngine.FIRST] * NUM_STREAMS
    assert rest == [StreamingEngine.REST] * NUM_STREAMS
    assert stateless.failed == {}


@pytest.mark.thorough
async def test_two_plugins_restarted_one_after_the_other_cost_no_request(open_envoy):
    calls = [STATELESS, TURN_BY_BODY, BODILESS, TURN_BY_HEADER, CREATE, READ, STREAMED]
    # Longer than Envoy's health check needs to notice.
    async with (
        open_envoy(2, drain_delay_s=6) as (envoy, _, gateways),
        traffic(envoy.url, calls, num_clients=12) as load,
    ):
        await load.until(300)
        for gateway in gateways:
            await gateway.restart()
            await envoy.until_healthy(PLUGIN, 2)
            await envoy.until_healthy(GATEWAY_HTTP, 2)
            await load.until(load.num_answered + 300)
        await load.until(5_000)

    assert load.failed == {}
    assert {kind for kind, _ in load.answers} == {call.kind for call in calls}


@pytest.mark.thorough
async def test_a_plugin_that_is_late_for_one_health_check_is_not_taken_away(open_envoy):
    checks = f"cluster.{PLUGIN}.health_check"
    async with (
        open_envoy(1) as (envoy, _, gateways),
        traffic(envoy.url, [TURN_BY_BODY, TURN_BY_HEADER, CREATE, STATELESS], num_clients=8) as load,
    ):
        await load.until(50)
        for counter in ("attempt", "failure"):
            async with _paused(gateways[0]):
                await envoy.until_counted(f"{checks}.{counter}", 1)
            # The two pauses are not two failures in a row.
            await envoy.until_counted(f"{checks}.success", 1)
            num_healthy = await envoy.stat(f"cluster.{PLUGIN}.membership_healthy")
            await load.until(load.num_answered + 50)

            assert (load.failed, num_healthy) == ({}, 1)


@asynccontextmanager
async def _paused(gateway: GatewayProcess):
    gateway.pause()
    try:
        yield
    finally:
        gateway.resume()
