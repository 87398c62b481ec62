"""The head of a safetensors file with one tensor: 8 bytes of length, then JSON, then padding. Pure.

The length of the head depends only on the lengths of its texts. So a writer can leave room for it, fill the tensor in
place and write the head last. The meaning of the texts belongs to block_file.py and manifest.py.

`supplement` is a second object of texts, inside the tensor's entry. The safetensors library ignores it there, and
unknown keys in it do not make a file unreadable, as they would in `__metadata__`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeAlias

from contextcache.errors import CorruptBlock

Dtype: TypeAlias = Literal["U8", "U32"]
_DTYPE_BYTES: dict[str, int] = {"U8": 1, "U32": 4}
HEAD_BYTES = 8
_ALIGNMENT = 64
"""The tensor starts at a multiple of a cache line."""
_MAX_HEADER_BYTES = 64 << 20
_MAX_SIZE = 1 << 48
SUPPLEMENT = "supplement"
_KEYS = {"dtype", "shape", "data_offsets"}
_JSON = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Content of a file's head."""

    tensor: str
    dtype: Dtype
    shape: tuple[int, ...]
    metadata: Mapping[str, str]
    supplement: Mapping[str, str] = field(default_factory=dict)
    """Empty: the file has none."""

    @property
    def data_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * _DTYPE_BYTES[self.dtype]


def encode_header(header: TensorHeader) -> bytes:
    """Return the head, padded with spaces to a multiple of 64 bytes."""
    entry: dict[str, object] = {
        "dtype": header.dtype,
        "shape": list(header.shape),
        "data_offsets": [0, header.data_bytes],
    }
    if header.supplement:
        entry[SUPPLEMENT] = dict(header.supplement)
    document = {"__metadata__": dict(header.metadata), header.tensor: entry}
    raw = _JSON.encode(document).encode()
    padded = raw + b" " * (-(len(raw) + HEAD_BYTES) % _ALIGNMENT)
    return len(padded).to_bytes(HEAD_BYTES, "little") + padded


def tensor_start(head: bytes) -> int:
    """Return the offset of a file's tensor, told by its first `HEAD_BYTES`."""
    return HEAD_BYTES + int.from_bytes(head[:HEAD_BYTES], "little")


def decode_header(file: memoryview) -> tuple[TensorHeader, int]:
    """Return the head of a file and the offset of its tensor.

    Raises CorruptBlock unless the file holds exactly one tensor that ends where the file ends.
    """
    length = int.from_bytes(file[:HEAD_BYTES], "little")
    start = HEAD_BYTES + length
    if len(file) < HEAD_BYTES or length > _MAX_HEADER_BYTES or start > len(file):
        raise CorruptBlock("the file is shorter than its header")
    try:
        header = _header_of(json.loads(str(file[HEAD_BYTES:start], "utf-8")))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as exc:
        raise CorruptBlock("the file's header is malformed") from exc
    if start + header.data_bytes != len(file):
        raise CorruptBlock("the file's size differs from its header")
    return header, start


def _header_of(document: Any) -> TensorHeader:
    metadata = document.pop("__metadata__")
    ((tensor, entry),) = document.items()
    shape = entry["shape"]
    (size,) = shape
    if not isinstance(shape, list) or type(size) is not int or not 0 <= size <= _MAX_SIZE:
        raise ValueError("the tensor is not a list of so many values")
    if entry.keys() - {SUPPLEMENT} != _KEYS or entry["dtype"] not in _DTYPE_BYTES:
        raise ValueError("the tensor's entry has unknown fields or an unknown dtype")
    supplement = _texts(entry[SUPPLEMENT]) if SUPPLEMENT in entry else {}
    header = TensorHeader(tensor, entry["dtype"], (size,), _texts(metadata), supplement)
    if entry["data_offsets"] != [0, header.data_bytes]:
        raise ValueError("the tensor does not fill the file")
    return header


def _texts(pairs: Any) -> dict[str, str]:
    if not isinstance(pairs, dict):
        raise TypeError("the metadata is not an object")
    # Both fail: a value that is no text, and half a character, which JSON can spell and no checksum can cover.
    "".join([*pairs, *pairs.values()]).encode()
    return pairs
