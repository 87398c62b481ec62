"""The figures of what the plugin costs: pure arithmetic on times."""

import pytest

from benchmarks.bench_overhead import BARS, Window, steps_in, summary

TOKENS_S = [0.0, 1.0, 2.0, 3.5, 4.0, 5.0, 6.0]


def pairs(**instead):
    """Three pairs of each, with ours as fast as without; `instead` says how long each took with ours."""
    taken = {what: [10.0] * 3 for what in BARS} | instead
    return {what: [{"with": value, "without": 10.0} for value in values] for what, values in taken.items()}


def row_of(what, **instead):
    return next(row for row in summary(pairs(**instead)) if row["what"] == what)


def test_steps_are_those_from_the_first_token_in_the_window_to_the_first_after_it():
    assert steps_in(TOKENS_S, Window(0.5, 3.7)) == [1000.0, 1500.0, 500.0]


def test_a_window_within_one_step_has_that_step():
    assert steps_in(TOKENS_S, Window(2.1, 2.2)) == [500.0]


@pytest.mark.parametrize("window", [Window(4.5, 6.5), Window(-1.0, 3.0), Window(7.0, 8.0)])
def test_a_request_that_did_not_run_all_the_time_has_no_steps(window):
    assert steps_in(TOKENS_S, window) == []


@pytest.mark.parametrize(
    ("what", "within", "beyond"), [("ttft", 10.2, 10.3), ("burst", 10.2, 10.3), ("step", 10.5, 10.6)]
)
def test_a_bar_is_met_by_the_median_of_the_pairs(what, within, beyond):
    assert row_of(what, **{what: [1.0, within, 99.0]})["met"] is True
    assert row_of(what, **{what: [1.0, beyond, 99.0]})["met"] is False


def test_what_has_no_bar_is_only_reported():
    row = row_of("longest step", **{"longest step": [50.0] * 3})

    assert (row["with_ms"], row["without_ms"], row["ratio"], row["bar"], row["met"]) == (50.0, 10.0, 5.0, None, None)
