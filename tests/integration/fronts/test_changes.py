"""Contexts that are changed, over both fronts, with the manager as a process of its own over a real Valkey."""

from __future__ import annotations

import asyncio
import json
from random import Random

import pytest

from tests.kit.fake_vllm import encode
from tests.kit.fronts import code_of, envoy_too, only_http
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


@envoy_too
async def test_a_patch_changes_what_is_read_and_nothing_else(front):
    session_id = await created(front)
    before = await told(front.get(f"/v1/context/{session_id}"))
    changed = await told(patch(front, session_id, ttl=7200, ttl_policy="sliding", metadata={"a": "b"}))

    read = await told(front.get(f"/v1/context/{session_id}"))
    assert before.pop("recent_turns") == read.pop("recent_turns")
    assert changed == read
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


def rewind(front, session_id: str, generation: int, *, headers=None):
    return front.post(f"/v1/context/{session_id}/rewind", {"generation": generation}, headers=headers)


@envoy_too
async def test_a_rewound_context_goes_on_from_where_it_was(front, pod):
    """The engine sees what the client took back no more."""
    session_id = await created(front)
    await told(turn(front, session_id, " one"))
    await told(turn(front, session_id, " two"))
    rewound = await told(rewind(front, session_id, 2))
    async with turn(front, session_id, " three") as answer:
        again = await answer.json()
        generation = answer.headers["x-context-generation"]

    assert (rewound["generation"], rewound["turns"], generation) == (4, 3, "5")
    assert again["usage"]["context"]["context_tokens"] == rewound["tokens"]
    assert pod.engine.generations()[-1]["prompt"] == encode("Hello! one! three")
    async with rewind(front, session_id, 3) as answer:
        assert await code_of(answer) == (409, "generation_gone")
    async with rewind(front, session_id, 1, headers={"If-Match": "3"}) as answer:
        assert await code_of(answer) == (409, "generation_mismatch")
    async with rewind(front, session_id, 0) as answer:
        assert await code_of(answer) == (400, "invalid_request")


@only_http
async def test_rewinds_and_turns_at_once_have_one_serial_order(front, pod):
    """Whatever order they took: each turn saw what the ones before it left, and nothing that was taken back."""
    session_id = await created(front)

    async def one(number: int) -> int:
        asking = rewind(front, session_id, 1) if number % 3 == 0 else turn(front, session_id, f" {number}")
        async with asking as answer:
            await answer.read()
            return answer.status

    statuses = await asyncio.gather(*(one(number) for number in range(30)))
    last = await told(front.get(f"/v1/context/{session_id}"))
    await told(turn(front, session_id, " end"))
    prompt = pod.engine.generations()[-1]["prompt"]

    assert set(statuses) <= {200, 409}
    assert last["state"] == "ready"
    assert len(prompt) == last["tokens"] + len(encode(" end"))
    assert prompt[: len(encode("Hello!"))] == encode("Hello!")


def fork(front, source_id: str, **body):
    return front.post(f"/v1/context/{source_id}/fork", body)


@envoy_too
async def test_a_fork_and_its_source_go_on_apart(front, pod):
    session_id = await created(front)
    await told(turn(front, session_id, " one"))
    whole = await told(fork(front, session_id), 201)
    early = await told(fork(front, session_id, generation=1, ttl=900, metadata={"a": "b"}), 201)
    of_fork = await told(fork(front, whole["session_id"]), 201)
    await told(front.delete(f"/v1/context/{session_id}"))
    for context, expected in ((whole, "Hello! one! x"), (early, "Hello! x"), (of_fork, "Hello! one! x")):
        again = await told(turn(front, context["session_id"], " x"))

        assert again["usage"]["context"]["context_tokens"] == context["tokens"]
        assert pod.engine.generations()[-1]["prompt"] == encode(expected)
    assert (early["ttl"], early["metadata"], whole["generation"]) == (900, {"a": "b"}, 1)
    async with fork(front, session_id) as answer:
        assert await code_of(answer) == (404, "context_not_found")
    async with fork(front, whole["session_id"], session_id=early["session_id"]) as answer:
        assert await code_of(answer) == (409, "context_exists")


@only_http
async def test_forks_and_a_delete_of_their_source_at_once_are_whole_contexts_or_none(front):
    for _ in range(4):
        session_id = await created(front)

        async def one(source: str = session_id) -> tuple[int, dict]:
            async with fork(front, source) as answer:
                return answer.status, await answer.json()

        async def gone(source: str = session_id) -> tuple[int, dict]:
            async with front.delete(f"/v1/context/{source}") as answer:
                return answer.status, {}

        outcomes = await asyncio.gather(one(), one(), gone(), one(), one())

        assert {status for status, _ in outcomes} <= {200, 201, 404}
        for status, context in outcomes:
            if status == 201:
                found = await told(turn(front, context["session_id"]))
                assert found["usage"]["context"]["context_tokens"] == context["tokens"]


@envoy_too
async def test_a_call_creates_the_context_it_names_where_there_is_none(front, pod):
    asked = {"context_create": "if_missing", "ttl": 900, "metadata": {"a": "b"}}
    first = await told(turn(front, "mine", "Hello", **asked))
    second = await told(turn(front, "mine", " more", **asked))
    found = await told(front.get("/v1/context/mine"))
    async with turn(front, "other", "Hello", context_create="always") as answer:
        assert await code_of(answer) == (404, "context_not_found")
    body = {"model": MODEL, "prompt": "Hello", "context_create": "if_missing"}
    async with front.post("/v1/completions", body) as answer:
        assert await code_of(answer) == (400, "invalid_request")
    async with front.post("/v1/completions", body, headers={"X-Session-ID": "ctx_by_header"}) as answer:
        assert (await answer.json())["session_id"] == "ctx_by_header"

    assert (first["session_id"], second["session_id"]) == ("mine", "mine")
    assert (found["generation"], found["ttl"], found["metadata"]) == (2, 900, {"a": "b"})
    assert encode("Hello! more") in [body["prompt"] for body in pod.engine.generations()]


@envoy_too
async def test_of_many_calls_that_may_create_one_context_one_does(front, pod):
    """Nobody's turn is lost, and nobody has a context of his own."""

    async def one(number: int) -> tuple[int, str]:
        async with turn(front, "mine", f" {number}", context_create="if_missing") as answer:
            body = await answer.json()
            return answer.status, body["error"]["code"] if answer.status != 200 else ""

    outcomes = await asyncio.gather(*(one(number) for number in range(12)))
    listed = await told(front.get("/v1/context"))

    assert {outcome for outcome in outcomes if outcome[0] != 200} <= {(409, "context_busy")}
    (context,) = listed["data"]
    assert context["generation"] == sum(status == 200 for status, _ in outcomes) >= 1
