"""What is said of samples: pure arithmetic."""

import pytest

from benchmarks.estimates import cell, interval, paired_row, percentile, ratio_row

VALUES = [18.0, 19.0, 20.0, 21.0, 22.0, 23.0, 24.0, 25.0, 200.0]


def test_a_percentile_lies_in_its_interval_and_the_interval_among_the_samples():
    for q in (50.0, 95.0):
        low, high = interval(VALUES, q)

        assert min(VALUES) <= low < percentile(VALUES, q) <= high <= max(VALUES)


def test_more_samples_make_a_narrower_interval():
    few, many = interval(VALUES[:-1]), interval(VALUES[:-1] * 20)

    assert many[1] - many[0] < few[1] - few[0]


@pytest.mark.parametrize(("bar", "met"), [(1.1, True), (1.09, False), (None, None)])
def test_a_bar_is_met_when_the_ratio_is_within_it(bar, met):
    row = ratio_row([1.0, 22.0, 900.0], [19.0, 20.0, 21.0], bar)

    assert row["ratio"] == pytest.approx(1.1)
    assert (row["bar"], row["met"]) == (bar, met)
    assert row["ratio_95"][0] < 1.1 < row["ratio_95"][1]


def test_a_ratio_of_other_percentiles_is_of_those():
    row = ratio_row([1.0] * 9 + [80.0] * 9, [1.0] * 9 + [40.0] * 9, 1.0, q=95)

    assert (row["ratio"], row["ratio_95"], row["met"]) == (2.0, [2.0, 2.0], False)


def test_a_bar_on_what_there_are_no_samples_of_is_missed():
    nothing = {"ratio": None, "ratio_95": None, "bar": 1.0, "met": False}

    assert ratio_row([], [1.0], 1.0) == ratio_row([1.0], [], 1.0) == paired_row([], [], 1.0) == nothing


def test_pairs_do_not_mind_that_the_machine_was_slower_for_a_while():
    without = [10.0, 10.0, 10.0, 30.0, 30.0]

    row = paired_row([value * 1.01 for value in without], without, 1.02)

    assert (row["ratio"], row["ratio_95"], row["met"]) == (1.01, [1.01, 1.01], True)


def test_cells_show_figures_intervals_and_verdicts():
    assert [cell(value) for value in (None, 3, 2.26, [1.0, 2.0], True, False)] == [
        "-",
        "3",
        "2.3",
        "1.0 to 2.0",
        "yes",
        "NO",
    ]
