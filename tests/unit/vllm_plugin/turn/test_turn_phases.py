"""The table of a turn's phases."""

from __future__ import annotations

import pytest

from vllm_plugin.turn.turn import PHASES, Phase

ENDS = {Phase.COMMITTED, Phase.READ_ONLY, Phase.REFUSED, Phase.UNKNOWN, Phase.ABORTED}


def test_a_turn_that_has_ended_never_changes():
    assert {move.start for move in PHASES} == set(Phase) - ENDS


def test_every_phase_is_reached_from_the_lease():
    reached = {Phase.LEASED}
    for _ in Phase:
        reached |= {move.end for move in PHASES if move.start in reached}

    assert reached == set(Phase)


def test_every_turn_that_has_not_ended_can_be_aborted():
    assert {move.start for move in PHASES if move.end is Phase.ABORTED} == set(Phase) - ENDS


def test_a_refusal_after_a_silent_commit_does_not_count_the_turn_a_second_time():
    """Its usage may be part of the first commit."""
    assert PHASES.after(Phase.IN_DOUBT, "commit refused") is Phase.UNKNOWN
    with pytest.raises(AssertionError, match="illegal"):
        PHASES.after(Phase.LEASED, "committed")
