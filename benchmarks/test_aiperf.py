"""Figures of AIPerf's reports."""

from __future__ import annotations

from benchmarks.bench_aiperf import figures, rows_of

TIMES = {"p50": 10.0, "p95": 20.0}
REPORT = {"request_count": {"avg": 9.0}, "time_to_first_token": TIMES, "request_latency": TIMES}


def test_a_report_without_errors_has_no_failures_and_one_with_errors_tells_them():
    assert figures(REPORT)["failures"] == 0
    assert figures({**REPORT, "error_request_count": {"avg": 2.0}})["failures"] == 2


def test_a_row_compares_ours_with_each_system_round_by_round():
    fast, slow = ({**figures(REPORT), "computed_tokens": 5, "turn_p50": took_ms} for took_ms in (10.0, 40.0))

    ours, peer = rows_of({"ours": [fast, slow], "peer": [slow, slow]})

    assert (ours["computed_tokens"], ours["ours_to_it_turn_p50"]) == (10, 1.0)
    assert (peer["turn_ms_median"], peer["ours_to_it_turn_p50"]) == (40.0, 0.62)
