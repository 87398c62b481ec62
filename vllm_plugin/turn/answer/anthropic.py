"""Turns on `/v1/messages`: the chat's turns, told in Anthropic's words.

vLLM's own converters make a chat request of the request, and a message of the chat's answer, as they do for the same
request without a context. They are asked of the application behind us
(`state.anthropic_serving_messages`; vLLM 0.32 entrypoints/anthropic/serving.py), nothing of vLLM's is imported. An
engine that has none of them carries no contexts here.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from typing_extensions import override

from contextcache.errors import EngineFailed, InvalidRequest, error_object
from contextcache.fields import OUR_FIELDS
from contextcache.model import SessionId, UsageFormat
from vllm_plugin.turn.answer.chat import Dialect, JsonAnswer, SseAnswer
from vllm_plugin.turn.answer.events import Event, EventSplitter
from vllm_plugin.turn.engine import Scope
from vllm_plugin.turn.prompt.request import CHAT_PATH, TurnRequest, read_turn
from vllm_plugin.turn.refusals import by_vllm, engine_error
from vllm_plugin.turn.turn import Client, Turn

_CONVERTERS = ("to_chat_completion_request", "messages_full_converter", "message_stream_converter")
_MERGE = "_merge_inline_system"
_EFFORT = "_get_disabled_thinking_effort"
"""How this engine's template takes system messages, and thinking (vLLM 0.31 and newer): the converters must be told."""


@dataclass(frozen=True, slots=True)
class Anthropic(Dialect):
    """vLLM's converters between Anthropic's messages and its own chat."""

    serving: Any
    """An AnthropicServingMessages."""
    told: Mapping[str, Any]
    """Further arguments of the converter of requests."""

    @classmethod
    async def of(cls, scope: Scope) -> Anthropic:
        """Return those of the application behind us. Raises InvalidRequest: it has none."""
        serving: Any = getattr(getattr(scope.get("app"), "state", None), "anthropic_serving_messages", None)
        if not all(hasattr(serving, name) for name in (*_CONVERTERS, _MERGE)):
            raise InvalidRequest(
                "this engine does not support contexts on /v1/messages: leave session_id out", param="session_id"
            )
        told = {"merge_inline_system": getattr(serving, _MERGE)}
        if hasattr(serving, _EFFORT):
            told["disabled_thinking_effort"] = await getattr(serving, _EFFORT)()
        return cls(serving, told)

    @override
    def turn(self, client: Client, body: dict[str, Any], raw: bytes, named: SessionId | None) -> TurnRequest:
        """Check a turn, a chat's from here on. Raises InvalidRequest, with vLLM's words for vLLM's own fields."""
        # Anthropic's usage has read and computed tokens, which are the whole prompt.
        return replace(read_turn(CHAT_PATH, self._chat(body), client.headers), usage=UsageFormat.OPENAI)

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        # A tool's result has no type of vLLM's own: its converter guesses.
        with by_vllm("a message", "messages"):
            asked = _types(self.serving).AnthropicMessagesRequest.model_validate(body)
            chat = self.serving.to_chat_completion_request(asked, **self.told)
        said: dict[str, Any] = chat.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return said | {key: body[key] for key in OUR_FIELDS if key in body}

    @override
    def answer(self, turn: Turn) -> JsonAnswer | SseAnswer:
        """Return a reader of the chat's answer that writes Anthropic's."""
        request = turn.request
        return _MessageStream(request, self.serving) if request.stream else _WholeMessage(request, self.serving)


class _WholeMessage(JsonAnswer):
    """A whole answer."""

    def __init__(self, request: TurnRequest, serving: Any) -> None:
        super().__init__(request)
        self._serving = serving
        self._message: dict[str, Any] = {}

    @override
    def read(self) -> None:
        """Read the answer and tell it anew: nothing is committed that cannot be told."""
        super().read()
        told = _types(self._serving).ChatCompletionResponse.model_validate(self._stripped())
        self._message = self._serving.messages_full_converter(told).model_dump(exclude_none=True)

    @override
    def closing(self, usage: dict[str, Any], session: dict[str, Any]) -> bytes:
        """Return the message with the turn's usage and session fields."""
        return json.dumps({**self._message, **session, "usage": _usage(usage, self._answer["usage"])}).encode()


class _MessageStream(SseAnswer):
    """An answer as Anthropic's events. The last two, `message_delta` with the usage and `message_stop`, wait."""

    tells_done: ClassVar[bool] = False

    def __init__(self, request: TurnRequest, serving: Any) -> None:
        super().__init__(request)
        self._fed = _Fed()
        self._events = serving.message_stream_converter(self._fed)
        self._step = self._events.__anext__()
        self._last: list[Event] = []

    @override
    def passing(self, event: Event, answer: dict[str, Any]) -> bytes:
        """Return Anthropic's events of a chat's event."""
        return self._told(super().passing(event, answer))

    @override
    def failing(self, event: Event) -> bytes:
        """Return an engine's error as Anthropic's."""
        failure = engine_error(500, event.data or b"")  # in a stream its own status has gone already
        told = {"type": "error", "error": error_object(failure)}
        return b"event: error\ndata: %b\n\n" % json.dumps(told).encode()

    @override
    def complete(self) -> None:
        """Check that the stream came to its end, and tell that anew: nothing is committed that cannot be told."""
        super().complete()
        if not self.result.error:
            self._last = list(EventSplitter().feed(self._told(*self.last_events())))

    @override
    def closing(self, usage: dict[str, Any], session: dict[str, Any]) -> bytes:
        """Return the last events, of which `message_delta` has the usage and session fields."""
        assert self._usage_event is not None
        ours = {**session, "usage": _usage(usage, self._usage_event["usage"])}
        return b"".join(_with_usage(event, ours) for event in self._last)

    @override
    def close(self) -> None:
        """End the converter, which else waits for more of the chat's events."""
        with suppress(GeneratorExit, StopAsyncIteration, StopIteration, RuntimeError):
            self._step.throw(GeneratorExit)

    def _told(self, *events: bytes) -> bytes:
        """Return the converter's output for whole events. It waits for nothing but them, so it is run by hand."""
        self._fed.events.extend(event.decode() for event in events)
        told: list[str] = []
        while True:
            try:
                if self._step.send(None) is not None:
                    raise EngineFailed("vLLM waits for data other than the answer")
                break
            except StopIteration as one:
                told.append(one.value)
                self._step = self._events.__anext__()
            except StopAsyncIteration:
                break
        if any(one.startswith("event: error") for one in told):
            raise EngineFailed("the engine's events do not form a message")
        return "".join(told).encode()


class _Fed:
    """A chat's events, as vLLM's converter takes them: it gives up control where there are none yet."""

    def __init__(self) -> None:
        self.events: deque[str] = deque()

    def __aiter__(self) -> _Fed:
        return self

    async def __anext__(self) -> str:
        while not self.events:
            await _Pause()
        return self.events.popleft()


class _Pause:
    def __await__(self) -> Any:
        yield


def _types(serving: Any) -> Any:
    """Return the module of the converters, which has the types that they take."""
    return sys.modules[type(serving).__module__]


def _usage(usage: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Return Anthropic's usage: the three kinds of input tokens are the whole prompt, those read were not computed.

    `created_cache_tokens`, those of the computed ones that the engine keeps in its own cache, is vLLM's count.
    """
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    computed = usage["prompt_tokens"] - cached
    created = min((engine.get("prompt_tokens_details") or {}).get("created_cache_tokens") or 0, computed)
    return {
        "input_tokens": computed - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "context": usage["context"],
    }


def _with_usage(event: Event, ours: dict[str, Any]) -> bytes:
    if b"event: message_delta" not in event.others or event.data is None:
        return event.raw
    return event.with_data(json.dumps({**json.loads(event.data), **ours}, ensure_ascii=False).encode())
