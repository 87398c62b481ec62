"""The engine's answer, JSON or events: collect what the transcript needs, edit what the client sees. Pure.

Both shapes hold the end back until the turn has been settled: `JsonAnswer` everything, `SseAnswer` the event with the
finish reason, the usage event and `[DONE]`. Events before that pass at once and in order, without the token ids that
the client did not ask for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from contextcache.errors import EngineFailed
from vllm_plugin.turn.request import CHAT_PATH, TurnRequest

_EVENT_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"
_MAX_EVENT_BYTES = 16 << 20


@dataclass(slots=True)
class AnswerResult:
    """What an answer turned out to be."""

    token_ids: list[int] = field(default_factory=list)
    """Every sampled token, in order, the end-of-sequence token included."""
    text: str = ""
    """Text the client has seen (completions, and the content of a chat message)."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """As the engine counts them."""
    error: bool = False
    """The engine broke off with an error event."""

    def message(self) -> dict[str, Any]:
        """Return the chat message the client would send back as history."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        elif self.text == "":
            message["content"] = ""
        return message

    def take_usage(self, usage: dict[str, Any]) -> None:
        """Read the engine's usage object."""
        self.prompt_tokens = usage.get("prompt_tokens", 0)
        self.completion_tokens = usage.get("completion_tokens", 0) or 0
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def take_choice(self, choice: dict[str, Any]) -> None:
        """Read one choice of a whole answer or of one event."""
        self.token_ids += choice.get("token_ids") or []
        part = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or part.get("content") or ""
        for call in part.get("tool_calls") or []:
            self._take_tool_call(call)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.stop_reason = choice.get("stop_reason") if choice.get("finish_reason") else self.stop_reason

    def _take_tool_call(self, call: dict[str, Any]) -> None:
        index = call.get("index", len(self.tool_calls))
        while len(self.tool_calls) <= index:
            self.tool_calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        stored = self.tool_calls[index]
        stored["id"] = call.get("id") or stored["id"]
        function = call.get("function") or {}
        stored["function"]["name"] = function.get("name") or stored["function"]["name"]
        stored["function"]["arguments"] += function.get("arguments") or ""


def _without_output(choice: dict[str, Any]) -> None:
    """Empty a choice of a prefill-only turn: the engine had to sample one token that nobody asked for."""
    for key in ("text", "content"):
        for holder in (choice, choice.get("message") or {}, choice.get("delta") or {}):
            if key in holder:
                holder[key] = ""
    choice["logprobs"] = None
    choice["finish_reason"] = "length"


def _strip(answer: dict[str, Any], *, keep_token_ids: bool) -> None:
    """Remove what only we asked the engine for, and our own parameters that vLLM echoes."""
    answer.pop("kv_transfer_params", None)
    if keep_token_ids:
        return
    answer.pop("prompt_token_ids", None)
    for choice in answer.get("choices", []):
        choice.pop("token_ids", None)
        choice.pop("prompt_token_ids", None)


def _settle_result(result: AnswerResult, request: TurnRequest) -> None:
    if request.prefill_only:
        result.token_ids, result.text, result.tool_calls = [], "", []
        result.completion_tokens = 0


class JsonAnswer:
    """A whole answer in one body."""

    def __init__(self, request: TurnRequest) -> None:
        self._request = request
        self._body = bytearray()
        self._answer: dict[str, Any] = {}
        self.result = AnswerResult()

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes; nothing passes before the end."""
        self._body += chunk
        return b""

    def complete(self) -> None:
        """Read the body. Raises EngineFailed when it is not an answer."""
        try:
            self._answer = json.loads(bytes(self._body))
            choice = self._answer["choices"][0]
            self.result.take_choice(choice)
            self.result.take_usage(self._answer["usage"])
        except (ValueError, KeyError, IndexError, TypeError) as exc:
            raise EngineFailed("the engine's answer cannot be read") from exc
        if self._request.prefill_only:
            _without_output(choice)
        _settle_result(self.result, self._request)

    def closing(self, usage: dict[str, Any], session: dict[str, Any]) -> bytes:
        """Return the body with the turn's usage and session fields."""
        _strip(self._answer, keep_token_ids=self._request.wants_token_ids)
        return json.dumps({**self._answer, **session, "usage": usage}).encode()


class SseAnswer:
    """An answer as a stream of events; events may be cut anywhere between two chunks."""

    def __init__(self, request: TurnRequest) -> None:
        self._request = request
        self._buffer = bytearray()
        self._finish_events: list[dict[str, Any]] = []
        self._usage_event: dict[str, Any] | None = None
        self._done = False
        self.result = AnswerResult()

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes, return what may pass now. Raises EngineFailed for an event that cannot be read."""
        self._buffer += chunk
        passing = bytearray()
        while (end := self._buffer.find(_EVENT_END)) >= 0:
            event = bytes(self._buffer[:end])
            del self._buffer[: end + len(_EVENT_END)]
            passing += self._take_event(event)
        if len(self._buffer) > _MAX_EVENT_BYTES:
            raise EngineFailed("the engine sent an event without an end")
        return bytes(passing)

    def complete(self) -> None:
        """Check that the stream came to its proper end. Raises EngineFailed."""
        if self.result.error:
            return
        if not self._done or not self._finish_events or self._usage_event is None:
            raise EngineFailed("the engine's stream broke off")
        _settle_result(self.result, self._request)

    def closing(self, usage: dict[str, Any], session: dict[str, Any]) -> bytes:
        """Return the last events: the finish reason, the usage and session fields, `[DONE]`.

        A client that asked for a usage event gets one; any other finds usage and session in the last event it
        expects, because an event without choices breaks loops that read `choices[0]`.
        """
        for event in self._finish_events:
            _strip(event, keep_token_ids=self._request.wants_token_ids)
        last = self._finish_events[-1]
        events = list(self._finish_events)
        if self._request.wants_usage_chunk and self._usage_event is not None:
            last = self._usage_event
            events.append(last)
        last |= {**session, "usage": usage}
        return b"".join(_event(event) for event in events) + _DATA + _DONE + _EVENT_END

    def _take_event(self, raw: bytes) -> bytes:
        if not raw.startswith(_DATA):
            return raw + _EVENT_END  # comments and keep-alives
        data = raw[len(_DATA) :]
        if data.strip() == _DONE:
            self._done = True
            return raw + _EVENT_END if self.result.error else b""
        try:
            event = json.loads(data)
        except ValueError as exc:
            raise EngineFailed("the engine sent an event that is not JSON") from exc
        if "error" in event:
            self.result.error = True
            return raw + _EVENT_END
        return self._take_answer_event(event)

    def _take_answer_event(self, event: dict[str, Any]) -> bytes:
        if event.get("usage"):
            self.result.take_usage(event["usage"])
        choices = event.get("choices") or []
        if not choices:
            self._usage_event = event
            return b""
        choice = choices[0]
        self.result.take_choice(choice)
        finished = choice.get("finish_reason") is not None
        if self._request.prefill_only:
            _without_output(choice)
        if finished:
            self._finish_events.append(event)
            return b""
        if self._request.prefill_only:
            return b""
        _strip(event, keep_token_ids=self._request.wants_token_ids)
        if self._exists_for_us_only(choice):
            return b""
        if not self._request.wants_usage_chunk:
            event.pop("usage", None)
        return _event(event)

    def _exists_for_us_only(self, choice: dict[str, Any]) -> bool:
        """Return whether this is an empty chat delta, sent only because token ids were asked for."""
        return (
            self._request.path == CHAT_PATH
            and not self._request.wants_token_ids
            and not any(choice.get("delta", {}).values())
            and not choice.get("logprobs")
        )


def _event(event: dict[str, Any]) -> bytes:
    return _DATA + json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode() + _EVENT_END
