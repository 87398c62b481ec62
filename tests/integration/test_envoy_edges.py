"""Requests at the edge of what Envoy takes: trailers without a body, headers repeated or too many. None slips past."""

from __future__ import annotations

import json

import pytest

from contextcache.identity import IDENTITY_HEADER, UNROUTED_HEADER
from tests.kit import http2
from tests.kit.fronts import code_of, running_front
from tests.kit.gateway_parts import KEY
from tests.kit.gateway_server import settings_for

HEADERS = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
TRAILERS = {"x-session-id": "ctx_1", IDENTITY_HEADER: "v1.forged.mac"}


@pytest.fixture
async def front(engine, manager, tmp_path):
    await manager.add("ctx_1", holder="pod-a")
    settings = settings_for(tmp_path, {"pod-a": engine}, manager_port=manager.port)
    async with running_front("envoy", settings, num_ready=1) as front:
        yield front


async def test_a_request_of_trailers_without_a_body_does_not_pass_the_gateway_unrouted(front, engine):
    for path in ("/v1/completions", "/v1/context", "/v1/embeddings"):
        sized = {**HEADERS, "content-length": "0"}
        answer = json.loads(await http2.post(front.port, path, sized, trailers=TRAILERS))

        assert answer["error"]["code"] == "invalid_request"
    assert engine.turns == []
    for path in ("/v1/completions", "/v1/context", "/v1/embeddings"):  # of no size: through the HTTP front
        await http2.post(front.port, path, HEADERS, trailers=TRAILERS)

    assert [found.target for found in engine.turns] == ["/v1/completions", "/v1/embeddings"]
    assert not any(found.header(name) for found in engine.turns for name in (UNROUTED_HEADER, IDENTITY_HEADER))


async def test_trailers_after_a_body_say_nothing(front, engine):
    for path in ("/v1/completions", "/v1/context", "/v1/embeddings"):
        await http2.post(front.port, path, HEADERS, body=b"{}", trailers=TRAILERS)
    stateless, create, other = engine.turns

    assert [found.body for found in engine.turns] == [b"{}"] * 3
    assert stateless.header(IDENTITY_HEADER) == other.header(IDENTITY_HEADER) == []
    assert len(create.header(IDENTITY_HEADER)) == 1
    assert create.header(IDENTITY_HEADER) != ["v1.forged.mac"]
    assert not any(found.header(name) for found in engine.turns for name in (UNROUTED_HEADER, "x-session-id"))


async def test_headers_that_leave_no_room_for_ours_are_refused(front, engine):
    crowd = {f"x-filler-{number}": "1" for number in range(188)}
    for path, body in (("/v1/completions", {"cache_salt": "x"}), ("/v1/context", {}), ("/v1/embeddings", {})):
        async with front.post(path, body, headers=crowd) as answer:
            assert await code_of(answer) == (400, "invalid_request")

    assert engine.turns == []


async def test_a_header_that_is_repeated_names_its_context_all_the_same(front, engine):
    async with front.post("/v1/completions", {}, headers={"X-Session-ID": "ctx_1, ctx_1"}) as answer:
        assert answer.status == 200
    async with front.post("/v1/completions", {}, headers={"X-Session-ID": "ctx_1, ctx_2"}) as answer:
        assert answer.status == 400

    assert [len(found.header(IDENTITY_HEADER)) for found in engine.turns] == [1]
