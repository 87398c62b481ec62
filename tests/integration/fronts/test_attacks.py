"""What a client must not be able to do: choose its pod's address, say who it is, reach a pod by another spelling."""

from __future__ import annotations

import itertools

import pytest

from contextcache.clock import SystemClock
from contextcache.identity import (
    DESTINATION_HEADER,
    IDENTITY_HEADER,
    TENANT_HEADER,
    UNROUTED_HEADER,
    Identity,
    sign_identity,
    tenant_tag,
)
from gateway.flows import ROUTING_HEADERS
from tests.kit.fronts import code_of, only_envoy
from tests.kit.gateway_parts import KEY, SECRET
from tests.kit.identities import verify_identity
from tests.kit.stub_engine import StubEngine


@pytest.fixture
async def decoy():
    """A server that no request may reach: what `engine_paths` and the endpoints do not name."""
    decoy = StubEngine()
    await decoy.start()
    yield decoy
    await decoy.stop()


def steering(decoy) -> dict[str, str]:
    address = f"127.0.0.1:{decoy.port}"
    return {
        "X-Gateway-Destination-Endpoint": address,
        "X-Envoy-Original-Dst-Host": address,
        "X-Gateway-Destination-Endpoint-Subset": address,
        "X-Gateway-Destination-Endpoint-Served": address,
        "X-Envoy-Original-Path": "/v1/context",
        "X-Original-Url": "/v1/context",
        "X-Http-Method-Override": "DELETE",
        "X-Forwarded-Host": address,
        "Envoy.lb": address,
        IDENTITY_HEADER: "v1.forged.mac",
        TENANT_HEADER: tenant_tag("other", SECRET),
        UNROUTED_HEADER: "0",
    }


def arrived(engine) -> list[dict[str, list[str]]]:
    """Return the headers of ours that each request arrived with."""
    ours = ROUTING_HEADERS | {IDENTITY_HEADER}
    return [{name: found.header(name) for name in ours if found.header(name)} for found in engine.turns]


def routed_to(engine) -> dict[str, list[str]]:
    """Return the headers by which a gateway routes a request without a context."""
    address = f"127.0.0.1:{engine.port}"
    return {
        DESTINATION_HEADER: [address],
        TENANT_HEADER: [tenant_tag("demo", SECRET)],
    }


async def test_headers_that_steer_steer_nothing(front, engine, manager, decoy):
    await manager.add("ctx_1")
    body = {"prompt": "x", "cache_salt": "y", "kv_transfer_params": {"context_cache": "z"}}
    for path, more in (
        ("/v1/completions", {}),
        ("/v1/embeddings", {}),
        ("/v1/context", {}),
        ("/v1/completions", {"session_id": "ctx_1"}),
    ):
        async with front.post(path, {**body, **more}, headers=steering(decoy)) as answer:
            assert answer.status == 200
    own = routed_to(engine)
    *stateless, create, turn = arrived(engine)
    now_ms = SystemClock().now_ms()

    assert stateless == [own, own]
    assert verify_identity(create.pop(IDENTITY_HEADER)[0], SECRET, now_ms=now_ms).session_id is None
    assert verify_identity(turn.pop(IDENTITY_HEADER)[0], SECRET, now_ms=now_ms).session_id == "ctx_1"
    assert (create, turn) == (own, own)
    assert [found.json() for found in engine.turns[:3]] == [{"prompt": "x"}] * 3
    assert decoy.received == []


async def test_headers_that_steer_steer_nothing_without_a_body(front, engine, decoy):
    for _ in range(3):
        async with front.get("/v1/responses/r1", headers=steering(decoy)) as answer:
            assert answer.status == 200
    own = routed_to(engine)
    del own[TENANT_HEADER]  # it asks the engine for no work

    assert arrived(engine) == [own] * 3
    assert decoy.received == []


async def test_headers_that_steer_do_not_change_a_control_call(front, engine, manager, decoy):
    await manager.add("ctx_1")
    async with front.get("/v1/context/ctx_1", headers=steering(decoy)) as answer:
        assert (await answer.json())["session_id"] == "ctx_1"
    async with front.get("/v1/context", headers=steering(decoy)) as answer:
        assert [found["session_id"] for found in (await answer.json())["data"]] == ["ctx_1"]

    assert engine.turns == decoy.received == []


async def test_an_identity_signed_for_somebody_else_or_in_the_past_is_replaced(front, engine):
    now_ms = SystemClock().now_ms()
    stolen = sign_identity(Identity("other", "req_1", now_ms + 60_000, "ctx_theirs"), SECRET)
    for path in ("/v1/completions", "/v1/context"):
        async with front.post(path, {"prompt": "x"}, headers={IDENTITY_HEADER: stolen}) as answer:
            assert answer.status == 200
    stateless, create = engine.turns

    assert stateless.header(IDENTITY_HEADER) == []
    assert verify_identity(create.header(IDENTITY_HEADER)[0], SECRET, now_ms=now_ms).tenant == "demo"


async def test_repeated_headers_hide_nothing(front, engine):
    body = b'{"cache_salt":"x","a":1}'
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
        "content-type: application/json\r\ncontent-type: multipart/form-data\r\n"
        f"x-context-identity: a\r\nx-context-identity: b\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    answer = await front.raw(head.encode() + body)

    assert answer.startswith(b"HTTP/1.1 200")
    assert engine.turns[0].json() == {"a": 1}
    assert engine.turns[0].header(IDENTITY_HEADER) == []


async def test_the_signed_identity_cannot_be_taken_off_as_a_header_of_one_hop(front, engine):
    named = f"close, {IDENTITY_HEADER}, {DESTINATION_HEADER}, authorization"
    head = f"POST /v1/context HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\nconnection: {named}\r\n"
    answer = await front.raw(f"{head}content-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}".encode())

    # Refused, or carried with what we signed: never carried without.
    assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 40"))
    assert all(found.header(IDENTITY_HEADER) and not found.header("authorization") for found in engine.turns)


async def test_two_lengths_or_a_length_and_chunks_are_refused_or_one_request(front, engine):
    head = f"POST /v1/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
    hidden = "POST /v1/context HTTP/1.1\r\nhost: g\r\ncontent-length: 2\r\n\r\n{}"
    for lengths in (
        f"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{hidden}",
        f"content-length: 2\r\ncontent-length: {2 + len(hidden)}\r\n\r\n{{}}{hidden}",
        f"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n{hidden}",
    ):
        answer = await front.raw(f"{head}{lengths}".encode())

        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501")), (lengths, answer)
    assert engine.turns == []


SPELLINGS = (
    "//v1/context", "/v1//context", "/v1/%63ontext//", "/v1/context%2F%2F", "/v1/%2e/context",
    "/V1/CONTEXT", "/v1/x/%2e%2e/context", "/v1/x/../context", "/v1/context%00", "/v1/./context", "/v1/../v1/context",
    "/v1/Context", "/v1/context%3F", "/./v1/context", "http://g/v1//context", "/v1/%2563ontext", "\\v1\\context",
    "/v1\\context", "/v1/context%5c", "/v1/context//", "/v1/context/a/b/c", "/v1/context%20",
    "/v1/context/%2e%2e/completions", "*", "/v1/c\u0336ontext",
)  # fmt: skip


async def test_no_spelling_of_the_context_path_reaches_a_pod(front, engine):
    for method, spelling in itertools.product(("POST", "GET"), SPELLINGS):
        head = f"{method} {spelling} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
        answer = await front.raw(f"{head}content-length: 2\r\n\r\n{{}}".encode())

        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400", b"HTTP/1.1 405")), (spelling, answer)
    assert engine.turns == []


async def test_a_create_spelled_otherwise_is_signed_like_any_other_or_refused(front, front_kind, engine):
    for spelling in ("/v1/%63ontext", "/v1%2fcontext", "/%76%31/context", "/v1/context#x"):
        head = f"POST {spelling} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
        answer = await front.raw(f"{head}content-length: 2\r\n\r\n{{}}".encode())

        # The HTTP front decodes a path as the pod does; Envoy has only the spelling.
        assert answer.startswith(b"HTTP/1.1 200" if front_kind == "http" else b"HTTP/1.1 40"), answer
    assert all(found.header(IDENTITY_HEADER) for found in engine.turns)
    assert len(engine.turns) == (4 if front_kind == "http" else 0)


async def test_a_path_that_only_looks_like_a_context_is_not_found(front, engine):
    async with front.post("/v1/context;x", {}) as answer:
        assert await code_of(answer) == (404, "not_found")

    assert engine.turns == []


async def test_paths_of_the_operator_are_not_to_be_had(front, engine):
    for method, path in (("POST", "/reset_prefix_cache"), ("POST", "/sleep"), ("GET", "/server_info"), ("POST", "/")):
        async with front.request(method, path) as answer:
            assert await code_of(answer) == (404, "not_found")
    for method, path in (("PUT", "/v1/context"), ("POST", "/v1/context/ctx_1"), ("DELETE", "/v1/context")):
        async with front.request(method, path) as answer:
            assert await code_of(answer) == (405, "method_not_allowed")
            assert answer.headers["allow"]

    assert engine.turns == []


@only_envoy
async def test_without_a_plugin_headers_that_steer_steer_nothing(front, engine, decoy):
    await front.end_gateway()
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/responses/r1"), ("POST", "/v1/embeddings")):
        async with front.request(method, path, data=b"{}", headers=steering(decoy)) as answer:
            assert answer.status == 200

    assert arrived(engine) == [{UNROUTED_HEADER: ["1"]}] * 3
    assert decoy.received == []


@only_envoy
async def test_without_a_plugin_what_may_be_a_context_is_refused(front, engine, decoy):
    await front.end_gateway()
    for path, headers in (
        ("/v1/context", {}),
        ("/v1/context", steering(decoy)),
        ("/v1/completions", {"X-Session-ID": "ctx_1"}),
        ("/v1/chat/completions", {"X-Session-ID": "ctx_1", **steering(decoy)}),
    ):
        async with front.post(path, {"prompt": "x"}, headers=headers) as answer:
            assert (await code_of(answer))[0] == 503
            assert answer.headers["retry-after"]
    for call in (front.get("/v1/context"), front.get("/v1/context/ctx_1"), front.delete("/v1/context/ctx_1")):
        async with call as answer:
            assert (await code_of(answer))[0] == 503
            assert answer.headers["retry-after"]

    assert engine.turns == decoy.received == []


@only_envoy
async def test_without_a_plugin_no_spelling_of_the_context_path_reaches_a_pod(front, engine):
    await front.end_gateway()
    for spelling in SPELLINGS:
        head = f"POST {spelling} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
        answer = await front.raw(f"{head}content-length: 2\r\n\r\n{{}}".encode())

        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), (spelling, answer)
    assert engine.turns == []
