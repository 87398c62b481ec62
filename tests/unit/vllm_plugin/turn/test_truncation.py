"""A context that is too long for a turn is cut where the request wants that, and the engine sees what is left."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.fake_vllm import FakeVllm, decode, encode
from tests.kit.turn_bench import Answer, Pod

SYSTEM = {"role": "system", "content": "Be brief."}
LAST, ROLLING = "last_history_tokens", "rolling_tokens"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def by(kind: str, tokens: int) -> dict[str, Any]:
    return {"truncation": {"type": kind, "tokens": tokens}}


def told(answer: Answer) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    return answer.json["usage"]["context"]


@pytest.fixture
def pod(tmp_path):
    return Pod(tmp_path, FakeVllm(max_model_len=120))


async def text_of(pod: Pod, text: str) -> str:
    return (await pod.create(prompt=text)).json["session_id"]


async def chat_of(pod: Pod, *, turns: int = 3, head: bool = True) -> str:
    """Return a chat context of so many turns; each is a message of ten letters and `!`."""
    first, *more = (user(f"message {index} ") for index in range(turns))
    session_id = (await pod.create(messages=[SYSTEM, first] if head else [first])).json["session_id"]
    for message in more:
        told(await pod.chat(session_id, messages=[message]))
    return session_id


def sent_text(pod: Pod) -> str:
    """Return what the engine got, which is what the chat template makes of the messages beside it."""
    body = pod.engine.generations()[-1]
    ids = body["kv_transfer_params"]["prompt_token_ids"]

    assert ids == pod.engine.render(body["messages"], generate=True, open_end=False)
    return decode(ids)


async def test_without_it_what_does_not_fit_is_refused(pod):
    session_id = await text_of(pod, "x" * 100)
    refused = await pod.ask(session_id, prompt="y" * 30)
    resent = await pod.ask(session_id, prompt="x" * 130, **by(ROLLING, 10))

    assert [answer.json["error"]["code"] for answer in (refused, resent)] == ["context_length_exceeded"] * 2


async def test_what_fits_is_not_cut(pod):
    session_id = await text_of(pod, "abc")
    for kind in (LAST, ROLLING):
        answer = await pod.ask(session_id, prompt=" more", context_commit=False, **by(kind, 4))

        assert pod.engine.generations()[-1]["prompt"] == encode("abc! more")
        assert "truncated_tokens" not in told(answer)


async def test_of_text_the_last_tokens_of_the_history_stay(pod):
    session_id = await text_of(pod, "abcdefghij")
    answer = await pod.ask(session_id, prompt=" more", **by(LAST, 4))
    _, segments = await pod.transcript(session_id)

    assert pod.engine.generations()[-1]["prompt"] == encode("hij! more")
    assert told(answer)["truncated_tokens"] == len("abcdefg")
    assert (told(answer)["match"], told(answer)["context_tokens"]) == ("append", 0)
    assert [segment.text for segment in segments] == ["hij! more", "!"]
    assert [segment.token_ids for segment in segments] == [tuple(encode("hij! more")), tuple(encode("!"))]


async def test_the_last_tokens_are_fewer_where_so_many_do_not_fit(pod):
    session_id = await text_of(pod, "x" * 100)
    answer = await pod.ask(session_id, prompt="y" * 30, max_tokens=20, **by(LAST, 90))

    # 120 of the window, 20 for the answer, 30 are new.
    assert pod.engine.generations()[-1]["prompt"] == encode("x" * 69 + "!" + "y" * 30)
    assert told(answer)["truncated_tokens"] == 31


async def test_a_full_window_rolls_on_by_as_many_tokens_as_are_said(pod):
    session_id = await text_of(pod, "x" * 100)
    turns = [told(await pod.ask(session_id, prompt="y" * 9, **by(ROLLING, 40))) for _ in range(4)]

    # 110 and 120 with what is new: the second is too long by one, and forty go. Then there is room again.
    assert [turn.get("truncated_tokens", 0) for turn in turns] == [0, 40, 0, 0]
    assert len(pod.engine.generations()[-1]["prompt"]) == 100


async def test_the_token_that_begins_every_sequence_stays(tmp_path):
    pod = Pod(tmp_path, FakeVllm(max_model_len=120, bos=[2]))
    session_id = await text_of(pod, "abcdefghij")
    await pod.ask(session_id, prompt=" more", **by(LAST, 4))

    assert pod.engine.generations()[-1]["prompt"] == [2, *encode("hij! more")]


@pytest.mark.parametrize("kind", [LAST, ROLLING])
async def test_of_messages_the_system_prompt_and_whole_turns_stay(pod, kind):
    """Seen to fail with the cut in the middle of a turn, and with the system prompt cut."""
    session_id = await chat_of(pod)
    answer = await pod.chat(session_id, messages=[user("new")], max_tokens=8, **by(kind, 1 if kind == ROLLING else 48))

    seen = sent_text(pod)
    assert seen.startswith("<system>Be brief.")
    assert "message 0" not in seen
    assert "<user>message 2 " in seen
    assert seen.index("message 2") < seen.rindex("<assistant>!") < seen.index("<user>new")
    assert seen.removeprefix("<system>Be brief.\x03\n").startswith("<user>")
    assert told(answer)["truncated_tokens"] > 0
    assert told(answer)["context_tokens"] >= len("<system>Be brief.")
    assert len(seen) + 8 <= pod.engine.max_model_len


async def test_a_cut_context_goes_on_from_what_the_engine_saw(pod):
    session_id = await chat_of(pod)
    told(await pod.chat(session_id, messages=[user("new")], **by(LAST, 30)))
    seen, (session, segments) = sent_text(pod), await pod.transcript(session_id)
    again = await pod.chat(session_id, messages=[user("and on")], context_commit=False)

    assert decode([token for segment in segments for token in segment.token_ids]).startswith(seen)
    assert session.num_tokens == sum(len(segment.token_ids) for segment in segments)
    assert session.generation == 4
    assert sent_text(pod).startswith(seen)
    assert told(again)["context_tokens"] == session.num_tokens


async def test_nothing_but_head_and_new_messages_may_be_left(pod):
    session_id = await chat_of(pod, turns=2)
    answer = await pod.chat(session_id, messages=[user("n" * 50)], max_tokens=10, **by(ROLLING, 1000))

    assert sent_text(pod).count("<user>") == 1
    assert sent_text(pod).startswith("<system>Be brief.")
    assert told(answer)["truncated_tokens"]


async def test_what_is_new_is_never_cut(pod):
    session_id = await chat_of(pod, turns=1)
    num_asked = len(pod.engine.generations())
    for more in ({"messages": [user("n" * 110)]}, {"messages": [user("new")], "max_tokens": 119}):
        answer = await pod.chat(session_id, **more, **by(ROLLING, 10))

        assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
    assert len(pod.engine.generations()) == num_asked


async def test_results_of_calls_stay_with_the_calls(pod):
    pod.engine.max_model_len = 10_000
    session_id = await chat_of(pod, turns=2)
    pod.engine.calls = ({"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}},)
    told(await pod.chat(session_id, messages=[user("call")]))
    result = {"role": "tool", "tool_call_id": "call_1", "content": "noon"}
    told(await pod.chat(session_id, messages=[result], **by(LAST, 1)))

    messages = pod.engine.generations()[-1]["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[1] == user("call")


async def test_a_turn_that_commits_nothing_leaves_all_there(pod):
    session_id = await text_of(pod, "abcdefghij")
    told(await pod.ask(session_id, prompt=" more", context_commit=False, **by(LAST, 4)))
    _, segments = await pod.transcript(session_id)

    assert [segment.text for segment in segments] == ["abcdefghij", "!"]


async def test_a_create_has_nothing_to_cut(pod):
    refused = await pod.create(prompt="abc", **by(LAST, 4))
    body = {"model": "m", "session_id": "mine", "prompt": "abc", "context_create": "if_missing", **by(LAST, 4)}
    made = await pod.post("/v1/completions", body, pod.identity("mine"))

    assert (refused.status, refused.json["error"]["param"]) == (400, "truncation")
    assert told(made)["committed"]


async def test_a_context_of_text_and_messages_is_not_cut(pod):
    session_id = await text_of(pod, "abcdefghij")
    answer = await pod.chat(session_id, messages=[user("new")], **by(LAST, 4))

    assert (answer.status, answer.json["error"]["param"]) == (400, "truncation")
