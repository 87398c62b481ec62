"""Requests that users of similar systems reported as broken (tests/README.md): they mean what they mean to vLLM."""

import pytest

ENGINES_OWN = [
    {"prompt_logprobs": 1, "logprobs": 2},
    {"stop": ["\n\n", "END"], "stop_token_ids": [5], "include_stop_str_in_output": True},
    {"ignore_eos": True, "min_tokens": 3, "skip_special_tokens": False, "add_special_tokens": False},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"regex": "[0-9]+"}, "seed": 7, "logit_bias": {"5": -100}},
]


@pytest.mark.parametrize("fields", ENGINES_OWN, ids="+".join)
async def test_fields_of_the_engine_reach_it_as_they_came_in_creates_and_turns(pod, fields):
    create = await pod.create(prompt="Hello", session_id="mine", **fields)
    turn = await pod.ask("mine", prompt=" more", **fields)
    chat = await pod.chat("mine", messages=[{"role": "user", "content": "x"}], **fields)

    assert [answer.status for answer in (create, turn, chat)] == [200] * 3
    sent = pod.engine.generations()
    assert [{name: body.get(name) for name in fields} for body in sent] == [fields] * 3


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_a_stream_says_its_usage_once_whatever_its_options_are(pod, options):
    await pod.create(prompt="Hello", session_id="mine")
    answer = await pod.ask("mine", prompt=" more", stream=True, stream_options=options)

    assert answer.status == 200
    assert len([event for event in answer.events if event.get("usage")]) == 1
    assert answer.body.count(b"[DONE]") == 1


@pytest.mark.parametrize("options", ["yes", 1, [True]])
async def test_stream_options_that_are_no_object_are_refused_by_name(pod, options):
    answer = await pod.create(prompt="Hello", stream=True, stream_options=options)

    assert (answer.status, answer.json["error"]["param"]) == (400, "stream_options")
