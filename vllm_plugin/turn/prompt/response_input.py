"""A request for a response as the request for a chat. Pure.

Sources: OpenAI's API reference ("Create a model response") and the types of the `openai` package. Items become messages
as in vLLM 0.32 entrypoints/openai/responses/utils.py (`construct_input_messages`, `construct_tool_dicts`), so a request
has the same prompt with a context and without one. A message that vLLM cuts to its first part keeps all its parts here.
The form of the items has been checked before (`contextcache/input_items.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import asdict

from contextcache.errors import InvalidRequest
from contextcache.input_items import ITEMS_MAX
from contextcache.items import CUSTOM_INPUT, flat_name, messages_of
from vllm_plugin.turn.prompt.request import read_as

TOOLS_MAX = ITEMS_MAX
"""Tools of a request, those of namespaces included."""
LOGPROBS = "message.output_text.logprobs"
_PASSED = frozenset(
    {"chat_template_kwargs", "frequency_penalty", "ignore_eos", "include_reasoning", "include_stop_str_in_output"}
    | {"logit_bias", "min_p", "model", "parallel_tool_calls", "presence_penalty", "priority", "repetition_penalty"}
    | {"seed", "skip_special_tokens", "stop", "stop_token_ids", "stream", "structured_outputs", "temperature", "top_k"}
    | {"top_p", "user", "vllm_xargs", "watermarking"}
)
"""Fields of vLLM 0.32 `ResponsesRequest` that its `ChatCompletionRequest` has under the same name."""
NAMES: Mapping[str, str] = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""Names of translated fields by those of a chat. Positions in lists differ, so an error names the field alone."""
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
"""Parameters of the function that stands for a custom tool (vLLM 0.32 tool_parsers/utils.py)."""


class _Function(Struct, tag="function"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class _FreeText(Struct):
    type: Literal["text"]
    """No grammar: vLLM has none for custom tools."""


class _Custom(Struct, tag="custom"):
    name: str
    description: str | None = None
    format: _FreeText | None = None


class _Namespace(Struct, tag="namespace"):
    name: str
    tools: list[_Function | _Custom]


class _Format(Struct):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class _Text(Struct):
    format: _Format | None = None


class _Reasoning(Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


_Tool: TypeAlias = _Function | _Custom | _Namespace


class _Request(Struct):
    """Fields that are translated, or repeated in the answer."""

    input: str | list[dict[str, Any]]
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    temperature: float | None = None
    text: _Text | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[_Tool] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    user: str | None = None


class ToolNames:
    """Names of a request's tools, as the client has them and as the chat has them. `tools`: as the client sent them."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.customs = frozenset(tool["name"] for tool in tools if tool["type"] == "custom")
        self._spaces = {
            flat_name(space["name"], tool["name"]): (space["name"], tool["name"])
            for space in tools
            if space["type"] == "namespace"
            for tool in space["tools"]
        }

    def of_client(self, name: str) -> dict[str, str]:
        """Return the fields with the client's name of a tool."""
        space, local = self._spaces.get(name, ("", name))
        return {"namespace": space, "name": local} if space else {"name": local}

    def of_chat(self, name: Any) -> list[str]:
        """Return the chat's names of the tools that a client may mean in `tool_choice`, besides `name` itself."""
        return [flat for flat, (_, local) in self._spaces.items() if local == name]


def chat_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat's fields of a request for a response. Raises InvalidRequest naming the field at fault."""
    asked = read_as(_Request, body, unknown="a context's tools must be functions of the client")
    tools = [*_functions(asked.tools or ())]
    if len(tools) > TOOLS_MAX:
        raise InvalidRequest(f"tools may have at most {TOOLS_MAX} items", param="tools")
    wants_logprobs = LOGPROBS in (asked.include or ())
    fields = {key: body[key] for key in _PASSED & body.keys()} | {
        "messages": messages_of(asked.input, takes_compaction=True),
        "tools": tools or None,
        "tool_choice": _tool_choice(asked.tool_choice, tools, ToolNames(body.get("tools") or ())),
        "max_completion_tokens": asked.max_output_tokens,
        "reasoning_effort": asked.reasoning and asked.reasoning.effort,
        "response_format": asked.text and _response_format(asked.text.format),
        "logprobs": wants_logprobs or None,
        "top_logprobs": asked.top_logprobs if wants_logprobs else None,
    }
    return _given(fields)


def _functions(tools: Sequence[_Tool]) -> Iterator[dict[str, Any]]:
    """Yield the chat's functions: those of a namespace under one name each, a custom tool with one text."""
    for tool in tools:
        if isinstance(tool, _Namespace):
            named = (one for one in tool.tools if isinstance(one, _Function))
            yield from (_function(asdict(one) | {"name": flat_name(tool.name, one.name)}) for one in named)
        elif isinstance(tool, _Function):
            yield _function(asdict(tool))
        else:
            yield _function(asdict(tool) | {"format": None, "parameters": _CUSTOM_PARAMETERS})


def _function(said: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": _given(said)}


def _given(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {key: value for key, value in said.items() if value is not None}


def _tool_choice(said: str | dict[str, Any] | None, tools: Sequence[dict[str, Any]], names: ToolNames) -> Any:
    """Return a chat's choice. Raises InvalidRequest."""
    if said in (None, "auto", "none"):
        return said if tools else None
    if said == "required" and tools:
        return said
    name = said.get("name") if isinstance(said, dict) and said.get("type") in ("function", "custom") else None
    known = [tool["function"]["name"] for tool in tools]
    meant = [name] if name in known else [flat for flat in names.of_chat(name) if flat in known]
    if len(meant) != 1:
        told = "tool_choice must be auto, none, or, with `tools`, required or the name of exactly one of them"
        raise InvalidRequest(told, param="tool_choice")
    return {"type": "function", "function": {"name": meant[0]}}


def _response_format(said: _Format | None) -> dict[str, Any] | None:
    if said is None:
        return None
    if said.type != "json_schema":
        return {"type": said.type}
    if said.name is None or said.schema is None:
        raise InvalidRequest("`text.format` of type json_schema must have a `name` and a `schema`", param="text.format")
    return {"type": said.type, "json_schema": _given(asdict(said) | {"type": None})}
