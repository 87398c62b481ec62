"""Result of a check in words for the operator, and the report: findings as lines of text, or as JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
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


_SIGNS = {Level.OK: "✓", Level.WARNING: "!", Level.FAILED: "✗", Level.SKIPPED: "-"}
_WIDTH = 120
_TEXT_CHARS_MAX = 1000


def lines_of(finding: Finding) -> Iterable[str]:
    """Yield a finding as lines of text: sign, check and text, then the hint."""
    yield f"{_SIGNS[finding.level]} {finding.check:<15} {_printable(finding.text)}"
    indent = " " * 18
    yield from textwrap.wrap(finding.hint, _WIDTH, initial_indent=f"{indent}→ ", subsequent_indent=f"{indent}  ")


def _printable(text: str) -> str:
    """Return foreign text for a terminal: shortened, and without control characters."""
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return shown if len(shown) <= _TEXT_CHARS_MAX else f"{shown[:_TEXT_CHARS_MAX]}…"


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line of the report."""
    counts = Counter(finding.level for finding in findings)
    if counts[Level.FAILED]:
        return f"{counts[Level.FAILED]} of {len(findings)} checks failed."
    doubtful = counts[Level.WARNING]
    return f"All works; {doubtful} of {len(findings)} checks need attention." if doubtful else "All is well."


def as_json(examined: str, findings: Sequence[Finding], *, kind: str = "url") -> str:
    """Return the whole report as one JSON object; `kind` is the key of `examined`."""
    counts = Counter(finding.level for finding in findings)
    entries = []
    for finding in findings:
        more = {"hint": finding.hint, "facts": finding.facts}
        entry = {"check": finding.check, "level": finding.level.value, "text": finding.text}
        entries.append(entry | {name: value for name, value in more.items() if value})
    bad = counts[Level.FAILED]
    head = {kind: examined, "ok": not bad, "failed": bad, "warnings": counts[Level.WARNING]}
    return json.dumps(head | {"findings": entries}, indent=2)


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if a check failed, else 0. A warning is no failure."""
    return int(any(finding.level is Level.FAILED for finding in findings))
