"""A packed segment is the segment it was made of."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_manager.segments import PackedSegment, packed
from contextcache.model import Segment, SegmentKind

SEGMENTS = st.builds(
    Segment,
    kind=st.sampled_from(SegmentKind),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple),
    text=st.text(max_size=5),
    messages_json=st.text(max_size=5),
)


@given(SEGMENTS)
def test_packing_changes_nothing_that_can_be_seen(segment: Segment) -> None:
    small = packed(segment)

    assert (small.kind, small.token_ids, small.text, small.messages_json, small.num_tokens) == (
        *(segment.kind, segment.token_ids, segment.text, segment.messages_json),
        len(segment.token_ids),
    )
    assert small == segment
    assert segment == small
    assert hash(small) == hash(segment)
    assert packed(small) is small


@given(SEGMENTS, SEGMENTS)
def test_segments_are_equal_when_their_contents_are(one: Segment, other: Segment) -> None:
    same = (one.kind, one.token_ids, one.text, one.messages_json) == (
        *(other.kind, other.token_ids, other.text, other.messages_json),
    )

    assert (packed(one) == other) is same
    assert (one == other) is same


def test_a_packed_segment_cannot_be_changed_either() -> None:
    small = packed(Segment(SegmentKind.PROMPT, (1,), text="a"))

    with pytest.raises((AttributeError, TypeError)):  # the latter is what 3.11 says of a subclass with slots
        small.packed_ids = b""


def test_a_long_segment_takes_four_bytes_an_id() -> None:
    small = packed(Segment(SegmentKind.PROMPT, tuple(range(100_000)), text=""))

    assert small.size_bytes < 4 * 100_000 + 200


def test_ids_cut_in_the_middle_are_refused() -> None:
    with pytest.raises(ValueError, match="inside an id"):
        PackedSegment(SegmentKind.PROMPT, b"12345", text="", messages_json="")


def test_an_id_that_is_no_u32_is_refused() -> None:
    for token in (-1, 2**32):
        with pytest.raises(struct.error):
            packed(Segment(SegmentKind.PROMPT, (token,)))
