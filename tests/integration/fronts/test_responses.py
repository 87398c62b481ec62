"""Contexts on `/v1/responses` from the client to the committed transcript, through either front."""

from __future__ import annotations

import json

import pytest

from tests.kit.fake_vllm import FakeVllm
from tests.kit.fronts import code_of, envoy_too, only_envoy
from tests.kit.gateway_parts import OTHER_KEY
from tests.kit.turn_pod import MODEL, running_turn_pod
from tests.kit.until import until


@pytest.fixture
async def pod(tmp_path, manager):
    async with running_turn_pod(tmp_path, manager_port=manager.port, engine=FakeVllm()) as pod:
        yield pod


def post(front, given="Hi", *, headers=None, **body):
    return front.post("/v1/responses", {"model": MODEL, "input": given, **body}, headers=headers)


async def told(front, given="Hi", **body):
    async with post(front, given, **body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def test_a_stored_response_goes_on_by_its_id_and_an_older_one_branches(front, pod):
    first = await told(front, "One", store=True)
    second = await told(front, "Two", previous_response_id=first["id"])
    branch = await told(front, "Other", previous_response_id=first["id"])
    after = [await told(front, "Three", previous_response_id=one["id"]) for one in (second, branch)]

    mine = first["session_id"]
    assert [first["id"], second["id"], after[0]["id"]] == [f"resp_{number}_{mine}" for number in (1, 2, 3)]
    other = branch["session_id"]
    assert other != mine
    assert [branch["id"], after[1]["id"]] == [f"resp_{number}_{other}" for number in (2, 3)]
    prompts = [
        "".join(map(chr, body["kv_transfer_params"]["prompt_token_ids"])) for body in pod.engine.generations()[-2:]
    ]
    assert ["One" in prompt and "Three" in prompt for prompt in prompts] == [True, True]
    assert ["Two" in prompt for prompt in prompts] == [True, False]
    assert ["Other" in prompt for prompt in prompts] == [False, True]


REFUSED = {
    "what is no item": (400, {"given": [{"type": "nothing"}]}),
    "another model": (400, {"model": "other"}),
    "a window that is too short": (400, {"given": "x" * 11_000}),
    "a failing engine": (502, {}),
    "another generation": (409, {"headers": {"If-Match": '"7"'}}),
}


@envoy_too
@pytest.mark.parametrize("what", REFUSED)
async def test_refused_turns_on_an_older_response_leave_nothing_behind(front, pod, manager, what):
    """Seen to fail: each left a context that lasted as long as the one it was a branch of."""
    status, said = REFUSED[what]
    first = await told(front, "One", store=True)
    await told(front, "Two", previous_response_id=first["id"])
    if what == "a failing engine":
        pod.engine.answer = lambda ids: str(1 // 0)
    for number in range(3):
        how = {"given": f"Other {number}", **said}
        async with post(front, previous_response_id=first["id"], **how) as answer:
            assert answer.status == status, await answer.text()

    async with front.get("/v1/context") as answer:
        assert [one["session_id"] for one in (await answer.json())["data"]] == [first["session_id"]]
    await until(manager.manager.count_sessions, is_so=lambda number: number == 1, what="no branch is left")


@envoy_too
async def test_a_conversation_is_made_by_its_first_response_and_an_answer_is_given_again(front, pod):
    """Seen to fail: the second of two equal requests made a branch."""
    first = await told(front, conversation="talk")
    again = [
        await told(front, "And", previous_response_id=first["id"], headers={"Idempotency-Key": "k"}) for _ in range(2)
    ]
    stored = [await told(front, store=True, headers={"Idempotency-Key": "new"}) for _ in range(2)]

    assert (first["conversation"], first["session_id"]) == ({"id": "talk"}, "talk")
    assert again[0] == again[1]
    assert stored[0] == stored[1]
    assert len(pod.engine.generations()) == 3
    async with front.get("/v1/context/talk") as answer:
        assert (await answer.json())["generation"] == 2


@envoy_too
async def test_a_stream_ends_with_the_commit(front):
    async with post(front, conversation="talk", stream=True) as answer:
        raw = (await answer.content.read()).decode()
        assert answer.headers["x-session-id"] == "talk"

    last = [frame.split("\n") for frame in raw.split("\n\n") if frame][-1]
    assert last[0] == "event: response.completed"
    response = json.loads(last[1].removeprefix("data: "))["response"]
    assert (response["id"], response["usage"]["context"]["committed"]) == ("resp_1_talk", True)


@envoy_too
async def test_another_tenant_finds_nothing_of_it(front, pod):
    first = await told(front, store=True)
    before = len(pod.engine.generations())
    headers = {"authorization": f"Bearer {OTHER_KEY}"}
    async with post(front, previous_response_id=first["id"], headers=headers) as answer:
        assert await code_of(answer) == (400, "previous_response_not_found")

    assert len(pod.engine.generations()) == before


@envoy_too
async def test_a_response_without_a_context_reaches_the_engine_as_it_came(front, pod):
    await told(front, store=False)

    assert ("/v1/responses", {"model": MODEL, "input": "Hi", "store": False}) in pod.engine.requests


@only_envoy
async def test_with_the_gateway_gone_a_response_that_goes_on_reaches_no_engine(front, pod):
    await front.end_gateway()
    before = len(pod.engine.generations())
    for said in ({"conversation": "talk"}, {"previous_response_id": "resp_1_talk"}, {"store": True}):
        async with post(front, **said) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "gateway_unavailable")

    assert len(pod.engine.generations()) == before
