"""Dataclasses and protobuf messages, converted by the names of their fields. Pure.

A dataclass field corresponds to the message field of the same name, and an enum member to the message's enum member.
A tuple corresponds to a bytes field that packs its numbers as unsigned 32-bit little-endian integers.
Dataclass fields that the message lacks are not sent. `_FIELDS` and `_ARGUMENTS` have those whose shapes differ.
The rules of a class are compiled once, at its first conversion.
"""

from __future__ import annotations

import struct
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from contextcache.errors import ContextCacheError, InvalidRequest
from contextcache.model import CacheSessionMetadata, KVGroup, Manifest, Usage, UsageReport, kv_kind
from contextcache.terms import Terms

MessageT = TypeVar("MessageT", bound=Message)
ValueT = TypeVar("ValueT")
Fields = dict[str, Any]


def message_of(message_class: type[MessageT], value: Any = None, **more: Any) -> MessageT:
    """Return the message of a dataclass value, with further fields. None leaves a field unset.

    The fields of a further dataclass lie flat in the message when the message has no field of its name.
    Raises TypeError or ValueError for a value that the message cannot hold.
    """
    descriptor = message_class.DESCRIPTOR
    value_class: Any = type(value)
    written = {} if value is None else _writer(value_class, descriptor)(value)
    for name, given in more.items():
        given_class: Any = type(given)
        field = descriptor.fields_by_name.get(name)
        written |= _writer(given_class, descriptor)(given) if field is None else {name: _written(given, field)}
    return message_class(**written)


def value_of(value_class: type[ValueT], message: Message) -> ValueT:
    """Return the dataclass value of a message. Raises as `arguments_of`."""
    return value_class(**arguments_of(value_class, message))


def arguments_of(function: Callable[..., Any], message: Message) -> Fields:
    """Return the keyword arguments of a function, or of a dataclass, that a message holds.

    Raises ContextCacheError for an enum number that this release does not know.
    """
    return _reader(function, message.DESCRIPTOR)(message)


@cache
def _writer(value_class: Any, descriptor: Any) -> Callable[[Any], Fields]:
    hints = get_type_hints(value_class)
    by_hand = _FIELDS.get(value_class, {})
    sent = [field.name for field in fields(value_class) if field.name in {*descriptor.fields_by_name} - {*by_hand}]
    plain = [name for name in sent if hints[name] in _PLAIN]
    nested = [(name, _writing(hints[name], descriptor.fields_by_name[name])) for name in sent if name not in plain]

    def write(value: Any) -> Fields:
        written = {name: getattr(value, name) for name in plain}
        for name, convert in nested:
            written[name] = convert(getattr(value, name))
        for name, convert in by_hand.items():
            written[name] = convert(value)
        return written

    return write


def _writing(hint: Any, field: Any) -> Callable[[Any], Any]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        numbers = _numbers(field.enum_type)
        return {member: numbers[member.name] for member in hint}.__getitem__
    return partial(_written, field=field)


def _written(value: Any, field: Any) -> Any:
    """Return a value as the constructor of a message takes it."""
    if isinstance(value, Enum):
        return _numbers(field.enum_type)[value.name]
    if is_dataclass(value):
        value_class: Any = type(value)
        return _writer(value_class, field.message_type)(value)
    if field.message_type is None or value is None or isinstance(value, Mapping):
        return value
    return [_written(one, field) for one in value]


@cache
def _reader(function: Any, descriptor: Any) -> Callable[[Any], Fields]:
    hints = {name: hint for name, hint in get_type_hints(function).items() if name != "return"}
    converted = dict(_ARGUMENTS.get(function, {}))
    plain = []
    for name in hints.keys() - converted:
        field, hint = descriptor.fields_by_name.get(name), hints[name]
        if field is not None and hint in _PLAIN:
            plain.append(name)
        elif field is not None:
            converted[name] = _converter(hint, field)
        elif is_dataclass(hint):
            value_class: Any = hint
            converted[name] = partial(value_of, value_class)

    def read(message: Any) -> Fields:
        found = {name: getattr(message, name) for name in plain}
        for name, convert in converted.items():
            found[name] = convert(message)
        return found

    return read


def _converter(hint: Any, field: Any) -> Callable[[Any], Any]:
    """Return the function that reads a field of a message."""
    get, name = attrgetter(field.name), field.name
    if hint in _PLAIN:
        return get
    if get_origin(hint) is types.UnionType:
        convert = _converter(get_args(hint)[0], field)
        return lambda message: convert(message) if message.HasField(name) else None
    if field.enum_type is not None:
        numbers = _numbers(field.enum_type)
        # A message without the field has the first member.
        members = {0: next(iter(hint))} | {numbers[member.name]: member for member in hint}
        return lambda message: _member(members, get(message), field)
    inner = next(iter(get_args(hint)), hint)
    if field.message_type is None or field.message_type.GetOptions().map_entry:
        numbers_of = partial(_numbers_of, name) if field.type == field.TYPE_BYTES else tuple
        container = dict if field.message_type else numbers_of
        return lambda message: container(get(message))
    if inner is hint:
        return lambda message: value_of(hint, get(message))
    return lambda message: tuple(value_of(inner, one) for one in get(message))


def _numbers_of(name: str, packed: bytes) -> tuple[int, ...]:
    """Return unsigned 32-bit little-endian integers. Raises InvalidRequest."""
    if len(packed) % 4:
        raise InvalidRequest(f"{name} must have four bytes each", param=name)
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def _member(members: Mapping[int, Enum], number: int, field: Any) -> Enum:
    if number not in members:
        raise ContextCacheError(f"{field.full_name} is {number}: a newer release sent a value that this one lacks")
    return members[number]


_PLAIN = (str, int, float, bool, bytes)


@cache
def _numbers(enum: Any) -> Mapping[str, int]:
    """Return the number of each member: SESSION_MODE_PREFIX is PREFIX."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {value.name.removeprefix(prefix): value.number for value in enum.values}


_FIELDS: Mapping[Any, Mapping[str, Callable[[Any], Any]]] = {
    CacheSessionMetadata: {
        "holders": lambda session: session.holders or (),
        "knows_holders": lambda session: session.holders is not None,
        "forked_from": lambda session: session.forked_from[0] if session.forked_from else "",
        "forked_generation": lambda session: session.forked_from[1] if session.forked_from else 0,
    },
    KVGroup: {"runs": lambda group: [{"first_token": first, "end_token": end} for first, end in group.runs]},
    Terms: {"metadata": lambda terms: None if terms.metadata is None else {"entries": terms.metadata}},
    UsageReport: {
        "days": lambda report: [
            {"day": day, "usage": [{"key": one.key, "counts": one.counts, "model": one.model} for one in usage]}
            for day, usage in report.days.items()
        ]
    },
}
"""Fields of a message that are not those of the dataclass."""
_ARGUMENTS: Mapping[Any, Mapping[str, Callable[[Any], Any]]] = {
    CacheSessionMetadata: {
        "holders": lambda message: tuple(message.holders) if message.knows_holders else None,
        "forked_from": lambda message: (
            (message.forked_from, message.forked_generation) if message.forked_from else None
        ),
    },
    KVGroup: {
        "kind": lambda message: kv_kind(message.kind),
        "runs": lambda message: tuple((run.first_token, run.end_token) for run in message.runs),
    },
    # The files of a manifest follow from the rest (kv_sidecar.format.manifest).
    Manifest: {"files": lambda _message: ()},
    Terms: {"metadata": lambda message: dict(message.metadata.entries) if message.HasField("metadata") else None},
    UsageReport: {
        "days": lambda message: {day.day: [value_of(Usage, one) for one in day.usage] for day in message.days}
    },
}
"""Arguments of a dataclass that are not fields of the message."""
