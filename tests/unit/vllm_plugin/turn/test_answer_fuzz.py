"""The reader of answers against bytes of any kind: typed errors only, bounded memory, nothing altered that must not be.

Seen failing: with the splitter knowing LF only, events that end in CRLF never end; with exceptions of the JSON's shape
let through, `data: []` was an AttributeError; with a tool call's index unbounded, one event took all memory;
with half a surrogate pair, the event could not be written; with `abort` taken for an end, half an answer was complete.
"""

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contextcache.errors import EngineFailed, NoReadyEndpoint
from vllm_plugin.turn.answer.chat import JsonAnswer, SseAnswer
from vllm_plugin.turn.answer.events import EVENT_BYTES_MAX, EventSplitter
from vllm_plugin.turn.prompt.request import CHAT_PATH, COMPLETIONS_PATH, read_turn

TYPED = (EngineFailed, NoReadyEndpoint)
USAGE = {"prompt_tokens": 5, "completion_tokens": 2}


def request(path=COMPLETIONS_PATH, **body):
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT_PATH else {"prompt": "x"}
    return read_turn(path, {"model": "m", **prompt, "stream": True, **body}, {})


def cut(stream, places):
    """Cut a stream at these shares of its length."""
    edges = sorted({0, len(stream), *(round(place * len(stream)) for place in places)})
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


places = st.lists(st.floats(0, 1), max_size=12)
ends = st.sampled_from([b"\n\n", b"\r\n\r\n"])
comments = st.binary(max_size=12).map(lambda text: b": " + text.replace(b"\r", b"").replace(b"\n", b""))
texts = st.text(max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["choices", "usage", "error", "delta", "text", "token_ids", "finish_reason", "tool_calls", "index", "content"]
shaped = st.recursive(
    json_values,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)


def token_event(text, token, finish=None):
    return {"choices": [{"text": text, "token_ids": [token], "finish_reason": finish}]}


@given(
    pieces=st.lists(st.tuples(texts, ends, st.none() | comments), max_size=6),
    end=ends,
    places=places,
    spaced=st.booleans(),
)
def test_whatever_the_chunks_and_line_ends_text_and_comments_pass_and_the_end_waits(pieces, end, places, spaced):
    prefix = b"data: " if spaced else b"data:"
    stream = b""
    for number, (text, event_end, comment) in enumerate(pieces):
        stream += b"" if comment is None else comment + event_end
        stream += prefix + json.dumps(token_event(text, number)).encode() + event_end
    last = [token_event("!", 99, "stop"), {"choices": [], "usage": USAGE}]
    stream += b"".join(prefix + json.dumps(event).encode() + end for event in last) + prefix + b"[DONE]" + end
    answer = SseAnswer(request())

    passed = b"".join(answer.feed(chunk) for chunk in cut(stream, places))
    answer.complete()
    whole = passed + answer.closing({"prompt_tokens": 1}, {"session_id": "s"})

    found = list(EventSplitter().feed(whole))
    events = [json.loads(event.data) for event in found if event.data not in (None, b"[DONE]")]
    assert "".join(event["choices"][0]["text"] for event in events) == "".join(piece[0] for piece in pieces) + "!"
    assert answer.result.text == "".join(piece[0] for piece in pieces) + "!"
    assert answer.result.token_ids == [*range(len(pieces)), 99]
    kept = [event.raw for event in found if event.data is None]
    assert kept == [comment + event_end for _, event_end, comment in pieces if comment is not None]
    assert [event.data for event in found].count(b"[DONE]") == 1
    assert found[-1].data == b"[DONE]"


@given(stream=st.binary(max_size=400), places=places)
@example(stream=b"data: []\n\n", places=[])
@example(stream=b'data: {"choices":[{"delta":{"tool_calls":[{"index":1000000000}]}}]}\n\n', places=[])
@example(stream=b'data: {"choices":[{"token_ids":"abc"}]}\n\n', places=[])
@example(stream=b'data: {"choices":[{"text":"\\ud800"}]}\n\n', places=[])
@example(stream=b"data: " + b"[" * 100_000 + b"\n\n", places=[])
@example(stream=b"data: \xff\xfe\n\n", places=[])
def test_any_bytes_are_events_or_a_typed_error(stream, places):
    for path in (COMPLETIONS_PATH, CHAT_PATH):
        answer = SseAnswer(request(path))
        try:
            for chunk in cut(stream, places):
                answer.feed(chunk)
            answer.complete()
        except TYPED:
            continue


@given(values=st.lists(shaped, max_size=5), prefill=st.booleans(), wants_ids=st.booleans())
def test_any_json_in_an_event_is_read_or_a_typed_error(values, prefill, wants_ids):
    whole = [*values, token_event("", 1, "stop"), {"choices": [], "usage": USAGE}]
    stream = b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in whole) + b"data: [DONE]\n\n"
    for path in (COMPLETIONS_PATH, CHAT_PATH):
        answer = SseAnswer(request(path, return_token_ids=wants_ids, **({"max_tokens": 0} if prefill else {})))
        try:
            answer.feed(stream)
            answer.complete()
            if not answer.result.error:
                answer.closing({}, {})
        except TYPED:
            continue


@given(body=st.binary(max_size=200) | shaped.map(lambda value: json.dumps(value).encode()))
@example(body=b"{" * 100_000)
def test_any_whole_answer_is_read_or_a_typed_error(body):
    for path in (COMPLETIONS_PATH, CHAT_PATH):
        answer = JsonAnswer(request(path, stream=False))
        try:
            answer.feed(body)
            answer.complete()
            answer.closing({}, {})
        except TYPED:
            continue


def test_a_line_without_an_end_is_given_up_at_its_bound_and_costs_no_search_of_what_was_searched():
    answer = SseAnswer(request())
    chunk = b"x" * 64
    fed = 0

    def feed_on():
        nonlocal fed
        while fed <= 2 * EVENT_BYTES_MAX:
            answer.feed(chunk)
            fed += len(chunk)

    with pytest.raises(EngineFailed, match="without an end"):
        feed_on()

    assert EVENT_BYTES_MAX < fed + len(chunk) <= EVENT_BYTES_MAX + 2 * len(chunk)


def test_half_a_surrogate_pair_passes_escaped_as_it_came():
    answer = SseAnswer(request())

    passed = answer.feed(b'data: {"choices":[{"text":"\\ud83d","token_ids":[1]}]}\n\n')

    assert b"\\ud83d" in passed


@pytest.mark.parametrize("after", [b"data: [DONE]\n\n", b": bye\n\n"])
def test_a_second_done_and_late_comments_change_nothing(after):
    answer = SseAnswer(request())
    events = [token_event("a", 1, "stop"), {"choices": [], "usage": USAGE}]
    stream = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"

    answer.feed(stream + after)
    answer.complete()

    assert answer.closing({}, {}).count(b"[DONE]") == 1


def test_what_comes_after_the_end_is_an_engine_that_failed():
    answer = SseAnswer(request())

    with pytest.raises(EngineFailed):
        answer.feed(b"data: [DONE]\n\n" + b"data: " + json.dumps(token_event("a", 1)).encode() + b"\n\n")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("ids", "error"), [([], NoReadyEndpoint), ([1, 2], EngineFailed)])
def test_an_answer_the_engine_gave_up_is_not_complete(stream, ids, error):
    choice = {"text": "ab", "token_ids": ids, "finish_reason": "abort"}
    if stream:
        answer = SseAnswer(request())
        events = [{"choices": [choice]}, {"choices": [], "usage": USAGE}]
        body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    else:
        answer = JsonAnswer(request(stream=False))
        body = json.dumps({"choices": [choice], "usage": USAGE}).encode()
    assert answer.feed(body) == b""

    with pytest.raises(error):
        answer.complete()
