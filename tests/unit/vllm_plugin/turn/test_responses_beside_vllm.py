"""Our translation of `/v1/responses` beside vLLM's own: the same prompt, the same items, the same events.

`DIFFERENT` lists the requests that differ, each with the reason.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, split_delta
from vllm.entrypoints.openai.responses.utils import (
    build_response_output_items,
    construct_input_messages,
    construct_tool_dicts,
)

from contextcache.errors import InvalidRequest
from contextcache.fields import OUR_FIELDS
from contextcache.responses import REPEATED, RESPONSE_FIELDS
from vllm_plugin.turn.answer.response_output import ResponseOutput
from vllm_plugin.turn.answer.responses import _REFUSED, Responses
from vllm_plugin.turn.prompt.response_input import _PASSED, TOOLS_MAX, ToolNames, chat_fields

USER = {"role": "user", "content": "Hi"}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]}
REASONING = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
SUMMARY = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"}
OTHER_CALL = CALL | {"call_id": "c2", "namespace": "maps", "name": "find"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": 'a "é"'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "wet"}
PARTS = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "wet"}]}
CUSTOM_RESULT = {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"}
ITEMS: list[Any] = [
    "Hi",
    [USER],
    [USER | {"type": "message"}],
    [{"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
    [{"role": "system", "content": "a"}, USER, ANSWER, USER],
    [USER, {"role": "assistant", "content": "Hello"}, {"role": "assistant", "content": "again"}],
    [USER, {"role": "assistant", "content": ""}, USER],
    [USER, {"role": "assistant", "content": [{"type": "input_text", "text": "Hello"}]}],
    [USER, REASONING, ANSWER, CALL, OTHER_CALL, RESULT, CUSTOM_CALL, CUSTOM_RESULT],
    [USER, SUMMARY, CALL, PARTS, REASONING, ANSWER],
    [USER, ANSWER, REASONING, ANSWER, USER],
    [USER, CALL, ANSWER, RESULT],
    [REASONING, REASONING],
]
DIFFERENT = [
    # vLLM keeps the first part alone: a client's text would be lost.
    ([ANSWER | {"content": ANSWER["content"] * 2}], [{"role": "assistant", "content": "HelloHello"}]),
    ([REASONING | {"content": REASONING["content"] * 2}], [{"role": "assistant", "reasoning": "HmHm"}]),
    # vLLM fails on a refusal, and on an answer without parts, with an internal error.
    ([ANSWER | {"content": [{"type": "refusal", "refusal": "No"}]}], [{"role": "assistant", "content": "No"}]),
    ([ANSWER | {"content": []}], [{"role": "assistant", "content": ""}]),
]
FUNCTION = {"type": "function", "name": "f", "description": "d", "strict": True,
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    FUNCTION,
    {"type": "function", "name": "bare", "parameters": None},
    {"type": "custom", "name": "patch", "description": "x", "format": {"type": "text"}},
    {"type": "namespace", "name": "maps", "description": "of the world", "tools": [
        {"type": "function", "name": "find", "parameters": {}}, {"type": "custom", "name": "left_out"}]},
]  # fmt: skip


def chat(given: Any, **body: Any) -> dict[str, Any]:
    return chat_fields({"model": "m", "input": given, **body})


def of_vllm(given: Any) -> list[dict[str, Any]]:
    """Return vLLM's messages with the fields that a template gets, the text of parts under one name."""
    request = ResponsesRequest.model_validate(json.loads(json.dumps({"model": "m", "input": given})))
    texts = {"type": "text"}
    messages = [
        {key: value for key, value in message.items() if key in ("role", "content", "tool_calls", "tool_call_id")
         or (key == "reasoning" and value is not None)} for message in construct_input_messages(
            request_input=request.input)]  # fmt: skip
    for message in messages:
        if isinstance(content := message.get("content"), list):
            message["content"] = [{**texts, "text": part["text"]} for part in content]
    return messages


@pytest.mark.parametrize("given", ITEMS)
def test_items_become_the_messages_that_vllm_makes_of_them(given):
    assert chat(given)["messages"] == of_vllm(given)


@pytest.mark.parametrize(("given", "ours"), DIFFERENT)
def test_text_that_vllm_loses_or_fails_on_is_kept(given, ours):
    assert chat(given)["messages"] == ours
    with suppress(AttributeError, IndexError):
        assert of_vllm(given) != ours


def test_tools_become_the_functions_that_vllm_makes_of_them():
    request = ResponsesRequest.model_validate({"model": "m", "input": "x", "tools": TOOLS})
    ours = chat("x", tools=TOOLS)["tools"]

    made = construct_tool_dicts(request.tools, request.tool_choice)
    assert [ChatCompletionToolsParam.model_validate(tool).model_dump() for tool in ours] == made


@pytest.mark.parametrize("named", ["f", "patch", "maps__find", "find"])
@pytest.mark.parametrize("kind", ["function", "custom"])
def test_a_named_tool_is_the_one_that_vllm_chooses(named, kind):
    choice = {"type": kind, "name": named}
    request = ResponsesRequest.model_validate({"model": "m", "input": "x", "tools": TOOLS, "tool_choice": choice})

    assert chat("x", tools=TOOLS, tool_choice=choice)["tool_choice"]["function"]["name"] == request.tool_choice.name


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "name": "f"}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "none"}},
        {"tools": [*TOOLS, TOOLS[-1] | {"name": "sea"}], "tool_choice": {"type": "function", "name": "find"}},
        {"tools": TOOLS, "tool_choice": "any"},
        # vLLM accepts these and lets the model call any tool.
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        {"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}},
    ],
)
def test_a_choice_of_no_tool_is_refused(body):
    with pytest.raises(InvalidRequest) as refused:
        chat("x", **body)

    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_choice_without_tools_is_not_passed_because_the_chat_refuses_it(choice):
    translated = chat("x", tool_choice=choice, tools=[])

    assert not {"tools", "tool_choice"} & translated.keys()
    ChatCompletionRequest.model_validate(translated)


def test_tools_of_namespaces_count_as_tools():
    space = {"type": "namespace", "name": "n", "tools": [FUNCTION] * (TOOLS_MAX - 1)}

    assert len(chat("x", tools=[FUNCTION, space])["tools"]) == TOOLS_MAX
    with pytest.raises(InvalidRequest, match="at most 4096"):
        chat("x", tools=[FUNCTION, FUNCTION, space])


TRANSLATED = {"include", "input", "max_output_tokens", "reasoning", "text", "tool_choice", "tools", "top_logprobs"}
IGNORED = {
    # vLLM's route ignores them too, or repeats them alone.
    "max_tool_calls", "service_tier", "prompt_cache_key",
    # Of images and renderings, which contexts do not have.
    "media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs",
    # Never from clients.
    "request_id", "cache_salt", "kv_transfer_params", "ec_transfer_params",
}  # fmt: skip


def test_each_field_of_the_engines_route_has_one_meaning_here():
    read = {*ResponsesRequest.model_fields}
    ours = OUR_FIELDS | RESPONSE_FIELDS | {"instructions"}

    assert read - {*REPEATED} - ours - _PASSED - TRANSLATED - {*_REFUSED} == IGNORED - {*REPEATED}
    assert read & {*ChatCompletionRequest.model_fields} >= _PASSED


def test_the_chat_accepts_all_that_is_translated():
    schema = {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object"}}
    body = {"tools": TOOLS, "tool_choice": {"type": "custom", "name": "patch"}, "text": {"format": schema},
            "reasoning": {"effort": "low", "summary": "auto"}, "max_output_tokens": 5, "top_logprobs": 3,
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "stop": ["x"], "user": "u",
            "temperature": 0, "top_p": 1, "parallel_tool_calls": False}  # fmt: skip
    read = ChatCompletionRequest.model_validate(json.loads(json.dumps(chat(ITEMS[8], **body))))
    theirs = ResponsesRequest.model_validate({"model": "m", "input": "x", **body, "tool_choice": "auto"})

    sampling = repr(read.to_sampling_params(5, {})).replace("extra_args=None", "extra_args={}")
    assert sampling == repr(theirs.to_sampling_params(5, {}))
    assert (read.reasoning_effort, read.tool_choice.function.name) == ("low", "patch")
    assert read.parallel_tool_calls is False


@pytest.mark.parametrize(
    ("said", "response_format"),
    [({"format": {"type": "json_object"}}, {"type": "json_object"}), ({"format": {"type": "text"}}, {"type": "text"}),
     ({"verbosity": "low"}, None)],
)  # fmt: skip
def test_a_format_is_that_of_the_chat(said, response_format):
    assert chat("x", text=said).get("response_format") == response_format
    ChatCompletionRequest.model_validate(chat("x", text=said))


def call(index: int, arguments: str, **first: Any) -> dict[str, Any]:
    named = {"name": first["name"]} if first else {}
    begun = {"id": first["id"], "type": "function"} if first else {}
    return {"tool_calls": [{"index": index, **begun, "function": {**named, "arguments": arguments}}]}


ANSWERS: dict[str, list[dict[str, Any]]] = {
    "text": [{"role": "assistant", "content": ""}, {"content": "He"}, {"content": "llo"}],
    "reasoning first": [{"reasoning": "H"}, {"reasoning": "m"}, {"content": "Hi"}],
    "both in one delta": [{"reasoning": "Hm", "content": "Hi"}, {"content": "!"}],
    "calls": [{"content": "Hi"}, call(0, "", id="c1", name="f"), call(0, '{"a"'), call(0, ": 1}"),
              call(1, "{}", id="c2", name="maps__find")],
    "a custom call": [call(0, '{"inp', id="c1", name="patch"), call(0, 'ut": "é"}')],
    "calls in one delta": [{"tool_calls": call(0, "{}", id="a", name="f")["tool_calls"]
                            + call(1, "{}", id="b", name="f")["tool_calls"]}],
    "text again": [{"content": "a"}, {"reasoning": "b"}, {"content": "c"}],
}  # fmt: skip


def ours_of(deltas: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    output = ResponseOutput(ToolNames(TOOLS))
    events = [json.loads(json.dumps(event)) for delta in deltas for event in output.take(delta, None)]
    return events + output.end(), output.items


def vllms_of(deltas: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    tools = ResponsesRequest.model_validate({"model": "m", "input": "x", "tools": TOOLS}).tools
    processor, events = SimpleStreamingEventProcessor(tools=tools), []
    for delta in deltas:
        for one in split_delta(DeltaMessage.model_validate(delta)):
            state, tool_call = processor.resolve_target_state(one)
            if state.name == "NONE":
                continue
            if processor.needs_transition(state, tool_call):
                events += processor.close_current() + processor.open(state, tool_call)
            events += processor.emit_delta(one, SimpleNamespace(), None)
    events += processor.close_current()
    return [event.model_dump(mode="json") for event in events], [
        item.model_dump(mode="json") for item in processor.output_items
    ]


def plain(told: Any) -> Any:
    """Return events or items without their random ids, and without nulls and empty lists, which mean the same."""
    if isinstance(told, dict):
        ids = {"id", "item_id", "sequence_number"}
        return {key: plain(value) for key, value in told.items() if key not in ids and value not in (None, [])}
    return [*map(plain, told)] if isinstance(told, list) else told


@pytest.mark.parametrize("name", ANSWERS)
def test_events_and_items_of_a_stream_are_those_of_vllm(name):
    """Without the deltas of a custom tool's input: ours is one, after the end of its arguments.

    They are JSON text, which may be cut within an escape.
    """
    events, items = ours_of(ANSWERS[name])
    vllms, vllms_items = vllms_of(ANSWERS[name])

    def others(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [event for event in told if event["type"] != "response.custom_tool_call_input.delta"]

    assert plain(others(events)) == plain(others(vllms))
    assert plain(items) == plain(vllms_items)


WHOLE = {"reasoning": "Hm", "content": "Hello", "tool_calls": [
    {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
    {"index": 1, "id": "c2", "type": "function", "function": {"name": "maps__find", "arguments": "{}"}},
    {"index": 2, "id": "c3", "type": "function", "function": {"name": "patch", "arguments": "bare"}}]}  # fmt: skip


def test_a_whole_answer_has_the_items_of_vllm():
    tools = ResponsesRequest.model_validate({"model": "m", "input": "x", "tools": TOOLS}).tools
    calls = [SimpleNamespace(id=one["id"], **one["function"]) for one in WHOLE["tool_calls"]]
    vllms = build_response_output_items(WHOLE["reasoning"], WHOLE["content"], calls, tools=tools)
    _, items = ours_of([WHOLE])

    told = plain([item.model_dump(mode="json") for item in vllms])
    told[0]["status"] = "completed"  # vLLM's stream says so, its whole answer not
    assert plain(items) == told


def stream(deltas: list[dict[str, Any]], finish_reason: str) -> list[Any]:
    """Return the events of a whole stream of ours, as the `openai` package reads them."""
    body = {"model": "m", "input": "x", "stream": True, "conversation": "mine", "tools": TOOLS, "tool_choice": "none"}
    request = Responses().turn(
        SimpleNamespace(path="/v1/responses", headers={}), body, json.dumps(body).encode(), "mine"
    )
    session = SimpleNamespace(session_id="mine", generation=0)
    reader = Responses().answer(
        SimpleNamespace(request=request, session=session, save_ref="ref", started_ms=1000, comparison=None)
    )
    chunks = [{"choices": [{"index": 0, "delta": delta, "token_ids": [7]}]} for delta in deltas]
    chunks[-1]["choices"][0]["finish_reason"] = finish_reason
    chunks.append({"choices": [], "usage": {"completion_tokens": len(deltas)}})
    told = b"".join(reader.feed(f"data: {json.dumps(one)}\n\n".encode()) for one in chunks)
    told += reader.feed(b"data: [DONE]\n\n")
    reader.complete()
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "context": {"committed": True},
             "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
    told += reader.closing(usage, {"session_id": "mine"})
    frames = re.findall(rb"event: (\S+)\ndata: (.*)\n\n", told)
    assert [json.loads(data)["type"].encode() for _, data in frames] == [kind for kind, _ in frames]
    return [TypeAdapter(ResponseStreamEvent).validate_json(data) for _, data in frames]


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_is_read_by_openais_types_and_adds_up_to_its_response(name):
    events = stream(ANSWERS[name], "stop")
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        state.handle_event(event)
    final = state._completed_response
    items = {index: item.to_dict() for index, item in state._completed_output.items()}

    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [items[index] for index in sorted(items)] == [item.to_dict() for item in events[-1].response.output]
    added = state._output_items
    assert {index: plain(item.to_dict()) for index, item in added.items() if item.type == "function_call"} == {
        index: plain(item) | {"status": "in_progress"} for index, item in items.items()
        if item["type"] == "function_call"
    }  # fmt: skip
    assert final.output_text == "".join(delta.get("content") or "" for delta in ANSWERS[name])
    Response.model_validate(final.to_dict())


def test_a_stream_that_was_cut_by_its_limit_ends_as_incomplete():
    """vLLM says `response.completed`; OpenAI's reference has an event of its own."""
    last = stream(ANSWERS["text"], "length")[-1]

    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert last.response.incomplete_details.reason == "max_output_tokens"
