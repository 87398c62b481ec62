"""Answers that every call of one context has in common: absent, foreign, expired, busy, and with the store away."""

import pytest

from contextcache.model import NewSession

CALLS = {
    "read": ("GET", "", None),
    "delete": ("DELETE", "", None),
    "patch": ("PATCH", "", {"ttl": 600}),
    "fork": ("POST", "/fork", {}),
    "rewind": ("POST", "/rewind", {"generation": 1}),
}
each_call = pytest.mark.parametrize("call", CALLS)


async def ask(client, call, name="ctx_1", *, headers=None):
    method, end, body = CALLS[call]
    return await client.request(method, f"/v1/context/{name}{end}", json=body, headers=headers)


def told(answer):
    return answer.status_code, answer.json()["error"]["code"]


@each_call
async def test_unknown_foreign_deleted_and_impossible_ids_answer_byte_for_byte_alike(client, parts, other, call):
    await parts.directory.add("ctx_1")
    await parts.directory.add("ctx_2")
    await client.delete("/v1/context/ctx_2")
    asked = [("ctx_1", other), ("ctx_2", None), ("ctx_nobody", None), ("a:b", None), ("x" * 300, None)]
    answers = [await ask(client, call, name, headers=who) for name, who in asked]

    assert {answer.content for answer in answers} == {(await ask(client, "read", "ctx_nobody")).content}
    assert {told(answer) for answer in answers} == {(404, "context_not_found")}
    assert len({tuple(sorted(set(answer.headers) - {"x-request-id"})) for answer in answers}) == 1


@each_call
async def test_an_expired_context_is_gone(client, parts, call):
    await parts.directory.add("ctx_1", ttl_s=600)
    parts.clock.advance(s=601)

    assert told(await ask(client, call)) == (410, "context_expired")


@pytest.mark.parametrize("call", ["patch", "fork", "rewind"])
async def test_a_context_that_is_being_created_is_busy(client, parts, call):
    await parts.directory.reserve(NewSession("demo", "ctx_1", "stub-model"), lease_id="create", lease_ttl_ms=10_000)
    answer = await ask(client, call)

    assert told(answer) == (409, "context_busy")
    assert answer.headers["retry-after"] == "10"


@each_call
async def test_the_store_down_is_typed_and_says_when_to_come_back(client, parts, call):
    await parts.directory.add("ctx_1")
    parts.directory.down = True
    for answer in (await ask(client, call), await client.get("/v1/context")):
        assert told(answer) == (503, "store_unavailable")
        assert answer.headers["retry-after"] == "1"
