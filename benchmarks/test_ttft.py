"""The figures of the benchmark of times to the first token: pure arithmetic on answers."""

import pytest

from benchmarks.bench_ttft import BARS, SIZES, WAYS, Sample, ratios, rounds, times

TTFT_MS = {"cold": 1000.0, "create": 1010.0, "hit": 20.0, "turn": 19.0, "memory": 20.5, "disk": 25.0}


def sample(way, ttft_ms, *, size=1200, number=1, **other):
    cached = 0 if WAYS[way] == "none" else size
    found = {"computed_tokens": size + 7 - cached, "cached_tokens": cached, "source": WAYS[way], "restore_ms": None}
    return Sample(number, way, size, ttft_ms, **(found | other))


def samples(size=1200, **instead):
    """Three of each way around its usual time; `instead` has a way's samples, where they are others."""
    spread = (0.5, 1.0, 3.0)
    usual = {way: [sample(way, ttft_ms * share, size=size) for share in spread] for way, ttft_ms in TTFT_MS.items()}
    return [one for taken in (usual | instead).values() for one in taken]


def ratio_row(taken, way, of, size=1200):
    return next(row for row in ratios(taken, [size]) if (row["way"], row["of"]) == (way, of))


def ttft_row(taken, way, size=1200):
    return next(row for row in times(taken, [size]) if row["way"] == way)


@pytest.mark.parametrize(("median_ms", "met"), [(20.9, True), (21.1, False)])
def test_a_bar_is_met_when_the_ratio_of_medians_is_within_it(median_ms, met):
    memory = [sample("memory", ms) for ms in (1.0, median_ms, 5000.0)]

    row = ratio_row(samples(memory=memory), "memory", "hit")

    assert row["ratio"] == pytest.approx(median_ms / 20.0)
    assert row["bar"] == 1.05
    assert row["met"] is met


@pytest.mark.parametrize("other", [{"source": "host"}, {"source": "recompute"}, {"computed_tokens": 600}])
def test_a_sample_from_elsewhere_is_dropped_and_counted(other):
    disk = [sample("disk", 1.0, **other), sample("disk", 30.0), sample("disk", 32.0)]
    taken = samples(disk=disk)

    row = ttft_row(taken, "disk")

    assert (row["n"], row["dropped"], row["ttft_ms_median"]) == (2, 1, 31.0)
    assert ratio_row(taken, "disk", "hit")["ratio"] == pytest.approx(31.0 / 20.0)


def test_a_cold_answer_that_found_something_cached_is_dropped():
    cold = [sample("cold", 10.0, cached_tokens=32, source="device"), sample("cold", 1000.0)]

    row = ttft_row(samples(cold=cold), "cold")

    assert (row["n"], row["dropped"], row["ttft_ms_median"]) == (1, 1, 1000.0)


def test_a_bar_on_what_no_sample_counts_for_is_missed():
    taken = samples(memory=[sample("memory", 1.0, source="disk")])

    row = ratio_row(taken, "memory", "hit")

    assert (row["ratio"], row["ratio_95"], row["met"]) == (None, None, False)
    assert ttft_row(taken, "memory")["ttft_ms_median"] is None


def test_what_has_no_bar_is_only_reported():
    for row in (ratio_row(samples(150), "disk", "cold", 150), ratio_row(samples(8000), "disk", "hit", 8000)):
        assert row["ratio"] is not None
        assert (row["bar"], row["met"]) == (None, None)


def test_a_median_lies_in_its_interval_and_the_interval_among_the_samples():
    values = [18.0, 19.0, 20.0, 21.0, 22.0, 23.0, 24.0, 25.0, 200.0]
    taken = samples(hit=[sample("hit", ms, restore_ms=ms / 2) for ms in values])

    row = ttft_row(taken, "hit")
    low, high = row["ttft_ms_95"]

    assert min(values) <= low < row["ttft_ms_median"] == 22.0 < high <= max(values)
    assert high <= row["ttft_ms_p90"] <= 200.0
    assert row["restore_ms_median"] == 11.0
    low, high = ratio_row(taken, "hit", "cold")["ratio_95"]
    assert low < 0.022 < high


def test_every_bar_is_of_a_length_that_is_measured():
    assert {size for bars in BARS.values() for size in bars} == set(SIZES)


def test_rounds_of_every_length_are_spread_over_the_run_with_more_of_the_short():
    places = rounds([150, 5800], 9)

    assert places[:2] == [(0, 150), (0, 5800)]
    assert len(places) == len(set(places)) == 28 + 10
    assert [number for number, size in places if size == 5800] == list(range(10))
    assert all(places.index((number, 5800)) == places.index((3 * number, 150)) + 1 for number in range(10))


def test_the_way_from_a_peer_is_shown_where_it_was_taken_only():
    peers = [sample("peer", 40.0), sample("peer", 42.0, source="disk")]

    rows = [row for row in times(samples(), [1200]) if row["way"] == "peer"]
    row = ttft_row(samples(peer=peers), "peer")

    assert rows == []
    assert (row["n"], row["dropped"], row["ttft_ms_median"]) == (1, 1, 40.0)
    assert ratio_row(samples(peer=peers), "peer", "cold")["ratio"] == pytest.approx(0.04)
    assert not any("peer" in (row["way"], row["of"]) for row in ratios(samples(), [1200]))
