"""Our translation of `/v1/messages` beside vLLM's own converters: the same chat request, message and events.

Differences, with the reason:

| vLLM 0.32 | ours | reason |
| --- | --- | --- |
| images become parts of the chat | 400 | a context stores token ids, which do not say which image was computed |
| `tool_addition`, `tool_removal`, `tool_reference` change the tools | 400 | a turn's tools are those of its request |
| blocks that lack fields, or are in a message of the wrong role, are guessed at | 400 | Anthropic refuses them |
| `tools: []` reaches the engine | no tools | vLLM's chat route refuses an empty list |
| numbers and booleans in strings are read | 400 | Anthropic refuses them |
| an empty `messages` beside a `system` is a chat | 400 | Anthropic refuses it |
| a `system` string keeps Claude Code's billing header | it goes, as from blocks | its hash changes every prompt |
| later system messages: tried in Jinja | tried in the engine | the engine has more functions for templates |
| a whole message without `stop_sequence` | `null` | Anthropic has it always |
| a thinking block begins without a `signature` | empty | Anthropic has it always |
| `message_start` has cached tokens if the chunk has | always, 0 if unknown | Anthropic has them always |
| a call's arguments that come while another block is open vanish | 502 | the client would run a call that nobody made |
| `usage` is the engine's | the turn's, with `context` | each endpoint counts as its own API does (ADR 0091) |
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from contextcache.errors import EngineFailed, InvalidRequest
from tests.kit.vllm_words import anthropic_serving
from vllm_plugin.turn.answer.anthropic import Anthropic
from vllm_plugin.turn.prompt.message_input import Template, chat_of
from vllm_plugin.turn.prompt.request import CHAT_PATH, read_turn

SERVING = anthropic_serving()
TYPES = sys.modules[type(SERVING).__module__]
IN_PLACE = Template(merges_system=False, no_thinking="none")
MERGED = Template(merges_system=True, no_thinking="low")
SCHEMA = {"type": "object", "properties": {"depth": {"type": ["integer", "null"], "default": None}}}
TOOL = {"name": "depth", "input_schema": SCHEMA}
USED = {"type": "tool_use", "id": "c1", "name": "depth", "input": {"unit": None, "lake": "Ühl"}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
BILLED = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}


def text(*said: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": one, "cache_control": {"type": "ephemeral"}} for one in said]


def result(content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content, "is_error": False}


def talk(*said: Any) -> dict[str, Any]:
    """Return a body whose messages are the user's and the assistant's in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": content} for at, content in enumerate(said)]}


REQUESTS = [
    {},
    {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}},
    {"output_config": {"effort": "max"}, "thinking": {"type": "disabled"}},
    {"output_config": {"effort": None, "format": {"type": "json_schema"}}},
    {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "depth"}},
    {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    {"tools": [TOOL], "tool_choice": {"type": "none"}},
    {"tools": [TOOL | {"type": "custom", "description": "tells it", "strict": True, "defer_loading": True}]},
    {"tools": [{"name": "depth", "input_schema": {"properties": {}}}], "tool_choice": {"type": "auto"}},
    {"tools": []},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025},
    {"thinking": {"type": "adaptive", "display": "omitted"}},
    {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"date": None}},
    {"stop_sequences": ["end"], "temperature": 0, "top_p": 0.5, "top_k": 3, "vllm_xargs": {"a": 1}},
    {"watermarking": True, "metadata": {"user_id": "u"}, "service_tier": "auto", "stop_sequences": None},
    {"stream": True, "system": text("a", "b")},
    {"stream": False, "system": "Be brief"},
    {"system": [BILLED, *text("Be brief", "")]},
    talk("Hi", [THOUGHT, {"type": "redacted_thinking", "data": "x"}, *text("!"), USED], [result("wet"), *text("And?")]),
    talk("Hi", [USED, USED | {"id": "c2", "input": {}}], [result(text("251 m", "deep")), result(None)]),
    talk("Hi", [{"type": "thinking", "thinking": ""}], text("a", "", "b"), "Yes", text("")),
    talk("Hi", [], "And"),
    {
        "system": "Be brief",
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "system", "content": [BILLED, *text("It rains", "now")]},
            {"role": "system", "content": BILLED["text"]},
            {"role": "assistant", "content": "!"},
            {"role": "system", "content": "It snows"},
            {"role": "user", "content": "And"},
        ],
    },
]


@pytest.mark.parametrize("template", [IN_PLACE, MERGED])
@pytest.mark.parametrize("more", REQUESTS)
def test_the_chat_request_is_the_one_that_vllm_makes(more, template):
    """Seen to fail: a JSON schema was named as the field is, not as it is spelled."""
    body = {"model": "m", "max_tokens": 50, **talk("Hi"), **more}

    ours = TYPES.ChatCompletionRequest.model_validate(json.loads(json.dumps(chat_of(body, template))))
    its = SERVING.to_chat_completion_request(
        TYPES.AnthropicMessagesRequest.model_validate(body),
        merge_inline_system=template.merges_system,
        disabled_thinking_effort=template.no_thinking,
    )

    assert told(ours) == told(its)


def told(request: Any) -> dict[str, Any]:
    # Where no tools are, no choice is made among them, whatever the field says.
    said = {key: value for key, value in request.model_dump(mode="json").items() if key != "request_id"}
    return said | {"stop": said["stop"] or []} | ({} if said["tools"] else {"tools": None, "tool_choice": None})


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"max_tokens": "5"}, "max_tokens", "must be `int`, got `str`"),
        ({"max_tokens": 0}, "max_tokens", "must be `int` >= 1"),
        ({"max_tokens": None}, "max_tokens", "must be `int`"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": ["Hi"]}, "messages[0]", "must be `object`, got `str`"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role", "Invalid value 'judge'"),
        (talk([{"type": "image", "source": {}}]), "messages[0].content[0]", "a context can store only text"),
        (talk([{"type": "document", "source": {}}]), "messages[0].content[0]", "a context can store only text"),
        (talk([result([{"type": "image"}])]), "messages[0].content[0].content[0]", "a context can store only text"),
        (talk([USED]), "messages[0].content[0]", "Invalid value 'tool_use'"),
        (talk("Hi", [result("wet")]), "messages[1].content[0]", "Invalid value 'tool_result'"),
        (talk("Hi", [{"type": "tool_use", "id": "c1", "name": "f"}]), "messages[1].content[0].input", "is required"),
        (talk([{"type": "text"}]), "messages[0].content[0].text", "is required"),
        (talk([{"text": "x"}]), "messages[0].content[0].type", "is required"),
        ({"system": [{"type": "image"}]}, "system[0]", "a context can store only text"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "is required"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "is required"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "Invalid enum value 'some'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens", "at least 1024"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4000}}, "thinking.budget_tokens", "less than max_tokens"),
        ({"output_config": {"effort": "vast"}}, "output_config.effort", "Invalid enum value 'vast'"),
        ({"stop_sequences": "end"}, "stop_sequences", "must be `array | null`, got `str`"),
        ({"messages": [{"role": "x" * 100_000, "content": ""}]}, "messages[0].role", "Invalid value 'xxx"),
    ],
)
def test_a_mistake_is_named_with_its_field(more, param, said):
    with pytest.raises(InvalidRequest) as refused:
        chat_of({"model": "m", "max_tokens": 4000, **talk("Hi"), **more}, IN_PLACE)

    assert refused.value.param == param
    assert said in refused.value.message
    assert len(refused.value.message) < 400


def test_a_body_without_a_field_that_must_be_there_is_refused_by_its_name():
    with pytest.raises(InvalidRequest) as refused:
        chat_of({"model": "m", **talk("Hi")}, IN_PLACE)

    assert (refused.value.param, refused.value.message) == ("max_tokens", "`max_tokens`: is required")


USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
OURS = {**USAGE, "prompt_tokens_details": {"cached_tokens": 4}, "context": {"committed": True}}


def call(arguments: str, *, index: int = 0, **more: Any) -> dict[str, Any]:
    name = {"name": f"f{index}"} if "id" in more else {}
    return {"index": index, "function": {"arguments": arguments, **name}, **more}


def answering(chat: dict[str, Any]) -> Any:
    request = read_turn(CHAT_PATH, chat_of({"model": "m", "max_tokens": 50, **talk("Hi"), **chat}, IN_PLACE), {})
    return Anthropic().answer(SimpleNamespace(request=request, save_ref=None))


MESSAGES = [
    ({"content": "Hello"}, "stop", None),
    ({"content": None}, "stop", None),
    ({"content": "Hello", "reasoning": "hm"}, "length", None),
    ({"content": None, "reasoning": "hm"}, "length", None),
    ({"content": "Hello"}, "stop", "end"),
    ({"content": "Hello"}, "stop", 7),
    ({"content": "Hello"}, "repetition", None),
    ({"content": "", "tool_calls": [call('{"a": 1}', id="c1"), call("{}", index=1, id="c2")]}, "tool_calls", None),
    ({"content": "Hello", "tool_calls": [call('{"a": null}', id="c1")]}, "stop", "end"),
]


@pytest.mark.parametrize(("message", "reason", "matched"), MESSAGES)
def test_a_message_is_the_one_that_vllm_makes(message, reason, matched):
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason, "stop_reason": matched}
    chat = {"id": "chat-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    chat["usage"] = USAGE

    reader = answering({})
    reader.feed(json.dumps(chat).encode())
    reader.complete()
    ours = json.loads(reader.closing(OURS, {"session_id": "mine"}))
    its = SERVING.messages_full_converter(TYPES.ChatCompletionResponse.model_validate(chat)).model_dump(
        exclude_none=True
    )

    assert ours.pop("session_id") == "mine"
    assert ours.pop("usage")["context"] == {"committed": True}
    assert list(map(unsigned, ours.pop("content"))) == list(map(unsigned, its.pop("content")))
    assert {"stop_reason": None, "stop_sequence": None, **its} == {**ours, "usage": its["usage"]}


def unsigned(said: Any) -> Any:
    """Return blocks and events without their random signatures."""
    if not isinstance(said, dict):
        return said
    if "signature" in said:
        assert isinstance(said["signature"], str)
    return {key: unsigned(value) for key, value in said.items() if key != "signature"}


def step(finish: str | None = None, matched: Any = None, **delta: Any) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish, "stop_reason": matched}


STREAMS = [
    [step(content="Hel"), step(content="lo"), step("stop", content="")],
    [step(content="Hello"), step("stop", "end", content="!")],
    [step("length", content="")],
    [step(reasoning="h"), step(reasoning="m"), step(content="Hi"), step("stop")],
    [step(reasoning="hm", content="Hi"), step(content="!"), step("stop")],
    [step(reasoning="hm"), step("length")],
    [step(content="Hi"), step(reasoning="hm"), step("stop", content="!")],
    [step(content="Hi", reasoning=""), step(tool_calls=[call("", id="c1")]), step(tool_calls=[call('{"a"')]),
     step(tool_calls=[call(": 1}")]), step("tool_calls", content="")],
    [step(tool_calls=[call("{}", id="c1")]), step(tool_calls=[call("", index=1, id="c2")]),
     step(tool_calls=[call("{}", index=1)]), step("stop")],
    [step(tool_calls=[call("{", id="c1"), call("}")]), step("tool_calls")],
    [step(tool_calls=[call("{", id="c1")]), step(content="late"), step(content="r", tool_calls=[call("}")]),
     step("tool_calls")],
    [step(tool_calls=[call("{", id="c1")]), step(content="late"), step(tool_calls=[call("{}", index=1, id="c2")]),
     step("tool_calls")],
    [step(tool_calls=[call("{", id="c1")]), step(reasoning="hm"), step("stop", "end")],
    [step(tool_calls=[call("{}", id="c1")]), step("stop", "end")],
    [step(tool_calls=[call("{", id="c1")]), step(tool_calls=[call("}", id="c1")]), step("stop")],
    [step(content="Hi"), step("stop", 7, tool_calls=[call("{}", id="c1")])],
    [step(content="Hi"), step("repetition")],
]  # fmt: skip


def chunks(steps: list[dict[str, Any]]) -> list[str]:
    head = {"id": "chat-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "usage": USAGE}
    begun = [step(role="assistant", content=""), *steps]
    events = [{**head, "choices": [one]} for one in begun] + [{**head, "choices": []}]
    return [f"data: {one}\n\n" for one in (*map(json.dumps, events), "[DONE]")]


@pytest.mark.parametrize("steps", STREAMS)
def test_a_stream_has_the_events_that_vllm_makes(steps):
    said = chunks(steps)
    reader = answering({"stream": True})
    passed = b"".join(reader.feed(one.encode()) for one in said)
    reader.complete()
    ours = events((passed + reader.closing(OURS, {"session_id": "mine"})).decode())
    its = events("".join(asyncio.run(converted(said))))

    assert ours[-2].pop("session_id") == "mine"
    assert ours[-2].pop("usage")["context"] == {"committed": True}
    del its[-2]["usage"]
    its[0]["message"]["usage"] |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert list(map(unsigned, ours)) == list(map(unsigned, its))


async def converted(said: list[str]) -> list[str]:
    async def chat() -> Any:
        for one in said:
            yield one

    return [event async for event in SERVING.message_stream_converter(chat())]


def events(stream: str) -> list[dict[str, Any]]:
    found = []
    for frame in stream.split("\n\n")[:-1]:
        named, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert named == f"event: {found[-1]['type']}"
    return found


@pytest.mark.parametrize(
    "steps",
    [
        [step(tool_calls=[call("{", id="c1")]), step(reasoning="hm")],
        [step(tool_calls=[call("{", id="c1"), call("{", index=1, id="c2")])],
        [step(content="Hi")],
    ],
)
def test_a_part_of_a_call_without_its_block_is_an_engines_fault(steps):
    """Seen to fail, as vLLM's converter does: the part was missing, and the client had half a call."""
    reader = answering({"stream": True})
    begun = "".join(chunks([*steps, step(tool_calls=[call("}")])])[:-2])

    with pytest.raises(EngineFailed):
        reader.feed(begun.encode())
