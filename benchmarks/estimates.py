"""What samples say: a median or another percentile, and where it lies with 95 % as a bootstrap has it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

MEDIAN = 50.0
_DRAWS = 5000


def percentile(values: Sequence[float], q: float = MEDIAN, *, digits: int = 1) -> float | None:
    """Return a percentile; None of nothing."""
    return round(float(np.percentile(values, q)), digits) if values else None


def interval(values: Sequence[float], q: float = MEDIAN, *, digits: int = 1) -> list[float] | None:
    """Return the two edges between which a percentile lies with 95 %; None of nothing."""
    return edges(drawn_percentiles(values, q), digits) if values else None


def ratio_row(
    above: Sequence[float], below: Sequence[float], bar: float | None, *, q: float = MEDIAN, digits: int = 4
) -> dict[str, Any]:
    """Return the ratio of two percentiles, its interval, the most it may be, and whether it is.

    Each percentile is drawn by itself. A bar on what there are no samples of is missed.
    """
    found = float(np.percentile(above, q) / np.percentile(below, q)) if above and below else None
    drawn = None if found is None else drawn_percentiles(above, q, 1) / drawn_percentiles(below, q, 2)
    return {
        "ratio": found and round(found, digits),
        "ratio_95": None if drawn is None else edges(drawn, digits),
        "bar": bar,
        "met": None if bar is None else found is not None and found <= bar,
    }


def paired_row(above: Sequence[float], below: Sequence[float], bar: float | None, *, digits: int = 4) -> dict[str, Any]:
    """Return the same of the median of ratios, each of two samples that were taken one after the other."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    found = percentile(ratios, digits=digits)
    met = None if bar is None else found is not None and found <= bar
    return {"ratio": found, "ratio_95": interval(ratios, digits=digits), "bar": bar, "met": met}


def cell(value: object, form: str = ".1f") -> str:
    """Return a figure, an interval or a verdict as a table shows it."""
    if isinstance(value, list):
        return " to ".join(format(edge, form) for edge in value)
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return format(value, form) if isinstance(value, float) else "-" if value is None else str(value)


def drawn_percentiles(values: Sequence[float], q: float, seed: int = 1) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the percentiles of bootstrap samples."""
    drawn = np.random.default_rng(seed).choice(np.asarray(values, dtype=np.float64), (_DRAWS, len(values)))
    return np.asarray(np.percentile(drawn, q, axis=1))


def edges(drawn: np.ndarray[Any, np.dtype[np.float64]], digits: int) -> list[float]:
    """Return the edges between which 95 % of what was drawn lies."""
    return [round(float(edge), digits) for edge in np.percentile(drawn, (2.5, 97.5))]
