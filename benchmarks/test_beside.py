"""The figures beside others: pure arithmetic on answers."""

import json

import pytest

from benchmarks.bench_beside import Sample, ahead, bounded, kv_bytes_a_token, times


def sample(system, ttft_ms, *, way="memory", computed=14, cached=1140):
    return Sample(1, way, 1200, system, ttft_ms, computed, cached)


def samples(**ttfts_ms):
    return [sample(system, ms) for system, taken in ttfts_ms.items() for ms in taken]


def is_ahead(taken):
    return next(row for row in ahead(taken, [1200], ["lmcache"]) if row["way"] == "memory")["met"]


@pytest.mark.parametrize(
    ("ours", "lmcache", "met"),
    [
        ([20.0, 21.0, 22.0], [30.0, 31.0, 32.0], True),
        ([20.0, 21.0, 33.0], [30.0, 31.0, 32.0], False),
        ([30.0, 31.0, 32.0], [20.0, 21.0, 22.0], False),
        ([20.0, 21.0, 22.0], [], False),
        ([], [30.0, 31.0, 32.0], False),
    ],
)
def test_ours_is_ahead_when_the_intervals_are_apart(ours, lmcache, met):
    assert is_ahead(samples(ours=ours, lmcache=lmcache)) is met


@pytest.mark.parametrize(
    ("system", "computed", "counts"),
    [("ours", 64, True), ("ours", 96, False), ("tiering", 96, True), ("lmcache", 320, True), ("lmcache", 400, False)],
)
def test_a_sample_counts_when_no_more_was_computed_than_what_the_system_cannot_store(system, computed, counts):
    row = next(
        row for row in times([sample(system, 1.0, computed=computed)], [1200], [system]) if row["way"] == "memory"
    )

    assert (row["n"], row["dropped"]) == ((1, 0) if counts else (0, 1))


def test_a_cold_answer_that_found_something_does_not_count():
    assert sample("lmcache", 1.0, way="cold", computed=1150, cached=0).counts
    assert not sample("lmcache", 1.0, way="cold", computed=900, cached=256).counts


@pytest.mark.parametrize(("memory_ms", "met"), [(36.4, True), (36.6, False)])
def test_memory_is_within_its_bound_when_it_takes_a_hit_and_one_and_a_half_copies_and_15_ms(memory_ms, met):
    taken = [*samples(ours=[memory_ms]), sample("ours", 20.0, way="hit")]

    (row,) = bounded(taken, [1200], 1000, lambda size_bytes: 1.0 if size_bytes == 1_140_000 else 99.0)

    assert (row["at_most_ms"], row["met"]) == (36.5, met)


def test_a_bound_without_samples_is_missed():
    assert not bounded(samples(ours=[20.0]), [1200], 1000, lambda _: 1.0)[0]["met"]


def test_kv_of_a_token_is_counted_from_the_models_shape(tmp_path):
    shape = {"hidden_size": 576, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(shape))

    assert kv_bytes_a_token(tmp_path) == 23_040
