"""What a torture run is told and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True, slots=True)
class Options:
    """One call of `python -m tests.torture`."""

    seed: int
    """Every choice a run makes follows from it; `random()` gives a generator that runs do not share."""
    turns: int = 500
    """How much a run does where it counts turns (or calls); others scale with it, 500 being their default size."""
    minutes: float | None = None
    """How long a run may take, for those that go on for a time (`soak`); None: the run's own default."""
    cases: str = ""
    """A regular expression: of runs that have named cases (`matrix`), those it is found in."""

    def random(self, name: str) -> Random:
        """Return the generator of one run: the same for the same seed and name, whatever else runs."""
        return Random(f"{self.seed}/{name}")


@dataclass(slots=True)
class Report:
    """What one run has seen."""

    name: str
    rows: dict[str, int | float | str] = field(default_factory=dict)
    """What was counted or measured, in the order of the table."""
    failures: list[str] = field(default_factory=list)
    """What must not be and was, one line or more each, with all one needs to see it again; empty: all is well."""
    tables: dict[str, tuple[list[str], list[list[str]]]] = field(default_factory=dict)
    """Further tables by title: heads and rows."""

    def count(self, row: str, amount: int = 1) -> None:
        """Add to a counter."""
        value = self.rows.get(row, 0)
        assert isinstance(value, int), row
        self.rows[row] = value + amount

    def as_json(self) -> Mapping[str, object]:
        """Return what goes into the JSON: tables as lists of objects."""
        tables = {
            title: [dict(zip(heads, row, strict=True)) for row in rows] for title, (heads, rows) in self.tables.items()
        }
        return {"name": self.name, "rows": self.rows, "tables": tables, "failures": self.failures}
