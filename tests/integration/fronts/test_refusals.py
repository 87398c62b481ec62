"""What a client is told when it cannot be served: the same status, code and bytes through either front."""

from __future__ import annotations

import asyncio
import io
import time

import pytest

from gateway.http import carrier
from tests.kit.fronts import code_of, envoy_too, only_http, until_answered
from tests.kit.gateway_parts import OTHER_KEY

STREAM = {"model": "stub-model", "prompt": "x", "stream": True}


async def test_a_context_that_is_foreign_deleted_or_never_was_gets_one_answer(front, engine, manager):
    await manager.add("ctx_mine")
    await manager.add("ctx_foreign", tenant="other")
    async with front.delete("/v1/context/ctx_mine") as answer:
        assert answer.status == 200
    found = set()
    for name in ("ctx_mine", "ctx_foreign", "ctx_none"):
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages"):
            async with front.post(path, {"prompt": "more", "session_id": name}) as answer:
                found.add((answer.status, await answer.read()))
        async with front.get(f"/v1/context/{name}") as answer:
            found.add((answer.status, await answer.read()))

    assert len(found) == 1
    assert found.pop()[0] == 404
    assert engine.turns == []


@envoy_too
async def test_a_label_needs_no_manager(front, engine, manager):
    """Seen to fail: 503 with the manager gone."""
    await manager.add("mine")
    await manager.stop()
    labels = ("mine", "agent-run-7", "my agent's run/7", "a, b")
    try:
        for label in labels:
            async with front.post("/v1/completions", {"prompt": "x"}, headers={"X-Session-ID": label}) as answer:
                assert answer.status == 200
    finally:
        await manager.start()

    assert [found.header("x-context-identity") for found in engine.turns] == [[]] * len(labels)
    assert [found.header("x-context-unrouted") for found in engine.turns] == [[]] * len(labels)


@envoy_too
async def test_a_label_that_equals_a_context_of_the_tenant_continues_it(front, engine, manager):
    """Seen failing: the engine alone answered with 200, through either front."""
    await manager.add("chat-42")
    await manager.add("chat-43", tenant="other")
    for label in ("chat-42", "chat-43", "chat-44"):
        async with front.post("/v1/completions", {"prompt": "x"}, headers={"X-Session-ID": label}) as answer:
            assert answer.status == 200

    assert [bool(found.header("x-context-identity")) for found in engine.turns] == [True, False, False]


@envoy_too
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_misspelt_handle_reaches_no_pod(front, engine, path):
    """Seen to fail: 200 from the engine alone, through either front."""
    async with front.post(path, {"model": "stub-model", "prompt": "x", "sesion_id": "chat-42"}) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "sesion_id")
    assert engine.turns == []


@envoy_too
@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/contexts", "/v1/context"),
        ("/v1/context/ctx_1/forks", "/v1/context/{session_id}/fork"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/models/", "/v1/models"),
    ],
)
async def test_a_path_that_is_not_found_names_the_nearest(front, engine, path, meant):
    """Seen to fail: `no such path`, and nothing else, through either front."""
    async with front.post(path, {"prompt": "x"}) as answer:
        assert await code_of(answer) == (404, "not_found")
        assert (await answer.json())["detail"] == f"no such path: did you mean {meant}?"
    assert engine.turns == []


@envoy_too
async def test_a_slash_at_the_end_of_a_path_of_ours_changes_nothing(front, engine, manager):
    """Seen to fail: 404, through either front. The pod gets the bare path."""
    await manager.add("ctx_1")
    for body in ({"prompt": "x"}, {"prompt": "x" * (9 << 20)}):
        async with front.post("/v1/context/", body) as answer:
            assert answer.status == 200
    for path in ("/v1/context/", "/v1/context/ctx_1/", "/v1/usage/", "/v1/models/stub-model/"):
        async with front.get(path) as answer:
            assert answer.status == 200, path
    async with front.get("/healthz/", headers={"authorization": ""}) as answer:
        assert answer.status == 200

    assert [found.target for found in engine.turns] == ["/v1/context"] * 2


@envoy_too
async def test_a_model_is_described_through_either_front(front, engine):
    """Seen to fail: 404 `not_found`."""
    async with front.get("/v1/models/stub-model") as answer:
        assert (answer.status, (await answer.json())["id"]) == (200, "stub-model")
    async with front.get("/v1/models/org%2Fmodel") as answer:
        assert await code_of(answer) == (404, "model_not_found")
    async with front.get("/v1/models/stub-model", headers={"authorization": "Bearer nobodys"}) as answer:
        assert await code_of(answer) == (401, "invalid_api_key")


NOT_RIGHT = [
    ("/v1/completions", {"prompt": "x"}, {"authorization": "Bearer nobodys"}, (401, "invalid_api_key")),
    ("/v1/context", {"prompt": "x"}, {"authorization": ""}, (401, "invalid_api_key")),
    ("/v1/embeddings", {"input": "x"}, {"authorization": "Basic eA=="}, (401, "invalid_api_key")),
    ("/v1/context", b'{"model": "m", }', {}, (400, "invalid_request")),
    ("/v1/context", b"", {}, (400, "invalid_request")),
    ("/v1/context", b"[]", {}, (400, "invalid_request")),
    ("/v1/completions", {"prompt": "x", "session_id": 7}, {}, (400, "invalid_request")),
    ("/v1/completions", {"prompt": "x", "session_id": "../etc"}, {}, (400, "invalid_request")),
    ("/v1/completions", b'{"session_id": "ctx_1" "prompt": "x"}', {}, (400, "invalid_request")),
    *(
        (path, b'{"\\u0073ession_id": "ctx_none"}', {}, (404, "context_not_found"))
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses")
    ),
    ("/v1/messages", {"messages": []}, {"X-Session-ID": "ctx_none"}, (404, "context_not_found")),
    ("/v1/messages", {"messages": [], "session_id": 7}, {}, (400, "invalid_request")),
    *(
        ("/v1/responses", {"input": "x", "previous_response_id": said}, {}, (400, "previous_response_not_found"))
        for said in ("resp_0a", "resp_1_none")
    ),
    ("/v1/responses", {"input": "x", "conversation": "none", "store": False}, {}, (404, "context_not_found")),
    *(
        ("/v1/responses", {"input": "x", **said}, {}, (400, "invalid_request"))
        for said in (
            {"conversation": 7},
            {"previous_response_id": 7},
            {"store": "yes"},
            {"conversation": "mine", "previous_response_id": "resp_1_mine"},
        )
    ),
    *(
        (path, {"model": "m", "session_id": named}, {}, (400, "invalid_request"))
        for path in ("/v1/chat/completions/batch", "/v1/embeddings")
        for named in ("ctx_1", "mine", 7)
    ),
    ("/v1/completions", {"session_id": "ctx_none"}, {"X-Session-ID": "ctx_other"}, (400, "invalid_request")),
    ("/v1/completions", {"session_id": "ctx_none"}, {"X-Session-ID": "ctx_none"}, (404, "context_not_found")),
]


@envoy_too
async def test_a_request_that_cannot_be_right_is_refused_in_the_same_bytes_by_both_fronts(front, engine):
    for path, body, headers, expected in NOT_RIGHT:
        async with front.post(path, body, headers=headers) as answer:
            assert await code_of(answer) == expected, (path, body)
            found = await answer.read()
        async with front.gateway.post(path, body, headers=headers) as plain:
            same = ("content-type", "content-length", "www-authenticate", "retry-after")

            assert (plain.status, await plain.read()) == (expected[0], found), (path, body)
            assert [plain.headers.get(name) for name in same] == [answer.headers.get(name) for name in same]
    assert engine.turns == []


@envoy_too
async def test_a_key_of_another_tenant_reaches_its_own_contexts_only(front, engine, manager):
    await manager.add("ctx_1", tenant="demo")
    other = {"authorization": f"Bearer {OTHER_KEY}"}
    async with front.post("/v1/completions", {"session_id": "ctx_1"}, headers=other) as answer:
        assert await code_of(answer) == (404, "context_not_found")
    async with front.get("/v1/context", headers=other) as answer:
        assert (await answer.json())["data"] == []

    assert engine.turns == []


@envoy_too
@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_of_33_mib_is_refused_and_the_next_one_is_served(front, engine, announced):
    async def pieces():
        for _ in range(33):
            yield b"x" * (1 << 20)

    for path, headers in (("/v1/context", {}), ("/v1/completions", {}), ("/v1/completions", {"X-Session-ID": "label"})):
        data = io.BytesIO(b"x" * (33 << 20)) if announced else pieces()
        async with front.request("POST", path, data=data, headers=headers) as answer:
            assert await code_of(answer) == (413, "body_too_large"), (path, headers)
        async with front.post("/v1/completions", {"prompt": path}) as answer:
            assert answer.status == 200

    assert [found.json() for found in engine.turns] == [{"prompt": "/v1/context"}, *[{"prompt": "/v1/completions"}] * 2]


@envoy_too
async def test_without_the_manager_session_calls_fail_at_once_and_stateless_ones_pass(front, engine, manager):
    await manager.add("ctx_1")
    await manager.stop()
    for call in (
        front.post("/v1/completions", {"session_id": "ctx_1"}),
        front.post("/v1/completions", {"prompt": "x"}, headers={"X-Session-ID": "ctx_1"}),
        front.get("/v1/context"),
        front.get("/v1/context/ctx_1"),
    ):
        async with call as answer:
            assert await code_of(answer) == (503, "store_unavailable")
            assert answer.headers["retry-after"]
            # Where inner services live is none of a client's business.
            assert "127.0.0.1" not in await answer.text()
    async with front.post("/v1/completions", {"prompt": "x"}) as answer:
        assert answer.status == 200
    async with front.get("/readyz") as answer:
        assert (answer.status, await answer.json()) == (503, {"ready": False})
    assert (await front.gateway.details())["missing"] == ["context manager"]

    await manager.start()
    await until_answered(lambda: front.post("/v1/completions", {"session_id": "ctx_1"}), 200)


@envoy_too
async def test_a_dead_pod_is_typed_and_a_living_one_takes_over(open_front, engine, other):
    async with open_front({"pod-a": engine, "pod-b": other}) as front:
        await engine.stop()
        for _ in range(4):
            async with front.post("/v1/completions", {"prompt": "x"}) as answer:
                assert answer.status == 200
        assert len(other.turns) == 4
        await other.stop()
        for _ in range(2):
            async with front.post("/v1/completions", {"prompt": "x"}) as answer:
                assert await code_of(answer) == (503, "no_ready_endpoint")
                assert answer.headers["retry-after"]


@envoy_too
async def test_control_calls_are_counted_like_all_others(open_front, engine, manager):
    """Seen failing before: a hundred of a hundred passed at one a second."""
    await manager.add("ctx_1")
    limits = {"tenant_rate_per_s": 0.001, "tenant_burst": 3}
    async with open_front({"pod-a": engine}, manager_port=manager.port, **limits) as front:
        found = []
        for call in (
            lambda: front.get("/v1/context"),
            lambda: front.get("/v1/context/ctx_1"),
            lambda: front.post("/v1/completions", {"prompt": "x"}),
            lambda: front.delete("/v1/context/ctx_1"),
            lambda: front.get("/v1/context?limit=nonsense"),
        ):
            async with call() as answer:
                found.append((answer.status, "retry-after" in answer.headers))
        other = {"authorization": f"Bearer {OTHER_KEY}"}
        async with front.get("/v1/context", headers=other) as answer:
            found.append((answer.status, "retry-after" in answer.headers))

    assert found == [(200, False)] * 3 + [(429, True)] * 2 + [(200, False)]


@envoy_too
async def test_bodies_over_what_may_be_held_are_refused_and_the_room_is_given_back(open_front, engine, manager):
    async with open_front({"pod-a": engine}, manager_port=manager.port, max_buffered_bytes=100) as front:
        async with front.post("/v1/completions", b"x" * 101) as answer:
            assert await code_of(answer) == (503, "no_ready_endpoint")
        for _ in range(3):
            async with front.post("/v1/completions", b"x" * 99) as answer:
                assert answer.status == 200


@pytest.mark.thorough
@only_http
async def test_a_gateway_that_was_busy_itself_refuses_nobody(open_front, engine, manager, monkeypatch):
    """Seen to fail: one connection that was late by the gateway's own stall took the only pod out, 503 for all."""
    open_socket, stalls = carrier._open_pod_socket, iter([2.5])

    def opened_late(address):
        time.sleep(next(stalls, 0))  # once, longer than a connection may take
        return open_socket(address)

    monkeypatch.setattr(carrier, "_open_pod_socket", opened_late)

    async def ask(number: int) -> int:
        async with front.post("/v1/completions", {"prompt": str(number)}) as answer:
            return answer.status

    async with open_front({"pod-a": engine}, manager_port=manager.port, connect_timeout_s=2) as front:
        statuses = await asyncio.gather(*(ask(number) for number in range(80)))

    assert next(stalls, None) is None
    assert statuses == [200] * 80


@envoy_too
async def test_many_requests_at_once_are_all_answered(front, engine):
    async def ask(number: int) -> int:
        async with front.post("/v1/completions", {"prompt": str(number)}) as answer:
            return answer.status

    statuses = await asyncio.gather(*(ask(number) for number in range(80)))

    assert statuses == [200] * 80
    assert {found.json()["prompt"] for found in engine.turns} == {str(number) for number in range(80)}
