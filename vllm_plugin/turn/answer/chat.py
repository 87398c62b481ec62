"""The engine's answer, JSON or events: collect the transcript's part, edit the client's part. Pure.

Both shapes hold the end back until the turn has been settled: `JsonAnswer` everything, `SseAnswer` the event with the
finish reason, the usage event and `[DONE]`. Events before that pass at once and in order, without the token ids that
the client did not ask for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from contextcache.errors import ContextCacheError, EngineFailed, NoReadyEndpoint
from contextcache.model import SessionId, UsageFormat
from vllm_plugin.turn.answer.events import Event, EventSplitter
from vllm_plugin.turn.prompt.request import CHAT_PATH, TurnRequest, read_turn

if TYPE_CHECKING:
    from vllm_plugin.turn.answer.rest import Rest
    from vllm_plugin.turn.engine import Engine
    from vllm_plugin.turn.turn import Client, Turn

DONE = b"[DONE]"
_END = b"data: %b\n\n" % DONE
_ANSWER_BYTES_MAX = 256 << 20
"""Limit of a whole answer, and of the held part of a stream: ten times a long one with 20 log-probabilities a token."""
_TOOL_CALLS_MAX = 1024
UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)
"""Errors that reading JSON of any shape may raise."""
GIVEN_UP = frozenset({"abort", "error"})
"""vLLM 0.32 v1/engine/__init__.py FINISH_REASON_STRINGS: the engine stopped before the answer's end. It does so
with every request while it shuts down."""


@dataclass(slots=True)
class AnswerResult:
    """Content of an answer."""

    token_ids: list[int] = field(default_factory=list)
    """Every sampled token, in order, the end-of-sequence token included."""
    text: str = ""
    """Text the client has seen (completions, and the content of a chat message)."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    has_reasoning: bool = False
    """The client has seen reasoning, which is not part of the text."""
    text_offset: int = 0
    """Offset of the next token in the log-probabilities of a completion."""
    item_ids: list[str] = field(default_factory=list)
    """Ids of a response's output items, by which its client may send them again."""
    response: dict[str, Any] = field(default_factory=dict)
    """Fields of a response that are stored with the answer (`responses.RECORDED`)."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    """As the engine counts them."""
    kv_transfer: dict[str, Any] = field(default_factory=dict)
    """Report of the engine's connector: a whole answer has it, a stream not."""

    def message(self) -> dict[str, Any]:
        """Return the chat message the client would send back as history."""
        if not self.tool_calls:
            return {"role": "assistant", "content": self.text}
        return {"role": "assistant", "content": self.text or None, "tool_calls": self.tool_calls}

    def finish(self, *, prefill_only: bool) -> None:
        """Raise `given_up` for an answer that the engine gave up.

        `prefill_only`: the answer is empty, although the engine had to sample one token.
        """
        if self.finish_reason in GIVEN_UP:
            raise self.given_up()
        if prefill_only:
            self.token_ids, self.text, self.tool_calls, self.completion_tokens = [], "", [], 0

    def given_up(self) -> ContextCacheError:
        """Return the error of an answer that the engine gave up."""
        if not self.token_ids:
            return NoReadyEndpoint("the engine accepts no more turns", retry_after_s=1)
        return EngineFailed("the engine failed before the answer ended")

    def take_usage(self, completion_tokens: Any, prompt_details: Any) -> None:
        """Read the parts of the engine's usage object."""
        self.completion_tokens = _count(completion_tokens)
        self.cached_tokens = _count((prompt_details or {}).get("cached_tokens"))

    def take_choice(self, choice: dict[str, Any]) -> None:
        """Read one choice of a whole answer or of one event."""
        self.token_ids += map(_count, choice.get("token_ids") or ())
        part = choice.get("message") or choice.get("delta") or {}
        # A string that one name alone holds grows in place. Else each token copies the whole text.
        text, self.text = self.text, ""
        text += choice.get("text") or part.get("content") or ""
        self.text = text
        if part.get("reasoning"):
            self.has_reasoning = True
        if (logprobs := choice.get("logprobs")) and (offsets := logprobs.get("text_offset")):
            self.text_offset = offsets[-1] + len(logprobs["tokens"][-1])
        for call in part.get("tool_calls") or ():
            self.take_call(call)
        if reason := choice.get("finish_reason"):
            self.finish_reason, self.stop_reason = reason, choice.get("stop_reason")

    def take_call(self, call: dict[str, Any]) -> None:
        """Read a tool call, or the next part of one, in a chat's form."""
        index = call.get("index", len(self.tool_calls))
        if not 0 <= index < _TOOL_CALLS_MAX:
            raise ValueError(index)
        while len(self.tool_calls) <= index:
            self.tool_calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        stored = self.tool_calls[index]
        stored["id"] = call.get("id") or stored["id"]
        told, function = stored["function"], call.get("function") or {}
        told["name"] = function.get("name") or told["name"]
        arguments, told["arguments"] = told["arguments"], ""  # as with the text
        arguments += function.get("arguments") or ""
        told["arguments"] = arguments


def _count(value: Any) -> int:
    """Return a number that counts or names something; none is 0. Raises TypeError, ValueError."""
    if value is None:
        return 0
    if type(value) is not int:
        raise TypeError(value)
    if not 0 <= value < 1 << 63:
        raise ValueError(value)
    return value


def _without_output(choice: dict[str, Any]) -> None:
    """Empty a choice of a prefill-only turn: the engine had to sample one token."""
    for key in ("text", "content"):
        for holder in (choice, choice.get("message") or {}, choice.get("delta") or {}):
            if key in holder:
                holder[key] = ""
    choice["logprobs"] = None
    choice["finish_reason"] = "length"


def _strip(answer: dict[str, Any], *, keep_token_ids: bool) -> None:
    """Remove fields that only we asked the engine for, and our own parameters that vLLM echoes."""
    answer.pop("kv_transfer_params", None)
    if keep_token_ids:
        return
    answer.pop("prompt_token_ids", None)
    for choice in answer.get("choices", []):
        choice.pop("token_ids", None)
        choice.pop("prompt_token_ids", None)


class JsonAnswer:
    """A whole answer in one body."""

    def __init__(self, request: TurnRequest) -> None:
        self._request = request
        self._body = bytearray()
        self._answer: dict[str, Any] = {}
        self.result = AnswerResult()

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes; nothing passes before the end. Raises EngineFailed for more than an answer can be."""
        self._body += chunk
        if len(self._body) > _ANSWER_BYTES_MAX:
            raise EngineFailed("the engine's answer has no end")
        return b""

    def is_over(self, *, more: bool) -> bool:
        """Return whether the engine's answer has ended. `more`: whether it sends more bytes."""
        return not more

    def complete(self) -> None:
        """Read the body. Raises EngineFailed when it is not an answer, NoReadyEndpoint when the engine gave it up."""
        try:
            self._answer = json.loads(bytes(self._body))
            self.read()
        except UNREADABLE as exc:
            raise EngineFailed("the engine's answer is not valid") from exc

    def read(self) -> None:
        """Read the transcript's part of the whole answer. Raises what JSON of another shape does."""
        (choice,) = self._answer["choices"]
        self.result.take_choice(choice)
        usage = self._answer["usage"]
        self.result.take_usage(usage.get("completion_tokens"), usage.get("prompt_tokens_details"))
        if isinstance(told := self._answer.get("kv_transfer_params"), dict):
            self.result.kv_transfer = told
        if self._request.prefill_only:
            _without_output(choice)
        self.result.finish(prefill_only=self._request.prefill_only)

    def closing(self, usage: dict[str, Any], session: dict[str, Any]) -> bytes:
        """Return the body with the turn's usage and session fields."""
        _strip(self._answer, keep_token_ids=self._request.wants_token_ids)
        return json.dumps({**self._answer, **session, "usage": usage}).encode()


class SseAnswer:
    """An answer as a stream of events; events may be cut anywhere between two chunks.

    Several engines may send it: after a break, `rest` makes the next engine's events those of the first.
    """

    def __init__(self, request: TurnRequest, *, counts_whole_prompt: bool = True) -> None:
        """`counts_whole_prompt`: its usage counts the prompt as the engine's does (`UsageFormat.OPENAI`)."""
        self._request = request
        self._tells_running_usage = request.wants_usage_chunk and counts_whole_prompt and not request.prefill_only
        """Computed tokens are known at the end only, so a stream that counts those has no usage before."""
        self._splitter = EventSplitter()
        self.head: dict[str, Any] = {}
        """`id`, `object`, `created` and `model` of the first event."""
        self.rest: Rest | None = None
        self.is_done = False
        """The answer has its end."""
        self.gave_up = False
        """The engine said that it ends early."""
        self.error: Event | None = None
        """The engine's error, if it told one."""
        self._finish_events: list[dict[str, Any]] = []
        """The one with the finish reason, and whatever follows it."""
        self._usage_event: dict[str, Any] | None = None
        self._held_bytes = 0
        self.result = AnswerResult()

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes, return those that may pass now. Raises EngineFailed for an event that cannot be read."""
        try:
            return b"".join([self._take_event(event) for event in self._splitter.feed(chunk)])
        except ContextCacheError:
            raise
        except UNREADABLE as exc:
            raise EngineFailed("the engine sent an invalid event") from exc

    @property
    def needs_no_more(self) -> bool:
        """Whether the engine's later events are not read."""
        return self.gave_up or (self.rest is not None and self.rest.ended)

    def is_over(self, *, more: bool) -> bool:
        """Return whether the stream has ended. One that breaks off may go on elsewhere."""
        return self.is_done and (not more or self.needs_no_more)

    def begin_rest(self, rest: Rest | None) -> None:
        """Read on from another engine; None: it begins the answer."""
        self.rest, self._splitter = rest, EventSplitter()
        self.gave_up, self.error = False, None

    def end(self, usage_event: dict[str, Any]) -> None:
        """End the answer without the engine, which has sent the last token."""
        self._usage_event, self.is_done, self.gave_up = usage_event, True, False

    def complete(self) -> None:
        """Check that the stream came to its proper end. Raises EngineFailed, NoReadyEndpoint."""
        if self.gave_up:
            raise self.result.given_up()
        self.result.finish(prefill_only=self._request.prefill_only)
        if not self.is_done or not self._finish_events or self._usage_event is None:
            raise EngineFailed("the engine's stream broke")

    def closing(self, usage: dict[str, Any], session: dict[str, Any]) -> bytes:
        """Return the last events: the finish reason, the usage and session fields, `[DONE]`.

        A client that asked for a usage event gets one; any other finds usage and session in the last event it
        expects, because an event without choices breaks loops that read `choices[0]`.
        """
        last = (self._usage_event if self._request.wants_usage_chunk else None) or self._finish_events[-1]
        last |= {**session, "usage": usage}
        return self.told_end()

    def told_end(self) -> bytes:
        """Return the held events and `[DONE]`."""
        return b"".join(b"data: %b\n\n" % compact_json(event) for event in self.held_events()) + _END

    def held_events(self) -> list[dict[str, Any]]:
        """Return the held events: the finish reason, and the usage event if the client asked for one."""
        for event in self._finish_events:
            _strip(event, keep_token_ids=self._request.wants_token_ids)
        if not self._request.wants_usage_chunk or self._usage_event is None:
            return self._finish_events
        return [*self._finish_events, self._usage_event]

    def passing(self, event: Event, answer: dict[str, Any]) -> bytes:
        """Return the client's bytes of an event before the last ones."""
        return event.with_data(compact_json(answer))

    def failing(self, error: Event) -> bytes:
        """Return the client's last bytes for an error of the engine's in the stream."""
        return error.raw + _END

    def _take_event(self, event: Event) -> bytes:
        if self.needs_no_more:
            return b""
        if event.data is None:
            return event.raw  # comments and keep-alives
        if event.data.strip() == DONE:
            self.is_done = True
            return b""
        if self.is_done:
            raise EngineFailed("the engine sent data after the end")
        answer = _decoded(event.data)
        if has_error := bool(answer.get("error")):
            self.error = event
        self.gave_up = has_error or (answer.get("choices") or [{}])[0].get("finish_reason") in GIVEN_UP
        if self.gave_up or (self.rest is not None and not self.rest.take(answer)):
            return b""
        self.head = self.head or {name: answer[name] for name in ("id", "object", "created", "model") if name in answer}
        passing = self._take_answer_event(event, answer)
        if self.rest is not None and self.rest.ended:
            self.end(self.rest.usage_event())
        return passing

    def _take_answer_event(self, event: Event, answer: dict[str, Any]) -> bytes:
        if usage := answer.get("usage"):
            self.result.take_usage(usage.get("completion_tokens"), usage.get("prompt_tokens_details"))
        choices = answer.get("choices") or []
        if not choices:
            self.hold(event)
            self._usage_event = answer
            return b""
        (choice,) = choices
        self.result.take_choice(choice)
        if not self._tells_running_usage:
            answer.pop("usage", None)
        finished = choice.get("finish_reason") is not None
        if self._request.prefill_only:
            _without_output(choice)
        if finished or self._finish_events:
            self.hold(event)
            self._finish_events.append(answer)
            return b""
        if self._request.prefill_only:
            return b""
        _strip(answer, keep_token_ids=self._request.wants_token_ids)
        if self._exists_for_us_only(choice):
            return b""
        return self.passing(event, answer)

    def hold(self, event: Event) -> None:
        """Count an event that waits. Raises EngineFailed for more than an answer can have."""
        self._held_bytes += len(event.raw)
        if self._held_bytes > _ANSWER_BYTES_MAX:
            raise EngineFailed("the engine's stream has no end")

    def _exists_for_us_only(self, choice: dict[str, Any]) -> bool:
        """Return whether this is an empty chat delta, sent only because token ids were asked for."""
        return (
            self._request.path == CHAT_PATH
            and not self._request.wants_token_ids
            and not any((choice.get("delta") or {}).values())
            and not choice.get("logprobs")
        )


def _decoded(data: bytes) -> Any:
    """Return the JSON of an event's data. Raises the errors of `json.loads`."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):  # half a surrogate pair and NaN are JSON for vLLM
        return json.loads(data)


def compact_json(answer: Any) -> bytes:
    """Return a value, such as an event's data, as JSON in UTF-8."""
    try:
        return msgspec.json.encode(answer)
    except (UnicodeEncodeError, OverflowError):  # half a surrogate pair is no UTF-8: written as it came, escaped
        return json.dumps(answer, separators=(",", ":")).encode()


class Dialect:
    """Dialect of a route: this one is the engine's own, of completions and chats. The others extend it.

    It translates a request into a turn of a completion or a chat, and the engine's answer into the client's.
    """

    names: ClassVar[Mapping[str, str]] = {}
    """Client's names of a chat's fields that the dialect names otherwise."""

    async def prepare(self, engine: Engine) -> None:
        """Ask the engine for facts that `turn` needs. Raises EngineFailed, NoReadyEndpoint."""

    def turn(self, client: Client, body: dict[str, Any], raw: bytes, named: SessionId | None) -> TurnRequest:  # noqa: ARG002  # the others read them
        """Check a request, `raw` as it came, of the context it was routed for. Raises InvalidRequest."""
        return read_turn(client.path, body, client.headers)

    def client_field(self, param: str) -> str:
        """Return the client's name of a field that an error names as the engine does, with its place in it."""
        return self.names.get(re.split(r"[.\[]", param, maxsplit=1)[0], param)

    def answer(self, turn: Turn) -> JsonAnswer | SseAnswer:
        """Return a reader of the engine's answer that writes the client's."""
        if not turn.request.stream:
            return JsonAnswer(turn.request)
        return SseAnswer(turn.request, counts_whole_prompt=turn.usage is UsageFormat.OPENAI)
