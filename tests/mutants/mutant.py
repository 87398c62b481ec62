"""What a mutant is, and the lists of them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutant:
    """One promise broken in one place."""

    name: str
    file: str
    """Of the tree's root."""
    old: str
    """Stands in the file exactly once."""
    new: str
    tests: tuple[str, ...]
    """Node ids, at least one of which must fail; seconds, and no chance in them."""
    why: str
    """What a user would suffer."""

    def copies(self, root: Path) -> int:
        """Return how often `old` stands in its file."""
        file = root / self.file
        return file.read_text().count(self.old) if file.is_file() else 0

    def apply(self, root: Path) -> None:
        """Write the mutant as a new file, so that whoever shares the old one by a link keeps it."""
        file = root / self.file
        text = file.read_text().replace(self.old, self.new)
        file.unlink()
        file.write_text(text)


def read_mutants(directory: Path) -> list[Mutant]:
    """Return the mutants of all lists. Raises TypeError for a field that is missing or not known, ValueError."""
    mutants: dict[str, Mutant] = {}
    for file in sorted(directory.glob("*.toml")):
        for name, fields in tomllib.loads(file.read_text()).items():
            if name in mutants:
                raise ValueError(f"two mutants are called {name}")
            mutants[name] = Mutant(name, **{**fields, "tests": tuple(fields["tests"])})
    return list(mutants.values())
