"""The judge of the soak: a leak is found in ten minutes of noise, and noise is no leak."""

from __future__ import annotations

import math
from random import Random

import pytest

from tests.kit.seed import random_of
from tests.torture.soak_slopes import slope_of

TIMES_S = [float(second) for second in range(0, 1200, 10)]


def series(random: Random, *, per_hour: float, noise: float, warm_up: float = 0.0) -> list[float]:
    """A level of 100 that warms up in some minutes, grows, and scatters."""
    warmed = [warm_up * (1 - math.exp(-time_s / 100)) for time_s in TIMES_S]
    return [
        100 + up + per_hour * time_s / 3600 + random.gauss(0, noise) for up, time_s in zip(warmed, TIMES_S, strict=True)
    ]


# By chance one of 500 is off further; three of 40 are on one day of 10 000.


def test_a_leak_is_found_in_noise():
    """Seen to fail with the slope's sign turned."""
    random = random_of("leak")
    slopes = [slope_of(TIMES_S, series(random, per_hour=60, noise=2)) for _ in range(40)]

    assert all(slope.grows_beyond(12) for slope in slopes)
    assert sum(abs(slope.per_hour - 60) > 5 * slope.noise_per_hour for slope in slopes) <= 2


def test_noise_and_warming_up_are_no_leak():
    """Seen to fail, for a dozen of the forty, without the margin for chance."""
    random = random_of("noise")
    slopes = [slope_of(TIMES_S, series(random, per_hour=0, noise=3, warm_up=150)) for _ in range(40)]

    assert sum(slope.grows_beyond(6) for slope in slopes) <= 2


def test_a_sawtooth_is_flat():
    teeth = [100 + (time_s % 300) / 3 for time_s in TIMES_S]

    assert not slope_of(TIMES_S, teeth).grows_beyond(24)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0, 3.0]])
def test_too_few_values_say_nothing(values):
    assert not slope_of(TIMES_S[: len(values)], values).grows_beyond(0)
