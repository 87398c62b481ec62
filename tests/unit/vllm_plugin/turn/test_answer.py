"""Answers: ids are collected, the client sees its own shape, and the end waits for the turn."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextcache.errors import EngineFailed
from vllm_plugin.turn.answer.chat import JsonAnswer, SseAnswer
from vllm_plugin.turn.prompt.request import CHAT_PATH, COMPLETIONS_PATH, read_turn


def request(path=COMPLETIONS_PATH, **body):
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT_PATH else {"prompt": "x"}
    return read_turn(path, {"model": "m", **prompt, **body}, {})


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_event(text, ids, finish=None):
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": finish}
    return event(id="c", choices=[choice])


USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
STREAM = (
    text_event("a", [1]) + text_event("b", [2], "stop") + event(id="c", choices=[], usage=USAGE) + b"data: [DONE]\n\n"
)
OURS = {"prompt_tokens": 1}
SESSION = {"session_id": "s"}


def parse(stream):
    return [json.loads(part[6:]) for part in stream.split(b"\n\n") if part and part != b"data: [DONE]"]


def test_text_passes_at_once_and_the_end_waits():
    answer = SseAnswer(request(stream=True))

    first = answer.feed(text_event("a", [1]))
    last = answer.feed(text_event("b", [2], "stop"))

    assert [chunk["choices"][0]["text"] for chunk in parse(first)] == ["a"]
    assert last == b""


def test_the_stream_ends_with_usage_session_and_one_done():
    answer = SseAnswer(request(stream=True, stream_options={"include_usage": True}))
    passed = answer.feed(STREAM)
    answer.complete()

    stream = passed + answer.closing(OURS, SESSION)

    assert stream.count(b"[DONE]") == 1
    assert stream.endswith(b"data: [DONE]\n\n")
    events = parse(stream)
    assert events[-1]["choices"] == []
    assert (events[-1]["usage"], events[-1]["session_id"]) == (OURS, "s")
    assert b"token_ids" not in stream


def test_a_client_that_asked_for_no_usage_event_finds_usage_in_the_last_event_with_a_choice():
    answer = SseAnswer(request(stream=True))
    passed = answer.feed(STREAM)
    answer.complete()

    events = parse(passed + answer.closing(OURS, SESSION))

    assert all(chunk["choices"] for chunk in events)
    assert (events[-1]["usage"], events[-1]["session_id"]) == (OURS, "s")


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=8))
def test_events_may_be_cut_anywhere(cuts):
    edges = [0, *sorted(set(cuts)), len(STREAM)]
    answer = SseAnswer(request(stream=True))

    passed = b"".join(answer.feed(STREAM[start:end]) for start, end in itertools.pairwise(edges))
    answer.complete()

    assert [chunk["choices"][0]["text"] for chunk in parse(passed)] == ["a"]
    assert (answer.result.token_ids, answer.result.text, answer.result.cached_tokens) == ([1, 2], "ab", 4)


@pytest.mark.parametrize("end", [len(STREAM) - 14, len(STREAM) - 60, 10])
def test_a_stream_without_its_end_is_no_answer(end):
    answer = SseAnswer(request(stream=True))
    answer.feed(STREAM[:end])

    with pytest.raises(EngineFailed):
        answer.complete()


def test_an_error_event_waits_until_no_other_engine_goes_on():
    answer = SseAnswer(request(stream=True))
    told = event(error={"message": "boom"})

    assert answer.feed(told + text_event("a", [1]) + b"data: [DONE]\n\n") == b""
    assert answer.gave_up
    assert answer.failing(answer.error) == told + b"data: [DONE]\n\n"


def test_token_ids_stay_for_a_client_that_asked_for_them():
    answer = SseAnswer(request(stream=True, return_token_ids=True))

    assert parse(answer.feed(text_event("a", [1])))[0]["choices"][0]["token_ids"] == [1]


def test_an_empty_chat_delta_that_exists_only_for_its_token_ids_is_dropped():
    answer = SseAnswer(request(CHAT_PATH, stream=True))

    passed = answer.feed(event(choices=[{"index": 0, "delta": {}, "token_ids": [7], "finish_reason": None}]))

    assert passed == b""
    assert answer.result.token_ids == [7]


def test_tool_calls_are_put_together_from_their_pieces():
    answer = SseAnswer(request(CHAT_PATH, stream=True))
    pieces = [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"city":'}},
        {"index": 0, "function": {"arguments": '"Paris"}'}},
    ]
    for piece in pieces:
        answer.feed(event(choices=[{"index": 0, "delta": {"tool_calls": [piece]}, "finish_reason": None}]))

    assert answer.result.message() == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
        ],
    }


def test_a_whole_answer_loses_our_fields_and_gains_the_turns():
    answer = JsonAnswer(request())
    choice = {"index": 0, "text": "hi", "token_ids": [1], "prompt_token_ids": [9], "finish_reason": "length"}
    answer.feed(json.dumps({"choices": [choice], "usage": USAGE, "kv_transfer_params": {"a": 1}}).encode())
    answer.complete()

    body = json.loads(answer.closing(OURS, SESSION))

    assert body == {
        "choices": [{"index": 0, "text": "hi", "finish_reason": "length"}],
        "usage": OURS,
        "session_id": "s",
    }


def test_prefill_only_answers_nothing_and_keeps_nothing():
    answer = JsonAnswer(request(max_tokens=0))
    choice = {"index": 0, "text": "h", "token_ids": [1], "finish_reason": "length"}
    answer.feed(json.dumps({"choices": [choice], "usage": USAGE}).encode())
    answer.complete()

    assert json.loads(answer.closing(OURS, SESSION))["choices"][0]["text"] == ""
    assert (answer.result.token_ids, answer.result.text, answer.result.completion_tokens) == ([], "", 0)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices": []}', b"not json"])
def test_a_body_that_is_no_answer_is_an_engine_fault(body):
    answer = JsonAnswer(request())
    answer.feed(body)

    with pytest.raises(EngineFailed):
        answer.complete()
