"""Pages whose tables name tests: the promises of the threat model, and the 54 reports in tests/README.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.docs.test_named_code import names_of

ROOT = Path(__file__).parents[3]
NUM_REPORTS = 54


def rows(page: str, begin: str, end: str) -> list[list[str]]:
    """Return the cells of the tables between two headings, without their heads."""
    section = (ROOT / page).read_text().partition(begin)[2].partition(end)[0]
    return [row.strip("| ").split(" | ") for row in section.splitlines() if re.match(r"\| (?!---|promise|class)", row)]


PROMISES = rows("docs/concepts/threat-model.md", "## What is promised", "## What is not promised")
REPORTS = rows("tests/README.md", "## Reports of others", "\n## ")


def lost(cell: str, folder: Path) -> list[tuple[str, str]]:
    """Return the tests that a cell names and that do not exist; `…` is the file named before it."""
    found, file = [], ""
    for path, function in re.findall(r"`([\w/]+\.py|…)::(\w+)`", cell):
        file = file if path == "…" else path
        if function not in names_of(folder / file):
            found.append((file, function))
    return found


@pytest.mark.parametrize(
    ("table", "folder", "without"),
    [(PROMISES, ROOT, "the same"), (REPORTS, ROOT / "tests", "none: .{20}")],
    ids=["promises", "reports"],
)
def test_each_row_names_tests_that_exist_or_says_why_there_are_none(table, folder, without):
    """Seen to fail with a test's name misspelt in each page, and with an empty cell."""
    assert len(table) >= 14
    for title, _, cell in table:
        assert "::" in cell or re.match(without, cell), f"no test holds: {title}"
        assert lost(cell, folder) == [], title


def test_each_report_is_in_one_class():
    """Seen to fail with one number left out, and with one written twice."""
    numbers = sorted(int(number) for _, reports, _ in REPORTS for number in reports.split(", "))

    assert numbers == list(range(1, NUM_REPORTS + 1))
