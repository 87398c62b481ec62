"""The meaning of a chat message, however a client writes it. Pure.

Only the input of a chat template counts (vLLM 0.32 renderers/chat_utils.py `_parse_chat_message_content`).
SDKs write the same thing in many ways: text as parts or as a string, arguments of tool calls as new JSON, answers
without their outer white space; they add nulls, `index`, `cache_control`, `reasoning`, `refusal`, `annotations`. None
of that makes another message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

SYSTEM = "system"
ASSISTANT = "assistant"
_UNREADABLE = (ValueError, RecursionError)
_ARGUMENTS_CHARS_MAX = 256 << 10
"""Characters of tool calls among some messages that are read as values, in 40 ms at worst. The rest is compared as
text."""
_EXACT_MAX = 2**53
"""JavaScript has no whole numbers beyond it."""


class Call(NamedTuple):
    """One tool call."""

    id: str
    name: str
    arguments: str
    """As canonical JSON; as it came when it is none."""


class Meaning(NamedTuple):
    """One message, hashable: equal for messages that mean the same."""

    role: str
    """`system` for developer messages too."""
    text: str
    calls: tuple[Call, ...]
    """Tool calls of an answer."""
    answers: str
    """The call whose result this is; empty for other messages."""
    more: str
    """Further fields of a client's message that a template may show: its `name`, `task`, `tools`."""


def meanings(messages: Sequence[Mapping[str, Any]]) -> tuple[Meaning, ...]:
    """Return the meanings of messages. Takes any shape: the engine refuses its own faults."""
    arguments = _Arguments()
    return tuple(_meaning(message, arguments) for message in messages)


def rendering(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a message as vLLM gives it to a chat template, with each spelling that a template may show.

    Messages that mean the same and differ here have other tokens: text in parts is joined by the template or with line
    ends, numbers and keys of arguments are shown as they stand, reasoning may be shown.
    """
    calls, content = message.get("tool_calls"), message.get("content")
    return (
        message["role"],
        tuple(map(_part, content)) if isinstance(content, list) else (content or "",),
        tuple(map(_shown_call, calls)) if isinstance(calls, list) else (),
        [message.get(key) or "" for key in ("tool_call_id", "name", "task", "tools")],
        message.get("reasoning") or message.get("reasoning_content") or "",
    )


def _meaning(message: Mapping[str, Any], arguments: _Arguments) -> Meaning:
    role = message["role"]
    text = "".join(map(_part, content)) if isinstance(content := message.get("content"), list) else _word(content)
    if role == ASSISTANT:
        calls = message.get("tool_calls")
        said = tuple(_call(call, arguments) for call in calls) if isinstance(calls, list) else ()
        return Meaning(role, text.strip(), said, "", "")
    more = {key: message[key] for key in ("name", "task", "tools") if message.get(key)}
    return Meaning(
        SYSTEM if role == "developer" else role,
        text,
        (),
        _word(message.get("tool_call_id")) if role == "tool" else "",
        _canonical(more) if more else "",
    )


class _Arguments:
    """Reads arguments of tool calls as values, until they are too long together."""

    def __init__(self) -> None:
        self._num_left = _ARGUMENTS_CHARS_MAX
        self._decoder = msgspec.json.Decoder(float_hook=_number)

    def read(self, given: Any) -> str:
        """Return them as canonical JSON; as they came when they are none, or too long."""
        if not given:
            return "{}"  # to vLLM an absent or empty string is a call without arguments
        if not isinstance(given, str):
            return _word(given)
        self._num_left -= len(given)
        try:
            return _canonical(self._decoder.decode(given)) if self._num_left >= 0 else given
        except _UNREADABLE:
            return given


def _part(part: Any) -> str:
    return _word(part.get("text")) if isinstance(part, dict) else _word(part)


def _call(call: Any, arguments: _Arguments) -> Call:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return Call("", "", _canonical(call))
    return Call(_word(call.get("id")), _word(function.get("name")), arguments.read(function.get("arguments")))


def _shown_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    shown = function.get("arguments")
    if isinstance(shown, str) and len(shown) <= _ARGUMENTS_CHARS_MAX:
        with suppress(*_UNREADABLE):
            shown = msgspec.json.decode(shown)
    return call.get("id"), function.get("name"), msgspec.json.encode(shown)


def _number(written: str) -> float | int:
    """Return 2.0 as 2, as JavaScript writes it. Raises ValueError for a number that JSON cannot write."""
    number = float(written)
    if not math.isfinite(number):
        raise ValueError("the number is too large")
    return int(number) if number.is_integer() and abs(number) < _EXACT_MAX else number


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else _canonical(value)


def _canonical(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
