"""Findings as lines for people, or as JSON."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from contextcache.doctor.finding import Finding, Level

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
