"""Turns on `/v1/responses`: composed as the chat's turns, answered by vLLM's own route for responses.

vLLM's own functions make chat messages of a request's items, as for the same request without a context. The engine
then gets the items as they came, and our prompt's ids instead of rendering them. It returns the sampled ids beside
their text (vLLM 0.32 entrypoints/openai/responses/protocol.py:
`kv_transfer_params.prompt_token_ids`, `enable_response_messages`). The functions are asked of the application behind us
(`state.openai_serving_responses`), nothing of vLLM's is imported. An engine that has none of them carries no contexts.

OpenAI's `instructions` are those of one request: they take the place of the system message that a conversation begins
with. A turn that says `previous_response_id` or `conversation` and has none goes on without it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from typing_extensions import override

from contextcache.claim import RESPONSES_PATH, SESSION_HEADER, label_of, read_strict_claims
from contextcache.errors import EngineFailed, InvalidRequest
from contextcache.fields import OUR_FIELDS
from contextcache.input_items import ITEMS_MAX
from contextcache.model import ContextMode, SessionId, UsageFormat
from contextcache.responses import RESPONSE_FIELDS, continued_by, response_id
from vllm_plugin.turn.answer.chat import AnswerResult, Dialect, JsonAnswer, SseAnswer, compact_json
from vllm_plugin.turn.answer.events import Event
from vllm_plugin.turn.engine import Scope
from vllm_plugin.turn.prompt.request import CHAT_PATH, NEVER_FROM_CLIENTS, TurnRequest, read_turn
from vllm_plugin.turn.refusals import by_vllm
from vllm_plugin.turn.turn import Client, Turn

_RENDERING = ("construct_input_messages", "construct_tool_dicts")
_MADE = "enable_response_messages"
_MADE_BY_IT = ("input_messages", "output_messages")
_CHAT_FIELDS = frozenset({"messages", "return_token_ids", "stream_options"})
"""That a response's request has not."""
_TEXT_PARTS = frozenset({"input_text", "output_text"})
_PARTS = _TEXT_PARTS | {"text", "summary_text", "reasoning_text", "refusal"}
_ITEMS = frozenset(
    {"", "message", "reasoning", "function_call", "function_call_output"}
    | {"custom_tool_call", "custom_tool_call_output"}
)
_TOOLS = frozenset({"function", "custom", "namespace"})
_TOOLS_MAX = ITEMS_MAX
"""vLLM 0.32 takes 50 us for a tool that fits none of its types."""
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning")
_REFUSED: Mapping[str, str] = {
    "background": "a turn is answered while its client waits",
    "previous_input_messages": "the context has the previous messages",
    "stop": "a stop text may end within a token",
}
_ENDS = {"completed": "stop", "incomplete": "length"}
"""Finish reasons by status."""


@dataclass(frozen=True, slots=True)
class Responses(Dialect):
    """vLLM's own words for responses."""

    serving: Any
    """An OpenAIServingResponses."""
    rendering: Any
    """The module of its renderer, which makes messages of items."""
    ends: frozenset[int]
    """Tokens that end this model's answers."""

    @classmethod
    async def of(cls, scope: Scope) -> Responses:
        """Return those of the application behind us. Raises InvalidRequest: it has none."""
        serving: Any = getattr(getattr(scope.get("app"), "state", None), "openai_serving_responses", None)
        rendering: Any = None
        ends: set[int] = set()
        try:
            renderer = serving.online_renderer
            if not renderer.use_harmony:
                rendering = sys.modules[type(renderer).__module__]
            told = serving.engine_client.input_processor.generation_config_fields.get("eos_token_id")
            ends = {renderer.renderer.get_eos_token_id(), *([told] if isinstance(told, int) else told or ())}
        except AttributeError:
            rendering = None
        if not all(hasattr(rendering, name) for name in _RENDERING):
            raise InvalidRequest(
                "this engine does not support contexts on /v1/responses: leave session_id out", param="session_id"
            )
        return cls(serving, rendering, frozenset(ends))

    @override
    def turn(self, client: Client, body: dict[str, Any], raw: bytes, named: SessionId | None) -> TurnRequest:
        """Check a turn, `raw` as it came, of the context it was routed for.

        Raises InvalidRequest, with vLLM's words for vLLM's own fields.
        """
        header = client.headers.get(SESSION_HEADER)
        label = named if named is not None and named == label_of(header) else None
        asked = continued_by(RESPONSES_PATH, read_strict_claims(raw, RESPONSES_PATH), header, label=label)
        if asked is None or asked.session_id not in (None, named):
            raise InvalidRequest("the body names a different context than the gateway routed", param="session_id")
        for key, reason in _REFUSED.items():
            if body.get(key):
                raise InvalidRequest(f"{key} cannot be used with a context: {reason}", param=key)
        given = {key: value for key, value in body.items() if key not in OUR_FIELDS | RESPONSE_FIELDS}
        parsed = self._parsed(given)
        chat = {
            **{key: body[key] for key in OUR_FIELDS - {"truncation", "context_create"} if key in body},
            "model": body.get("model"),
            "messages": self._messages(parsed.input),
            "tools": self._tools(parsed),
            "chat_template_kwargs": parsed.chat_template_kwargs,
            "reasoning_effort": None if parsed.reasoning is None else parsed.reasoning.effort,
            "stream": parsed.stream,
            "include_reasoning": parsed.include_reasoning,
            "truncation": _truncation(body),
        }
        turn = read_turn(CHAT_PATH, chat, client.headers)
        # Ids that clients choose would meet in the engine.
        fields = {key: value for key, value in given.items() if key not in NEVER_FROM_CLIENTS | {"request_id"}}
        if "metadata" in body:
            fields["metadata"] = body["metadata"]  # of the response, as of the context
        return replace(
            turn,
            engine_fields=fields,
            # Its usage counts the whole prompt, and the tokens that were read.
            usage=UsageFormat.OPENAI,
            context_mode=turn.context_mode or (ContextMode.AUTO if _continues(body) else None),
            commit=asked.commits and turn.commit,
            expected_generation=turn.expected_generation or asked.generation,
            creates_if_missing=asked.creates,
            instructions=parsed.instructions or ("" if _continues(body) else None),
            follows=_continues(body),
            item_ids=_item_ids(body.get("input")),
            said={key: body[key] for key in RESPONSE_FIELDS if key in body},
        )

    @override
    def asking(self, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a chat's turn for this engine."""
        fields = {key: value for key, value in body.items() if key not in _CHAT_FIELDS}
        return RESPONSES_PATH, {**fields, "store": False, _MADE: True}

    @override
    def answer(self, turn: Turn) -> JsonAnswer | SseAnswer:
        """Return a reader of the engine's response that writes the client's."""
        told = _Told(turn, self.ends)
        return _ResponseStream(turn.request, told) if turn.request.stream else _WholeResponse(turn.request, told)

    def _parsed(self, given: dict[str, Any]) -> Any:
        """Return the request. Raises InvalidRequest."""
        items, tools = (held if isinstance(held := given.get(name), list) else () for name in ("input", "tools"))
        if len(tools) > _TOOLS_MAX:
            raise InvalidRequest(f"tools may have at most {_TOOLS_MAX} items", param="tools")
        for index, tool in enumerate(tools):
            if _kind(tool) not in _TOOLS:
                raise InvalidRequest("a context's tools must be functions of the client", param=f"tools[{index}]")
        for index, item in enumerate(items):
            if not _is_text_item(item):
                raise InvalidRequest("a context can store only text, calls and their results", param=f"input[{index}]")
        with by_vllm("the request", "input"):
            return sys.modules[type(self.serving).__module__].ResponsesRequest.model_validate(dict(given))

    def _messages(self, items: Any) -> list[dict[str, Any]]:
        with by_vllm("an item", "input"):
            made = self.rendering.construct_input_messages(request_instructions=None, request_input=items)
            return [_message(message) for message in made]

    def _tools(self, parsed: Any) -> list[dict[str, Any]] | None:
        leaves_out = self.serving.online_renderer.exclude_tools_when_tool_choice_none
        with by_vllm("a tool", "tools"):
            tools: list[dict[str, Any]] | None = self.rendering.construct_tool_dicts(
                parsed.tools, parsed.tool_choice, exclude_tools_when_tool_choice_none=leaves_out
            )
        return tools


@dataclass(slots=True)
class _Told:
    """How one turn's response is read and told."""

    turn: Turn
    ends: frozenset[int]

    def read(self, response: dict[str, Any], result: AnswerResult) -> None:
        """Read the transcript's part of a response that has ended. Raises EngineFailed."""
        result.token_ids = [token for message in response["output_messages"] for token in message["tokens"]]
        result.finish_reason = _ENDS.get(response["status"])
        for item in response["output"]:
            _take_item(item, result)
        result.item_ids = [item["id"] for item in response["output"] if isinstance(item.get("id"), str)]
        result.take_report(response)
        usage = response["usage"]
        result.take_usage(usage["output_tokens"], usage["input_tokens_details"])
        ends = self.ends.union(self.turn.request.engine_fields.get("stop_token_ids") or ())
        # vLLM gives an aborted answer the status of a whole one.
        is_whole = result.finish_reason == "length" or (result.token_ids[-1:] and result.token_ids[-1] in ends)
        if not result.finish_reason or not is_whole:
            result.finish_reason = "abort"
        result.finish(prefill_only=False)

    def told(self, response: dict[str, Any]) -> dict[str, Any]:
        """Return a response as its client is told it."""
        turn = self.turn
        ours: dict[str, Any] = {"previous_response_id": turn.request.said.get("previous_response_id")}
        if turn.save_ref is not None:
            ours["id"] = response_id(turn.session.session_id, turn.session.generation + 1)
        if turn.request.said.get("conversation") is not None:
            ours["conversation"] = {"id": turn.session.session_id}
        hidden = {"kv_transfer_params", *(() if turn.request.engine_fields.get(_MADE) else _MADE_BY_IT)}
        return {key: value for key, value in response.items() if key not in hidden} | ours

    def closed(self, response: dict[str, Any], usage: dict[str, Any], session: dict[str, Any]) -> dict[str, Any]:
        """Return the whole response with the turn's usage and session fields."""
        details = {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]}
        counted = {**response["usage"], "context": usage["context"]}
        counted["input_tokens_details"] = {**(counted["input_tokens_details"] or {}), **details}
        return {**self.told(response), **session, "usage": counted}


class _WholeResponse(JsonAnswer):
    """A response in one body."""

    def __init__(self, request: TurnRequest, told: _Told) -> None:
        super().__init__(request)
        self._told = told

    @override
    def read(self) -> None:
        self._told.read(self._answer, self.result)

    @override
    def closing(self, usage: dict[str, Any], session: dict[str, Any]) -> bytes:
        told = self._told.closed(self._answer, usage, session)
        if not usage["context"]["committed"]:
            told["id"] = self._answer["id"]  # no request can continue it
        return json.dumps(told).encode()


class _ResponseStream(SseAnswer):
    """A response as events. The last one, with the whole response, waits for the commit.

    Events that vLLM sends before it asks the engine wait for the next event: the receipt is known by then.
    """

    tells_done: ClassVar[bool] = False

    def __init__(self, request: TurnRequest, told: _Told) -> None:
        super().__init__(request)
        self._told = told
        self._early: list[bytes] = []
        self._last: Event | None = None
        self._whole: dict[str, Any] = {}

    @override
    def failing(self, event: Event) -> bytes:
        self.result.error = True
        return self._after_early(event.raw)

    @override
    def complete(self) -> None:
        if self._last is None and not self.result.error:
            raise EngineFailed("the engine's stream broke")

    @override
    def closing(self, usage: dict[str, Any], session: dict[str, Any]) -> bytes:
        assert self._last is not None
        response = self._told.closed(self._whole["response"], usage, session)
        return b"".join(self._early) + _with_response(self._last, self._whole, response)

    @override
    def _take_answer_event(self, event: Event, answer: dict[str, Any]) -> bytes:
        if self._last is not None:
            raise EngineFailed("the engine sent data after the end")
        match answer["type"]:
            case "response.created" | "response.in_progress":
                self.hold(event)
                self._early.append(_with_response(event, answer, self._told.told(answer["response"])))
                return b""
            case "response.completed" | "response.incomplete":
                self.hold(event)
                if not self.result.error:
                    self._told.read(answer["response"], self.result)
                self._last, self._whole = event, answer
                return b""
            case "response.failed":
                self.result.error = True
                return self._after_early(_with_response(event, answer, self._told.told(answer["response"])))
            case "error":
                return self.failing(event)
            case _:
                return self._after_early(event.raw)

    def _after_early(self, told: bytes) -> bytes:
        whole = b"".join((*self._early, told))
        self._early.clear()
        return whole


def _with_response(event: Event, answer: dict[str, Any], response: dict[str, Any]) -> bytes:
    return event.with_data(compact_json({**answer, "response": response}))


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with a template's fields only, its parts of text under one name."""
    kept = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}
    content = kept.get("content")
    if content is not None and not isinstance(content, str):
        kept["content"] = [_part(part) for part in content]
    return kept


def _part(part: Any) -> Any:
    is_text = isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
    return {"type": "text", "text": part["text"]} if is_text else part


def _is_text_item(item: Any) -> bool:
    """Return whether an item is of a kind that a context holds, with nothing but text in its lists."""
    if _kind(item) not in _ITEMS:
        return False
    lists = (item[key] for key in ("content", "output", "summary") if isinstance(item.get(key), list))
    return all(_kind(part) in _PARTS for parts in lists for part in parts)


def _kind(said: Any) -> str:
    """Return the type of an item, a part or a tool; empty: it says none."""
    kind = said.get("type", "") if isinstance(said, dict) else None
    return kind if isinstance(kind, str) else "none of these"


def _take_item(item: dict[str, Any], result: AnswerResult) -> None:
    """Read one output item: the chat message that vLLM would make of it (its `construct_input_messages`)."""
    if item["type"] == "message":
        result.text += "".join(part.get("text") or "" for part in item["content"])
    elif item["type"] == "function_call":
        name = f"{space}__{item['name']}" if (space := item.get("namespace")) else item["name"]
        result.take_call({"id": item["call_id"], "function": {"name": name, "arguments": item["arguments"]}})
    elif item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": item["input"]}, ensure_ascii=False)
        result.take_call({"id": item["call_id"], "function": {"name": item["name"], "arguments": arguments}})


def _item_ids(items: Any) -> frozenset[str]:
    named = (item.get("id") for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
    return frozenset(one for one in named if isinstance(one, str))


def _continues(body: Mapping[str, Any]) -> bool:
    """Return whether the body names its predecessor in OpenAI's fields: the input follows that."""
    return body.get("previous_response_id") is not None or body.get("conversation") is not None


def _truncation(body: Mapping[str, Any]) -> Any:
    said = body.get("truncation")
    if said == "auto":
        told = 'truncation must be {"type": "rolling_tokens", "tokens": …} with a context, not "auto"'
        raise InvalidRequest(told, param="truncation")
    return None if said == "disabled" else said
