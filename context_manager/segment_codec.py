"""Transcript segments as bytes, the way they lie in Redis. Pure; no token id is ever looked at here.

A segment is two msgpack objects one after the other: the number of tokens, then the array
[kind, token ids as u32 little-endian bytes, text, messages_json]. The number stands alone in front so that
`scripts/commit.lua` can count what a diverging turn drops; Redis's msgpack does not know byte strings.
"""

from __future__ import annotations

import sys
from array import array

import msgpack

from contextcache.errors import InvalidRequest
from contextcache.model import Segment, SegmentKind


def pack_segment(segment: Segment) -> bytes:
    """Return the bytes of a segment. Raises InvalidRequest for an id that is no u32 or text that is no Unicode."""
    try:
        ids = _u32_bytes(segment.token_ids)
        fields = [segment.kind.value, ids, segment.text, segment.messages_json]
        packed: bytes = msgpack.packb(len(segment.token_ids)) + msgpack.packb(fields, use_bin_type=True)
    except OverflowError as exc:
        raise InvalidRequest("a token id is not an unsigned 32-bit number", param="token_ids") from exc
    except UnicodeEncodeError as exc:
        raise InvalidRequest("a segment holds text that is not valid Unicode", param="text") from exc
    return packed


def unpack_segment(packed: bytes) -> Segment:
    """Return the segment of `pack_segment`'s bytes. Raises ValueError when they are anything else."""
    objects = msgpack.Unpacker(raw=False)
    objects.feed(packed)
    try:
        num_tokens, (kind, ids, text, messages_json) = objects
    except (msgpack.UnpackException, TypeError) as exc:
        raise ValueError("bytes that are no segment") from exc
    if (type(num_tokens), type(ids), type(text), type(messages_json)) != (int, bytes, str, str):
        raise ValueError("a segment's parts are of other types than they must be")
    if len(ids) != num_tokens * 4:
        raise ValueError("a segment says another number of tokens than it holds")
    return Segment(SegmentKind(kind), _u32_tuple(ids), text=text, messages_json=messages_json)


def _u32_bytes(token_ids: tuple[int, ...]) -> bytes:
    numbers = array("I", token_ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _u32_tuple(ids: bytes) -> tuple[int, ...]:
    numbers = array("I")
    numbers.frombytes(ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)
