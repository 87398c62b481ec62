"""Check of the items of a response's input against the types that the engine accepts. Pure.

vLLM 0.32 tries an item with each of its types and writes an error for each field that does not fit: 230 errors for an
item that fits none, in ten ms. Rules:

1. An item of an unknown type, or without a required field of the right JSON kind, is refused.
2. An item that fits a flat type passes: the engine accepts it too.
3. Only the engine checks the nested objects of other items, so an input may hold at most UNCHECKED_MAX of them.

The tables repeat the types of `openai`, which vLLM uses. A test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from operator import or_
from types import GenericAlias
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, defstruct

from contextcache.errors import InvalidRequest

ITEMS_MAX = 4096
"""Items of an input. vLLM 0.32 takes 140 us for an item that fits one of its types."""
COMPACTION = "compaction"
"""Type of the item that stands for a compacted conversation."""
UNCHECKED_MAX = 256
"""Items that fit no flat type, with the elements of their lists. vLLM 0.32 takes two seconds if all are invalid."""


class AnyObject(msgspec.Struct, gc=False):
    """Any object."""


_Text = str | None
_MaybeText = str | UnsetType
_Texts = list[str]
_Objects = list[AnyObject]
_Role = Literal["user", "assistant", "system", "developer"]
_Status = Literal["in_progress", "completed", "incomplete"]
_SearchStatus = Literal["in_progress", "searching", "completed", "incomplete", "failed"]
_Phase = Literal["commentary", "final_answer"] | None
_Nothing = Annotated[list[Any], Meta(max_length=0)]


def _struct(name: str, fields: Mapping[str, Any], **tagged: Any) -> type[msgspec.Struct]:
    """Return a type of object. A field whose kind includes None or UnsetType may be absent."""
    members: list[Any] = []
    for field, kind in fields.items():
        kinds = (kind, *getattr(kind, "__args__", ()))
        absent = [UNSET] if UnsetType in kinds else [None] if {None, type(None)} & set(kinds) else []
        members.append((field, kind, *absent))
    return defstruct(name, members, kw_only=True, gc=False, **tagged)


def _union(parts: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the union of types of parts, by the name in `type`."""
    return reduce(or_, [_struct(name, fields, tag_field="type", tag=name) for name, fields in parts.items()])


def _all(kind: Any, *names: str) -> dict[str, Any]:
    """Return fields of one kind."""
    return dict.fromkeys(names, kind)


def _parts(parts: Mapping[str, Mapping[str, Any]]) -> Any:
    return GenericAlias(list, (_union(parts),))


_Parts = _parts(
    {
        "input_text": {"text": str},
        "input_image": {},
        "input_file": {},
        "output_text": {"text": str},
        "refusal": {"refusal": str},
    }
)
_InputParts = _parts(
    {
        "input_text": {"text": str, "prompt_cache_breakpoint": UnsetType},
        "input_image": {
            "detail": Literal["low", "high", "auto", "original"] | UnsetType,
            **_all(_Text, "file_id", "image_url"),
            "prompt_cache_breakpoint": UnsetType,
        },
        "input_file": {
            "detail": Literal["auto", "low", "high"] | UnsetType,
            **_all(_MaybeText, "file_data", "file_url", "filename"),
            "file_id": _Text,
            "prompt_cache_breakpoint": UnsetType,
        },
    }
)
_LOGPROB = {"token": str, "bytes": list[int], "logprob": float}
_TopLogprobs: Any = GenericAlias(list, (_struct("top_logprob", _LOGPROB),))
_Annotations = _parts(
    {
        "file_citation": {"file_id": str, "filename": str, "index": int},
        "url_citation": _all(int, "end_index", "start_index") | _all(str, "title", "url"),
        "container_file_citation": _all(int, "end_index", "start_index")
        | _all(str, "container_id", "file_id", "filename"),
        "file_path": {"file_id": str, "index": int},
    }
)
_Logprobs: Any = GenericAlias(list, (_struct("logprob", _LOGPROB | {"top_logprobs": _TopLogprobs}),))
_OutputParts = _parts(
    {
        "output_text": {"text": str, "annotations": _Annotations | UnsetType, "logprobs": _Logprobs | None},
        "refusal": {"refusal": str},
    }
)
_Search = _union(
    {
        "search": {"queries": _Texts | UnsetType, "query": _MaybeText, "sources": _Nothing | UnsetType},
        "open_page": {"url": _Text},
        "find_in_page": {"pattern": str, "url": str},
    }
)

REQUIRED: dict[str, dict[str, Any]] = {
    "message": {"role": _Role, "content": str | _Parts},
    "function_call": {"arguments": str, "call_id": str, "name": str},
    "function_call_output": {"output": str | _Parts},
    "custom_tool_call": {"call_id": str, "input": str, "name": str},
    "custom_tool_call_output": {"call_id": str, "output": str | _Parts},
    "reasoning": {"summary": _Objects},
    "item_reference": {"id": str},
    "file_search_call": {"id": str, "queries": _Texts, "status": str},
    "web_search_call": {"id": str, "action": AnyObject, "status": str},
    "computer_call": {"id": str, "call_id": str, "pending_safety_checks": _Objects, "status": str},
    "computer_call_output": {"call_id": str, "output": AnyObject},
    "code_interpreter_call": {"id": str, "container_id": str, "status": str},
    "image_generation_call": {"id": str, "status": str},
    "tool_search_call": {"arguments": Any},
    "tool_search_output": {"tools": _Objects},
    "additional_tools": {"role": str, "tools": _Objects},
    "configuration_update": {},
    COMPACTION: {"encrypted_content": str},
    "compaction_trigger": {},
    "local_shell_call": {"id": str, "action": AnyObject, "call_id": str, "status": str},
    "local_shell_call_output": {"id": str, "output": str},
    "shell_call": {"action": AnyObject, "call_id": str},
    "shell_call_output": {"call_id": str, "output": _Objects},
    "apply_patch_call": {"call_id": str, "operation": AnyObject, "status": str},
    "apply_patch_call_output": {"call_id": str, "status": str},
    "mcp_list_tools": {"id": str, "server_label": str, "tools": _Objects},
    "mcp_approval_request": {"id": str, "arguments": str, "name": str, "server_label": str},
    "mcp_approval_response": {"approval_request_id": str, "approve": bool},
    "mcp_call": {"id": str, "arguments": str, "name": str, "server_label": str},
    "program": {"id": str, "call_id": str, "code": str, "fingerprint": str},
    "program_output": {"id": str, "call_id": str, "result": str, "status": str},
}
"""Required fields of each type of item. vLLM 0.32 adds an `id` to a reasoning item without one."""

FLAT: dict[str, dict[str, Any]] = {
    "message": {"role": _Role, "content": str | _InputParts, "phase": _Phase},
    "function_call": REQUIRED["function_call"]
    | _all(_Text, "id", "namespace")
    | {"status": _Status | None, "async": bool | None, "caller": None},
    "function_call_output": _all(_Text, "id", "call_id", "name", "namespace")
    | {"output": str | _InputParts, "status": _Status | None, "caller": None},
    "custom_tool_call": REQUIRED["custom_tool_call"]
    | _all(_MaybeText, "id", "namespace")
    | {"async": bool | UnsetType, "caller": None},
    "custom_tool_call_output": {"call_id": str, "output": str | _InputParts, "id": _MaybeText, "caller": None},
    "reasoning": {
        "summary": _parts({"summary_text": {"text": str}}),
        "id": _MaybeText,
        "content": _parts({"reasoning_text": {"text": str}}) | None,
        "encrypted_content": _Text,
        "status": _Status | None,
    },
    "item_reference": {"id": str},
    "file_search_call": {"id": str, "queries": _Texts, "status": _SearchStatus, "results": None},
    "web_search_call": {"id": str, "action": _Search, "status": _SearchStatus},
}
"""All fields of the types whose nested objects are listed here completely."""
FLAT_OUTPUT_MESSAGE: dict[str, Any] = {
    "type": Literal["message"],
    "role": Literal["assistant"],
    "content": _OutputParts,
    "id": str | UnsetType,
    "status": _Status | UnsetType,
    "phase": _Phase,
}
"""Message of an engine that the client sends again. vLLM 0.32 adds `id`, `status` and `annotations`."""


class _Head(msgspec.Struct, gc=False):
    """Fields that determine an item's type, and the content of a compaction."""

    type: str | None = None
    role: Any = None
    encrypted_content: Any = None


def _decoders(name: str) -> list[msgspec.json.Decoder[Any]]:
    """Return the decoders of a type of item: its flat types, then its required fields."""
    tag = {"type": str | None if name == _REFERENCE else Literal[name] | UnsetType}
    types = [tag | FLAT[name]] if name in FLAT else []
    types += [FLAT_OUTPUT_MESSAGE] if name == _MESSAGE else []
    return [msgspec.json.Decoder(_struct(name, fields)) for fields in (*types, tag | REQUIRED[name])]


_MESSAGE, _REFERENCE = "message", "item_reference"
_HEAD = msgspec.json.Decoder(_Head)
_DECODERS = {name: _decoders(name) for name in REQUIRED}
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


def check_items_of_input(spelled: bytes | bytearray | msgspec.Raw, *, param: str = "input") -> None:
    """Raise InvalidRequest that names `param` for too many items, or for an item that its type does not allow.

    Raises DecodeError or UnicodeDecodeError if the input is no strict JSON.
    """
    items = _LIST.decode(spelled)
    if len(items) > ITEMS_MAX:
        raise InvalidRequest(f"{param} has more than {ITEMS_MAX} items", param=param)
    num_unchecked = sum(_num_unchecked(f"{param}[{index}]", item) for index, item in enumerate(items))
    if num_unchecked > UNCHECKED_MAX:
        raise InvalidRequest(
            f"{param} has more than {UNCHECKED_MAX} items of unusual types, their list elements included",
            param=param,
        )


def last_compaction(spelled: bytes | bytearray | msgspec.Raw) -> str | None:
    """Return the content of the last compaction item of a checked input; None: it has none. Raises DecodeError."""
    heads = map(_HEAD.decode, reversed(_LIST.decode(spelled)))
    return next((head.encrypted_content for head in heads if head.type == COMPACTION), None)


def _num_unchecked(place: str, item: msgspec.Raw) -> int:
    """Return the number of objects that only the engine checks: 0, or the item and the elements of its lists.

    Raises InvalidRequest for an item that its type does not allow.
    """
    try:
        head = _HEAD.decode(item)
        name = head.type or (_REFERENCE if head.role is None else _MESSAGE)
        if name not in _DECODERS:
            raise InvalidRequest(f"{place}.type is not a known item type", param=place)
        *flat, required = _DECODERS[name]
        for decoder in flat:
            with suppress(msgspec.ValidationError):
                decoder.decode(item)
                return 0
        required.decode(item)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(_fault(place, str(exc)), param=place) from exc
    return _num_elements(msgspec.json.decode(item))


def _num_elements(item: dict[str, Any]) -> int:
    """Return the number of objects that the engine may try with each type: the item, and the elements of its lists."""
    fields = list(item.values())
    elements = [element for held in fields if isinstance(held, list) for element in held]
    lists = [held for one in (*fields, *elements) if isinstance(one, dict) for held in one.values()]
    return 1 + len(elements) + sum(len(held) for held in lists if isinstance(held, list))


def _fault(item: str, told: str) -> str:
    """Return an item's fault without its texts."""
    where = re.search(r"`\$([^`]*)`$", told)
    place = item + (where[1] if where else "")
    missing = re.search(r"missing required field `(\w+)`", told)
    if missing:
        return f"{place} lacks `{missing[1]}`, which its type requires"
    return f"{place} has the wrong type"
