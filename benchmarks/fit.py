"""How a cost grows with a size: the exponent of the power through its medians. Pure arithmetic, no measuring.

Cost = c · size^e is a line in logarithms; e is its slope by least squares over the medians. Its interval is that of the
samples (bootstrap of each size by itself), not of the line: what bends shows in `last`, the slope between the two
largest sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from benchmarks.estimates import MEDIAN, drawn_percentiles, edges
from deploy.local.table import figure, render

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Samples: TypeAlias = Mapping[int, Sequence[float]]
"""By size."""
Bar: TypeAlias = tuple[float | None, float | None]
"""The least and the largest exponent; None: it may be as small, or as large, as it likes."""


def growth(samples: Samples) -> dict[str, Any]:
    """Return medians by size, each with its interval, exponent, its interval and `last`; None where there is none.

    Sizes whose median is not above 0 have no logarithm: they are shown and not fitted. Two are needed for a line.
    """
    medians = {size: float(np.median(taken)) for size, taken in sorted(samples.items()) if taken}
    fitted = [size for size, median in medians.items() if size > 0 and median > 0]
    row: dict[str, Any] = {"medians": {str(size): _rounded(median) for size, median in medians.items()}}
    drawn = {size: drawn_percentiles(samples[size], MEDIAN, size) for size in medians}
    row["medians_95"] = {str(size): [_rounded(edge) for edge in edges(of, 9)] for size, of in drawn.items()}
    if len(fitted) < 2:
        return row | dict.fromkeys(("exponent", "exponent_95", "last"))
    slopes = _slopes(fitted, np.stack([np.maximum(drawn[size], 1e-12) for size in fitted]))
    of_medians = _slopes(fitted, np.array([[medians[size]] for size in fitted]))
    last = _slopes(fitted[-2:], np.array([[medians[size]] for size in fitted[-2:]]))
    exponents = {"exponent": round(float(of_medians[0]), 3), "exponent_95": edges(slopes, 3)}
    return row | exponents | {"last": round(float(last[0]), 3)}


def is_met(exponent: float | None, bar: Bar | None) -> bool | None:
    """Return whether an exponent is within its bar; None without a bar. What was not measured misses it."""
    if bar is None:
        return None
    least, most = bar
    return exponent is not None and (least is None or exponent >= least) and (most is None or exponent <= most)


def grown(what: str, unit: str, samples: Samples, bar: Bar | None = None) -> dict[str, Any]:
    """Return the row of one cost."""
    row: dict[str, Any] = {"what": what, "unit": unit, "n": max(map(len, samples.values()), default=0)}
    row |= growth(samples)
    return row | {"bar": bar, "wanted": wanted(bar), "met": is_met(row["exponent"], bar)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of one axis, sizes from left to right."""
    sizes = sorted({int(size) for row in rows for size in row["medians"]})
    shown = [f"{size:,}".replace(",", " ") for size in sizes]
    heads = ["what", "unit", *shown, "exponent", "95 %", "last", "bar", "met"]
    cells = []
    for row in rows:
        costs = [figure(row["medians"].get(str(size))) for size in sizes]
        met = {None: "-", True: "yes", False: "NO"}[row["met"]]
        exponents = [_exponent(row[name]) for name in ("exponent", "exponent_95", "last")]
        cells.append([row["what"], row["unit"], *costs, *exponents, row["wanted"] or "-", met])
    return render(heads, cells)


def wanted(bar: Bar | None) -> str:
    """Return what is wanted of an exponent, empty: nothing."""
    edges = zip("≥≤", bar or (None, None), strict=True)
    return " and ".join(f"{sign} {edge:g}" for sign, edge in edges if edge is not None)


def _exponent(value: float | list[float] | None) -> str:
    if isinstance(value, list):
        return " to ".join(map(_exponent, value))
    return "-" if value is None else f"{round(value, 2) + 0:.2f}"


def _slopes(sizes: Sequence[int], costs: Floats) -> Floats:
    """Return the slope of each column of `costs` [sizes, draws]."""
    return np.asarray(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
