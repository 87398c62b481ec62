"""The gateway over real sockets: real manager and gRPC behind it, a stub in the pods' place."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import pytest

from contextcache.clock import SystemClock
from contextcache.identity import IDENTITY_HEADER, verify_identity
from gateway.flows import ROUTING_HEADERS
from tests.helpers.gateway_parts import KEY, OTHER_KEY, SECRET, write_keys
from tests.helpers.gateway_server import DEADLINE_S, RunningManager, running_gateway, settings_for
from tests.helpers.stub_engine import StubEngine

STREAM = {"model": "stub-model", "prompt": "x", "stream": True}


@pytest.fixture
async def engine():
    engine = StubEngine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def manager():
    manager = RunningManager()
    await manager.start()
    yield manager
    await manager.stop()


@pytest.fixture
async def gateway(tmp_path, engine, manager):
    settings = settings_for(tmp_path, {"pod-a": engine}, manager_port=manager.port, max_body_bytes=24 << 20)
    async with running_gateway(settings, num_ready=1) as gateway:
        yield gateway


async def code_of(answer) -> tuple[int, str]:
    body = json.loads(await answer.read())

    assert body["detail"] == body["error"]["message"]
    assert answer.headers["x-request-id"]
    return answer.status, body["error"]["code"]


async def raw_exchange(port: int, request: bytes) -> bytes:
    """Send bytes as they are and return all that comes until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_stateless_request_arrives_byte_for_byte(gateway, engine):
    body = b'{ "model":"stub-model",\t"prompt" : "Gr\xc3\xbc\xc3\x9fe", "temperature":1.0e0 }'
    async with gateway.post(
        "/v1/completions?a=%2Fb&c=d%20e", body, headers={"X-Own": "kept", "x-request-id": "mine"}
    ) as answer:
        echoed = await answer.json()
    received = engine.turns[0]

    assert (answer.status, echoed["target"]) == (200, "/v1/completions?a=%2Fb&c=d%20e")
    assert received.body == body
    assert received.header("x-own") == ["kept"]
    assert received.header("x-request-id") == ["mine"]
    assert received.header("host") == [f"127.0.0.1:{engine.port}"]
    assert received.header("authorization") == []
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers.getall("server", []) == []


async def test_any_method_and_path_under_v1_is_carried(gateway, engine):
    for method, path in (("GET", "/v1/responses/r1"), ("PUT", "/v1/x"), ("DELETE", "/v1/y"), ("POST", "/tokenize")):
        async with gateway.http.request(method, gateway.url + path, headers=gateway.auth) as answer:
            assert (await answer.json())["method"] == method

    assert (engine.turns[0].method, engine.turns[0].target) == ("GET", "/v1/responses/r1")


async def test_forged_headers_and_keys_do_not_arrive(gateway, engine):
    forged = {
        "X-Context-Identity": "v1.forged.mac",
        "x-gateway-destination-endpoint": "10.0.0.1:80",
        "Target-Pod": "x",
        "X-Envoy-Original-Dst-Host": "10.0.0.1",
    }
    body = {"prompt": "x", "cache_salt": "y", "kv_transfer_params": {"context_cache": "z"}}
    for path in ("/v1/completions", "/v1/embeddings", "/v1/context"):
        async with gateway.post(path, body, headers=forged) as answer:
            assert answer.status == 200
    stateless, other, create = engine.turns

    for found in (stateless, other, create):
        assert found.json() == {"prompt": "x"}
        assert not {name for name, _ in found.headers} & ROUTING_HEADERS
    assert stateless.header(IDENTITY_HEADER) == other.header(IDENTITY_HEADER) == []
    assert verify_identity(create.header(IDENTITY_HEADER)[0], SECRET, now_ms=SystemClock().now_ms()).tenant == "demo"


async def test_repeated_headers_hide_nothing(gateway, engine):
    body = b'{"cache_salt":"x","a":1}'
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
        "content-type: application/json\r\ncontent-type: multipart/form-data\r\n"
        f"x-context-identity: a\r\nx-context-identity: b\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    answer = await raw_exchange(gateway.port, head.encode() + body)

    assert answer.startswith(b"HTTP/1.1 200")
    assert engine.turns[0].json() == {"a": 1}
    assert engine.turns[0].header(IDENTITY_HEADER) == []


async def test_headers_for_one_hop_end_there(gateway, engine):
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\nconnection: close, X-Hop\r\n"
        "x-hop: 1\r\nproxy-authorization: secret\r\nte: trailers\r\nx-end: 1\r\ncontent-length: 2\r\n\r\n{}"
    )
    await raw_exchange(gateway.port, head.encode())
    names = {name for name, _ in engine.turns[0].headers}

    assert names & {"x-hop", "proxy-authorization", "te", "x-end"} == {"x-end"}


async def test_a_turn_is_signed_and_an_unknown_or_foreign_one_is_not_carried(gateway, engine, manager):
    await manager.add("ctx_1")
    await manager.add("ctx_foreign", tenant="other")
    body = {"prompt": "more", "session_id": "ctx_1"}
    async with gateway.post("/v1/completions", body) as answer:
        assert answer.status == 200
    identity = verify_identity(engine.turns[0].header(IDENTITY_HEADER)[0], SECRET, now_ms=SystemClock().now_ms())
    async with gateway.post("/v1/completions", {**body, "session_id": "ctx_foreign"}) as foreign:
        foreign_body = await foreign.read()
    async with gateway.post("/v1/completions", {**body, "session_id": "ctx_none"}) as unknown:
        unknown_body = await unknown.read()

    assert (identity.tenant, identity.session_id) == ("demo", "ctx_1")
    assert engine.turns[0].json() == body
    assert (foreign.status, foreign_body) == (unknown.status, unknown_body) == (404, foreign_body)
    assert len(engine.turns) == 1


async def test_the_control_calls_reach_the_real_manager(gateway, manager):
    await manager.add("ctx_1")
    async with gateway.get("/v1/context/ctx_1") as answer:
        one = await answer.json()
    async with gateway.get("/v1/context?limit=5") as answer:
        page = await answer.json()
    async with gateway.http.delete(f"{gateway.url}/v1/context/ctx_1", headers=gateway.auth) as answer:
        gone = await answer.json()
    async with gateway.get("/v1/context/ctx_1") as answer:
        again = await code_of(answer)

    assert (one["tokens"], one["holder"]) == (3, {"endpoint": "pod-a", "state": "unreachable"})
    assert [entry["session_id"] for entry in page["data"]] == ["ctx_1"]
    assert gone == {"session_id": "ctx_1", "status": "success"}
    assert again == (404, "context_not_found")


async def test_a_stream_arrives_chunk_by_chunk_before_its_end(gateway, engine):
    async with gateway.post("/v1/completions", STREAM) as answer:
        engine.release("one")
        first = await answer.content.readany()
        engine.release("two")
        second = await answer.content.readany()
        engine.finish()
        rest = await answer.content.read()

    assert (first, second, rest) == (b'data: {"text": "one"}\n\n', b'data: {"text": "two"}\n\n', b"")
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-context-mode"] == "append"
    assert "keep-alive" not in answer.headers


async def test_a_client_that_leaves_a_stream_ends_the_pods_work(gateway, engine):
    async with gateway.post("/v1/completions", STREAM) as answer:
        engine.release()
        await answer.content.readany()
        answer.close()

    await asyncio.wait_for(engine.noticed_disconnect.wait(), DEADLINE_S)
    assert engine.disconnects == 1


async def test_a_client_that_leaves_before_the_answer_ends_the_pods_work(gateway, engine):
    engine.stall = True

    async def ask():
        async with gateway.post("/v1/completions", STREAM):
            pass

    asking = asyncio.create_task(ask())
    await asyncio.wait_for(engine.arrived.wait(), DEADLINE_S)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    await asyncio.wait_for(engine.noticed_disconnect.wait(), DEADLINE_S)
    assert engine.disconnects == 1


async def test_a_pod_that_breaks_off_before_its_answer_is_a_typed_error(gateway, engine):
    engine.break_next = "headers"
    async with gateway.post("/v1/completions", {"prompt": "x"}) as answer:
        assert await code_of(answer) == (502, "engine_error")


async def test_a_pod_that_breaks_off_in_its_answer_breaks_the_clients_connection(gateway, engine):
    engine.break_next = "body"
    async with gateway.post("/v1/completions", STREAM) as answer:
        engine.release()
        await answer.content.readany()
        engine.finish()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.read()


async def test_a_body_of_20_mib_passes(gateway, engine):
    body = b'{"prompt": "' + b"x" * (20 << 20) + b'"}'
    async with gateway.post("/v1/completions", body) as answer:
        assert (answer.status, (await answer.json())["size"]) == (200, len(body))

    assert engine.turns[0].body == body


async def test_a_body_over_the_limit_is_refused_and_the_gateway_goes_on(gateway, engine):
    async with gateway.post("/v1/completions", b"x" * ((24 << 20) + 1)) as answer:
        assert await code_of(answer) == (413, "body_too_large")

    async def unannounced():
        for _ in range(25):
            yield b"x" * (1 << 20)

    async with gateway.http.post(f"{gateway.url}/v1/completions", data=unannounced(), headers=gateway.auth) as answer:
        assert await code_of(answer) == (413, "body_too_large")
    assert engine.turns == []
    async with gateway.post("/v1/completions", {"prompt": "x"}) as answer:
        assert answer.status == 200


async def test_no_spelling_of_the_context_path_reaches_a_pod_unsigned(gateway, engine):
    spellings = (
        "//v1/context", "/v1//context", "/v1/context/", "/v1/%63ontext/", "/v1/context%2F", "/v1/%2e/context",
        "/V1/CONTEXT", "/v1/x/%2e%2e/context", "/v1/x/../context", "/v1/context%00", "/v1/context;x",
        "/v1/Context", "/v1/context%3F", "/./v1/context", "http://g/v1//context", "/v1/%2563ontext",
    )  # fmt: skip
    for spelling in spellings:
        head = f"POST {spelling} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
        answer = await raw_exchange(gateway.port, f"{head}content-length: 2\r\n\r\n{{}}".encode())

        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400", b"HTTP/1.1 200")), answer
    unsigned = [found.target for found in engine.turns if not found.header(IDENTITY_HEADER)]

    # The only ones carried are other paths to the pod's router as well.
    assert unsigned == ["/v1/context;x"]


async def test_a_percent_encoded_create_is_signed_like_any_other(gateway, engine):
    head = f"POST /v1/%63ontext HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
    answer = await raw_exchange(gateway.port, f"{head}content-length: 2\r\n\r\n{{}}".encode())

    assert answer.startswith(b"HTTP/1.1 200")
    assert engine.turns[0].header(IDENTITY_HEADER)


async def test_new_keys_count_without_a_restart(gateway, tmp_path):
    write_keys(tmp_path / "keys.json", {"a-new-key": "demo", OTHER_KEY: "other"})
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with gateway.post("/v1/completions", {}, headers={"authorization": "Bearer a-new-key"}) as answer:
                if answer.status == 200:
                    break
                assert await code_of(answer) == (401, "invalid_api_key")
            await asyncio.sleep(0.05)

    async with gateway.post("/v1/completions", {}) as answer:
        assert await code_of(answer) == (401, "invalid_api_key")


async def test_without_the_manager_session_calls_fail_at_once_and_stateless_ones_pass(gateway, engine, manager):
    await manager.add("ctx_1")
    await manager.stop()
    for call in (
        gateway.post("/v1/completions", {"session_id": "ctx_1"}),
        gateway.get("/v1/context"),
        gateway.get("/v1/context/ctx_1"),
    ):
        async with call as answer:
            assert await code_of(answer) == (503, "store_unavailable")
            assert answer.headers["retry-after"]
    async with gateway.post("/v1/completions", {"prompt": "x"}) as answer:
        assert answer.status == 200
    async with gateway.get("/readyz") as answer:
        assert (answer.status, (await answer.json())["missing"]) == (503, ["context manager"])

    await manager.start()
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with gateway.post("/v1/completions", {"session_id": "ctx_1"}) as answer:
                if answer.status == 200:
                    break
            await asyncio.sleep(0.05)


async def test_a_dead_pod_is_typed_and_a_living_one_takes_over(tmp_path, engine):
    other = StubEngine()
    await other.start()
    # Slow probes: it is the refused connection that has to be noticed.
    settings = settings_for(tmp_path, {"pod-a": engine, "pod-b": other}, probe_timeout_s=1)
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


async def test_an_unhealthy_pod_gets_nothing_until_it_is_healthy_again(gateway, engine):
    engine.healthy = False
    await gateway.until_ready(0)
    async with gateway.post("/v1/completions", {"prompt": "x"}) as answer:
        assert await code_of(answer) == (503, "no_ready_endpoint")

    engine.healthy = True
    await gateway.until_ready(1)
    async with gateway.post("/v1/completions", {"prompt": "x"}) as answer:
        assert answer.status == 200


async def test_a_pod_that_never_answers_meets_the_deadlines(tmp_path, engine):
    engine.stall = True
    for deadline in ({"idle_timeout_s": 0.1}, {"total_timeout_s": 0.1}):
        settings = settings_for(tmp_path, {"pod-a": engine}, **deadline)
        async with running_gateway(settings, num_ready=1) as gateway, gateway.post("/v1/completions", {}) as answer:
            assert await code_of(answer) == (502, "engine_error")


async def test_a_request_body_that_stops_coming_is_refused_and_gives_its_room_back(tmp_path, engine):
    settings = settings_for(tmp_path, {"pod-a": engine}, body_timeout_s=0.1, max_buffered_bytes=60)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\ncontent-length: 50\r\n\r\n"
    async with running_gateway(settings, num_ready=1) as gateway:
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(head.encode() + b"x" * 40)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
            writer.close()
            await writer.wait_closed()
            assert answer.startswith(b"HTTP/1.1 400")
        async with gateway.post("/v1/completions", b"x" * 50) as whole:
            assert whole.status == 200

    assert len(engine.turns) == 1


async def test_requests_over_the_limits_are_refused_and_the_room_is_given_back(tmp_path, engine):
    settings = settings_for(tmp_path, {"pod-a": engine}, max_in_flight=1, max_buffered_bytes=100)
    async with running_gateway(settings, num_ready=1) as gateway:
        async with gateway.post("/v1/completions", STREAM) as running:
            engine.release()
            await running.content.readany()
            async with gateway.post("/v1/completions", {}) as answer:
                assert await code_of(answer) == (503, "no_ready_endpoint")
            engine.finish()
            await running.content.read()
        async with gateway.post("/v1/completions", b"x" * 101) as answer:
            assert await code_of(answer) == (503, "no_ready_endpoint")
        for _ in range(3):
            async with gateway.post("/v1/completions", b"x" * 99) as answer:
                assert answer.status == 200


async def test_a_stop_lets_a_running_stream_finish(tmp_path, engine):
    settings = settings_for(tmp_path, {"pod-a": engine})
    async with running_gateway(settings, num_ready=1) as gateway, gateway.post("/v1/completions", STREAM) as answer:
        engine.release("one")
        await answer.content.readany()
        gateway.stop.set()
        async with asyncio.timeout(DEADLINE_S):
            while await _accepts(gateway.port):
                await asyncio.sleep(0.02)
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
