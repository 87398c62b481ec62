"""The reader of answers against bytes of any kind: typed errors only, bounded memory, nothing altered that must not be.

Seen failing: with the splitter knowing LF only, events that end in CRLF never end; with exceptions of the JSON's shape
let through, `data: []` was an AttributeError; with a tool call's index unbounded, one event took all memory;
with half a surrogate pair, the event could not be written; with `abort` taken for an end, half an answer was complete;
with `data: …` as one event whatever line ends it had, a chunk with two events or CRLF was read as one; with msgspec's
reading alone, NaN and half a surrogate pair were errors; with the prompt's ids left in a choice, the client saw them.
"""

import itertools
import json
import re

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


def split_at_once(stream):
    """Return the events of a whole stream: their bytes, data and other lines."""
    events, start = [], 0
    for end in re.finditer(rb"\r?\n\r?\n", stream):
        lines = [line.removesuffix(b"\r") for line in stream[start : end.start()].split(b"\n")]
        data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
        others = tuple(line for line in lines if not line.startswith(b"data:"))
        events.append((stream[start : end.end()], b"\n".join(data) if data else None, others if data else ()))
        start = end.end()
    return events


lines = st.sampled_from([b"data: {}", b"data:1", b"data: ", b"data: x\ry", b"event: e", b": c", b"", b"\r", b" "])
line_ends = st.sampled_from([b"\n", b"\n", b"\r\n", b"\r\r\n", b"\n\n"])


@given(parts=st.lists(st.tuples(lines, line_ends).map(b"".join), max_size=12), places=st.none() | places)
@example(parts=[b"data: {}\r\r\n", b"\n"], places=[])
@example(parts=[b"event: e\n", b"data: {}\n\n"], places=None)
def test_events_are_the_same_whatever_the_chunks(parts, places):
    stream = b"".join(parts)
    splitter = EventSplitter()

    chunks = parts if places is None else cut(stream, places)
    found = [event for chunk in chunks for event in splitter.feed(chunk)]

    assert [(event.raw, event.data, event.others) for event in found] == split_at_once(stream)


any_texts = st.text(max_size=8) | st.text(st.sampled_from('a"\\\n\x7f\u00e9\u4e16\ud83d\ude00\U0001f600'), max_size=8)
"""Halves of surrogate pairs too."""
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_texts, inner, max_size=3),
    max_leaves=8,
)
kept_fields = st.dictionaries(st.text(max_size=6).map("x_{}".format), values, max_size=2)
logprobs = st.none() | st.fixed_dictionaries({"content": st.lists(kept_fields, max_size=2)})
tool_calls = st.lists(
    st.fixed_dictionaries(
        {"index": st.integers(0, 3)},
        optional={
            "id": st.text(max_size=4),
            "function": st.fixed_dictionaries({}, optional={"name": st.text(max_size=4), "arguments": any_texts}),
        },
    ),
    max_size=2,
)
deltas = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("assistant"),
        "content": st.none() | any_texts,
        "reasoning": any_texts,
        "tool_calls": tool_calls,
    },
)
chunks = st.tuples(
    st.fixed_dictionaries({"text": any_texts}) | st.fixed_dictionaries({"delta": deltas}),
    st.fixed_dictionaries(
        {},
        optional={
            "logprobs": logprobs,
            "prompt_token_ids": st.none() | st.lists(st.integers(0, 9)),
            "token_ids": st.none() | st.lists(st.integers(0, (1 << 63) - 1), max_size=3),
            "finish_reason": st.none(),
            "stop_reason": st.none(),
        },
    ),
    st.fixed_dictionaries({}, optional={"usage": st.none() | st.just(USAGE), "prompt_token_ids": st.just([1])}),
    kept_fields,
    st.booleans(),
)


def as_told(chunk, *, wants_ids, tells_usage, is_chat):
    """Return what a client is told of an engine's event before the last ones; None: nothing."""
    part, fields, more, others, _ = chunk
    hidden = set() if wants_ids else {"token_ids", "prompt_token_ids"}
    hidden |= set() if tells_usage else {"usage"}
    choice = {key: value for key, value in (part | fields).items() if key not in hidden}
    if is_chat and not wants_ids and not any(part.get("delta", {}).values()) and not fields.get("logprobs"):
        return None
    return {key: value for key, value in (more | others).items() if key not in hidden} | {"choices": [choice]}


def in_order(told):
    """Return JSON as text, by which -0.0 and 0, or 1 and True, differ."""
    return json.dumps(told, sort_keys=True)


@given(
    pieces=st.lists(chunks, max_size=5),
    places=places,
    wants_ids=st.booleans(),
    tells_usage=st.booleans(),
    path=st.sampled_from([COMPLETIONS_PATH, CHAT_PATH]),
)
def test_a_client_is_told_the_engine_s_events_without_the_fields_that_it_did_not_ask_for(
    pieces, places, wants_ids, tells_usage, path
):
    stream = b""
    for part, fields, more, others, escaped in pieces:
        told = json.dumps(more | {"choices": [part | fields]} | others, ensure_ascii=escaped, separators=(",", ":"))
        stream += b"data: " + told.encode("utf-8", "surrogatepass") + b"\n\n"
    options = {"stream_options": {"include_usage": True}} if tells_usage else {}
    answer = SseAnswer(request(path, return_token_ids=wants_ids, **options))

    passed = b"".join(answer.feed(chunk) for chunk in cut(stream, places))

    expected = [
        as_told(piece, wants_ids=wants_ids, tells_usage=tells_usage, is_chat=path == CHAT_PATH) for piece in pieces
    ]
    told = [json.loads(event.data) for event in EventSplitter().feed(passed)]
    assert list(map(in_order, told)) == [in_order(event) for event in expected if event is not None]
    texts = (part.get("text") or part.get("delta", {}).get("content") or "" for part, *_ in pieces)
    assert in_order(answer.result.text) == in_order("".join(texts))
    assert answer.result.token_ids == [token for _, fields, *_ in pieces for token in fields.get("token_ids") or ()]
    arguments = dict.fromkeys(range(4), "")
    for call in itertools.chain.from_iterable(part.get("delta", {}).get("tool_calls", ()) for part, *_ in pieces):
        arguments[call["index"]] += call.get("function", {}).get("arguments", "")
    found = [call["function"]["arguments"] for call in answer.result.tool_calls]
    assert in_order(found) == in_order([arguments[at] for at in range(len(found))])


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


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e400"])
def test_numbers_that_only_some_readers_take_break_no_answer(number):
    answer = SseAnswer(request())

    answer.feed(b'data: {"choices":[{"text":"a","token_ids":[1],"logprobs":{"token_logprobs":[%b]}}]}\n\n' % number)

    assert answer.result.text == "a"


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
        before = [{"choices": [choice | {"finish_reason": None}]}] if ids else []
        events = [*before, {"choices": [choice | {"token_ids": []}]}, {"choices": [], "usage": USAGE}]
        body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    else:
        answer = JsonAnswer(request(stream=False))
        body = json.dumps({"choices": [choice], "usage": USAGE}).encode()
    assert bool(answer.feed(body)) == bool(stream and ids)

    with pytest.raises(error):
        answer.complete()
