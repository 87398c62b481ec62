"""A chat's answer as the output items of a response, and the events that tell them. Pure.

Sources: OpenAI's API reference ("Streaming events") and the types of the `openai` package. A delta with several fields
becomes events in the order of vLLM 0.32 entrypoints/openai/responses/streaming_events.py `split_delta`. A whole answer
is one delta, so it has the items that its stream would have.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from contextcache.items import custom_input
from vllm_plugin.turn.prompt.response_input import ToolNames


class _Kind(NamedTuple):
    """Names of one type of item in its events."""

    id_prefix: str
    event: str
    """Part of the types of its events."""
    field: str
    """Field with its text."""
    part: str
    """Type of its part; empty: the text is a field of the item."""


_KINDS = {
    "reasoning": _Kind("rs", "reasoning_text", "text", "reasoning_text"),
    "message": _Kind("msg", "output_text", "text", "output_text"),
    "function_call": _Kind("fc", "function_call_arguments", "arguments", ""),
    "custom_tool_call": _Kind("ctc", "custom_tool_call_input", "input", ""),
}
_SAID: Mapping[str, dict[str, Any]] = {"reasoning": {"summary": []}, "message": {"role": "assistant"}}
_NO_STATUS = "custom_tool_call"


@dataclass(slots=True)
class _Growing:
    """The item that the answer adds to."""

    item: dict[str, Any]
    kind: _Kind
    call: int | None
    """Position of a call."""
    parts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    def part(self, text: str) -> dict[str, Any]:
        of_text = {"annotations": [], "logprobs": [*self.logprobs]} if self.kind.part == "output_text" else {}
        return {"type": self.kind.part, "text": text, **of_text}


class ResponseOutput:
    """Items of one answer. Each method returns the events of its change, without `sequence_number`."""

    def __init__(self, names: ToolNames) -> None:
        self._names = names
        self.items: list[dict[str, Any]] = []
        """Items that have ended."""
        self._growing: _Growing | None = None

    def take(self, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """Take a chat's delta. Raises the errors of JSON of another shape (`chat.UNREADABLE`)."""
        events: list[dict[str, Any]] = []
        if text := delta.get("reasoning"):
            events += self._begin("reasoning") + self._grow(text)
        if text := delta.get("content"):
            events += self._begin("message") + self._grow(text, (logprobs or {}).get("content") or ())
        for position, call in enumerate(delta.get("tool_calls") or ()):  # those of a whole answer have no `index`
            function = call.get("function") or {}
            events += self._begin_call(call.get("index", position), call, function)
            events += self._grow(function.get("arguments") or "")
        return events

    def end(self) -> list[dict[str, Any]]:
        """End the item that grows."""
        if (growing := self._growing) is None:
            return []
        self._growing = None
        item, kind, text = growing.item, growing.kind, "".join(growing.parts)
        events = []
        if item["type"] == "custom_tool_call":  # its text is known once the arguments are whole
            text = custom_input(text)
            events.append(self._event("delta", growing, delta=text))
        named = {"logprobs": growing.logprobs} if kind.part == "output_text" else {}
        named |= {"name": item["name"]} if item["type"] == "function_call" else {}
        events.append(self._event("done", growing, **{kind.field: text}, **named))
        if kind.part:
            part = growing.part(text)
            events.append(self._part_event("done", growing, part))
            item = {**item, "content": [part]}
        else:
            item = {**item, kind.field: text}
        if item["type"] != _NO_STATUS:
            item["status"] = "completed"
        events.append({"type": "response.output_item.done", "output_index": len(self.items), "item": item})
        self.items.append(item)
        return events

    def _begin_call(self, index: int, call: Mapping[str, Any], function: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self._growing is not None and self._growing.call == index:
            return []
        kind = "custom_tool_call" if (name := function["name"]) in self._names.customs else "function_call"
        return self._begin(kind, index, call_id=call["id"], **self._names.of_client(name))

    def _begin(self, type_: str, call: int | None = None, **said: Any) -> list[dict[str, Any]]:
        """Begin an item, unless one of this type grows already."""
        if call is None and self._growing is not None and self._growing.item["type"] == type_:
            return []
        events, kind = self.end(), _KINDS[type_]
        item = {"id": f"{kind.id_prefix}_{secrets.token_hex(16)}", "type": type_, **_SAID.get(type_, {}), **said}
        item |= {} if type_ == _NO_STATUS else {"status": "in_progress"}
        item["content" if kind.part else kind.field] = [] if kind.part else ""
        self._growing = growing = _Growing(item, kind, call)
        events.append({"type": "response.output_item.added", "output_index": len(self.items), "item": item})
        return [*events, self._part_event("added", growing, growing.part(""))] if kind.part else events

    def _grow(self, text: str, logprobs: Sequence[Any] = ()) -> list[dict[str, Any]]:
        growing = self._growing
        assert growing is not None
        growing.parts.append(text)
        growing.logprobs += logprobs
        if not text or growing.item["type"] == "custom_tool_call":
            return []
        told = {"logprobs": [*logprobs]} if growing.kind.part == "output_text" else {}
        return [self._event("delta", growing, delta=text, **told)]

    def _event(self, change: str, growing: _Growing, **told: Any) -> dict[str, Any]:
        place = {"item_id": growing.item["id"], "output_index": len(self.items)}
        place |= {"content_index": 0} if growing.kind.part else {}
        return {"type": f"response.{growing.kind.event}.{change}", **place, **told}

    def _part_event(self, change: str, growing: _Growing, part: dict[str, Any]) -> dict[str, Any]:
        return self._event(change, growing, part=part) | {"type": f"response.content_part.{change}"}
