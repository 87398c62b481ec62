"""Rewind over the whole HTTP front."""

import pytest

from contextcache.model import Segment, SegmentKind, TurnCommit
from tests.kit.gateway_parts import REF, manifest_of

TURN = (Segment(SegmentKind.PROMPT, (4, 5), text="more"), Segment(SegmentKind.ANSWER, (6,), text="!"))


@pytest.fixture
async def three(parts):
    """A context of three generations, its newest KV sealed."""
    await parts.directory.add("ctx_1")
    for generation in (1, 2):
        lease_id = f"turn-{generation}"
        await parts.directory.begin_turn("demo", "ctx_1", lease_id=lease_id, lease_ttl_ms=1000)
        keep = 2 * generation - 1
        await parts.directory.commit_turn(TurnCommit("demo", "ctx_1", lease_id, generation, keep, TURN, REF, "pod-a"))
    parts.sidecars["pod-a"].keep(manifest_of("ctx_1"))
    return "/v1/context/ctx_1/rewind"


def error_of(answer):
    body = answer.json()["error"]
    return answer.status_code, body["code"], body["param"]


async def test_a_rewind_answers_with_the_context_as_a_read_shows_it(client, three):
    answer = await client.post(three, json={"generation": 2})
    read = await client.get("/v1/context/ctx_1")

    assert answer.status_code == 200
    assert answer.json() | {"recent_turns": []} == read.json()
    told = answer.json()
    assert (told["generation"], told["tokens"], told["turns"]) == (4, 6, 3)
    assert told["holder"] == {"endpoint": "pod-a", "state": "sealed"}


async def test_a_repeated_rewind_answers_the_same(client, three):
    first = await client.post(three, json={"generation": 1})
    second = await client.post(three, json={"generation": 1.0})

    assert first.json() == second.json()


async def test_a_rewind_happens_on_the_generation_it_is_for_only(client, three):
    late = await client.post(three, json={"generation": 1}, headers={"if-match": '"2"'})
    odd = await client.post(three, json={"generation": 1}, headers={"if-match": "two"})
    empty = await client.post(three, json={"generation": 1}, headers={"if-match": ""})
    weak = await client.post(three, json={"generation": 1}, headers={"if-match": 'W/"2"'})
    done = await client.post(three, json={"generation": 1}, headers={"if-match": 'W/"3"'})
    any_one = await client.post(three, json={"generation": 1}, headers={"if-match": "*"})

    assert error_of(late)[:2] == error_of(weak)[:2] == (409, "generation_mismatch")
    assert any_one.json()["generation"] == 4
    assert error_of(odd) == error_of(empty) == (400, "invalid_request", "If-Match")
    assert done.json()["generation"] == 4


async def test_what_was_replaced_cannot_come_back_nor_what_never_was(client, three):
    for never in (4, 10**15 - 1):
        assert error_of(await client.post(three, json={"generation": never}))[:2] == (409, "generation_gone")
    await client.post(three, json={"generation": 1})
    answer = await client.post(three, json={"generation": 3})

    assert error_of(answer) == (409, "generation_gone", "generation")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "generation"),
        ({"generation": None}, "generation"),
        ({"generation": 0}, "generation"),
        ({"generation": 10**15}, "generation"),
        ({"generation": 2**60}, "generation"),
        ({"generation": "1"}, "generation"),
        ({"generation": True}, "generation"),
        ({"generation": 1.5}, "generation"),
        ({"generation": 1, "ttl": 600}, "ttl"),
    ],
)
async def test_what_names_no_generation_of_it_is_refused(client, three, body, param):
    answer = await client.post(three, json=body)

    assert error_of(answer) == (400, "invalid_request", param)
    assert (await client.get("/v1/context/ctx_1")).json()["generation"] == 3


async def test_while_a_turn_runs_the_context_is_busy(client, three, parts):
    await parts.directory.begin_turn("demo", "ctx_1", lease_id="turn", lease_ttl_ms=5000)
    answer = await client.post(three, json={"generation": 1})

    assert error_of(answer)[:2] == (409, "context_busy")
    assert answer.headers["retry-after"] == "5"


async def test_a_sliding_context_takes_its_kv_along(client, three, parts):
    await client.patch("/v1/context/ctx_1", json={"ttl_policy": "sliding"})
    parts.clock.advance(s=100)
    told = (await client.post(three, json={"generation": 1})).json()
    manifest, _ = await parts.sidecars["pod-a"].get_manifest("demo", REF)

    assert manifest.expires_at_ms // 1000 == told["expires_at"] == parts.clock.now_ms() // 1000 + 600
