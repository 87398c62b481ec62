"""Contexts that are changed, over both fronts, with the manager as a process of its own over a real Valkey."""

from __future__ import annotations

import asyncio
import json
from random import Random

import pytest

from tests.kit.fronts import code_of, only_http
from tests.kit.manager_process import running_manager_process
from tests.kit.turn_pod import MODEL, running_turn_pod


@pytest.fixture
async def manager(tmp_path, valkey):
    async with running_manager_process(tmp_path, valkey.url, MANAGER_MIN_TTL_S="60") as manager:
        yield manager


@pytest.fixture
async def pod(tmp_path, manager):
    async with running_turn_pod(tmp_path, manager_port=manager.port) as pod:
        yield pod


@pytest.fixture
async def front(open_front, pod, manager):
    async with open_front({"pod-a": pod}, manager_port=manager.port) as front:
        yield front


async def told(asking, status: int = 200) -> dict:
    async with asking as answer:
        body = await answer.read()
        assert answer.status == status, body
        return json.loads(body)


def turn(front, session_id: str, prompt: str = " more", **body):
    return front.post("/v1/completions", {"model": MODEL, "prompt": prompt, "session_id": session_id, **body})


async def created(front, **body) -> str:
    return (await told(front.post("/v1/context", {"model": MODEL, "prompt": "Hello", **body})))["session_id"]


def patch(front, session_id: str, **body):
    return front.request("PATCH", f"/v1/context/{session_id}", data=json.dumps(body).encode())


async def test_a_patch_changes_what_is_read_and_nothing_else(front):
    session_id = await created(front)
    before = await told(front.get(f"/v1/context/{session_id}"))
    changed = await told(patch(front, session_id, ttl=7200, ttl_policy="sliding", metadata={"a": "b"}))

    assert changed == await told(front.get(f"/v1/context/{session_id}"))
    moved = {"ttl", "ttl_policy", "metadata", "expires_at"}
    assert {name for name in before if before[name] != changed[name]} == moved
    assert (await told(turn(front, session_id)))["session_id"] == session_id


async def test_what_a_patch_may_not_say_is_typed_at_both_fronts(front):
    session_id = await created(front)
    for body, expected in (
        ({"ttl": 5}, (400, "ttl_out_of_range")),
        ({"mode": "prefix"}, (400, "invalid_request")),
    ):
        async with patch(front, session_id, **body) as answer:
            assert await code_of(answer) == expected
    async with patch(front, "ctx_none", ttl=600) as answer:
        assert await code_of(answer) == (404, "context_not_found")


@only_http
async def test_patches_and_turns_at_once_have_one_serial_order(front):
    """Every patch and every turn that was told it happened is there, whatever came between."""
    session_id = await created(front)
    rng = Random(15)

    async def turns() -> int:
        done = 0
        for _ in range(12):
            async with turn(front, session_id) as answer:
                assert answer.status == 200
                done += (await answer.json())["usage"]["context"]["committed"]
        return done

    async def patches(name: str) -> str:
        for number in range(12):
            found = await told(patch(front, session_id, ttl=rng.randint(600, 6000), metadata={name: str(number)}))
            assert found["metadata"].keys() <= {"one", "two"}
        return name

    committed, *_ = await asyncio.gather(turns(), patches("one"), patches("two"))
    last = await told(front.get(f"/v1/context/{session_id}"))

    assert committed == 12
    assert last["generation"] == 13
    assert list(last["metadata"].values()) == ["11"]
    assert last["ttl"] >= 600
