"""Tables of the command line on a terminal of 80 columns: figures and days are whole, or their column is left out."""

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
    "completion_tokens": 9876543,
    "saved_seconds": 6812.4,
    "byte_hours": {"host": 3 << 30, "disk": 1 << 29},
}
USAGE = {"days": [{"day": "2026-11-27", "keys": [KEY]}, {"day": "2026-11-28", "keys": [KEY]}], "total": KEY}


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
    assert all(whole in text for whole in ("2026-11-27", "2026-11-28", "83351234", "123456789", "6812.4", "computed"))
    assert max(map(len, text.splitlines())) <= 80


def test_turns_are_told_in_seconds(narrow):
    turn = TurnInfo(
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
    )
    output.print_rows(output.TURN_HEADS, output.turn_rows([turn]))
    text = narrow.export_text()

    assert "…" not in text
    assert all(whole in text for whole in ("first s", "16.40", "55.25", "16396", "55254", "append"))


def test_columns_stay_where_there_is_room(monkeypatch):
    wide = Console(width=200, record=True, file=io.StringIO())
    monkeypatch.setattr(output, "console", lambda **_: wide)
    output.print_rows(output.USAGE_HEADS, output.usage_rows(USAGE))

    assert " ".join(output.USAGE_HEADS).split() == wide.export_text().splitlines()[0].split()


def test_storage_over_time_has_no_false_zero():
    assert [output.gib_hours(value) for value in (0, 1 << 20, 5 << 29)] == ["0", "< 0.001", "2.5"]
