"""Kept results are read and compared by people: a row a line, medians and intervals, no raw samples."""

from __future__ import annotations

import json

import pytest

from benchmarks.result import RESULTS
from deploy.local.run_stamp import as_lines

FILES = sorted(RESULTS.glob("*.json"))
LINES_MAX = 2500
NUMBERS_MAX = 3
"""Numbers in a list: an interval has two, a load average three."""


def lists_of_numbers(value):
    """Return every list of numbers in a result, however deep."""
    if isinstance(value, list) and value and all(isinstance(one, int | float) for one in value):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [found for one in inner for found in lists_of_numbers(one)]


def test_a_row_of_a_table_is_a_line():
    """Seen to fail with the rows written with an indent of 1, a number a line."""
    rows = [{"way": "cold", "ms": 4.5, "ms_95": [4.1, 4.9]}, {"way": "disk", "ms": 1.5, "ms_95": [1.4, 1.6]}]
    report = {"commit": "abc1234", "rows": rows, "runs": [{"name": "matrix", "tables": {"cases": rows[:1]}}]}

    assert json.loads(as_lines(report)) == report
    assert as_lines(report) == (
        '{\n "commit": "abc1234",\n "rows": [\n'
        '  {"way": "cold", "ms": 4.5, "ms_95": [4.1, 4.9]},\n  {"way": "disk", "ms": 1.5, "ms_95": [1.4, 1.6]}\n ],\n'
        ' "runs": [\n  {\n   "name": "matrix",\n   "tables": {\n    "cases": [\n'
        '     {"way": "cold", "ms": 4.5, "ms_95": [4.1, 4.9]}\n    ]\n   }\n  }\n ]\n}\n'
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_kept_result_has_a_row_a_line_and_no_raw_samples(file):
    """Seen to fail with the results of 2026-11-27, which had the samples of each round."""
    text = file.read_text()
    result = json.loads(text)

    assert text == as_lines(result)
    assert [found for found in lists_of_numbers(result) if len(found) > NUMBERS_MAX] == []


def test_all_kept_results_are_short():
    """Seen to fail with 43 900 lines, when each number had a line."""
    assert len(FILES) > 20
    assert sum(len(file.read_text().splitlines()) for file in FILES) <= LINES_MAX
