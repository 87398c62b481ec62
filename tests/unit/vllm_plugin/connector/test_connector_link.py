"""When a rank takes its sidecar for gone, and maps its memory anew: not for what the sidecar says of its disk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from grpc import StatusCode

from contextcache.clock import ManualClock
from contextcache.errors import ContextCacheError, SidecarUnavailable, StorageFull
from contextcache.wire.rpc import CODE_KEY
from tests.unit.vllm_plugin.connector.fake_sidecar import FailedCall
from vllm_plugin.connector.metadata import EngineGroup, RankFacts
from vllm_plugin.connector.sidecar_link import RankLink
from vllm_plugin.connector.telemetry import Counters


def failed(cause: Exception | None) -> SidecarUnavailable:
    error = SidecarUnavailable("it did not")
    error.__cause__ = cause
    return error


SAID = failed(FailedCall(StatusCode.UNAVAILABLE, (CODE_KEY, "sidecar_unavailable")))
LATE = failed(None)
SILENT = failed(FailedCall(StatusCode.UNAVAILABLE))
OUT_OF_TIME = failed(FailedCall(StatusCode.DEADLINE_EXCEEDED))


@pytest.mark.parametrize(
    ("error", "arenas"),
    [(SAID, 2), (LATE, 2), (SILENT, 11), (OUT_OF_TIME, 1), (StorageFull("full"), 1)],
    ids=["its disk cannot be written", "too late", "nobody there", "no answer in time", "full"],
)
def test_an_arena_is_mapped_anew_when_nobody_answers_and_else_once_in_a_while(
    error: ContextCacheError, arenas: int
) -> None:
    """Seen failing: ten saves onto a disk that could not be written mapped ten arenas."""
    link, opened, clock = linked()
    link.terms()
    for _ in range(10):
        terms = link.terms()
        link.doubt(error, terms)
        if error is OUT_OF_TIME:
            link.doubt(LATE, terms)  # of another call; seen failing: while it was in doubt, that let the arena go
        link.terms()

    assert len(opened) == arenas
    clock.advance(s=10)
    link.doubt(SAID, link.terms())
    assert link.terms_now is None


def test_the_end_of_one_arena_does_not_take_the_next_from_the_rank() -> None:
    """Seen failing with `lost` for whatever arena there was: the word of a sidecar's end came after its restart."""
    link, opened, _ = linked()
    first = link.terms()
    link.lost(first)
    second = link.terms()
    opened[0]()  # the word of the first arena's end
    link.doubt(SILENT, first)  # a call that was made before the restart
    link.lost(first)

    assert link.terms_now is second
    opened[1]()
    assert link.terms_now is None


def test_no_save_waits_for_a_handshake_with_a_sidecar_that_failed_before() -> None:
    link, _, clock = linked(fails=1)
    with pytest.raises(SidecarUnavailable):
        link.terms()
    clock.advance(ms=250)
    assert link.is_worth_trying()

    answered = link.terms()

    assert link.seen == [True, False], "during the handshakes"
    assert link.terms() is answered


class Link(RankLink):
    seen: list[bool]
    """Whether a call was worth trying during each handshake."""


def linked(*, fails: int = 0) -> tuple[Link, list[Any], ManualClock]:
    """Return a link, the words of its arenas' ends, and its clock. The first `fails` handshakes fail."""
    opened, clock = [], ManualClock()

    def handshake(*_: object) -> object:
        link.seen.append(link.is_worth_trying())
        if len(link.seen) <= fails:
            raise SILENT
        return SimpleNamespace(block_tokens=256, block_size_bytes_max=1, arena=True)

    def open_arena(ended: Any) -> Any:
        opened.append(ended)
        return object()

    sidecar: Any = SimpleNamespace(handshake=handshake)
    link = Link(sidecar, open_arena, clock, Counters())
    link.seen = []
    link.introduce(RankFacts("f", "{}", 0, 1, (EngineGroup("full_attention", 16),)))
    return link, opened, clock
