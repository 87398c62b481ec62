"""Turns on `/v1/messages`: the chat's turns, told in Anthropic's words. Imports nothing of vLLM's.

Fields and events are those of Anthropic's API (https://platform.claude.com/docs/en/api/messages and
.../build-with-claude/streaming; types of its package `anthropic` 2.11). The chat request and the blocks of an answer
are those of vLLM 0.32 entrypoints/anthropic/serving.py, so that a request means the same with a context and without.
`tests/unit/vllm_plugin/turn/test_anthropic_beside_vllm.py` compares both, and lists the differences.

Two parts of a request depend on the engine's chat template, as in vLLM. They are asked once, by rendering short
conversations. A template that refuses a later system message gets all of them merged into the first one. A template
that ignores or refuses the effort `none` gets `low` for `thinking: disabled`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from typing_extensions import override

from contextcache.errors import EngineFailed, InvalidRequest, error_object
from contextcache.fields import OUR_FIELDS
from contextcache.model import SessionId, UsageFormat
from vllm_plugin.turn.answer.chat import AnswerResult, Dialect, JsonAnswer, SseAnswer, compact_json
from vllm_plugin.turn.answer.events import Event, EventSplitter
from vllm_plugin.turn.engine import Engine
from vllm_plugin.turn.prompt.request import CHAT_PATH, TurnRequest, read_turn
from vllm_plugin.turn.refusals import engine_error
from vllm_plugin.turn.turn import Client, Turn

_BILLING = "x-anthropic-billing-header"
"""Beginning of a system block of Claude Code's. Its hash differs in each request, and would change every prompt."""
_THINKING_TOKENS_MIN = 1024
_PASSED = ("model", "temperature", "top_p", "top_k", "watermarking", "vllm_xargs", "chat_template_kwargs")
"""Fields that the chat has too, and checks."""
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Anthropic's names of a chat's fields."""
_TOOL_FIELDS = ("description", "strict", "defer_loading")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_FAULT_CHARS_MAX = 200
_HELD = "a context can store only text, thinking, tool_use and tool_result blocks"
_Effort = Literal["low", "medium", "high", "xhigh", "max"]
_Json = dict[str, Any]


class _Block(msgspec.Struct, tag_field="type"):
    """Block of a message."""


class _Text(_Block, tag="text"):
    text: str


class _Thought(_Block, tag="thinking"):
    thinking: str


class _HiddenThought(_Block, tag="redacted_thinking"):
    """No engine can read it."""


class _ToolUse(_Block, tag="tool_use"):
    id: str
    name: str
    input: _Json


class _ToolResult(_Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] | None = None


class _Message(msgspec.Struct, tag_field="role"):
    """Message of one role, with the blocks that this role may have."""


class _User(_Message, tag="user"):
    content: str | list[_Text | _ToolResult]


class _Assistant(_Message, tag="assistant"):
    content: str | list[_Text | _Thought | _HiddenThought | _ToolUse]


class _System(_Message, tag="system"):
    content: str | list[_Text]


class _Tool(msgspec.Struct):
    name: str
    input_schema: _Json
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int = 0


class _OutputFormat(msgspec.Struct):
    type: Literal["json_schema"] = "json_schema"
    schema: _Json | None = None


class _OutputConfig(msgspec.Struct):
    effort: _Effort | None = None
    format: _OutputFormat | None = None


class _Request(msgspec.Struct):
    """Anthropic's fields that have a meaning here; the others are ignored, as in vLLM."""

    messages: Annotated[list[_User | _Assistant | _System], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    system: str | list[_Text] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None


@dataclass(frozen=True, slots=True)
class Template:
    """How a chat template takes two parts of a request."""

    merges_system: bool
    """It refuses system messages that are not the first one."""
    no_thinking: str
    """The effort that stands for `thinking: disabled`."""

    @classmethod
    async def of(cls, engine: Engine) -> Template:
        """Render short conversations on the engine. Raises EngineFailed, NoReadyEndpoint."""
        asked, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
        silent = await _rendered(engine, [asked], enable_thinking=False, reasoning_effort="none")
        thinking = [
            await _rendered(engine, [asked], enable_thinking=True, reasoning_effort=effort)
            for effort in get_args(_Effort)
        ]
        is_honoured = silent is not None and silent not in thinking
        later = await _rendered(engine, [system, asked, system, asked])
        return cls(merges_system=later is None, no_thinking="none" if is_honoured else "low")


async def _rendered(engine: Engine, messages: list[_Json], **arguments: Any) -> Any:
    """Return the token ids of a conversation; None: the template refuses it."""
    try:
        return (await engine.ask("/tokenize", {"messages": messages, "chat_template_kwargs": arguments}))["tokens"]
    except InvalidRequest:
        return None


class Anthropic(Dialect):
    """Anthropic's dialect in front of one engine. The first turn asks for the engine's template."""

    def __init__(self) -> None:
        """Know nothing of the engine's template yet."""
        self._template: Template | None = None

    @override
    async def prepare(self, engine: Engine) -> None:
        self._template = self._template or await Template.of(engine)

    @override
    def turn(self, client: Client, body: _Json, raw: bytes, named: SessionId | None) -> TurnRequest:
        """Check a turn, a chat's from here on. Raises InvalidRequest."""
        assert self._template is not None
        chat = chat_of(body, self._template) | {key: body[key] for key in OUR_FIELDS if key in body}
        # Anthropic's usage has read and computed tokens, which are the whole prompt.
        return replace(read_turn(CHAT_PATH, chat, client.headers), usage=UsageFormat.OPENAI)

    @override
    def client_field(self, param: str) -> str:
        """Return Anthropic's name of a chat's field."""
        return _NAMES.get(param, param)

    @override
    def answer(self, turn: Turn) -> JsonAnswer | SseAnswer:
        """Return a reader of the chat's answer that writes Anthropic's."""
        return _MessageStream(turn.request) if turn.request.stream else _WholeMessage(turn.request)


def chat_of(body: _Json, template: Template) -> _Json:
    """Return the chat request of a messages request. Raises InvalidRequest naming the field at fault."""
    try:
        asked = msgspec.convert(body, _Request)
    except ValueError as exc:
        raise _refusal(str(exc)) from exc
    chat = {
        "messages": list(_messages(asked, merges_system=template.merges_system)),
        "max_tokens": asked.max_tokens,
        "max_completion_tokens": asked.max_tokens,
        "stop": asked.stop_sequences,
        **{key: body.get(key) for key in _PASSED},
        **_output(asked.output_config or _OutputConfig()),
        **_thinking(asked, template.no_thinking),
        **_tools(asked.tools, asked.tool_choice),
    }
    if asked.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return {key: value for key, value in chat.items() if value is not None}


def _refusal(fault: str) -> InvalidRequest:
    """Return the error of the first field that has not its type, from msgspec's message."""
    fault, _, place = fault.rpartition(" - at `$") if " - at `$" in fault else (fault, "", "")
    param = place.removesuffix("`").removeprefix(".")
    if fault.startswith("Invalid value") and param.endswith("].type"):
        return InvalidRequest(f"{_HELD}: {fault[:_FAULT_CHARS_MAX]}", param=param.removesuffix(".type"))
    if fault.startswith("Object missing required field"):
        param, fault = f"{param}.{fault.split('`')[1]}".removeprefix("."), "is required"
    fault = fault[:_FAULT_CHARS_MAX].replace("Expected ", "must be ", 1)
    return InvalidRequest(f"`{param}`: {fault}" if param else fault, param=param or None)


def _messages(asked: _Request, *, merges_system: bool) -> Iterator[_Json]:
    systems = [message.content for message in asked.messages if isinstance(message, _System) and merges_system]
    if head := "".join(map(_system_text, [asked.system or "", *systems])):
        yield {"role": "system", "content": head}
    for message in asked.messages:
        match message:
            case _System():
                if (text := _system_text(message.content)) and not merges_system:
                    yield {"role": "system", "content": text}
            case _User(content=str(text)) | _Assistant(content=str(text)):
                yield {"role": "user" if isinstance(message, _User) else "assistant", "content": text}
            case _User():
                yield from _user(message.content)
            case _Assistant():
                yield _assistant(message.content)


def _system_text(content: str | list[_Text]) -> str:
    texts = [content] if isinstance(content, str) else [block.text for block in content]
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _user(blocks: Sequence[Any]) -> Iterator[_Json]:
    """Tell the results of tools first, as messages of their own."""
    for block in blocks:
        if isinstance(block, _ToolResult):
            content = block.content or ""
            text = content if isinstance(content, str) else "\n".join(part.text for part in content)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
    if texts := _texts(blocks):
        yield {"role": "user", "content": texts}


def _assistant(blocks: Sequence[Any]) -> _Json:
    said: _Json = {"role": "assistant"}
    if thoughts := [block.thinking for block in blocks if isinstance(block, _Thought)]:
        said["reasoning"] = "".join(thoughts)
    if calls := [block for block in blocks if isinstance(block, _ToolUse)]:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.input)}}
            for call in calls
        ]
    if texts := _texts(blocks):
        said["content"] = texts
    return said


def _texts(blocks: Sequence[Any]) -> str | list[_Json]:
    parts = [{"type": "text", "text": block.text} for block in blocks if isinstance(block, _Text) and block.text]
    return parts[0]["text"] if len(parts) == 1 else parts


def _output(config: _OutputConfig) -> _Json:
    told: _Json = {"reasoning_effort": config.effort}
    if config.format is not None and config.format.schema:
        schema = {"name": config.format.type, "schema": config.format.schema}
        told["response_format"] = {"type": config.format.type, "json_schema": schema}
    return told


def _thinking(asked: _Request, no_thinking: str) -> _Json:
    thinking = asked.thinking
    if thinking is None or thinking.type == "adaptive":
        return {}
    if thinking.type == "disabled":
        return {"reasoning_effort": no_thinking}
    if not _THINKING_TOKENS_MIN <= thinking.budget_tokens < asked.max_tokens:
        fault = f"must be at least {_THINKING_TOKENS_MIN} and less than max_tokens"
        raise InvalidRequest(f"`thinking.budget_tokens`: {fault}", param="thinking.budget_tokens")
    return {"thinking_token_budget": thinking.budget_tokens}


def _tools(tools: list[_Tool] | None, choice: _ToolChoice | None) -> _Json:
    told: _Json = {"tools": [_function(tool) for tool in tools]} if tools else {}
    if choice is not None:
        if choice.type == "tool" and not choice.name:
            raise InvalidRequest("`tool_choice.name`: is required", param="tool_choice.name")
        named = {"type": "function", "function": {"name": choice.name}}
        told["tool_choice"] = _CHOICES.get(choice.type, named)
        told["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return told


def _function(tool: _Tool) -> _Json:
    schema = tool.input_schema if "type" in tool.input_schema else {**tool.input_schema, "type": "object"}
    others = {key: value for key in _TOOL_FIELDS if (value := getattr(tool, key)) is not None}
    return {"type": "function", "function": {"name": tool.name, "parameters": schema, **others}}


class _WholeMessage(JsonAnswer):
    """A whole answer."""

    def __init__(self, request: TurnRequest) -> None:
        super().__init__(request)
        self._message: _Json = {}

    @override
    def read(self) -> None:
        """Read the answer and tell it anew: nothing is committed that cannot be told."""
        super().read()
        blocks: list[_Json] = []
        if thought := self._answer["choices"][0]["message"].get("reasoning"):
            blocks.append({"type": "thinking", "thinking": thought, "signature": secrets.token_hex(16)})
        # Clients read the first block, so that an empty answer has one.
        if self.result.text or not (blocks or self.result.tool_calls):
            blocks.append({"type": "text", "text": self.result.text})
        for call in self.result.tool_calls:
            function = call["function"]
            given = msgspec.convert(json.loads(function["arguments"]), _Json)
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
        self._message = {**_head(self._answer), "content": blocks, **_stop(self.result)}

    @override
    def closing(self, usage: _Json, session: _Json) -> bytes:
        """Return the message with the turn's usage and session fields."""
        return compact_json({**self._message, **session, "usage": _usage(usage, self._answer["usage"])})


class _MessageStream(SseAnswer):
    """An answer as Anthropic's events. The last two, `message_delta` with the usage and `message_stop`, wait."""

    tells_done: ClassVar[bool] = False

    def __init__(self, request: TurnRequest) -> None:
        super().__init__(request)
        self._has_begun = False
        self._open: _Json = {}
        """The block that is being told; empty: none."""
        self._num_stopped = 0
        """Blocks before it."""
        self._call_index = 0
        """The chat's index of the latest call."""
        self._after_call = ""
        """Text that came while a call was open. It gets a block of its own after the call."""
        self._last = b""
        self._counted: _Json = {}
        """The engine's usage."""

    @override
    def passing(self, event: Event, answer: _Json) -> bytes:
        """Return Anthropic's events of a chat's event."""
        return b"".join(map(_event, self._told(answer)))

    @override
    def failing(self, event: Event) -> bytes:
        """Return an engine's error as Anthropic's."""
        failure = engine_error(500, event.data or b"")  # in a stream its own status has gone already
        return _event({"type": "error", "error": error_object(failure)})

    @override
    def complete(self) -> None:
        """Check that the stream came to its end, and tell that anew: nothing is committed that cannot be told."""
        super().complete()
        if self.result.error:
            return
        *held, _done = EventSplitter().feed(b"".join(self.last_events()))
        chunks = [json.loads(event.data or b"") for event in held]
        told = [one for chunk in chunks for one in self._told(chunk)]
        self._last = b"".join(map(_event, (*told, *self._stopped())))
        self._counted = chunks[-1]["usage"]

    @override
    def closing(self, usage: _Json, session: _Json) -> bytes:
        """Return the last events, of which `message_delta` has the usage and session fields."""
        ours = {**session, "usage": _usage(usage, self._counted)}
        delta = {"type": "message_delta", "delta": _stop(self.result), **ours}
        return self._last + _event(delta) + _event({"type": "message_stop"})

    def _told(self, chunk: _Json) -> Iterator[_Json]:
        if not self._has_begun:
            self._has_begun = True
            usage = chunk.get("usage") or {}
            empty: _Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(usage, usage)}
            yield {"type": "message_start", "message": {**_head(chunk), **empty}}
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if thought := delta.get("reasoning"):
                yield from self._in_block({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta("thinking_delta", thinking=thought)
            if text := delta.get("content"):
                if self._open.get("type") == "tool_use":
                    self._after_call += text
                else:
                    yield from self._text(text)
            for call in delta.get("tool_calls") or ():
                yield from self._call(call)

    def _in_block(self, block: _Json) -> Iterator[_Json]:
        """Go on in a block, or begin it."""
        if self._open == block:
            return
        yield from self._stopped()
        self._open = block
        yield {"type": "content_block_start", "index": self._num_stopped, "content_block": block}

    def _stopped(self) -> Iterator[_Json]:
        """End the block, if one is open."""
        if not self._open:
            return
        if self._open["type"] == "thinking":
            yield self._delta("signature_delta", signature=secrets.token_hex(16))
        yield {"type": "content_block_stop", "index": self._num_stopped}
        self._num_stopped += 1
        text, self._after_call, self._open = self._after_call, "", {}
        if text:
            yield from self._text(text)
            yield from self._stopped()

    def _text(self, text: str) -> Iterator[_Json]:
        yield from self._in_block({"type": "text", "text": ""})
        yield self._delta("text_delta", text=text)

    def _call(self, call: _Json) -> Iterator[_Json]:
        function, index = call.get("function") or {}, call.get("index", 0)
        if call.get("id") and function.get("name"):
            yield from self._in_block({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
            self._call_index = index
        if arguments := function.get("arguments"):
            if self._open.get("type") != "tool_use" or index != self._call_index:
                raise EngineFailed("the engine's events do not form a message")
            yield self._delta("input_json_delta", partial_json=arguments)

    def _delta(self, kind: str, **part: str) -> _Json:
        return {"type": "content_block_delta", "index": self._num_stopped, "delta": {"type": kind, **part}}


def _event(told: _Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (told["type"].encode(), compact_json(told))


def _head(chat: _Json) -> _Json:
    return {"id": chat["id"], "type": "message", "role": "assistant", "model": chat["model"]}


def _stop(result: AnswerResult) -> _Json:
    """Return the reason. A call that a stop text has cut must not run, and one that is whole must."""
    reason, matched = None, None
    if result.finish_reason == "length":
        reason = "max_tokens"
    elif result.finish_reason in ("stop", "tool_calls"):
        calls = result.tool_calls
        is_whole = bool(calls) and _is_json(calls[-1]["function"]["arguments"])
        if isinstance(result.stop_reason, str) and not is_whole:
            reason, matched = "stop_sequence", result.stop_reason
        else:
            reason = "tool_use" if calls or result.finish_reason == "tool_calls" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": matched}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _usage(usage: _Json, engine: _Json) -> _Json:
    """Return Anthropic's usage: the three kinds of input tokens are the whole prompt, those read were not computed.

    `created_cache_tokens`, those of the computed ones that the engine keeps in its own cache, is vLLM's count.
    """
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    computed = usage.get("prompt_tokens", 0) - cached
    created = min((engine.get("prompt_tokens_details") or {}).get("created_cache_tokens") or 0, computed)
    told = {
        "input_tokens": computed - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.get("completion_tokens") or 0,
    }
    return told | ({"context": usage["context"]} if "context" in usage else {})
