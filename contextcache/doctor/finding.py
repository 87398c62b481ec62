"""What a check found, in words for whoever runs the deployment."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How it went."""

    OK = "ok"
    WARNING = "warning"
    """It works; something about it deserves a look."""
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. Never holds a key, a prompt or an answer."""

    check: str
    """Short name, the same in every run."""
    level: Level
    text: str
    hint: str = ""
    """What to do about it; empty when all is well."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Figures, for `--json`."""

    @property
    def admits(self) -> bool:
        """Whether it means that requests like the following ones are let in."""
        return (self.check == "key" and self.level is Level.OK) or self.facts.get("let_in") is True


def ok(check: str, text: str, **facts: Any) -> Finding:
    """Return a finding that all is well."""
    return Finding(check, Level.OK, text, facts=facts)


def warning(check: str, text: str, hint: str, **facts: Any) -> Finding:
    """Return a finding that something deserves a look."""
    return Finding(check, Level.WARNING, text, hint, facts)


def failed(check: str, text: str, hint: str, **facts: Any) -> Finding:
    """Return a finding that something is wrong."""
    return Finding(check, Level.FAILED, text, hint, facts)


def skipped(check: str, text: str) -> Finding:
    """Return a finding that nothing could be found."""
    return Finding(check, Level.SKIPPED, text)
