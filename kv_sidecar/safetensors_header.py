"""The head of a safetensors file with one tensor: 8 bytes of length, then JSON, then padding. Pure.

The length of the head depends only on the lengths of its texts, so a writer can leave room for it, fill the tensor
in place and write the head last. What the texts mean belongs to block_file.py and manifest.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias

from contextcache.errors import CorruptBlock

Dtype: TypeAlias = Literal["U8", "U32"]
_DTYPE_BYTES: dict[str, int] = {"U8": 1, "U32": 4}
_LENGTH_BYTES = 8
_ALIGNMENT = 64
"""The tensor starts at a multiple of a cache line."""
MAX_HEADER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What the head of a file says."""

    tensor: str
    dtype: Dtype
    shape: tuple[int, ...]
    metadata: Mapping[str, str]

    @property
    def data_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * _DTYPE_BYTES[self.dtype]


def encode_header(header: TensorHeader) -> bytes:
    """Return the head, padded with spaces to a multiple of 64 bytes."""
    document = {
        "__metadata__": dict(header.metadata),
        header.tensor: {"dtype": header.dtype, "shape": list(header.shape), "data_offsets": [0, header.data_bytes]},
    }
    raw = json.dumps(document, separators=(",", ":")).encode()
    padded = raw + b" " * (-(len(raw) + _LENGTH_BYTES) % _ALIGNMENT)
    return len(padded).to_bytes(_LENGTH_BYTES, "little") + padded


def decode_header(file: memoryview) -> tuple[TensorHeader, int]:
    """Return the head of a whole file and the offset of its tensor.

    Raises CorruptBlock unless the file holds exactly one tensor that ends where the file ends.
    """
    length = int.from_bytes(file[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if len(file) < _LENGTH_BYTES or length > MAX_HEADER_BYTES or start > len(file):
        raise CorruptBlock("the file is shorter than its head")
    try:
        header = _header_of(json.loads(bytes(file[_LENGTH_BYTES:start])))
    except (KeyError, TypeError, ValueError, RecursionError) as exc:
        raise CorruptBlock("the head of the file is not what it must be") from exc
    if start + header.data_bytes != len(file):
        raise CorruptBlock("the file does not end where its tensor ends")
    return header, start


def _header_of(document: Any) -> TensorHeader:
    metadata = document.pop("__metadata__")
    ((tensor, entry),) = document.items()
    shape = tuple(entry["shape"])
    texts = all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items())
    sizes = all(type(size) is int and size >= 0 for size in shape)
    if not texts or not sizes or entry["dtype"] not in _DTYPE_BYTES:
        raise ValueError("wrong types in the head")
    header = TensorHeader(tensor, entry["dtype"], shape, metadata)
    if entry["data_offsets"] != [0, header.data_bytes]:
        raise ValueError("the tensor does not fill the file")
    return header
