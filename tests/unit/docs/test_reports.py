"""tests/README.md: the table of reports holds each of the 54 once, with tests that exist or a reason for none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[2]
DOC = (TESTS / "README.md").read_text()
SECTION = DOC[DOC.index("## Reports of others") :]
ROWS = [row.strip("| ").split(" | ") for row in SECTION.splitlines() if re.match(r"\| (?!---|class)", row)]
NUM_REPORTS = 54


def named_tests(cell: str) -> list[tuple[str, str]]:
    """Return (file, function); `…` is the file named before it."""
    found, file = [], ""
    for path, function in re.findall(r"`([\w/]+\.py|…)::(\w+)`", cell):
        file = file if path == "…" else path
        found.append((file, function))
    return found


def test_each_report_is_in_one_class():
    """Seen to fail with one number left out, and with one written twice."""
    numbers = sorted(int(number) for _, reports, _ in ROWS for number in reports.split(", "))

    assert numbers == list(range(1, NUM_REPORTS + 1))


def test_each_class_names_tests_that_exist_or_says_why_there_are_none():
    """Seen to fail with a test's name misspelt, and with an empty cell."""
    for title, _, cell in ROWS:
        tests = named_tests(cell)
        assert tests or re.match(r"none: .{20}", cell), f"no test holds: {title}"
        for file, function in tests:
            names = {node.name for node in ast.walk(ast.parse((TESTS / file).read_text())) if hasattr(node, "name")}
            assert function in names, (file, function)
