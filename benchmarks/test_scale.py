"""What the benchmarks of growth hold their figures against."""

import pytest

from benchmarks.bench_scale import BARS, MEMORY_OF_A_CONTEXT, bytes_per_context
from benchmarks.fit import grown


def test_memory_of_a_context_is_what_the_last_ones_took():
    measured = {1000: [9.0, 10.0, 11.0], 10_000: [10.0], 100_000: [100.0]}

    assert bytes_per_context(measured) == pytest.approx(90 * 2**20 / 90_000)
    assert bytes_per_context(measured) < MEMORY_OF_A_CONTEXT


def test_one_number_of_contexts_says_nothing_about_one_more():
    assert bytes_per_context({1000: [5.0]}) == 0
    assert bytes_per_context({}) == 0


@pytest.mark.parametrize("what", ["look-up", "load from memory", "load from disk", "save, until sealed", "delete"])
def test_a_call_that_takes_as_long_as_there_are_contexts_misses_its_bar(what):
    linear, flat = ({1000: [1.0], 100_000: [of_many]} for of_many in (100.0, 1.1))

    assert grown(what, "ms", linear, BARS["contexts"][what])["met"] is False
    assert grown(what, "ms", flat, BARS["contexts"][what])["met"] is True


@pytest.mark.parametrize(("bytes_of_many", "met"), [(64.0, True), (58.0, True), (40.0, False), (80.0, False)])
def test_bytes_on_disk_are_linear_in_tokens_or_miss_their_bar(bytes_of_many, met):
    assert grown("disk", "MiB", {256: [1.0], 16_384: [bytes_of_many]}, BARS["tokens, 8B"]["disk"])["met"] is met
