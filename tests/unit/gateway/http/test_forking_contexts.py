"""Forks over the whole HTTP front: what they are, what they share, and what is left when one fails."""

import asyncio

import pytest

from contextcache.errors import StoreUnavailable
from contextcache.model import ForkedKV, NewSession, Segment, SegmentKind, TurnCommit
from tests.kit.gateway_parts import REF, manifest_of

TURN = (Segment(SegmentKind.PROMPT, (4, 5), text="more"), Segment(SegmentKind.ANSWER, (6,), text="!"))
FORK = "/v1/context/ctx_1/fork"


@pytest.fixture
async def two(parts):
    """A context of two generations, with KV at `pod-a`."""
    new = NewSession("demo", "ctx_1", "stub-model", ttl_s=600, metadata={"kind": "doc"})
    await parts.directory.reserve(new, lease_id="l", lease_ttl_ms=1000)
    first = Segment(SegmentKind.PROMPT, (1, 2, 3), text="hello")
    await parts.directory.commit_turn(TurnCommit("demo", "ctx_1", "l", 0, 0, (first,), REF, "pod-a"))
    await parts.directory.begin_turn("demo", "ctx_1", lease_id="t", lease_ttl_ms=1000)
    await parts.directory.commit_turn(TurnCommit("demo", "ctx_1", "t", 1, 1, TURN, REF, "pod-a"))
    parts.sidecars["pod-a"].keep(manifest_of("ctx_1"))
    return (first, *TURN)


def error_of(answer):
    body = answer.json()["error"]
    return answer.status_code, body["code"], body["param"]


async def transcript_of(parts, session_id):
    begun = await parts.directory.begin_turn("demo", session_id, lease_id="reader", lease_ttl_ms=1000, read_only=True)
    return begun.transcript()


async def refs_of(parts):
    return set(parts.sidecars["pod-a"]._kept)


async def test_a_fork_is_a_context_of_its_own_over_the_same_kv(client, two, parts):
    source = (await client.get("/v1/context/ctx_1")).json()
    parts.clock.advance(s=10)
    answer = await client.post(FORK)
    told = answer.json()

    assert answer.status_code == 201
    assert told | {"recent_turns": []} == (await client.get(f"/v1/context/{told['session_id']}")).json()
    assert (told.pop("forked_from"), source.pop("forked_from")) == ({"session_id": "ctx_1", "generation": 2}, None)
    assert told["session_id"].startswith("ctx_")
    own = {"session_id", "created", "expires_at", "generation", "turns"}
    assert {name: told[name] for name in set(told) - own} == {name: source[name] for name in set(told) - own}
    assert (told["generation"], told["turns"], told["holder"]["state"]) == (1, 1, "sealed")
    assert told["expires_at"] == source["expires_at"] + 10
    assert await transcript_of(parts, told["session_id"]) == two
    assert (await client.get("/v1/context/ctx_1")).json() == source | {"forked_from": None}


@pytest.mark.parametrize(("says", "num_asked"), [(True, 0), (False, 1)])
async def test_what_a_fork_has_is_asked_for_only_where_its_sidecar_is_too_old_to_say(
    client, two, parts, monkeypatch, says, num_asked
):
    sidecar, asked = parts.sidecars["pod-a"], []
    told, forks = sidecar.get_manifest, sidecar.fork_context

    async def get_manifest(*args):
        asked.append(args)
        return await told(*args)

    async def fork_context(*args, **terms):
        forked = await forks(*args, **terms)
        return forked if says else ForkedKV(0, "none")

    monkeypatch.setattr(sidecar, "get_manifest", get_manifest)
    monkeypatch.setattr(sidecar, "fork_context", fork_context)
    answer = (await client.post(FORK)).json()

    assert len(asked) == num_asked
    assert answer | {"recent_turns": []} == (await client.get(f"/v1/context/{answer['session_id']}")).json()
    assert answer["bytes"] > 0


async def test_a_fork_may_begin_at_an_earlier_turn_with_terms_of_its_own(client, two, parts):
    said = {
        "generation": 1,
        "session_id": "mine",
        "ttl": 900,
        "ttl_policy": "sliding",
        "metadata": {"branch": "b"},
    }
    answer = await client.post(FORK, json=said)
    told = answer.json()

    assert answer.status_code == 201
    assert {name: told[name] for name in ("session_id", "ttl", "ttl_policy", "metadata")} == {
        name: said[name] for name in ("session_id", "ttl", "ttl_policy", "metadata")
    }
    assert await transcript_of(parts, "mine") == two[:1]
    assert told["tokens"] == 3
    manifest, _ = await parts.sidecars["pod-a"].get_manifest("demo", (await _row(parts, "mine")).cache_ref)
    assert (manifest.session_id, manifest.expires_at_ms // 1000) == ("mine", told["expires_at"])


async def _row(parts, session_id):
    return await parts.directory.get_session_metadata("demo", session_id)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"generation": 3}, (409, "generation_gone", "generation")),
        ({"generation": 0}, (400, "invalid_request", "generation")),
        ({"generation": "1"}, (400, "invalid_request", "generation")),
        ({"session_id": "a:b"}, (400, "invalid_request", "session_id")),
        ({"session_id": 7}, (400, "invalid_request", "session_id")),
        ({"session_id": "ctx_1"}, (409, "context_exists", "session_id")),
        ({"ttl": 5}, (400, "ttl_out_of_range", "ttl")),
        ({"ttl": None}, (400, "invalid_request", "ttl")),
        ({"metadata": {"a": 1}}, (400, "invalid_request", "metadata")),
        ({"model": "other"}, (400, "invalid_request", "model")),
        ({"prompt": "x"}, (400, "invalid_request", "prompt")),
    ],
)
async def test_a_fork_that_cannot_be_leaves_nothing(client, two, parts, body, expected):
    """Neither a row nor KV: seen to fail without the KV of a fork taken back that was refused after it."""
    before = (await client.get("/v1/context")).json(), await refs_of(parts)
    answer = await client.post(FORK, json=body)

    assert error_of(answer) == expected
    assert ((await client.get("/v1/context")).json(), await refs_of(parts)) == before


async def test_what_a_later_turn_replaced_cannot_be_forked(client, two, parts):
    await client.post("/v1/context/ctx_1/rewind", json={"generation": 1})

    assert error_of(await client.post(FORK, json={"generation": 2})) == (409, "generation_gone", "generation")
    assert await refs_of(parts) == {REF}


@pytest.mark.parametrize("fault", ["down", "nothing there", "gone"])
async def test_without_the_holders_kv_a_fork_begins_cold_and_is_whole(client, two, parts, fault):
    if fault == "down":
        parts.sidecars["pod-a"].down = True
    elif fault == "nothing there":
        await parts.sidecars["pod-a"].delete_context("demo", session_id="ctx_1")
    else:
        parts.endpoints.follow([state.endpoint for state in parts.endpoints.states() if state.endpoint.name != "pod-a"])
    answer = await client.post(FORK)

    assert answer.status_code == 201
    row = await _row(parts, answer.json()["session_id"])
    assert (row.cache_ref, row.holder) == ("", "pod-a")
    assert await transcript_of(parts, row.session_id) == two
    assert answer.json()["holder"]["state"] == "absent"


async def test_a_context_with_a_turn_running_is_forked_as_it_was(client, two, parts):
    await parts.directory.begin_turn("demo", "ctx_1", lease_id="busy", lease_ttl_ms=9000)
    beside = await client.post(FORK)

    assert await transcript_of(parts, beside.json()["session_id"]) == two


async def test_a_fork_whose_commit_had_no_answer_is_told_again_and_is_one(client, two, parts, monkeypatch):
    """Seen to fail without the repeat: 503 for a fork that was made."""
    made = parts.directory.fork
    answers = [StoreUnavailable("no answer"), None]

    async def fork(source_id, **how):
        session = await made(source_id, **how)
        if (lost := answers.pop(0)) is not None:
            raise lost
        return session

    monkeypatch.setattr(parts.directory, "fork", fork)
    answer = await client.post(FORK)

    assert answer.status_code == 201
    assert len((await client.get("/v1/context")).json()["data"]) == 2


async def test_with_the_store_away_there_is_no_fork_and_what_was_reserved_dies_by_itself(
    client, two, parts, monkeypatch
):
    async def away(*_, **__):
        raise StoreUnavailable("away", retry_after_s=1)

    monkeypatch.setattr(parts.directory, "fork", away)
    monkeypatch.setattr(parts.directory, "abort_turn", away)
    answer = await client.post(FORK, json={"session_id": "mine"})

    assert error_of(answer)[:2] == (503, "store_unavailable")
    parts.clock.advance(s=10)
    assert (await client.get("/v1/context/mine")).status_code == 404


async def test_twenty_forks_at_once_are_twenty_contexts_and_the_last_to_go_frees_the_kv(client, two, parts):
    answers = await asyncio.gather(*(client.post(FORK) for _ in range(20)))
    ids = {answer.json()["session_id"] for answer in answers}
    of_fork = await client.post(f"/v1/context/{min(ids)}/fork")
    ids.add(of_fork.json()["session_id"])
    await client.delete("/v1/context/ctx_1")

    assert len(ids) == 21
    for session_id in ids:
        assert (await client.get(f"/v1/context/{session_id}")).json()["holder"]["state"] == "sealed"
        assert (await client.delete(f"/v1/context/{session_id}")).status_code == 200
    assert await refs_of(parts) == set()


async def test_a_fork_and_a_delete_of_its_source_at_once_are_one_after_the_other(client, two, parts):
    forked, deleted = await asyncio.gather(client.post(FORK), client.delete("/v1/context/ctx_1"))

    assert deleted.status_code == 200
    assert forked.status_code in {201, 404}
    kept = [forked.json()["session_id"]] if forked.status_code == 201 else []
    assert [found["session_id"] for found in (await client.get("/v1/context")).json()["data"]] == kept
    assert len(await refs_of(parts)) <= len(kept)
