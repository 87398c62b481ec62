"""The figures of the 404 benchmark say what they should when there is something to tell, and when there is not."""

from random import Random

import pytest

from benchmarks.bench_not_found import _row, mann_whitney


def times(seed, *, median_us=2000.0, spread_us=600.0, num=700):
    rng = Random(seed)
    return [rng.gauss(median_us, spread_us) for _ in range(num)]


def test_two_samples_of_one_kind_cannot_be_told_apart():
    share, p_value = mann_whitney(times(1), times(2))

    assert share == pytest.approx(0.5, abs=0.03)
    assert p_value > 0.05


def test_a_sample_that_is_always_longer_is():
    assert mann_whitney([3, 4, 5], [0, 1, 2]) == (1.0, pytest.approx(0.0495, abs=1e-3))
    assert mann_whitney([0, 1, 2], [3, 4, 5])[0] == 0.0


def test_work_of_a_fifth_of_a_millisecond_more_for_one_kind_is_over_the_bar():
    """As one more round trip to Redis or a sidecar would be, beside a noise of three times that."""
    row = _row("http", "read", "absent", "deleted", times(1), times(2, median_us=2200.0))

    assert row["p"] < 0.001
    assert not row["met"]
    assert _row("http", "read", "absent", "deleted", times(1), times(2))["met"]
