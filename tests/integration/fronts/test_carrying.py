"""What is carried to a pod and back: bytes, heads, streams; who notices when the other end goes."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from contextcache.clock import SystemClock
from contextcache.identity import IDENTITY_HEADER
from tests.kit.fronts import code_of, until_answered
from tests.kit.gateway_parts import KEY, OTHER_KEY, SECRET
from tests.kit.gateway_server import DEADLINE_S
from tests.kit.identities import verify_identity

STREAM = {"model": "stub-model", "prompt": "x", "stream": True}


async def test_a_stateless_request_arrives_byte_for_byte(front, engine):
    body = b'{ "model":"stub-model",\t"prompt" : "Gr\xc3\xbc\xc3\x9fe", "temperature":1.0e0 }'
    async with front.post(
        "/v1/completions?a=%2Fb&c=d%20e", body, headers={"X-Own": "kept", "x-request-id": "mine"}
    ) as answer:
        echoed = await answer.json()
    received = engine.turns[0]

    assert (answer.status, echoed["target"]) == (200, "/v1/completions?a=%2Fb&c=d%20e")
    assert received.body == body
    assert received.header("x-own") == ["kept"]
    assert received.header("x-request-id") == ["mine"]
    assert received.header("content-type") == ["application/json"]
    assert received.header("authorization") == []
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers.getall("server", []) == []


async def test_the_name_in_a_plain_request_s_body_is_the_engine_s(front, engine):
    """Seen to fail: the engine named the answer by the id that the front had made."""
    body = {"model": "stub-model", "prompt": "x", "request_id": "mine-1"}
    async with front.post("/v1/completions", body) as answer:
        assert answer.status == 200
    received = engine.turns[0]

    assert (received.header("x-request-id"), received.json()) == (["mine-1"], body)


async def test_a_key_counts_in_either_header_and_reaches_no_pod_in_any(front, engine):
    """Seen failing before: `X-Api-Key` alone was 401, and beside a bearer key it went on to the pod."""
    call = "POST /v1/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 2\r\nconnection: close\r\n{keys}\r\n{{}}"
    keys = (f"x-api-key: {KEY}\r\n", f"X-Api-Key: {KEY}\r\nauthorization: Bearer {KEY}\r\n")
    wrong = (f"x-api-key: {OTHER_KEY}\r\nauthorization: Bearer {KEY}\r\n", f"x-api-key: {KEY}\r\nx-api-key: {KEY}\r\n")
    answers = [await front.raw(call.format(keys=sent).encode()) for sent in (*keys, *wrong)]

    assert [answer.split()[1] for answer in answers] == [b"200", b"200", b"401", b"401"]
    assert [found.header(name) for found in engine.turns for name in ("authorization", "x-api-key")] == [[]] * 4


async def test_a_call_is_carried_as_it_came(front, engine):
    calls = (("GET", "/v1/responses/r1"), ("POST", "/v1/responses"), ("POST", "/tokenize"))
    for method, path in calls:
        async with front.request(method, path) as answer:
            assert (await answer.json())["method"] == method

    assert [(found.method, found.target) for found in engine.turns] == list(calls)


async def test_headers_for_one_hop_end_there(front, engine):
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\nconnection: close, X-Hop\r\n"
        "x-hop: 1\r\nproxy-authorization: secret\r\nx-end: 1\r\ncontent-length: 2\r\n\r\n{}"
    )
    await front.raw(head.encode())
    names = {name for name, _ in engine.turns[0].headers}

    assert names & {"x-hop", "proxy-authorization", "x-end"} == {"x-end"}


async def test_a_request_without_an_id_gets_one_in_its_answer_and_at_the_pod(front, engine):
    async with front.post("/v1/completions", {"prompt": "x"}) as answer:
        assert answer.status == 200

    assert engine.turns[0].header("x-request-id") == [answer.headers["x-request-id"]]


async def test_a_turn_is_signed_and_carried_with_its_body(front, engine, manager):
    await manager.add("ctx_1")
    in_body = {"prompt": "more", "session_id": "ctx_1"}
    in_header = b'{"prompt":  "more"}'
    async with front.post("/v1/completions", in_body) as answer:
        assert answer.status == 200
    async with front.post("/v1/chat/completions", in_header, headers={"X-Session-ID": "ctx_1"}) as answer:
        assert answer.status == 200
    now_ms = SystemClock().now_ms()
    identities = [verify_identity(found.header(IDENTITY_HEADER)[0], SECRET, now_ms=now_ms) for found in engine.turns]

    assert [(identity.tenant, identity.session_id) for identity in identities] == [("demo", "ctx_1")] * 2
    assert engine.turns[0].json() == in_body
    assert engine.turns[1].body == in_header


async def test_a_changed_body_arrives_whole_with_its_own_length(front, engine):
    text = "Grüße " * 20_000
    body = {"prompt": text, "cache_salt": "theirs", "session_id": None}
    async with front.post("/v1/completions", body) as answer:
        assert answer.status == 200
    received = engine.turns[0]

    assert received.json() == {"prompt": text, "session_id": None}
    assert received.header("content-length") == [str(len(received.body))]
    assert received.header("transfer-encoding") == []


async def test_a_body_of_unannounced_length_arrives_whole(front, engine):
    async def pieces():
        yield b'{"prompt": "'
        yield b"x" * 100_000
        yield b'", "cache_salt": "y"}'

    headers = {"content-type": "application/json"}
    async with front.request("POST", "/v1/completions", data=pieces(), headers=headers) as answer:
        assert answer.status == 200

    assert engine.turns[0].json() == {"prompt": "x" * 100_000}


async def test_the_control_calls_reach_the_real_manager(front, manager):
    await manager.add("ctx_1")
    async with front.get("/v1/context/ctx_1") as answer:
        one = await answer.json()
    async with front.get("/v1/context?limit=5") as answer:
        page = await answer.json()
    async with front.delete("/v1/context/ctx_1") as answer:
        gone = await answer.json()
    async with front.get("/v1/context/ctx_1") as answer:
        again = await code_of(answer)

    assert (one["tokens"], one["holder"]) == (3, {"endpoint": "pod-a", "state": "unreachable"})
    assert [entry["session_id"] for entry in page["data"]] == ["ctx_1"]
    assert gone == {"session_id": "ctx_1", "status": "success"}
    assert again == (404, "context_not_found")


async def test_health_and_the_api_document_need_no_key_and_the_metrics_stay_inside(front, front_kind):
    none = {"authorization": ""}
    for path in ("/healthz", "/openapi.json", "/console"):
        async with front.get(path, headers=none) as answer:
            assert answer.status == 200, path
    root = await front.raw(b"GET /?a=b HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n")
    assert (root.split()[1], b"\r\nlocation: /console\r\n" in root) == (b"307", True)
    await until_answered(lambda: front.get("/readyz", headers=none), 200)
    async with front.get("/metrics", headers=none) as answer:
        assert answer.status == (404 if front_kind == "envoy" else 200)


async def test_a_stream_arrives_chunk_by_chunk_before_its_end(front, engine):
    for path in ("/v1/completions", "/v1/context"):
        async with front.post(path, STREAM) as answer:
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


async def test_a_client_that_leaves_a_stream_ends_the_pods_work(front, engine):
    async with front.post("/v1/completions", STREAM) as answer:
        engine.release()
        await answer.content.readany()
        answer.close()

    await asyncio.wait_for(engine.noticed_disconnect.wait(), DEADLINE_S)
    assert engine.disconnects == 1


async def test_a_client_that_leaves_before_the_answer_ends_the_pods_work(front, engine):
    engine.stall = True

    async def ask():
        async with front.post("/v1/completions", STREAM):
            pass

    asking = asyncio.create_task(ask())
    await asyncio.wait_for(engine.arrived.wait(), DEADLINE_S)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    await asyncio.wait_for(engine.noticed_disconnect.wait(), DEADLINE_S)
    assert engine.disconnects == 1


async def test_a_pod_that_breaks_off_before_its_answer_is_a_typed_error_and_asked_once(front, engine):
    engine.break_next = "headers"
    async with front.post("/v1/completions", {"prompt": "x"}) as answer:
        assert await code_of(answer) == (502, "engine_error")

    assert len(engine.turns) == 1


async def test_a_pod_that_breaks_off_in_its_answer_breaks_the_clients_connection(front, engine):
    engine.break_next = "body"
    async with front.post("/v1/completions", STREAM) as answer:
        engine.release()
        await answer.content.readany()
        engine.finish()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.read()


async def test_bodies_of_20_mib_pass(front, engine, manager):
    await manager.add("ctx_1")
    body = b'{"prompt": "' + b"x" * (20 << 20) + b'"}'
    for path, headers in (("/v1/completions", {}), ("/v1/context", {}), ("/v1/completions", {"X-Session-ID": "ctx_1"})):
        async with front.post(path, body, headers=headers) as answer:
            assert (answer.status, json.loads(await answer.read())["size"]) == (200, len(body))
        assert engine.turns.pop(0).body == body
        engine.received.clear()
