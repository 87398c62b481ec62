"""Turns on `/v1/responses`: the chat's turns, told in the words of OpenAI's responses.

Sources: OpenAI's API reference (responses, streaming events), the types of the `openai` package, and vLLM 0.32
entrypoints/openai/responses where the reference says nothing. `prompt/response_input.py` translates the request,
`response_output.py` the answer's items.

OpenAI's `instructions` are those of one request: they take the place of the system message that a conversation begins
with. A turn that says `previous_response_id` or `conversation` and has none goes on without it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from typing_extensions import override

from contextcache.claim import RESPONSES_PATH, SESSION_HEADER, label_of, read_strict_claims
from contextcache.errors import EngineFailed, InvalidRequest
from contextcache.fields import OUR_FIELDS
from contextcache.input_items import COMPACTION
from contextcache.items import custom_arguments, custom_input
from contextcache.model import ContextMode, SessionId, UsageFormat
from contextcache.responses import (
    REPEATED,
    RESPONSE_FIELDS,
    continued_by,
    response_id,
    response_object,
    usage_of_response,
)
from vllm_plugin.turn.answer.chat import UNREADABLE, AnswerResult, Dialect, JsonAnswer, SseAnswer, compact_json
from vllm_plugin.turn.answer.diagnostics import openai_diagnostics
from vllm_plugin.turn.answer.events import Event
from vllm_plugin.turn.answer.response_output import ResponseOutput
from vllm_plugin.turn.prompt.request import CHAT_PATH, TurnRequest, read_compared, read_turn
from vllm_plugin.turn.prompt.response_input import NAMES, ToolNames, chat_fields
from vllm_plugin.turn.refusals import engine_error
from vllm_plugin.turn.turn import Client, Turn

_REFUSED: Mapping[str, str] = {
    "background": "a turn is answered while its client waits",
    "enable_response_messages": "the answer's token ids are returned on /v1/chat/completions",
    "previous_input_messages": "the context has the previous messages",
    "prompt": "no prompt templates are stored here",
}
_NOT_RECORDED = frozenset({"tools", "instructions", "conversation", "store", COMPACTION})
"""Fields that are not stored with each answer. Tools are large, and the transcript has the instructions."""


class Responses(Dialect):
    """OpenAI's responses."""

    names = NAMES

    @override
    def turn(self, client: Client, body: dict[str, Any], raw: bytes, named: SessionId | None) -> TurnRequest:
        """Check a turn, `raw` as it came, of the context it was routed for. Raises InvalidRequest."""
        header = client.headers.get(SESSION_HEADER)
        label = named if named is not None and named == label_of(header) else None
        asked = continued_by(RESPONSES_PATH, read_strict_claims(raw, RESPONSES_PATH), header, label=label)
        if asked is None or asked.session_id not in (None, named):
            raise InvalidRequest("the body names a different context than the gateway routed", param="session_id")
        for key, reason in _REFUSED.items():
            if body.get(key):
                raise InvalidRequest(f"{key} cannot be used with a context: {reason}", param=key)
        ours = {key: body[key] for key in OUR_FIELDS - {"truncation", "context_create"} if key in body}
        chat = chat_fields(body) | ours | {"truncation": _truncation(body)}
        turn = read_turn(CHAT_PATH, chat, client.headers)
        told = {**body, COMPACTION: asked.said.get(COMPACTION)}
        return replace(
            turn,
            # Its usage counts the whole prompt, and the tokens that were read.
            usage=UsageFormat.OPENAI,
            context_mode=turn.context_mode or (ContextMode.AUTO if _continues(body) else None),
            commit=asked.commits and turn.commit,
            expected_generation=turn.expected_generation or asked.generation,
            creates_if_missing=asked.creates,
            instructions=body.get("instructions") or ("" if _continues(body) else None),
            follows=_continues(body),
            item_ids=_item_ids(body.get("input")),
            compared_with=read_compared(body, "prompt_cache_options", "comparison_response_id") or None,
            said={key: told[key] for key in {*REPEATED, *RESPONSE_FIELDS, COMPACTION} if told.get(key) is not None},
        )

    @override
    def answer(self, turn: Turn) -> JsonAnswer | SseAnswer:
        """Return a reader of the chat's answer that writes the response."""
        return _ResponseStream(turn) if turn.request.stream else _WholeResponse(turn)


class _Response:
    """The response to one turn, as its client is told it."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._said = turn.request.said
        self._names = ToolNames(self._said.get("tools", ()))
        self._id = self._unkept_id = f"resp_{secrets.token_hex(16)}"
        """An id from which no request can continue."""
        if turn.save_ref is not None:
            self._id = response_id(turn.session.session_id, turn.session.generation + 1)
        self.output = ResponseOutput(self._names)

    def told(self, status: str, **more: Any) -> dict[str, Any]:
        """Return the response as it is now."""
        session_id = self._turn.session.session_id if "conversation" in self._said else None
        return response_object(
            self._id,
            said=self._said,
            status=status,
            created_at=self._turn.started_ms // 1000,
            model=self._turn.request.model,
            output=self.output.items,
            conversation=session_id,
        ) | dict(more)

    def closed(
        self, result: AnswerResult, engine: Mapping[str, Any], usage: Mapping[str, Any], session: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the whole response with the turn's usage and session fields. `engine`: the engine's usage."""
        counted = usage_of_response(
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            written=(engine.get("prompt_tokens_details") or {}).get("created_cache_tokens") or 0,
            reasoning=_reasoning_tokens(engine),
        )
        counted["context"] = usage["context"]
        if not usage["context"]["committed"]:
            self._id = self._unkept_id
        compared = self._turn.comparison
        if compared is None:
            return self.told(self._status(result), **session, usage=counted)
        found = openai_diagnostics(compared, cached_tokens=counted["input_tokens_details"]["cached_tokens"])
        return self.told(self._status(result), **session, usage=counted, prompt_cache_diagnostics=found)

    def remember(self, result: AnswerResult, engine: Mapping[str, Any]) -> None:
        """Note what is stored with the answer: ids of the items, calls as they may be sent again, and its record.

        `engine`: the engine's usage.
        """
        result.item_ids = [item["id"] for item in self.output.items]
        result.response = {key: value for key, value in self._said.items() if key not in _NOT_RECORDED} | {
            "created_at": self._turn.started_ms // 1000,
            "status": self._status(result),
            "reasoning_tokens": _reasoning_tokens(engine),
            "in_conversation": "conversation" in self._said,
        }
        for function in (call["function"] for call in result.tool_calls):
            if function["name"] in self._names.customs:
                function["arguments"] = custom_arguments(custom_input(function["arguments"]))

    def _status(self, result: AnswerResult) -> str:
        is_whole = result.finish_reason != "length" and not self._turn.request.prefill_only
        return "completed" if is_whole else "incomplete"


class _WholeResponse(JsonAnswer):
    """A response in one body."""

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn.request)
        self._response = _Response(turn)

    @override
    def read(self) -> None:
        super().read()
        (choice,) = self._answer["choices"]
        if not self._request.prefill_only:
            self._response.output.take(choice["message"], choice.get("logprobs"))
            self._response.output.end()
        self._response.remember(self.result, self._answer["usage"])

    @override
    def closing(self, usage: dict[str, Any], session: dict[str, Any]) -> bytes:
        return json.dumps(self._response.closed(self.result, self._answer["usage"], usage, session)).encode()


class _ResponseStream(SseAnswer):
    """A response as events. The last one, with the whole response, waits for the commit."""

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn.request)
        self._response = _Response(turn)
        self._num_events = 0
        self._end = b""

    @override
    def passing(self, event: Event, answer: dict[str, Any]) -> bytes:
        return self._told(answer)

    @override
    def failing(self, error: Event) -> bytes:
        failure = engine_error(500, error.data or b"")  # in a stream its own status has gone already
        told = {"code": "server_error", "message": failure.message}
        return self._begun() + self._lifecycle(self._response.told("failed", error=told))

    @override
    def complete(self) -> None:
        """Check that the stream came to its end, and tell that: nothing is committed that cannot be told."""
        super().complete()
        try:
            self._end = b"".join(map(self._told, self.held_events()))
            self._end += self._written(self._response.output.end())
        except UNREADABLE as exc:
            raise EngineFailed("the engine sent an invalid event") from exc
        self._response.remember(self.result, (self._usage_event or {}).get("usage") or {})

    @override
    def closing(self, usage: dict[str, Any], session: dict[str, Any]) -> bytes:
        assert self._usage_event is not None
        whole = self._response.closed(self.result, self._usage_event["usage"], usage, session)
        return self._end + self._lifecycle(whole)

    def _told(self, answer: dict[str, Any]) -> bytes:
        """Return the client's events of one of the chat's."""
        (choice,) = answer["choices"]
        delta = {} if self._request.prefill_only else choice.get("delta") or {}
        return self._begun() + self._written(self._response.output.take(delta, choice.get("logprobs")))

    def _begun(self) -> bytes:
        """Return the events that begin the stream, once."""
        if self._num_events:
            return b""
        response = self._response.told("in_progress")
        return self._lifecycle(response, "created") + self._lifecycle(response)

    def _lifecycle(self, response: dict[str, Any], change: str = "") -> bytes:
        return self._written([{"type": f"response.{change or response['status']}", "response": response}])

    def _written(self, events: Iterable[dict[str, Any]]) -> bytes:
        written = b""
        for event in events:
            kind = event["type"].encode()
            written += b"event: %b\ndata: %b\n\n" % (kind, compact_json({**event, "sequence_number": self._num_events}))
            self._num_events += 1
        return written


def _reasoning_tokens(engine: Mapping[str, Any]) -> int:
    return (engine.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0


def _item_ids(items: Any) -> frozenset[str]:
    named = (item.get("id") for item in items) if isinstance(items, list) else ()
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
