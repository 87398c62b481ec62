"""State machines as tables: each row has a phase, an event and the phase that follows.

A record keeps its phase in one field and changes it by `Phases.after` alone, under the record's lock.
`docs/architecture.md` draws the tables. No I/O and no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

Phase = TypeVar("Phase", bound=Enum)


class Move(NamedTuple, Generic[Phase]):
    """Row of a table."""

    start: Phase
    event: str
    end: Phase


class Phases(Generic[Phase]):
    """Table of a state machine. Every event is legal in the phases that have a row for it, in no others."""

    def __init__(self, rows: Iterable[tuple[Iterable[Phase], str, Phase]]) -> None:
        """`rows`: phases in which the event is legal, the event, the phase that follows.

        Raises ValueError if a phase and an event have two rows.
        """
        self._ends: dict[tuple[Phase, str], Phase] = {}
        for starts, event, end in rows:
            for start in starts:
                if (start, event) in self._ends:
                    raise ValueError(f"two rows for {start.name} and {event}")
                self._ends[start, event] = end

    def __iter__(self) -> Iterator[Move[Phase]]:
        """Yield the rows, one for each phase and event."""
        return (Move(start, event, end) for (start, event), end in self._ends.items())

    def allows(self, phase: Phase, event: str) -> bool:
        """Return whether the event is legal in this phase."""
        return (phase, event) in self._ends

    def after(self, phase: Phase, event: str) -> Phase:
        """Return the phase that follows. Raises AssertionError for an illegal event: a fault of the caller."""
        end = self._ends.get((phase, event))
        if end is None:
            raise AssertionError(f"{event} is illegal in phase {phase.name}")
        return end
