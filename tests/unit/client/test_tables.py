"""Tables of the command line on a terminal: figures and days are whole, or their column is left out."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from contextcache.cli import output
from contextcache.client.types import TurnInfo

KEY = {
    "key": "b8531798",
    "contexts": 16396,
    "turns": 55254,
    "computed_tokens": 83351234,
    "cached_tokens": 123456789,
    "saved_share": 0.597,
    "completion_tokens": 9876543,
    "saved_seconds": 6812.4,
    "byte_hours": {"host": 3 << 30, "disk": 1 << 29},
}
USAGE = {"days": [{"day": "2026-11-27", "keys": [KEY]}, {"day": "2026-11-28", "keys": [KEY]}], "total": KEY}
USAGE["models"] = [KEY | {"model": "org/smol"}]

TURN = TurnInfo(
    generation=12,
    at=1_795_880_000.0,
    computed_tokens=16396,
    cached_tokens=55254,
    context_tokens=71650,
    completion_tokens=8335,
    source="host",
    restore_ms=None,
    first_token_ms=16396.0,
    took_ms=55254.0,
    match="append",
    reason=None,
    saved_share=0.7712,
)


@pytest.fixture
def narrow(monkeypatch):
    """Return what draws tables in 80 columns."""
    drawn = Console(width=80, record=True, file=io.StringIO())
    monkeypatch.setattr(output, "console", lambda **_: drawn)
    return drawn


def test_usage_keeps_days_and_figures_whole(narrow):
    """Seen to fail with the columns cut to width: `2026-11-…` on every row, and `comput…`."""
    output.print_rows(output.USAGE_HEADS, output.usage_rows(USAGE))
    text = narrow.export_text()

    assert "…" not in text
    assert all(
        whole in text for whole in ("2026-11-27", "2026-11-28", "83351234", "123456789", "6812.4", "computed", "60 %")
    )
    assert max(map(len, text.splitlines())) <= 80


def test_turns_are_told_in_seconds(narrow):
    output.print_rows(output.TURN_HEADS, output.turn_rows([TURN]))
    text = narrow.export_text()

    assert "…" not in text
    assert all(whole in text for whole in ("first s", "16.40", "55.25", "16396", "55254", "77 %", "append"))


def test_columns_stay_where_there_is_room(monkeypatch):
    wide = Console(width=200, record=True, file=io.StringIO())
    monkeypatch.setattr(output, "console", lambda **_: wide)
    output.print_rows(output.USAGE_HEADS, output.usage_rows(USAGE))

    assert " ".join(output.USAGE_HEADS).split() == wide.export_text().splitlines()[0].split()


ROWS = {
    "contexts": (
        output.CONTEXT_HEADS,
        [
            (
                f"ctx_{'0' * 32}",
                "meta-llama/Llama-3.1-8B-Instruct",
                12,
                123456,
                "90 %",
                12,
                "ready",
                "59 min",
                f"ctx_{'1' * 32}",
            )
        ],
    ),
    "usage": (output.USAGE_HEADS, list(output.usage_rows(USAGE))),
    "turns": (output.TURN_HEADS, list(output.turn_rows([TURN]))),
    "kept": (output.KEPT_HEADS, [(f"key_{'0' * 32}", 123456, "12.3 MiB", "pod-a, pod-b", "59 min")]),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_table_of_any_width_has_whole_columns_and_names_each_row(name, columns, monkeypatch):
    """Seen failing at 60 columns: `tok…` over `123…`, and turns without their generation."""
    drawn = Console(width=columns, record=True, file=io.StringIO())
    monkeypatch.setattr(output, "console", lambda: drawn)
    heads, rows = ROWS[name]
    output.print_rows(heads, iter(rows))
    head, *lines = drawn.export_text().splitlines()
    cells = {str(cell) for row in rows for cell in row} | set(heads)

    assert [line.split()[0] for line in lines] == [str(row[0]) for row in rows]
    assert max(map(len, (head, *lines))) <= columns
    for part in (one.strip() for line in (head, *lines) for one in line.split("  ") if one.strip()):
        assert part in cells or (part[:4], part[-1]) == ("meta", "…"), part


def test_storage_over_time_has_no_false_zero():
    assert [output.gib_hours(value) for value in (0, 1 << 20, 5 << 29)] == ["0", "< 0.001", "2.5"]
