"""How the benchmarks fit a growth, and what meets a bar: pure arithmetic."""

import pytest

from benchmarks.fit import grown, growth, is_met, table, wanted
from deploy.local.table import figure

SIZES = (1000, 10_000, 100_000)


def power(exponent, *, factor=3.0, spread=(0.9, 1.0, 1.2)):
    """Samples of a cost that grows so, around its medians."""
    return {size: [factor * size**exponent * share for share in spread] for size in SIZES}


@pytest.mark.parametrize("exponent", [-0.5, 0.0, 0.1, 1.0, 2.0])
def test_the_exponent_of_a_power_is_found(exponent):
    found = growth(power(exponent))

    assert found["exponent"] == pytest.approx(exponent, abs=0.001)
    assert found["last"] == pytest.approx(exponent, abs=0.001)
    low, high = found["exponent_95"]
    assert low < exponent < high
    assert high - low < 0.15


def test_samples_that_agree_leave_no_doubt_about_the_exponent():
    assert growth(power(1.0, spread=(1.0,)))["exponent_95"] == [1.0, 1.0]


def test_what_bends_shows_between_the_two_largest_sizes():
    found = growth({1: [5.0], 10: [5.0], 100: [50.0]})

    assert found["exponent"] == pytest.approx(0.5)
    assert found["last"] == pytest.approx(1.0)


def test_one_outlier_of_three_moves_no_median():
    straight = power(1.0)
    straight[100_000][2] *= 50

    assert growth(straight)["exponent"] == pytest.approx(1.0, abs=0.001)


def test_medians_that_have_no_logarithm_are_shown_and_not_fitted():
    found = growth({1000: [-0.5], 10_000: [2.0], 100_000: [20.0]})

    assert found["medians"] == {"1000": -0.5, "10000": 2.0, "100000": 20.0}
    assert found["exponent"] == pytest.approx(1.0)
    assert growth({1000: [-0.5], 10_000: [2.0]})["exponent"] is None


@pytest.mark.parametrize(
    ("exponent", "bar", "met"),
    [
        (0.1, (None, 0.1), True),
        (0.101, (None, 0.1), False),
        (-3.0, (None, 0.1), True),
        (0.94, (0.95, 1.05), False),
        (0.95, (0.95, 1.05), True),
        (1.06, (0.95, 1.05), False),
        (-0.06, (-0.05, None), False),
        (7.0, (-0.05, None), True),
        (None, (None, 0.1), False),
        (None, None, None),
        (9.0, None, None),
    ],
)
def test_a_bar_is_met_within_its_edges_and_not_by_what_was_not_measured(exponent, bar, met):
    assert is_met(exponent, bar) is met


def test_a_row_says_whether_its_bar_is_met_and_the_table_says_so_too():
    rows = [grown("load", "ms", power(0.0), (None, 0.1)), grown("save", "ms", power(1.0), (None, 0.1))]

    assert [row["met"] for row in rows] == [True, False]
    lines = table(rows).splitlines()
    assert "1 000" in lines[0]
    assert "100 000" in lines[0]
    assert lines[-2].split()[-1] == "yes"
    assert lines[-1].split()[-1] == "NO"


@pytest.mark.parametrize(
    ("bar", "shown"), [((None, 0.1), "≤ 0.1"), ((-0.05, None), "≥ -0.05"), ((0.9, 1), "≥ 0.9 and ≤ 1"), (None, "")]
)
def test_a_bar_is_shown_with_the_edges_it_has(bar, shown):
    assert wanted(bar) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (123456.0, "123 456"), (0, "0"), (None, "-")],
)
def test_a_figure_has_three_digits_that_say_something(value, shown):
    assert figure(value) == shown
