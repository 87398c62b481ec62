"""A Secret as Helm sends its own records: in Kubernetes' protobuf, of which only the fields of a Secret are read here.

Numbers of fields: k8s.io/apimachinery runtime/generated.proto (Unknown), meta/v1 (ObjectMeta), api/core/v1 (Secret).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\x00"
_LENGTH_DELIMITED = 2


def secret(content: bytes) -> dict[str, Any]:
    """Return the Secret in a request's body that begins with MAGIC."""
    raw = _only(content.removeprefix(MAGIC), 2)
    metadata = _only(raw, 1)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": _only(metadata, 1).decode(), "labels": _map(metadata, 11)},
        "data": {key: base64.b64encode(value).decode() for key, value in _pairs(raw, 2)},
        "type": _only(raw, 3).decode(),
    }


def _map(message: bytes, number: int) -> dict[str, str]:
    return {key: value.decode() for key, value in _pairs(message, number)}


def _pairs(message: bytes, number: int) -> Iterator[tuple[str, bytes]]:
    for found, entry in _fields(message):
        if found == number:
            yield _only(entry, 1).decode(), _only(entry, 2)


def _only(message: bytes, number: int) -> bytes:
    return next((value for found, value in _fields(message) if found == number), b"")


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Return the fields that are text, bytes or messages; numbers are passed over."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        length, position = _varint(message, position)
        if tag & 7 == _LENGTH_DELIMITED:
            yield tag >> 3, message[position : position + length]
            position += length


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
