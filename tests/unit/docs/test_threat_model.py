"""docs/threat-model.md: every promise names tests, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOC = (ROOT / "docs" / "threat-model.md").read_text()
PROMISES = DOC[DOC.index("## What is promised") : DOC.index("## What is not promised")]
ROWS = [row.split(" | ") for row in PROMISES.splitlines() if re.match(r"\| (?!---|promise)", row)]


def named_tests(cell: str) -> list[tuple[str, str]]:
    """Return (file, function); `…` is the file named before it."""
    found, file = [], ""
    for path, function in re.findall(r"`(tests/[\w/]+\.py|…)::(\w+)`", cell):
        file = file if path == "…" else path
        found.append((file, function))
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row[0][2:40] for row in ROWS])
def test_a_promise_is_held_by_tests_that_exist(row):
    """Seen to fail with a test's name misspelt."""
    cell = row[2]

    assert named_tests(cell) or cell.startswith("the same"), "no test holds this"
    for file, function in named_tests(cell):
        names = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
        assert function in names, (file, function)


def test_every_promise_is_read():
    assert len(ROWS) >= 14
    assert all(len(row) == 3 for row in ROWS)
