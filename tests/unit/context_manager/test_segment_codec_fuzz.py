"""Whatever bytes lie in a transcript: a segment or ValueError, never anything else and never another segment."""

from __future__ import annotations

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from context_manager.segments import pack_segment, unpack_segment
from contextcache.model import Segment, SegmentKind

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
SEGMENTS = st.builds(
    Segment,
    kind=st.sampled_from(SegmentKind),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple),
    text=TEXT,
    messages_json=TEXT,
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=9) | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def read(packed: bytes) -> None:
    try:
        segment = unpack_segment(packed)
    except ValueError:
        return
    assert unpack_segment(pack_segment(segment)) == segment


@given(st.binary(max_size=64))
@example(b"")
@example(b"\xc1")
@example(b"\xc1\x00")
@example(b"\x00\x94\xc0\xc4\x00\xa0\xa0")
def test_any_bytes_are_a_segment_or_a_value_error(packed: bytes) -> None:
    """Seen to fail with msgpack's own errors and TypeError let through: OutOfData, FormatError, `len` of a number."""
    read(packed)


@given(ANYTHING, st.lists(ANYTHING, min_size=3, max_size=5) | ANYTHING)
def test_any_two_objects_are_a_segment_or_a_value_error(number: object, fields: object) -> None:
    read(msgspec.msgpack.encode(number) + msgspec.msgpack.encode(fields))


@given(SEGMENTS, st.data())
def test_a_segment_with_one_byte_changed_is_another_one_or_none(segment: Segment, data: st.DataObject) -> None:
    packed = bytearray(pack_segment(segment))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    read(bytes(packed))
