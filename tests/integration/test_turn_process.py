"""`python -m vllm_plugin.turn` as a process in front of an engine over HTTP: bytes, faults, ends and its own pages."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import uvicorn

from context_manager.client import ContextManagerClient
from contextcache.clock import SystemClock
from contextcache.errors import ContextNotFound
from contextcache.identity import Identity, sign_identity
from tests.kit.fake_vllm import FakeVllm
from tests.kit.gateway_parts import SECRET
from tests.kit.manager_process import running_manager_process
from tests.kit.process_memory import memory_bytes
from tests.kit.turn_process import ROOT, running_turn_process
from tests.kit.until import until
from vllm_plugin.turn import engine as turn_engine
from vllm_plugin.turn.__main__ import serve
from vllm_plugin.turn.forwarding import Forwarder
from vllm_plugin.turn.settings import TurnSettings
from vllm_plugin.turn.story import TurnStory

DEADLINE_S = 60


@pytest.fixture
async def turn(tmp_path, engine):
    async with running_turn_process(tmp_path, engine.url) as turn:
        yield turn


@pytest.fixture
async def http():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as http:
        yield http


async def begun_stream(http, turn, engine):
    """Return a streamed answer whose first event has come."""
    engine.release("first")
    answer = await http.post(f"{turn.url}/v1/completions", json={"stream": True})
    async with asyncio.timeout(DEADLINE_S):
        assert b"first" in await answer.content.readany()
    return answer


async def test_a_request_reaches_the_engine_as_it_came_and_so_does_its_answer(http, turn, engine):
    """Seen failing with the path decoded, and with the client's Host and Connection headers passed on."""
    headers = {"x-mine": "ä", "connection": "close", "content-type": "application/json"}
    async with http.post(f"{turn.url}/v1/embeddings?a=b%20c", data=b'{"x":  1}', headers=headers) as answer:
        told, kind = await answer.json(), answer.headers["content-type"]
    (received,) = engine.turns

    assert (answer.status, kind, told["target"]) == (200, "application/json", "/v1/embeddings?a=b%20c")
    assert (received.method, received.body) == ("POST", b'{"x":  1}')
    assert received.header("host") == [f"127.0.0.1:{engine.port}"]
    assert received.header("x-mine") == ["ä".encode().decode("latin-1")]
    assert received.header("connection") == []
    assert answer.headers.getall("content-length") == [str(len(json.dumps(told)))]
    assert "server" not in answer.headers


@pytest.mark.parametrize("in_chunks", [False, True])
async def test_a_large_body_passes_in_pieces_with_or_without_a_length(http, turn, engine, in_chunks):
    body = b"x" * (3 << 20) + b"end"

    async def pieces():
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    async with http.post(f"{turn.url}/v1/audio", data=pieces() if in_chunks else io.BytesIO(body)) as answer:
        assert (await answer.json())["size"] == len(body)
    assert engine.turns[0].body == body


async def test_a_stream_passes_event_by_event_and_its_end_is_whole(http, turn, engine):
    answer = await begun_stream(http, turn, engine)
    engine.release("second")
    assert b"second" in await answer.content.readany()
    engine.finish()

    assert await answer.content.read() == b""


@pytest.mark.parametrize("stall", [True, False])
async def test_a_client_that_leaves_ends_the_engine_s_request(http, turn, engine, stall):
    """Seen failing without the task that watches the client."""
    engine.stall = stall
    if stall:
        asking = asyncio.create_task(http.post(f"{turn.url}/v1/completions", json={}))
        await asyncio.wait_for(engine.arrived.wait(), DEADLINE_S)
        asking.cancel()
    else:
        (await begun_stream(http, turn, engine)).close()

    await asyncio.wait_for(engine.noticed_disconnect.wait(), DEADLINE_S)
    async with http.get(f"{turn.url}/v1/models") as answer:
        assert answer.status == 200


async def test_without_its_engine_it_lives_and_asks_clients_to_come_again(http, turn, engine):
    await engine.stop()
    for path in ("/v1/completions", "/health"):
        async with http.request("GET" if path == "/health" else "POST", turn.url + path) as answer:
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert (await answer.json())["error"]["code"] == "no_ready_endpoint"
    async with http.get(f"{turn.url}/healthz") as answer:
        assert answer.status == 200
    await engine.start()
    async with http.get(f"{turn.url}/health") as answer:
        assert (answer.status, answer.headers["x-context-in-flight"]) == (200, "")


async def test_an_engine_that_dies_in_an_answer_leaves_it_without_an_end(http, turn, engine):
    answer = await begun_stream(http, turn, engine)
    await engine.stop()

    with pytest.raises(aiohttp.ClientPayloadError):
        async with asyncio.timeout(DEADLINE_S):
            await answer.content.read()
    answer.close()


async def test_an_engine_that_dies_before_its_answer_is_an_error_of_the_engine(http, turn, engine):
    engine.break_next = "headers"
    async with http.post(f"{turn.url}/v1/completions", json={}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (502, "engine_error")


async def test_at_sigterm_the_answer_ends_whole_and_others_are_refused(http, turn, engine):
    """Seen failing without `draining.begin`, and without `finish_requests`: the answer was cut after five seconds."""
    answer = await begun_stream(http, turn, engine)
    turn.terminate()
    await until(lambda: turn.event("turn draining"), what="it drains")
    async with http.post(f"{turn.url}/v1/completions", json={}) as refused:
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    async with http.get(f"{turn.url}/health") as refused:
        assert refused.status == 503
    engine.release("last")
    engine.finish()
    rest = await answer.content.read()

    assert rest.endswith(b'{"text": "last"}\n\n')
    assert await turn.ended() == 0
    assert turn.events[-1]["event"] == "turn stopped"


async def test_its_own_metrics_are_on_its_port_and_the_engines_are_not(http, turn, engine):
    engine.load = {"vllm:num_requests_running": 1}
    async with http.get(f"{turn.url}/health") as answer:
        assert answer.status == 200
    async with http.get(f"{turn.url}/v1/models/any-name") as answer:
        status = answer.status
    timed = "contextcache_turn_request_duration_seconds_count"

    async def page() -> str:
        async with http.get(f"{turn.url}/metrics") as answer:
            return await answer.text()

    # Clients choose names and paths: only those of turns are series of their own. A request is counted after its end.
    other = f'{timed}{{code="{status}",route="other"}}'
    text = await until(page, is_so=lambda text: other in text, what="the request is counted")

    assert "contextcache_turn_transcript_memory_bytes 0.0" in text
    assert f'{timed}{{code="200",route="/health"}}' in text
    assert "any-name" not in text
    assert "vllm:" not in text


async def test_a_client_that_leaves_in_its_body_leaves_no_request_in_the_engine(turn, engine):
    engine.stall = True
    reader, writer = await asyncio.open_connection("127.0.0.1", turn.port)
    writer.write(b"POST /v1/audio HTTP/1.1\r\nhost: t\r\ncontent-length: 200000\r\n\r\n" + b"x" * 100_000)
    await writer.drain()
    writer.close()
    await writer.wait_closed()

    def is_over() -> bool:
        return not engine._connections or engine.disconnects > 0

    await until(is_over, what="the engine has no half request")
    assert engine.turns == []
    reader.feed_eof()


async def forwarded(engine, *messages, **scope):
    """Return the messages that the forwarder answers a request with. After `messages` the client is silent."""
    sent, left = [], list(messages)

    async def receive():
        return left.pop(0) if left else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/audio", "query_string": b"", "headers": []} | scope
    async with asyncio.timeout(DEADLINE_S), Forwarder(engine.url, silence_s=DEADLINE_S) as forwarder:
        await forwarder(scope, receive, send)
    return sent


async def test_a_body_that_stops_coming_is_a_client_s_mistake(engine, monkeypatch):
    """Seen failing without the deadline in `next_piece`."""
    monkeypatch.setattr(turn_engine, "_BODY_IDLE_S", 0.05)
    piece = {"type": "http.request", "body": b"x" * 100_000, "more_body": True}
    sent = await forwarded(engine, piece, headers=[(b"content-length", b"200000")])

    assert sent[0]["status"] == 400
    assert b"no byte of the body arrived" in sent[1]["body"]


@pytest.mark.parametrize("target", [b"*", b"@evil:80/", b"http://evil/"])
async def test_a_target_that_is_no_path_is_a_client_s_mistake_and_never_another_host(engine, target):
    """Seen failing without the check: an exception for the first and the last, another host for the second."""
    sent = await forwarded(engine, {"type": "http.request", "body": b""}, raw_path=target)

    assert sent[0]["status"] == 400
    assert engine.turns == []


async def test_an_engine_that_is_silent_fails_its_request(http, tmp_path, engine):
    engine.stall = True
    async with (
        running_turn_process(tmp_path, engine.url, TURN_ENGINE_TIMEOUT_S="0.2") as turn,
        http.post(f"{turn.url}/v1/completions", json={}) as answer,
    ):
        assert answer.status == 502


def test_it_imports_neither_vllm_nor_torch():
    code = "import sys, vllm_plugin.turn.__main__; print(sorted({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert found.stdout == "[]\n"


@asynccontextmanager
async def served(app):
    """Serve an ASGI application over HTTP; yields its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, ws="none"))
        serving = asyncio.create_task(server._serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await asyncio.wait_for(serving, DEADLINE_S)


CHAT = [{"messages": [{"role": "user", "content": text}]} for text in ("Hello", "And?")]
TEXT = [{"prompt": "Hello"}, {"prompt": " there"}]


async def test_it_ends_only_when_its_last_calls_were_made(tmp_path, monkeypatch):
    """Seen failing without `story.close`, which waits for releases of leases in the background."""
    (tmp_path / "secret").write_bytes(SECRET)
    stop, order, close = asyncio.Event(), [], TurnStory.close

    async def closed(story):
        await close(story)
        order.append("last calls made")

    monkeypatch.setattr(TurnStory, "close", closed)
    settings = TurnSettings(secret_file=tmp_path / "secret", listen_port=0)
    async with asyncio.timeout(DEADLINE_S):
        await serve(settings, stop, on_started=lambda _port: stop.set())
    order.append("ended")

    assert order == ["last calls made", "ended"]


async def test_at_its_end_it_gives_back_the_lease_of_a_client_that_left(http, tmp_path: Path, valkey):
    """The lease alone would keep the session busy for ten minutes."""
    vllm = FakeVllm(answer=lambda ids: "Hi", pause=asyncio.Event())
    async with (
        running_manager_process(tmp_path, valkey.url) as manager,
        served(vllm) as url,
        running_turn_process(tmp_path, url, TURN_MANAGER=manager.address, TURN_LEASE_TTL_MS="600000") as turn,
    ):
        identity = Identity("demo", "req", SystemClock().now_ms() + 60_000)
        signed = {"x-context-identity": sign_identity(identity, SECRET)}
        body = {"model": "m", "prompt": "Hello", "stream": True, "session_id": "mine"}
        answer = await http.post(f"{turn.url}/v1/context", json=body, headers=signed)
        assert b"H" in await answer.content.readany()
        turn.terminate()
        answer.close()
        assert await turn.ended() == 0
        vllm.pause.set()
        client = ContextManagerClient(manager.address)
        with pytest.raises(ContextNotFound):  # not ContextBusy: the reservation is gone
            await client.begin_turn("demo", "mine", lease_id="l", lease_ttl_ms=1000)
        await client.close()


@pytest.mark.parametrize(("path", "texts"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
async def test_turns_run_over_http_in_little_memory(http, tmp_path: Path, valkey, path, texts):
    vllm = FakeVllm(answer=lambda ids: "Hi")
    async with (
        running_manager_process(tmp_path, valkey.url) as manager,
        served(vllm) as url,
        running_turn_process(tmp_path, url, TURN_MANAGER=manager.address) as turn,
    ):

        async def ask(route, **body):
            identity = Identity("demo", "req", SystemClock().now_ms() + 60_000, body.get("session_id"))
            signed = {"x-context-identity": sign_identity(identity, SECRET)}
            async with http.post(turn.url + route, json={"model": "m", **body}, headers=signed) as answer:
                text = await answer.text()
            assert answer.status == 200, text
            return text

        first, more = texts
        session_id = json.loads(await ask("/v1/context", **first))["session_id"]
        streamed = await ask(path, session_id=session_id, stream=True, **more)
        last = json.loads(streamed.rstrip().rsplit("data: ", 2)[1])

        assert last["usage"]["context"]["committed"] is True
        assert streamed.endswith("data: [DONE]\n\n")
        assert memory_bytes(turn.process.pid, "VmRSS") < 150 << 20
