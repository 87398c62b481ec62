"""Messages mean something, whatever their shape and size."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from contextcache.errors import HistoryAmbiguous
from vllm_plugin.turn.prompt.matching import check_append, divergence, is_resend
from vllm_plugin.turn.prompt.meaning import meanings, rendering

ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = ODD | st.sampled_from(["", "{", "[" * 100_000, "1" * 5000, "1e999", "NaN", '"\\ud800"', '{"a":1,"a":2}'])
FUNCTION = ODD | st.fixed_dictionaries({}, optional={"name": ODD, "arguments": ARGUMENTS})
CALL = ODD | st.fixed_dictionaries({}, optional={"id": ODD, "type": ODD, "function": FUNCTION})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", ""])},
    optional={
        "content": ODD | st.lists(st.fixed_dictionaries({}, optional={"type": st.just("text"), "text": ODD})),
        "tool_calls": ODD | st.lists(CALL, max_size=3),
        **dict.fromkeys(("tool_call_id", "name", "task", "tools", "reasoning", "reasoning_content", "more"), ODD),
    },
)


def called(arguments: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "write", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@settings(max_examples=60, deadline=None)
@given(st.lists(MESSAGE, max_size=4), st.lists(MESSAGE, min_size=1, max_size=4))
def test_messages_of_any_shape_are_read_or_refused(stored, sent):
    said, known = meanings(sent), meanings(stored)

    assert said == meanings(json.loads(json.dumps(sent)))
    assert [rendering(message) for message in sent] == [*map(rendering, json.loads(json.dumps(sent)))]
    try:
        is_resend(known, said, is_chat=bool(stored))
        check_append(said)
    except HistoryAmbiguous:
        pass
    divergence(known, said)


def test_arguments_are_compared_as_values():
    for one, other in (("", None), ("{}", ""), ('{"a":1,"b":2.0}', '{"b": 2, "a": 1}'), ('{"a":1}', {"a": 1})):
        assert meanings([called(one)]) == meanings([called(other)])
    for one, other in (("1e999", "null"), ("[1]", "[2]"), ("{", "")):
        assert meanings([called(one)]) != meanings([called(other)])


def test_arguments_that_are_long_together_are_compared_as_they_are_written():
    """Reading 30 MB of them took 7 to 34 s, in which the API server did nothing else."""
    long, spaced = (json.dumps({"text": ["x"] * 40_000}, separators=(",", colon)) for colon in (":", ": "))

    assert meanings([called(long)]) == meanings([called(spaced)])
    assert meanings([called(long)] * 3) != meanings([called(spaced)] * 3)
    assert meanings([called(long)] * 3) == meanings([called(long)] * 3)
