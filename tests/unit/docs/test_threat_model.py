"""docs/concepts/threat-model.md: every promise names tests, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOC = (ROOT / "docs/concepts/threat-model.md").read_text()
PROMISES = DOC[DOC.index("## What is promised") : DOC.index("## What is not promised")]
ROWS = [row.split(" | ") for row in PROMISES.splitlines() if re.match(r"\| (?!---|promise)", row)]


def named_tests(cell: str) -> list[tuple[str, str]]:
    """Return (file, function); `…` is the file named before it."""
    found, file = [], ""
    for path, function in re.findall(r"`(tests/[\w/]+\.py|…)::(\w+)`", cell):
        file = file if path == "…" else path
        found.append((file, function))
    return found


def test_every_promise_is_held_by_tests_that_exist():
    """Seen to fail with a test's name misspelt."""
    assert len(ROWS) >= 14
    for promise, _, cell in ROWS:
        assert named_tests(cell) or cell.startswith("the same"), f"no test holds: {promise}"
        for file, function in named_tests(cell):
            names = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
            assert function in names, (file, function)
