"""What a pod remembers of transcripts is bounded, in bytes and in time, and never grows on what it did not see."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from context_manager.segments import PackedSegment, packed
from context_manager.transcript_memory import IDLE_S, NOTHING_KNOWN, KnownTranscript, TranscriptMemory
from contextcache.clock import ManualClock
from contextcache.model import (
    CacheSessionMetadata,
    Segment,
    SegmentKind,
    SessionMode,
    SessionState,
    TtlPolicy,
    TurnCommit,
)

BYTES_MAX = 20_000
TTL_S = 3600
ONE = packed(Segment(SegmentKind.PROMPT, tuple(range(1000)), text="x"))
"""Some 4 300 bytes."""
OTHER = packed(Segment(SegmentKind.ANSWER, (1, 2), messages_json="[]"))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def memory(clock: ManualClock) -> Iterator[TranscriptMemory]:
    memory = TranscriptMemory(bytes_max=BYTES_MAX, clock=clock)
    yield memory
    memory.close()


def session(clock: ManualClock, name: str = "ctx_1", *, mark: str = "m1", ttl_s: int = TTL_S) -> CacheSessionMetadata:
    return CacheSessionMetadata(
        session_id=name,
        tenant="demo",
        model_id="smol",
        mode=SessionMode.SESSION,
        state=SessionState.BUSY,
        generation=1,
        cache_ref="",
        previous_cache_ref="",
        holder="",
        created_at_ms=clock.now_ms(),
        expires_at_ms=clock.now_ms() + ttl_s * 1000,
        ttl_s=ttl_s,
        ttl_policy=TtlPolicy.FIXED,
        mark=mark,
    )


def commit(keep: int, *segments: Segment, lease_id: str = "lease") -> TurnCommit:
    return TurnCommit("demo", "ctx_1", lease_id, 1, keep, segments, "", "pod")


def transcript(*segments: PackedSegment) -> KnownTranscript:
    return NOTHING_KNOWN.grown(segments)


def found(memory: TranscriptMemory, name: str = "ctx_1") -> tuple[str, tuple[Segment, ...]]:
    known = memory.find("demo", name)
    return known.mark, known.segments


async def test_what_a_turn_began_with_and_what_it_committed_are_known(
    memory: TranscriptMemory, clock: ManualClock
) -> None:
    memory.begun(session(clock), transcript(ONE, OTHER), lease_id="lease")
    assert found(memory) == ("m1", (ONE, OTHER))
    memory.committed(session(clock, mark="m2"), commit(1, OTHER))

    assert found(memory) == ("m2", (ONE, OTHER))
    assert found(memory, "ctx_2") == ("", ())
    assert memory.find("other", "ctx_1") is NOTHING_KNOWN


async def test_a_commit_whose_beginning_was_not_seen_is_not_built_upon(
    memory: TranscriptMemory, clock: ManualClock
) -> None:
    """Seen to fail with what lay there under the id taken for the beginning: it was another turn's."""
    memory.begun(session(clock), transcript(ONE), lease_id="another")
    memory.committed(session(clock, mark="m2"), commit(1, OTHER))

    assert found(memory) == ("", ())
    memory.committed(session(clock, mark="m2"), commit(0, OTHER))
    assert found(memory) == ("m2", (OTHER,))


async def test_a_turn_that_ended_without_a_commit_is_not_built_upon(
    memory: TranscriptMemory, clock: ManualClock
) -> None:
    memory.begun(session(clock), transcript(ONE), lease_id="lease")
    memory.ended("lease")
    assert found(memory) == ("m1", (ONE,))
    memory.committed(session(clock, mark="m2"), commit(1, OTHER))

    assert found(memory) == ("", ())


async def test_a_transcript_without_a_mark_is_not_kept_but_may_be_grown(
    memory: TranscriptMemory, clock: ManualClock
) -> None:
    """A row whose last commit was the release before's, and a manager of this one that takes the next."""
    memory.begun(session(clock, mark=""), transcript(ONE), lease_id="lease")
    assert found(memory) == ("", ())
    memory.committed(session(clock, mark="m2"), commit(1, OTHER))

    assert found(memory) == ("m2", (ONE, OTHER))
    memory.committed(session(clock, mark=""), commit(0, OTHER))
    assert found(memory) == ("", ())


async def test_the_least_recently_used_goes_when_the_bytes_are_full(
    memory: TranscriptMemory, clock: ManualClock
) -> None:
    for number in range(4):
        memory.begun(session(clock, f"ctx_{number}"), transcript(ONE), lease_id="")
    memory.begun(session(clock, "ctx_0"), transcript(ONE), lease_id="")
    memory.begun(session(clock, "ctx_4"), transcript(ONE), lease_id="")

    assert [bool(found(memory, f"ctx_{number}")[0]) for number in range(5)] == [True, False, True, True, True]
    assert 4 * ONE.size_bytes < memory.size_bytes <= BYTES_MAX


async def test_a_transcript_that_is_larger_than_the_memory_displaces_nothing(
    memory: TranscriptMemory, clock: ManualClock
) -> None:
    memory.begun(session(clock, "ctx_2"), transcript(ONE), lease_id="")
    memory.begun(session(clock), transcript(*(ONE,) * 5), lease_id="")

    assert found(memory) == ("", ())
    assert found(memory, "ctx_2") == ("m1", (ONE,))


async def test_bytes_are_counted_down_to_none(memory: TranscriptMemory, clock: ManualClock) -> None:
    memory.begun(session(clock), transcript(ONE), lease_id="lease")
    memory.begun(session(clock), transcript(ONE, OTHER), lease_id="lease")
    memory.committed(session(clock, mark="m2"), commit(1, OTHER))
    memory.forget("demo", "ctx_1")
    memory.forget("demo", "ctx_1")

    assert memory.size_bytes == 0


@pytest.mark.parametrize(("ttl_s", "known_s"), [(TTL_S, IDLE_S), (60, 60)])
async def test_text_goes_with_the_sessions_life_and_ten_idle_minutes_at_most(
    memory: TranscriptMemory, clock: ManualClock, ttl_s: int, known_s: int
) -> None:
    memory.begun(session(clock, ttl_s=ttl_s), transcript(ONE), lease_id="")
    clock.advance(s=known_s - 0.001)
    memory.forget_due()
    assert found(memory) == ("m1", (ONE,))
    clock.advance(ms=1)

    assert found(memory) == ("", ())
    memory.forget_due()
    assert memory.size_bytes == 0


async def test_a_timer_drops_what_nobody_asks_for(memory: TranscriptMemory, clock: ManualClock) -> None:
    """No turn need come: the text of a deleted conversation leaves an idle pod too."""
    memory.begun(session(clock), transcript(ONE), lease_id="")
    assert memory._timer is not None
    clock.advance(s=IDLE_S)
    memory._timer._run()  # its time has come

    assert memory.size_bytes == 0


async def test_the_turns_whose_commit_is_awaited_are_bounded(memory: TranscriptMemory, clock: ManualClock) -> None:
    for number in range(3000):
        memory.begun(session(clock), transcript(OTHER), lease_id=f"lease-{number}")

    assert len(memory._begun) == 1024


async def test_readers_are_not_awaited(memory: TranscriptMemory, clock: ManualClock) -> None:
    memory.begun(session(clock), transcript(OTHER), lease_id="")

    assert not memory._begun
