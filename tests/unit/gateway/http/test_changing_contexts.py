"""PATCH over the whole HTTP front: what it changes, and what it refuses without having stored anything."""

import json

import pytest

from contextcache.names import MAX_METADATA_KEY_CHARS, MAX_METADATA_KEYS, MAX_METADATA_VALUE_CHARS
from tests.kit.gateway_parts import REF, manifest_of

LARGEST = {
    f"{number:02}" + "\U0001f642" * (MAX_METADATA_KEY_CHARS - 2): "\U0001f642" * MAX_METADATA_VALUE_CHARS
    for number in range(MAX_METADATA_KEYS)
}


def error_of(answer):
    body = answer.json()["error"]
    return answer.status_code, body["code"], body["param"]


async def test_a_patch_answers_with_the_context_as_a_read_shows_it(client, parts):
    await parts.directory.add("ctx_1", ttl_s=600)
    parts.clock.advance(s=100)
    changed = {"ttl": 7200, "ttl_policy": "sliding", "metadata": {"kind": "trial"}}
    answer = await client.patch("/v1/context/ctx_1", json=changed)
    read = await client.get("/v1/context/ctx_1")

    assert answer.status_code == 200
    assert answer.json() | {"recent_turns": []} == read.json()
    told = answer.json()
    assert {name: told[name] for name in changed} == changed
    assert told["expires_at"] == parts.clock.now_ms() // 1000 + 7200
    assert told["generation"] == 1


async def test_what_a_patch_does_not_name_stays(client, parts):
    await parts.directory.add("ctx_1")
    await client.patch("/v1/context/ctx_1", json={"metadata": {"a": "b"}})
    before = (await client.get("/v1/context/ctx_1")).json()
    del before["recent_turns"]  # which a change does not tell
    for nothing in ({}, {"ttl_policy": None}, {"metadata": None}):
        answer = await client.patch("/v1/context/ctx_1", json=nothing)

        assert (answer.status_code, answer.json()) == (200, before)
    emptied = await client.patch("/v1/context/ctx_1", json={"metadata": {}})

    assert emptied.json() == before | {"metadata": {}}


async def test_the_largest_metadata_there_may_be_passes_escaped(client, parts):
    """Seen to fail with a body of 64 KiB at most."""
    await parts.directory.add("ctx_1")
    answer = await client.patch("/v1/context/ctx_1", content=json.dumps({"metadata": LARGEST}))

    assert answer.status_code == 200
    assert answer.json()["metadata"] == LARGEST


async def test_kv_at_every_holder_lives_as_long_as_the_context(client, parts):
    await parts.directory.add("ctx_1", holder="pod-a")
    await parts.directory.note_holder("demo", "ctx_1", holder="pod-b")
    for sidecar in parts.sidecars.values():
        sidecar.keep(manifest_of("ctx_1"))
    told = (await client.patch("/v1/context/ctx_1", json={"ttl": 7200})).json()
    ends_ms = {(await sidecar.get_manifest("demo", REF))[0].expires_at_ms for sidecar in parts.sidecars.values()}

    assert {end_ms // 1000 for end_ms in ends_ms} == {told["expires_at"]}


async def test_a_sidecar_that_is_away_fails_no_patch(client, parts):
    await parts.directory.add("ctx_1", holder="pod-a")
    parts.sidecars["pod-a"].down = True
    answer = await client.patch("/v1/context/ctx_1", json={"ttl": 7200})

    assert (answer.status_code, answer.json()["ttl"]) == (200, 7200)
    assert answer.json()["holder"]["state"] == "unreachable"


HINTS = {"actions": [{"action_type": "pin", "payload": {"ttl": 300}}, {"action_type": "demote"}]}
"""The context lives for 600 s."""


async def test_a_hint_is_answered_beside_the_context(client, parts):
    await parts.directory.add("ctx_1", holder="pod-a")
    parts.sidecars["pod-a"].keep(manifest_of("ctx_1"))
    answer = await client.patch("/v1/context/ctx_1", json={"kv_hints": HINTS})
    [granted, placed] = answer.json()["hints"]

    assert granted["outcome"] == "accepted"
    assert granted["until"] <= answer.json()["expires_at"]
    assert placed["outcome"] == "accepted"
    assert placed["bytes"] == answer.json()["bytes"]


@pytest.mark.parametrize(("reason", "is_up", "has_kv"), [("unavailable", False, True), ("not_saved", True, False)])
async def test_a_hint_that_cannot_be_kept_is_denied_and_the_context_is_changed(client, parts, reason, is_up, has_kv):
    await parts.directory.add("ctx_1", holder="pod-a")
    parts.sidecars["pod-a"].down = not is_up
    if has_kv:
        parts.sidecars["pod-a"].keep(manifest_of("ctx_1"))
    answer = await client.patch("/v1/context/ctx_1", json={"kv_hints": HINTS, "metadata": {"a": "b"}})

    assert (answer.status_code, answer.json()["metadata"]) == (200, {"a": "b"})
    assert [(it["outcome"], it["reason"]) for it in answer.json()["hints"]] == [("denied", reason)] * 2


async def test_a_malformed_hint_changes_nothing(client, parts):
    await parts.directory.add("ctx_1")
    answer = await client.patch("/v1/context/ctx_1", json={"kv_hints": {"actions": 3}, "metadata": {"a": "b"}})
    read = await client.get("/v1/context/ctx_1")

    assert error_of(answer) == (400, "invalid_request", "kv_hints")
    assert read.json()["metadata"] == {}


REFUSED = [
    ({"ttl": 59}, (400, "ttl_out_of_range", "ttl")),
    ({"ttl": 7 * 24 * 3600 + 1}, (400, "ttl_out_of_range", "ttl")),
    ({"ttl": 10**30}, (400, "ttl_out_of_range", "ttl")),
    ({"ttl": 0}, (400, "ttl_out_of_range", "ttl")),
    ({"ttl": None}, (400, "invalid_request", "ttl")),
    ({"ttl": True}, (400, "invalid_request", "ttl")),
    ({"ttl": "600"}, (400, "invalid_request", "ttl")),
    ({"ttl": 600.5}, (400, "invalid_request", "ttl")),
    ({"ttl_policy": "forever"}, (400, "invalid_request", "ttl_policy")),
    ({"metadata": {"a": 1}}, (400, "invalid_request", "metadata")),
    ({"metadata": {str(number): "" for number in range(17)}}, (400, "invalid_request", "metadata")),
    ({"metadata": {"": "x"}}, (400, "invalid_request", "metadata")),
    ({"metadata": {"k" * 65: "x"}}, (400, "invalid_request", "metadata")),
    ({"metadata": {"k": "x" * 513}}, (400, "invalid_request", "metadata")),
    ({"metadata": []}, (400, "invalid_request", "metadata")),
    ({"model": "other"}, (400, "invalid_request", "model")),
    ({"ttl": 600, "generation": 1}, (400, "invalid_request", "generation")),
]


@pytest.mark.parametrize(("body", "expected"), REFUSED)
async def test_what_a_create_would_refuse_a_patch_refuses_too(client, parts, body, expected):
    await parts.directory.add("ctx_1")
    before = (await client.get("/v1/context/ctx_1")).json()
    answer = await client.patch("/v1/context/ctx_1", json=body)

    assert error_of(answer) == expected
    assert (await client.get("/v1/context/ctx_1")).json() == before


@pytest.mark.parametrize("body", [b"", b"[]", b'{"ttl": 600,}', b"\xff", b"null", b"[" * 200])
async def test_a_body_that_is_no_json_object_is_refused_in_our_words(client, parts, body):
    await parts.directory.add("ctx_1")
    answer = await client.patch("/v1/context/ctx_1", content=body)

    assert error_of(answer)[:2] == (400, "invalid_request")


async def test_a_body_that_is_larger_than_any_control_call_is_not_read(client, parts):
    await parts.directory.add("ctx_1")

    async def unannounced():
        for _ in range(1100):
            yield b" " * 1024

    declared = await client.patch("/v1/context/ctx_1", content=b" " * (1100 << 10))
    streamed = await client.patch("/v1/context/ctx_1", content=unannounced())

    assert error_of(declared)[:2] == error_of(streamed)[:2] == (413, "body_too_large")
    assert parts.tenants.held_bytes == 0
