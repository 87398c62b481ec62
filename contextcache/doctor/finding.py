"""Result of a check, in words for the operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

CLOCK_SKEW_S = 20.0
"""Largest difference of two clocks without a complaint. Signed identities live for a minute."""


class Level(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    """The deployment works, but needs attention."""
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
    """The cure; empty if the check succeeded."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Figures, for `--json`."""

    @property
    def admits(self) -> bool:
        """Whether the front accepts the requests of the following checks."""
        return (self.check == "key" and self.level is Level.OK) or self.facts.get("let_in") is True


def ok(check: str, text: str, **facts: Any) -> Finding:
    """Return a success."""
    return Finding(check, Level.OK, text, facts=facts)


def warning(check: str, text: str, hint: str, **facts: Any) -> Finding:
    """Return a finding that needs attention."""
    return Finding(check, Level.WARNING, text, hint, facts)


def failed(check: str, text: str, hint: str, **facts: Any) -> Finding:
    """Return a fault."""
    return Finding(check, Level.FAILED, text, hint, facts)


def skipped(check: str, text: str) -> Finding:
    """Return a check that could not run."""
    return Finding(check, Level.SKIPPED, text)
