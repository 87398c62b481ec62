"""Contexts on `/v1/messages` from the client to the committed transcript, through either front."""

from __future__ import annotations

import json

import pytest

from tests.kit.fake_vllm import FakeVllm
from tests.kit.fronts import code_of, only_envoy
from tests.kit.gateway_parts import OTHER_KEY
from tests.kit.turn_pod import MODEL, running_turn_pod

BODY = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
async def pod(tmp_path, manager):
    async with running_turn_pod(tmp_path, manager_port=manager.port, engine=FakeVllm()) as pod:
        yield pod


def post(front, *, headers=None, **body):
    return front.post("/v1/messages", {**BODY, **body}, headers=headers)


async def test_a_context_is_created_by_its_first_message_and_goes_on_by_body_and_by_header(front, pod):
    """Seen to fail: 400, this call cannot carry a context."""
    generations = []
    named = {"session_id": "ctx_mine", "context_create": "if_missing"}
    for body, headers in ((named, {}), (named, {}), ({}, {"X-Session-ID": "ctx_mine"})):
        async with post(front, headers=headers, **body) as answer:
            told = await answer.json()
            generations.append((answer.status, answer.headers["x-context-generation"], told["session_id"]))
            assert told["content"] == [{"type": "text", "text": "!"}]
            assert told["usage"]["context"]["committed"]

    assert generations == [(200, str(number), "ctx_mine") for number in (1, 2, 3)]
    async with front.get("/v1/context/ctx_mine") as answer:
        assert (await answer.json())["generation"] == 3


async def test_a_stream_ends_with_usage_and_without_done(front):
    async with post(front, session_id="mine", context_create="if_missing", stream=True) as answer:
        raw = (await answer.content.read()).decode()
        assert answer.headers["x-session-id"] == "mine"

    *_, delta, stop = [frame.split("\n") for frame in raw.split("\n\n") if frame]
    assert delta[0] == "event: message_delta"
    assert json.loads(delta[1].removeprefix("data: "))["usage"]["context"]["committed"]
    assert stop[0] == "event: message_stop"
    assert "[DONE]" not in raw


async def test_another_tenant_finds_nothing_and_is_told_so_in_either_dialect(front, pod):
    async with post(front, session_id="mine", context_create="if_missing") as answer:
        assert answer.status == 200
    before = len(pod.engine.generations())
    async with post(front, session_id="mine", headers={"authorization": f"Bearer {OTHER_KEY}"}) as answer:
        assert await code_of(answer) == (404, "context_not_found")
        assert (await answer.json())["type"] == "error"

    assert len(pod.engine.generations()) == before


async def test_a_message_without_a_context_reaches_the_engine_as_it_came(front, pod):
    async with post(front) as answer:
        assert answer.status == 404  # the toy engine's own: it serves no such path

    assert ("/v1/messages", BODY) in pod.engine.requests


@only_envoy
async def test_with_the_gateway_gone_a_context_in_the_head_is_refused_and_one_in_the_body_reaches_no_engine(front, pod):
    """Seen to fail: passed on without its context, as a plain request."""
    await front.end_gateway()
    before = len(pod.engine.generations())
    for named in ({"headers": {"X-Session-ID": "ctx_mine"}}, {"session_id": "mine"}):
        async with post(front, **named) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "gateway_unavailable")

    assert len(pod.engine.generations()) == before
