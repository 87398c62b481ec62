"""Plain-text tables for people: pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def render(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table; columns whose every cell is a number (or `-`) are aligned to the right."""
    columns = list(zip(heads, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    to_right = [all(_is_figure(cell) for cell in column[1:]) for column in columns]
    lines = [_line(heads, widths, to_right), "  ".join("-" * width for width in widths)]
    return "\n".join(lines + [_line(row, widths, to_right) for row in rows])


def _line(cells: Sequence[str], widths: Sequence[int], to_right: Sequence[bool]) -> str:
    placed = (
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, to_right, strict=True)
    )
    return "  ".join(placed).rstrip()


def _is_figure(cell: str) -> bool:
    return cell == "-" or cell.replace(".", "", 1).replace(" ", "").rstrip("%x").isdigit()


def figure(value: object) -> str:
    """Return a number, or an interval, with three digits that say something."""
    if isinstance(value, list):
        return " to ".join(map(figure, value))
    if not isinstance(value, int | float):
        return "-" if value is None else str(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}".replace(",", " ")
