"""What a pod says over real HTTP, and what it keeps to itself."""

import asyncio

import aiohttp
import pytest

from gateway.pods.endpoints import Health
from gateway.pods.probe import HttpProbe
from gateway.pods.state import Endpoint, EngineLoad
from tests.kit.stub_engine import StubEngine

LOAD = {"vllm:num_requests_running": 3.0, "vllm:num_requests_waiting": 2.0, "vllm:kv_cache_usage_perc": 0.5}


@pytest.fixture
async def probe():
    async with aiohttp.ClientSession() as session:
        yield HttpProbe(session, timeout_s=10)


async def test_a_pod_says_what_it_serves_and_how_much_it_has_to_do(engine, probe):
    engine.load = LOAD
    found = await probe(Endpoint("a", engine.url))

    assert found == Health(
        healthy=True, models=frozenset({"stub-model"}), load=EngineLoad(running=3, waiting=2, kv_usage=0.5), tenants={}
    )
    assert sum(found.target.count("name[]=vllm") for found in engine.received) == 4


async def test_a_pod_without_metrics_is_healthy_and_idle(engine, probe):
    told = Health(healthy=True, models=frozenset({"stub-model"}), tenants={})
    assert await probe(Endpoint("a", engine.url)) == told


async def test_a_pod_that_says_no_is_certainly_not_healthy(engine, probe):
    engine.healthy = False

    assert await probe(Endpoint("a", engine.url)) == Health(healthy=False)


async def test_a_pod_with_a_sidecar_whose_engine_lacks_the_middleware_is_not_healthy(engine, probe):
    """vLLM started without the injector's arguments: it would answer a turn without its context."""
    pod = Endpoint("a", engine.url, sidecar="127.0.0.1:1")
    engine.runs_turns = False

    assert await probe(pod) == Health(healthy=False)
    alone = await probe(Endpoint("a", engine.url))
    assert (alone.healthy, alone.runs_turns) == (True, False)
    engine.runs_turns = True
    assert (await probe(pod)).healthy


async def test_the_turn_process_says_health_and_tenants_and_vllm_models_and_load(engine, probe):
    """Seen failing with all pages read from either address, and without the header of limits."""
    turn = StubEngine(models=["other"], runs_turns=True, load={"vllm:num_requests_running": 9.0})
    await turn.start()
    engine.load = LOAD
    pod = Endpoint("a", engine.url, sidecar="127.0.0.1:1", turn_url=turn.url)
    found = await probe(pod)
    turn.limits_tenants = True
    limited = await probe(pod)
    await turn.stop()

    assert (found.models, found.load.running, found.tenants) == (frozenset({"stub-model"}), 3, {})
    assert (found.limits_tenants, limited.limits_tenants) == (False, True)
    assert [one.target for one in turn.received] == ["/health"] * 2


@pytest.mark.parametrize("away", ["turn", "engine"])
async def test_a_pod_of_which_one_address_refuses_is_certainly_not_healthy(engine, probe, away):
    """Seen failing for the engine as a pod that is only late, with 30 more probes to go."""
    turn = StubEngine(runs_turns=True)
    await turn.start()
    await {"turn": turn, "engine": engine}[away].stop()

    assert await probe(Endpoint("a", engine.url, turn_url=turn.url)) == Health(healthy=False)
    await (engine.start() if away == "engine" else turn.start())
    await turn.stop()


async def test_a_pod_that_is_not_there_is_certainly_not_healthy(engine, probe):
    await engine.stop()

    assert await probe(Endpoint("a", engine.url)) == Health(healthy=False)
    await engine.start()


async def answering(*answers):
    """Serve one raw answer for each path; None: accept, read, and say nothing."""

    async def connected(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            answer = next(body for path, body in answers if path in head)
            if answer is None:
                await reader.read()
                break
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
            await writer.drain()

    async def one(reader, writer):
        try:
            await connected(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def probed(*answers, timeout_s):
    server, url = await answering(*answers)
    async with server, aiohttp.ClientSession() as session:
        return await HttpProbe(session, timeout_s=timeout_s)(Endpoint("a", url))


async def test_a_pod_that_says_nothing_in_time_may_be_busy():
    assert await probed((b"/health", None), timeout_s=0.1) == Health(healthy=False, certain=False)


@pytest.mark.thorough
async def test_metrics_that_never_come_leave_a_pod_healthy_and_its_load_unknown():
    answers = ((b"/health", b""), (b"/v1/models", b'{"data": [{"id": "m"}]}'), (b"/metrics", None))

    assert await probed(*answers, timeout_s=5) == Health(
        healthy=True, models=frozenset({"m"}), load=None, runs_turns=False
    )


async def test_only_the_beginning_of_an_endless_page_is_read():
    page = b"vllm:num_requests_running 3\n" + b"x" * (4 << 20) + b"\nvllm:num_requests_waiting 9\n"
    answers = ((b"/health", b""), (b"/v1/models", b"{}"), (b"/metrics", page))

    assert (await probed(*answers, timeout_s=10)).load == EngineLoad(running=3)
