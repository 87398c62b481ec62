"""Items of responses and conversations as messages of a chat, and back. Pure.

Sources: OpenAI's API reference ("Create a model response", "Conversations") and the types of the `openai` package.
Items become messages as in vLLM 0.32 entrypoints/openai/responses/utils.py (`construct_input_messages`), so a request
has the same prompt with a context and without one. A message that vLLM cuts to its first part keeps all its parts here.
The form of the items has been checked before (`input_items.py`).

A transcript stores messages. A message that came as items has their ids under ITEM_IDS. The id of any other item is a
digest of its place and content, so it stays as long as the item does.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from contextcache.errors import InvalidRequest
from contextcache.input_items import COMPACTION
from contextcache.model import Segment, SegmentKind

_ASSISTANT = "assistant"
ITEM_IDS = "item_ids"
"""Key of a stored message: ids of its items. No part of the message that a template gets."""
RESPONSE = "stored_response"
"""Key of a stored answer of `/v1/responses`: fields of the response that the transcript does not have."""
INSTRUCTIONS: Mapping[str, Any] = {"is_instructions": True}
"""Value of RESPONSE in a transcript's first message, which a response's instructions put there."""
_TEXTS = {"input_text": "text", "output_text": "text", "summary_text": "text", "reasoning_text": "text"} | {
    "refusal": "refusal"
}
"""Fields with the text, by the type of a part."""
_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "function_call_output": "fco_",
    "custom_tool_call_output": "ctco_",
}
"""Prefixes of ids by the type of an item."""
_SEPARATOR = "__"
_CALLS = (_PREFIXES["function_call"], _PREFIXES["custom_tool_call"])
_MESSAGE_PARTS = ("reasoning", "content", "tool_calls")
"""Keys of a message that are items."""
CUSTOM_INPUT = "input"
"""Argument of the function that stands for a custom tool."""


class Compacted(dict[str, Any]):
    """Message in the place of a compaction item, with the item's content. No message of a client's JSON is one."""


def messages_of(
    given: str | Sequence[Mapping[str, Any]], *, param: str = "input", takes_compaction: bool = False
) -> list[dict[str, Any]]:
    """Return items as messages. Raises InvalidRequest that names `param` and the item's position.

    `takes_compaction`: a compaction item becomes a `Compacted`.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        try:
            if takes_compaction and item.get("type") == COMPACTION:
                messages.append(Compacted(role="user", content=_word(item, "encrypted_content")))
                continue
            _add(messages, item, f"{param}[{index}]")
        except (AttributeError, KeyError, TypeError) as exc:
            told = "an item of a context must be text, a call or a call's result, with the fields of its type"
            raise InvalidRequest(told, param=f"{param}[{index}]") from exc
    return messages


def flat_name(space: str, name: str) -> str:
    """Return the chat's name of a tool in a namespace."""
    return f"{space}{_SEPARATOR}{name}"


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool."""
    return json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return a custom tool's input; arguments of another form are the input themselves."""
    try:
        text = json.loads(arguments)[CUSTOM_INPUT]
    except (ValueError, LookupError, TypeError, RecursionError):
        return arguments
    return text if isinstance(text, str) else arguments


def messages_json(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the stored form of chat messages: compact JSON, keys sorted, so that equal messages are equal text."""
    return json.dumps(list(messages), separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def stored_ids(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ids that a stored message has for its items."""
    ids = message.get(ITEM_IDS)
    return tuple(one for one in ids if isinstance(one, str)) if isinstance(ids, list) else ()


def with_new_ids(messages: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with new ids for their items. `given`: the items that they come from."""
    customs = {item.get("call_id", "") for item in given if str(item.get("type")).startswith("custom_tool_call")}
    return [
        {**message, ITEM_IDS: [f"{_PREFIXES[item['type']]}{secrets.token_hex(16)}" for _, _, item in parts]}
        for message in messages
        for parts in (list(_items(message, (), customs)),)
    ]


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """One item of a transcript, and its place there."""

    item: dict[str, Any]
    segment: int
    message: int
    """Position in the segment's messages."""
    part: str
    """Key of the message's part that it is."""
    call: int
    """Position in the part, of a tool call."""


def items_of(segments: Sequence[Segment], *, name: str) -> list[PlacedItem]:
    """Return the items of a transcript. `name`: of the context, a part of the ids that are digests.

    Reasoning of answers and instructions of responses are no items. A completion's text is a message.
    """
    found: list[PlacedItem] = []
    customs: set[str] = set()
    given: set[str] = set()
    skipped = 1 if instructions_of(segments) is not None else 0
    for at, segment in enumerate(segments):
        for number, message in enumerate(stored_messages(segment)):
            if (at, number) < (0, skipped):
                continue
            ids = stored_ids(message)
            for part, call, item in _items(message, ids, customs):
                prefix = _PREFIXES[item["type"]]
                kept = _ids_of(ids, _CALLS if part == "tool_calls" else (prefix,))[call : call + 1]
                item_id = next(one for one in chain(kept, _digests(prefix, name, len(found), item)) if one not in given)
                given.add(item_id)
                found.append(PlacedItem({"id": item_id, **item}, at, number, part, call))
    return found


def _digests(prefix: str, name: str, place: int, item: Mapping[str, Any]) -> Iterator[str]:
    """Yield ids of an item without a stored one. An equal item may have moved from this place, and have the first."""
    for again in count():
        said = messages_json([{"context": name, "at": place, "again": again}, item])
        digest = hashlib.blake2b(said.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        yield f"{prefix}{digest}"


def instructions_of(segments: Sequence[Segment]) -> str | None:
    """Return the instructions of the last response in a transcript, its first message; None: there are none."""
    first = stored_messages(segments[0])[0] if segments else {}
    said = first.get("content") if response_record(first) == INSTRUCTIONS else None
    return said if isinstance(said, str) else None


def response_record(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a response that are stored with its answer; none for another message."""
    record = message.get(RESPONSE)
    return record if isinstance(record, dict) else {}


def untokenised(
    segments: Sequence[Segment], placed: Sequence[PlacedItem], first: int, *, gone: PlacedItem | None = None
) -> tuple[Segment, ...]:
    """Return the messages from the segment `first` on as one segment for the next turn to tokenise, without `gone`.

    `placed`: all items of the transcript, which keep their ids. Raises InvalidRequest for a completion's text.
    """
    ids: dict[tuple[int, int], list[str]] = {}
    for one in placed:
        if one is not gone:
            ids.setdefault((one.segment, one.message), []).append(one.item["id"])
    kept: list[dict[str, Any]] = []
    for at, segment in enumerate(segments[first:], first):
        if not segment.messages_json:
            raise InvalidRequest("an item before or in a completion's text cannot be deleted", param="item_id")
        for number, message in enumerate(stored_messages(segment)):
            left = message
            if gone is not None and (at, number) == (gone.segment, gone.message):
                left = _without(message, gone)
                if not any(map(left.get, _MESSAGE_PARTS)):
                    continue
            kept.append({**left, ITEM_IDS: ids.get((at, number), [])})
    return pending_segment(kept)


def pending_segment(messages: Sequence[Mapping[str, Any]]) -> tuple[Segment, ...]:
    """Return messages as a segment that the next turn tokenises; no segment for no messages."""
    return (Segment(SegmentKind.PROMPT, (), messages_json=messages_json(messages)),) if messages else ()


def stored_messages(segment: Segment) -> list[dict[str, Any]]:
    """Return the messages of a segment as stored; of a completion's segment one message."""
    if segment.messages_json:
        found: list[dict[str, Any]] = json.loads(segment.messages_json)
        return found
    return [{"role": _ASSISTANT if segment.kind is SegmentKind.ANSWER else "user", "content": segment.text}]


def _without(message: dict[str, Any], gone: PlacedItem) -> dict[str, Any]:
    """Return a message without one of its items."""
    rest = message.get(gone.part) if gone.part == "tool_calls" else None
    kept = [call for at, call in enumerate(rest or ()) if at != gone.call]
    found = {key: value for key, value in message.items() if key != gone.part}
    return found | {gone.part: kept} if kept else found


def _ids_of(ids: Sequence[str], prefixes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one for one in ids if one.startswith(prefixes))


def _items(
    message: Mapping[str, Any], ids: Sequence[str], customs: set[str]
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield a message's items without ids: part, position in it, item. `customs`: calls of custom tools so far."""
    role, content, done = message["role"], message.get("content"), {"status": "completed"}
    if role == "tool":
        call_id = _text(message.get("tool_call_id"))
        is_custom = call_id in customs or _ids_of(ids, (_PREFIXES["custom_tool_call_output"],))
        kind = "custom_tool_call_output" if is_custom else "function_call_output"
        output = content if isinstance(content, str) else _parts("input_text", content)
        yield "content", 0, {"type": kind, "call_id": call_id, "output": output, **done}
        return
    if role != _ASSISTANT:
        yield "content", 0, {"type": "message", "role": role, "content": _parts("input_text", content), **done}
        return
    if reasoning := _text(message.get("reasoning")):
        yield (
            "reasoning",
            0,
            {"type": "reasoning", "summary": [], "content": _parts("reasoning_text", reasoning), **done},
        )
    if content:
        parts = [part | {"annotations": [], "logprobs": []} for part in _parts("output_text", content)]
        yield "content", 0, {"type": "message", "role": role, "content": parts, **done}
    call_ids = _ids_of(ids, _CALLS)
    calls = message.get("tool_calls")
    for at, call in enumerate(calls if isinstance(calls, list) else ()):
        given = call if isinstance(call, dict) else {}
        function, call_id = given.get("function"), _text(given.get("id"))
        function = function if isinstance(function, dict) else {}
        name, arguments = _text(function.get("name")), _text(function.get("arguments"))
        if call_id in customs or (call_ids[at : at + 1] and call_ids[at].startswith(_PREFIXES["custom_tool_call"])):
            customs.add(call_id)
            said = {"type": "custom_tool_call", "input": custom_input(arguments)}
            yield "tool_calls", at, {**said, "call_id": call_id, "name": name}
        else:
            said = {"type": "function_call", "arguments": arguments, "name": name}
            yield "tool_calls", at, {**said, "call_id": call_id, **done}


def _text(said: Any) -> str:
    """Return a text of a client's message; empty for a value that is none."""
    return said if isinstance(said, str) else ""


def _parts(kind: str, content: Any) -> list[dict[str, Any]]:
    """Return a message's text as parts of a kind."""
    given = content if isinstance(content, list) else [] if content is None else [{"text": content}]
    return [{"type": kind, "text": part.get("text", "")} for part in given]


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], param: str) -> None:
    """Add an item to the messages. An assistant's message has the parts of several items."""
    match item.get("type") or "message", item.get("role"):
        case "message", role if role != _ASSISTANT:
            messages.append({"role": item["role"], "content": _content(item["content"])})
        case "function_call_output" | "custom_tool_call_output", _:
            result = {"content": _content(item["output"]), "tool_call_id": _word(item, "call_id")}
            messages.append({"role": "tool", **result})
        case "message", _:
            content = item["content"]
            _add_part(messages, "content", content if isinstance(content, str) else _joined(content))
        case "reasoning", _:
            if item.get("encrypted_content"):
                raise InvalidRequest("encrypted_content is not supported", param=param)
            _add_part(messages, "reasoning", _joined(item.get("content") or item["summary"]))
        case "function_call", _:
            name = _word(item, "name")
            name = flat_name(space, name) if (space := item.get("namespace")) else name
            _add_part(messages, "tool_calls", [_call(item, name, _word(item, "arguments"))])
        case "custom_tool_call", _:
            arguments = custom_arguments(_word(item, "input"))
            _add_part(messages, "tool_calls", [_call(item, _word(item, "name"), arguments)])
        case kind, _:
            raise KeyError(kind)


def _add_part(messages: list[dict[str, Any]], key: str, value: Any) -> None:
    last = messages[-1] if messages and messages[-1]["role"] == _ASSISTANT else None
    if last is None or (key in last and key != "tool_calls"):
        messages.append({"role": _ASSISTANT, key: value})
    else:
        last[key] = last.get(key, []) + value if key == "tool_calls" else value


def _call(item: Mapping[str, Any], name: str, arguments: str) -> dict[str, Any]:
    return {"id": _word(item, "call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _content(said: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    return said if isinstance(said, str) else [{"type": "text", "text": _text_of(part)} for part in said]


def _joined(parts: Sequence[Mapping[str, Any]]) -> str:
    return "".join(map(_text_of, parts))


def _text_of(part: Mapping[str, Any]) -> str:
    return _word(part, _TEXTS[part["type"]])


def _word(said: Mapping[str, Any], key: str) -> str:
    """Return a field with text. Raises KeyError, TypeError."""
    if not isinstance(text := said[key], str):
        raise TypeError(key)
    return text
