"""The figures of the agents' turns: pure arithmetic on answers."""

import pytest

from benchmarks.bench_turns import Turn, compared, ways


def turn(way, turn_ms, *, source="host", computed=600):
    return Turn(way, 1, 0, turn_ms / 2, turn_ms, computed, 2400, source)


def row_of(what, q, sessions_ms, stateless_ms):
    turns = [turn("sessions", ms) for ms in sessions_ms] + [turn("stateless", ms) for ms in stateless_ms]
    return next(row for row in compared(turns) if (row["what"], row["percentile"]) == (what, q))


@pytest.mark.parametrize(("slow_ms", "met"), [(500.0, True), (510.0, False)])
def test_the_bar_is_on_the_slow_turns(slow_ms, met):
    row = row_of("turn", 95, [1.0] * 9 + [slow_ms] * 2, [1000.0] * 11)

    assert (row["sessions_ms"], row["stateless_ms"], row["bar"], row["met"]) == (slow_ms, 1000.0, 0.5, met)


def test_the_median_and_the_first_token_are_only_reported():
    for what, q in (("turn", 50), ("ttft", 50), ("ttft", 95)):
        row = row_of(what, q, [900.0] * 3, [1000.0] * 3)

        assert (row["ratio"], row["bar"], row["met"]) == (0.9, None, None)


def test_without_turns_the_bar_is_missed():
    assert row_of("turn", 95, [], [1000.0])["met"] is False


def test_a_way_says_where_its_tokens_came_from():
    turns = [turn("sessions", 1.0), turn("sessions", 1.0, source="disk"), turn("sessions", 1.0, computed=3000)]

    sessions, stateless = ways(turns)

    assert sessions == {
        "way": "sessions",
        "n": 3,
        "computed_tokens": 600.0,
        "cached_tokens": 2400.0,
        "sources": {"host": 2, "disk": 1},
    }
    assert (stateless["n"], stateless["sources"]) == (0, {})
