"""What only the HTTP front has: deadlines, bounds, drain. What both fronts do is in `fronts/`."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.kit.fronts import code_of
from tests.kit.gateway_parts import KEY, OTHER_KEY, write_keys
from tests.kit.gateway_server import DEADLINE_S, running_gateway, settings_for
from tests.kit.stub_engine import StubEngine
from tests.kit.until import until

STREAM = {"model": "stub-model", "prompt": "x", "stream": True}


@pytest.fixture
async def gateway(tmp_path, engine, manager):
    settings = settings_for(tmp_path, {"pod-a": engine}, manager_port=manager.port)
    async with running_gateway(settings, num_ready=1) as gateway:
        yield gateway


async def test_new_keys_count_without_a_restart(gateway, tmp_path):
    write_keys(tmp_path / "keys.json", {"a-new-key": "demo", OTHER_KEY: "other"})

    async def is_known() -> bool:
        async with gateway.post("/v1/completions", {}, headers={"authorization": "Bearer a-new-key"}) as answer:
            assert answer.status == 200 or await code_of(answer) == (401, "invalid_api_key")
            return answer.status == 200

    await until(is_known, what="the new key counts")

    async with gateway.post("/v1/completions", {}) as answer:
        assert await code_of(answer) == (401, "invalid_api_key")


async def test_a_dead_pod_is_typed_and_a_living_one_takes_over(tmp_path, engine):
    other = StubEngine()
    await other.start()
    # Slow probes: it is the refused connection that has to be noticed.
    settings = settings_for(
        tmp_path, {"pod-a": engine, "pod-b": other}, probe_timeout_s=DEADLINE_S, connect_timeout_s=DEADLINE_S
    )
    settings = settings.model_copy(update={"probe_interval_s": 600.0})
    async with running_gateway(settings, num_ready=2) as gateway:
        await engine.stop()
        for _ in range(4):
            async with gateway.post("/v1/completions", {"prompt": "x"}) as answer:
                assert answer.status == 200
        assert len(other.turns) == 4
        await other.stop()
        for _ in range(2):
            async with gateway.post("/v1/completions", {"prompt": "x"}) as answer:
                assert await code_of(answer) == (503, "no_ready_endpoint")
                assert answer.headers["retry-after"]
        failed = await gateway.metric("contextcache_gateway_broken_exchanges_total", '{reason="connect"}')
    await engine.start()

    assert failed == 2


async def test_a_pod_that_never_answers_meets_the_deadlines(tmp_path, engine):
    engine.stall = True
    for deadline in ({"idle_timeout_s": 0.1}, {"total_timeout_s": 0.1}):
        settings = settings_for(tmp_path, {"pod-a": engine}, **deadline)
        async with running_gateway(settings, num_ready=1) as gateway, gateway.post("/v1/completions", {}) as answer:
            assert await code_of(answer) == (502, "engine_error")


async def test_a_request_body_that_stops_coming_is_refused_and_gives_its_room_back(tmp_path, engine):
    settings = settings_for(tmp_path, {"pod-a": engine}, body_timeout_s=5, max_buffered_bytes=60)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\ncontent-length: 50\r\n\r\n"
    async with running_gateway(settings, num_ready=1) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head.encode() + b"x" * 40)
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
        writer.close()
        await writer.wait_closed()
        assert answer.startswith(b"HTTP/1.1 408")
        async with gateway.post("/v1/completions", b"x" * 50) as whole:
            assert whole.status == 200

    assert len(engine.turns) == 1


async def test_requests_over_the_limit_are_refused_and_the_room_is_given_back(tmp_path, engine):
    settings = settings_for(tmp_path, {"pod-a": engine}, max_in_flight=1)
    async with running_gateway(settings, num_ready=1) as gateway:
        async with gateway.post("/v1/completions", STREAM) as running:
            engine.release()
            await running.content.readany()
            async with gateway.post("/v1/completions", {}) as answer:
                assert await code_of(answer) == (429, "too_many_in_flight")
            engine.finish()
            await running.content.read()
        async with gateway.post("/v1/completions", {}) as answer:
            assert answer.status == 200


async def test_a_stop_lets_a_running_stream_finish(tmp_path, engine):
    settings = settings_for(tmp_path, {"pod-a": engine})
    async with running_gateway(settings, num_ready=1) as gateway, gateway.post("/v1/completions", STREAM) as answer:
        engine.release("one")
        await answer.content.readany()
        gateway.stop.set()
        await until(lambda: _accepts(gateway.port), is_so=lambda accepts: not accepts, what="nobody listens")
        await asyncio.wait({gateway.serving}, timeout=0.5)
        assert not gateway.serving.done()
        engine.release("two")
        engine.finish()
        rest = await answer.content.read()

    assert rest == b'data: {"text": "two"}\n\n'


async def _accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def test_a_port_that_is_taken_is_an_error_with_the_port_in_it(tmp_path, engine):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = settings_for(tmp_path, {"pod-a": engine}).model_copy(update={"port": port})
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            async with running_gateway(settings, num_ready=1):
                pass


async def test_a_client_that_sent_its_next_request_and_left_is_noticed_in_both(tmp_path, engine, caplog):
    """Seen to fail without `told_of_the_end`: the pod computed on, for nobody."""
    engine.stall = True
    turn = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer %b\r\ncontent-length: 2\r\n\r\n{}"
    async with running_gateway(settings_for(tmp_path, {"pod-a": engine}), num_ready=1) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write((turn % KEY.encode()) * 2)
        await asyncio.wait_for(engine.arrived.wait(), DEADLINE_S)
        writer.close()
        await writer.wait_closed()
        await asyncio.wait_for(engine.noticed_disconnect.wait(), DEADLINE_S)

    assert len(engine.turns) == 1
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
