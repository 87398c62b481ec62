"""Transcript segments: packed in memory, and as bytes, as they lie in Redis and travel to a pod. Pure.

Token ids stay in four bytes each until a caller reads them. Python's own form takes ten times as much memory, and a
transcript of 100 000 ids would be converted at every turn. The converted ids are not kept here.

As bytes a segment is two msgpack objects one after the other: the number of tokens, then the array
[kind, token ids as u32 little-endian bytes, text, messages_json]. The number stands alone in front so that
`scripts/commit.lua` can count the tokens that a diverging turn drops: msgpack of Redis has no byte strings.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable

import msgspec
from typing_extensions import override

from context_manager import refusals
from contextcache.errors import InvalidRequest
from contextcache.model import Segment, SegmentKind

_INTEGER_BYTES = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
"""Length of a msgpack integer by its first byte; those below 0x80 are the number itself."""
_CONTENT = msgspec.msgpack.Decoder(tuple[str, bytes, str, str])
ID_BYTES = 4


class PackedSegment(Segment):
    """A Segment at a tenth of the memory."""

    __slots__ = ("packed_ids",)
    packed_ids: bytes
    """u32, little-endian."""

    def __init__(self, kind: SegmentKind, packed_ids: bytes, *, text: str, messages_json: str) -> None:
        """Take ids as they are packed. Raises ValueError when they are no whole number of u32."""
        if len(packed_ids) % ID_BYTES:
            raise ValueError("the packed token ids end inside an id")
        for name, value in (
            ("kind", kind),
            ("packed_ids", packed_ids),
            ("text", text),
            ("messages_json", messages_json),
        ):
            object.__setattr__(self, name, value)

    @property
    @override
    def token_ids(self) -> tuple[int, ...]:
        """The ids, converted at each call."""
        return struct.unpack(f"<{self.num_tokens}I", self.packed_ids)

    @property
    @override
    def num_tokens(self) -> int:
        return len(self.packed_ids) // ID_BYTES

    @property
    def size_bytes(self) -> int:
        """Memory of its content."""
        return len(self.packed_ids) + sys.getsizeof(self.text) + sys.getsizeof(self.messages_json)


def packed(segment: Segment) -> PackedSegment:
    """Return a segment in its packed form. Raises struct.error for an id that is no u32."""
    if isinstance(segment, PackedSegment):
        return segment
    ids = struct.pack(f"<{segment.num_tokens}I", *segment.token_ids)
    return PackedSegment(segment.kind, ids, text=segment.text, messages_json=segment.messages_json)


def pack_segment(segment: Segment) -> bytes:
    """Return the bytes of a segment. Raises InvalidRequest for an id that is no u32 or text that is no Unicode."""
    try:
        ids = packed(segment).packed_ids
        content = msgspec.msgpack.encode([segment.kind.value, ids, segment.text, segment.messages_json])
    except struct.error as exc:
        raise InvalidRequest("a token id must be an unsigned 32-bit integer", param="token_ids") from exc
    except UnicodeEncodeError as exc:
        raise InvalidRequest("a segment must hold valid Unicode", param="text") from exc
    return msgspec.msgpack.encode(segment.num_tokens) + content


def unpack_transcript(stored: Iterable[bytes]) -> tuple[PackedSegment, ...]:
    """Return the segments of a transcript. Raises ContextCacheError when one of them is none."""
    try:
        return tuple(map(unpack_segment, stored))
    except ValueError as exc:
        raise refusals.damaged() from exc


def num_tokens_of(stored: bytes) -> int:
    """Return the number of tokens of `pack_segment`'s bytes, read from their head. Raises ContextCacheError."""
    head_bytes = _INTEGER_BYTES.get(stored[0], 1) if stored else 1
    try:
        return msgspec.msgpack.decode(stored[:head_bytes], type=int)
    except ValueError as exc:
        raise refusals.damaged() from exc


def unpack_segment(stored: bytes) -> PackedSegment:
    """Return the segment of `pack_segment`'s bytes. Raises ValueError when they are anything else."""
    head_bytes = _INTEGER_BYTES.get(stored[0], 1) if stored else 1
    num_tokens = msgspec.msgpack.decode(stored[:head_bytes], type=int)
    kind, ids, text, messages_json = _CONTENT.decode(memoryview(stored)[head_bytes:])
    if len(ids) != num_tokens * 4:
        raise ValueError("a segment's num_tokens differs from the number of its token ids")
    return PackedSegment(SegmentKind(kind), ids, text=text, messages_json=messages_json)
