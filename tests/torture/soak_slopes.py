"""Whether a series is flat: a least-squares slope over its second half, and how much of it may be chance. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SIGMAS = 3.0
"""A slope counts from here on: of some hundred series, one that is flat would be called steep in a thousand runs."""
_CHUNKS = 10
"""Samples close to each other are alike. Means of so many chunks are nearly independent, so their scatter is honest."""


@dataclass(frozen=True, slots=True)
class Slope:
    """How a series goes on."""

    level: float
    """Mean of what was looked at."""
    per_hour: float
    noise_per_hour: float
    """One standard error of the slope."""

    def grows_beyond(self, bound_per_hour: float) -> bool:
        """Return whether it surely grows faster than this."""
        return self.per_hour - _SIGMAS * self.noise_per_hour > bound_per_hour


def slope_of(times_s: Sequence[float], values: Sequence[float]) -> Slope:
    """Return the slope over the second half of a series; the first half is warming up."""
    half = len(values) // 2
    times, seen = _means(times_s[half:]), _means(values[half:])
    if len(times) < 3:
        return Slope(values[-1] if values else 0.0, 0.0, math.inf)
    middle, level = sum(times) / len(times), sum(seen) / len(seen)
    spread = sum((time - middle) ** 2 for time in times)
    slope = sum((time - middle) * (value - level) for time, value in zip(times, seen, strict=True)) / spread
    left = sum((value - level - slope * (time - middle)) ** 2 for time, value in zip(times, seen, strict=True))
    error = math.sqrt(left / (len(times) - 2) / spread)
    return Slope(level, slope * 3600, error * 3600)


def _means(values: Sequence[float]) -> list[float]:
    size = max(1, len(values) // _CHUNKS)
    chunks = [values[start : start + size] for start in range(0, len(values) - size + 1, size)]
    return [sum(chunk) / len(chunk) for chunk in chunks]
