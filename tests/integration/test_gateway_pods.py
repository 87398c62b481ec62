"""A running gateway whose pods come, drain, go and say how much they have to do."""

import json

import pytest

from tests.kit.gateway_server import running_gateway, settings_for
from tests.kit.stub_engine import StubEngine
from tests.kit.until import until


@pytest.fixture
async def engines():
    engines = {name: StubEngine() for name in ("pod-a", "pod-b")}
    for engine in engines.values():
        await engine.start()
    yield engines
    for engine in engines.values():
        await engine.stop()


@pytest.fixture
def write(tmp_path, engines):
    """Replace the endpoint file with these pods."""

    def write(**draining):
        listed = [{"name": name, "url": engines[name].url, "draining": value} for name, value in draining.items()]
        (tmp_path / "new.json").write_text(json.dumps(listed))
        return (tmp_path / "new.json").rename(tmp_path / "endpoints.json")

    return lambda **draining: write(**{name.replace("_", "-"): value for name, value in draining.items()})


@pytest.fixture
async def gateway(tmp_path, engines, write):
    settings = settings_for(tmp_path, {}, endpoints_file=write(pod_a=False))
    async with running_gateway(settings, num_ready=1) as gateway:
        yield gateway


async def until_pods(gateway, condition):
    await until(gateway.details, is_so=lambda details: condition(details["endpoints"]), what="pods as they should be")


async def ask(gateway, num_requests):
    for _ in range(num_requests):
        async with gateway.post("/v1/completions", {"prompt": "x"}) as answer:
            assert answer.status == 200


async def test_pods_come_drain_and_go_while_requests_run(gateway, engines, write):
    write(pod_a=False, pod_b=False)
    await until_pods(gateway, lambda pods: set(pods) == {"pod-a", "pod-b"} and pods["pod-b"]["ready"])
    await ask(gateway, 4)
    assert {len(engine.turns) for engine in engines.values()} == {2}

    async with gateway.post("/v1/completions", {"prompt": "x", "stream": True}) as streaming:
        held = next(name for name, engine in engines.items() if len(engine.turns) == 3)
        write(**{name.replace("-", "_"): name == held for name in engines})
        await until_pods(gateway, lambda pods: pods[held]["draining"] and pods[held]["in_flight"] == 1)
        await ask(gateway, 3)
        write(**{name.replace("-", "_"): False for name in engines if name != held})
        await until_pods(gateway, lambda pods: held not in pods)
        engines[held].release("last words")
        engines[held].finish()
        words = await streaming.text()

    assert "last words" in words
    assert len(engines[held].turns) == 3


async def test_a_broken_file_changes_nothing(gateway, tmp_path, write):
    (tmp_path / "endpoints.json").write_text('[{"name": "pod-b"')
    await until(
        lambda: gateway.metric("contextcache_gateway_endpoint_reload_failures_total"), what="a failed reload is counted"
    )
    await ask(gateway, 1)

    write(pod_b=False)
    await until_pods(gateway, lambda pods: set(pods) == {"pod-b"} and pods["pod-b"]["ready"])
    await ask(gateway, 1)


async def test_a_pods_load_is_read_shown_and_obeyed(gateway, engines, write):
    write(pod_a=False, pod_b=False)
    engines["pod-a"].load = {"vllm:num_requests_running": 5.0, "vllm:kv_cache_usage_perc": 0.25}
    await until_pods(gateway, lambda pods: len(pods) == 2 and pods["pod-b"]["ready"] and pods["pod-a"]["running"] == 5)
    await ask(gateway, 3)

    assert (len(engines["pod-a"].turns), len(engines["pod-b"].turns)) == (0, 3)
    label = '{endpoint="pod-a",state="running"}'
    assert await gateway.metric("contextcache_gateway_endpoint_load_requests", label) == 5


async def test_when_every_pod_is_full_work_is_refused_and_a_look_is_not(gateway, engines):
    engines["pod-a"].load = {"vllm:num_requests_waiting": 256.0}
    await until_pods(gateway, lambda pods: pods["pod-a"]["waiting"] == 256)
    async with gateway.post("/v1/completions", {"prompt": "x"}) as answer:
        refused = await answer.json()
    async with gateway.get("/v1/models") as look:
        assert look.status == 200

    assert (answer.status, answer.headers["retry-after"]) == (429, "2")
    assert (refused["error"]["code"], refused["error"]["type"]) == ("endpoints_saturated", "rate_limit_error")
