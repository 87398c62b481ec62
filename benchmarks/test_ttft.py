"""The figures of the benchmark of times to the first token: pure arithmetic on answers."""

import pytest

from benchmarks.bench_ttft import SIZES, Sample, rows


def sample(way, size, ttft_ms, source="none"):
    return Sample(way, size, ttft_ms, computed_tokens=1, cached_tokens=2, source=source, restore_ms=None)


def samples(*, restored_ms, source="disk"):
    result = []
    for size in SIZES:
        result += [sample("cold", size, 1000.0 + extra) for extra in (-500, 0, 900)]
        result += [sample("prefix_cache", size, 20.0)]
        result += [sample("restored", size, ms, source) for ms in restored_ms]
    return result


def restored_row(all_rows, size):
    return next(row for row in all_rows if row["size"] == size and row["way"] == "restored")


@pytest.mark.parametrize(("median_ms", "met"), [(99.0, True), (101.0, False)])
def test_a_bar_is_met_when_the_ratio_of_medians_is_within_it(median_ms, met):
    row = restored_row(rows(samples(restored_ms=[1.0, median_ms, 5000.0])), 1450)

    assert row["ratio_to_cold"] == pytest.approx(median_ms / 1000.0)
    assert row["met"] is met


def test_a_fast_answer_that_did_not_come_from_disk_meets_no_bar():
    assert restored_row(rows(samples(restored_ms=[1.0], source="device")), 1450)["met"] is False


def test_a_length_without_a_bar_is_only_reported():
    row = restored_row(rows(samples(restored_ms=[900.0])), 150)

    assert row["bar"] is None
    assert row["met"] is None
