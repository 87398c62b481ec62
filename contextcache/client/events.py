"""A streamed answer as typed events. Sans-IO: bytes in, events out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from contextcache.client.failures import BrokenStream, api_error
from contextcache.client.types import Reply, reply

_EVENT_BYTES_MAX = 8 << 20
"""Size limit of one event: no engine sends as much, and another kind of body must not fill the memory."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call, as OpenAI has it. `index` is the call's number, `function.arguments` a piece of JSON."""

    index: int
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finished:
    """The whole answer, after the commit."""

    reply: Reply


Event: TypeAlias = TextDelta | ToolCallDelta | Finished


@dataclass(slots=True)
class StreamReader:
    """Parser of one answer's event stream, for pieces of any size."""

    headers: Mapping[str, str]
    """Headers of the answer, names in lower case."""
    is_finished: bool = False
    _rest: bytearray = field(default_factory=bytearray)
    _pieces: list[str] = field(default_factory=list)
    _last: dict[str, Any] = field(default_factory=dict)
    _usage: Mapping[str, Any] | None = None
    _finish_reason: str | None = None
    _tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the events that a piece completes. Raises ApiError for an error event, BrokenStream."""
        self._rest += data
        if b"\n" in data:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and not self.is_finished:
                    yield from self._event(bytes(line[5:].strip()))
        if len(self._rest) > _EVENT_BYTES_MAX:
            raise BrokenStream(f"an event of the stream has more than {_EVENT_BYTES_MAX} bytes", text=self.text)

    @property
    def text(self) -> str:
        """The text that has arrived."""
        return "".join(self._pieces)

    def end(self) -> None:
        """Raise BrokenStream unless the answer is complete."""
        if not self.is_finished:
            raise BrokenStream("the stream ended before the answer was complete", text=self.text)

    def _event(self, data: bytes) -> Iterator[Event]:
        try:
            if data == b"[DONE]":
                self.is_finished = True
                yield Finished(self._whole())
            else:
                yield from self._chunk(json.loads(data))
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as exc:
            raise BrokenStream("the stream has an event that is not an answer", text=self.text) from exc

    def _chunk(self, chunk: dict[str, Any]) -> Iterator[Event]:
        if chunk.get("error") is not None:
            raise api_error(_status_of(chunk), chunk, self.headers)
        self._last |= chunk
        self._usage = chunk.get("usage") or self._usage
        for choice in (chunk.get("choices") or ())[:1]:
            yield from self._choice(choice)

    def _choice(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        delta = choice.get("delta") or {}
        if piece := choice.get("text") or delta.get("content"):
            if not isinstance(piece, str):
                raise TypeError(piece)
            self._pieces.append(piece)
            yield TextDelta(piece)
        for call in delta.get("tool_calls") or ():
            self._join(call)
            yield ToolCallDelta(call.get("index", 0), call)

    def _join(self, call: Mapping[str, Any]) -> None:
        joined = self._tool_calls.setdefault(call.get("index", 0), {"function": {"name": "", "arguments": ""}})
        joined |= {key: value for key, value in call.items() if key not in {"function", "index"} and value}
        for key, value in (call.get("function") or {}).items():
            joined["function"][key] = joined["function"].get(key, "") + (value or "")

    def _whole(self) -> Reply:
        message = {"content": self.text, "tool_calls": [self._tool_calls[index] for index in sorted(self._tool_calls)]}
        choice = {"message": message, "finish_reason": self._finish_reason}
        return reply({**self._last, "choices": [choice], "usage": self._usage}, self.headers)


def _status_of(chunk: Mapping[str, Any]) -> int:
    error = chunk["error"]
    code = error.get("code") if isinstance(error, Mapping) else None
    return code if isinstance(code, int) else 500
