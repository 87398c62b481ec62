"""Anthropic's messages request, and the chat request that it stands for. Imports nothing of vLLM's.

Fields are those of Anthropic's API (https://platform.claude.com/docs/en/api/messages; types of its package `anthropic`
2.11). The chat request is the one of vLLM 0.32 entrypoints/anthropic/serving.py, so that a request means the same with
a context and without.

Two parts of a request depend on the engine's chat template, as in vLLM. They are asked once, by rendering short
conversations. A template that refuses a later system message gets all of them merged into the first one. A template
that ignores or refuses the effort `none` gets `low` for `thinking: disabled`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec

from contextcache.errors import InvalidRequest
from vllm_plugin.turn.engine import Engine
from vllm_plugin.turn.prompt.request import read_as

_BILLING = "x-anthropic-billing-header"
"""Beginning of a system block of Claude Code's. Its hash differs in each request, and would change every prompt."""
_THINKING_TOKENS_MIN = 1024
_PASSED = ("model", "temperature", "top_p", "top_k", "watermarking", "vllm_xargs", "chat_template_kwargs")
"""Fields that the chat has too, and checks."""
NAMES = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Anthropic's names of a chat's fields."""
_TOOL_FIELDS = ("description", "strict", "defer_loading")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
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


def chat_of(body: _Json, template: Template) -> _Json:
    """Return the chat request of a messages request. Raises InvalidRequest naming the field at fault."""
    asked = read_as(_Request, body, unknown=_HELD)
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
