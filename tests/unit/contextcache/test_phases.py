"""Tables of state machines."""

from __future__ import annotations

from enum import Enum, auto

import pytest

from contextcache.phases import Move, Phases


class Door(Enum):
    OPEN = auto()
    SHUT = auto()


TABLE = Phases([((Door.OPEN,), "shut", Door.SHUT), ((Door.SHUT, Door.OPEN), "open", Door.OPEN)])


def test_an_event_leads_to_the_phase_of_its_row() -> None:
    assert TABLE.after(Door.OPEN, "shut") is Door.SHUT
    assert TABLE.after(Door.OPEN, "open") is Door.OPEN


def test_an_event_without_a_row_is_a_fault_of_the_caller() -> None:
    assert not TABLE.allows(Door.SHUT, "shut")
    with pytest.raises(AssertionError, match="shut is illegal in phase SHUT"):
        TABLE.after(Door.SHUT, "shut")


def test_a_phase_and_an_event_have_one_row() -> None:
    with pytest.raises(ValueError, match="two rows for OPEN and shut"):
        Phases([((Door.OPEN,), "shut", Door.SHUT), ((Door.OPEN,), "shut", Door.OPEN)])


def test_a_table_lists_a_row_for_each_start() -> None:
    assert Move(Door.SHUT, "open", Door.OPEN) in set(TABLE)
    assert len(set(TABLE)) == 3
