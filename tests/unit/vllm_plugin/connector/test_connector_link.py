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
from vllm_plugin.connector.sidecar_link import LazySidecar, RankLink
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
    opened, clock = [], ManualClock()
    handshake = SimpleNamespace(block_tokens=256, block_size_bytes_max=1, arena=True)
    sidecar: Any = SimpleNamespace(handshake=lambda *_: handshake)
    open_arena: Any = lambda _gone: opened.append(1) or object()
    link = RankLink(LazySidecar(lambda _s: sidecar, timeout_s=1), open_arena, clock, Counters())
    link.introduce(RankFacts("f", "{}", 0, 1, (EngineGroup("full_attention", 16),)))
    link.terms()
    for _ in range(10):
        link.doubt(error)
        if error is OUT_OF_TIME:
            link.doubt(LATE)  # of another call; seen failing: while it was in doubt, that let the arena go
        link.terms()

    assert len(opened) == arenas
    clock.advance(s=10)
    link.doubt(SAID)
    assert link.terms_now is None
