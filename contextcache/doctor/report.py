"""Findings as a table for people or as JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from contextcache.doctor.finding import Finding, Level

_SIGNS = {Level.OK: "✓", Level.WARNING: "!", Level.FAILED: "✗", Level.SKIPPED: "-"}
_WIDTH = 120
_TEXT_CHARS_MAX = 1000


def lines_of(finding: Finding) -> Iterable[str]:
    """Yield one finding as lines of text: the sign, the check, what was found, and what to do."""
    yield f"{_SIGNS[finding.level]} {finding.check:<15} {_printable(finding.text)}"
    indent = " " * 18
    yield from textwrap.wrap(finding.hint, _WIDTH, initial_indent=f"{indent}→ ", subsequent_indent=f"{indent}  ")


def _printable(text: str) -> str:
    """Return text that others may have written as a terminal may get it: short, and none of it an order to it."""
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return shown if len(shown) <= _TEXT_CHARS_MAX else f"{shown[:_TEXT_CHARS_MAX]}…"


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line."""
    counts = Counter(finding.level for finding in findings)
    bad, doubtful = counts[Level.FAILED], counts[Level.WARNING]
    if bad:
        return f"{bad} of {len(findings)} checks failed."
    return "All is well." if not doubtful else f"All works; {doubtful} of {len(findings)} checks need attention."


def as_json(examined: str, findings: Sequence[Finding], *, kind: str = "url") -> str:
    """Return the whole report as one JSON object; `kind` is the key of `examined`."""
    counts = Counter(finding.level for finding in findings)
    report: dict[str, Any] = {
        kind: examined,
        "ok": not counts[Level.FAILED],
        "failed": counts[Level.FAILED],
        "warnings": counts[Level.WARNING],
        "findings": [_entry(finding) for finding in findings],
    }
    return json.dumps(report, indent=2)


def _entry(finding: Finding) -> dict[str, Any]:
    entry: dict[str, Any] = {"check": finding.check, "level": finding.level.value, "text": finding.text}
    return (
        entry | ({"hint": finding.hint} if finding.hint else {}) | ({"facts": finding.facts} if finding.facts else {})
    )


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 when a check failed, else 0; warnings are no failures."""
    return int(any(finding.level is Level.FAILED for finding in findings))
