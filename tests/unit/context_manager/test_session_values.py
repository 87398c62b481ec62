"""Rows, segments and shards as bytes: what is written is read back, and never changes its place."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from context_manager.limits import SessionKey
from context_manager.manager import ContextCacheManager
from context_manager.refusals import refusal
from context_manager.row import row_of_reply, stored_fields
from context_manager.segments import pack_segment, unpack_segment
from contextcache.clock import ManualClock
from contextcache.model import NewSession, Segment, SegmentKind, SessionMode, TtlPolicy
from contextcache.names import NUM_SHARDS, shard_of
from tests.kit.session_store import in_valkey

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
SEGMENTS = st.builds(
    Segment,
    kind=st.sampled_from(SegmentKind),
    token_ids=st.lists(st.integers(0, 2**32 - 1)).map(tuple),
    text=TEXT,
    messages_json=TEXT,
)


@given(SEGMENTS)
def test_a_segment_survives_its_bytes(segment: Segment) -> None:
    assert unpack_segment(pack_segment(segment)) == segment


def test_a_segments_bytes_are_what_is_written_down() -> None:
    packed = pack_segment(Segment(SegmentKind.ANSWER, (1, 0x01020304), text="a"))

    # 2 tokens, then an array of 4: "answer", 8 bytes of ids, "a", "".
    assert packed == b"\x02\x94\xa6answer\xc4\x08\x01\x00\x00\x00\x04\x03\x02\x01\xa1a\xa0"


def test_a_truncated_segment_is_never_read() -> None:
    packed = pack_segment(Segment(SegmentKind.ANSWER, (1, 2), text="a"))
    for length in range(len(packed)):
        with pytest.raises(ValueError):
            unpack_segment(packed[:length])


def test_a_segment_whose_count_and_ids_disagree_is_never_read() -> None:
    packed = pack_segment(Segment(SegmentKind.ANSWER, (1, 2), text="a"))

    with pytest.raises(ValueError, match="num_tokens differs"):
        unpack_segment(b"\x03" + packed[1:])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    new=st.builds(
        NewSession,
        tenant=st.just("demo"),
        session_id=st.just("ctx_1"),
        model_id=TEXT,
        mode=st.sampled_from(SessionMode),
        ttl_s=st.integers(1, 10**9),
        ttl_policy=st.sampled_from(TtlPolicy),
        metadata=st.dictionaries(TEXT, TEXT, max_size=4),
    )
)
def test_a_row_survives_its_fields(new: NewSession) -> None:
    """What reserve.lua writes is what the client asked for."""
    manager = ContextCacheManager(**in_valkey(clock=ManualClock(1_700_000_000_000)))
    lease: dict[str, Any] = {"lease_id": "l", "lease_ttl_ms": 5, "contexts_max": 0, "tenant_sets": []}
    key = SessionKey("demo", "ctx_1")
    row = asyncio.run(manager._change("reserve", key, **lease, **stored_fields(new)))[1]
    session = row_of_reply(key, row).session

    assert {name: getattr(session, name) for name in stored_fields(new)} == vars_of(new)
    assert session == asyncio.run(manager.locate("demo", "ctx_1"))
    assert (session.expires_at_ms - session.created_at_ms, session.holders) == (new.ttl_s * 1000, ())


def vars_of(new: NewSession) -> dict[str, Any]:
    return {field.name: getattr(new, field.name) for field in fields(new)}


def test_a_shard_never_changes_because_it_is_part_of_the_key() -> None:
    assert [shard_of("demo", f"ctx_{number}") for number in range(4)] == SHARDS_OF_DEMO
    assert {shard_of("demo", f"ctx_{number}") for number in range(2000)} == set(range(NUM_SHARDS))


SHARDS_OF_DEMO = [55, 56, 2, 51]


@pytest.mark.parametrize(("remaining_ms", "retry_after_s"), [(0, 1), (1, 1), (1000, 1), (1001, 2), (30_000, 30)])
def test_busy_says_when_to_come_back(remaining_ms: int, retry_after_s: int) -> None:
    assert refusal("busy", remaining_ms).retry_after_s == retry_after_s
