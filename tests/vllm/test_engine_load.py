"""What the gateway reads of a real engine's load, and that reading it stays cheap for the engine."""

import aiohttp
import pytest

from gateway.pods.probe import LOAD_PATH, HttpProbe
from gateway.pods.state import Endpoint, EngineLoad
from tests.kit.stack import MODEL

# The first test that asks for the stack starts it.
pytestmark = pytest.mark.timeout(900)


async def test_an_idle_engine_is_healthy_and_idle(client, stack):
    async with aiohttp.ClientSession() as session:
        found = await HttpProbe(session, timeout_s=30)(Endpoint("engine-0", stack.engine_urls[0]))

    assert (found.healthy, found.models) == (True, frozenset({MODEL}))
    assert found.load == EngineLoad(kv_usage=found.load.kv_usage)
    assert found.load.kv_usage < 1


async def test_the_engine_answers_with_the_gauges_asked_for_and_no_more(client, stack):
    async with aiohttp.ClientSession() as session, session.get(stack.engine_urls[0] + LOAD_PATH) as answer:
        lines = (await answer.text()).splitlines()

    assert sorted(line.split("{")[0] for line in lines if not line.startswith("#")) == [
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        *["vllm:num_requests_waiting_by_reason"] * 2,
    ]
