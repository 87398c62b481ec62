"""What the codec's benchmark says of numbers, and what it asks for."""

from __future__ import annotations

import torch

from benchmarks.bench_codec import BARS, GROUPS, Answer, not_loaded, numbers_of, same_until
from vllm_plugin.connector.copies.codec import STEPS


def test_smaller_groups_have_less_error_and_more_bits():
    pages = torch.randn(8, 4096, generator=torch.Generator().manual_seed(1)).bfloat16().view(torch.uint8).numpy()
    rows = {(row["codec"], row["group"]): row for row in numbers_of(pages, "bfloat16")}

    for name in STEPS:
        errors = [rows[name, group]["error"] for group in GROUPS]
        bits = [rows[name, group]["bits"] for group in GROUPS]
        assert errors == sorted(errors)
        assert bits == sorted(bits, reverse=True)
    assert rows["q8", 128]["error"] < rows["q4", 32]["error"]


def test_bars_are_above_what_the_bits_say_and_below_none():
    assert 8.5 / 16 < BARS["q8"]["bytes"] < 1
    assert 4.5 / 16 < BARS["q4"]["bytes"] < BARS["q8"]["bytes"]


def test_answers_are_the_same_up_to_the_first_other_token():
    def answer(*token_ids: int) -> Answer:
        return Answer(list(token_ids), [0.0] * len(token_ids), 0, 0.0)

    assert same_until(answer(1, 2, 3), answer(1, 2, 3)) == 3
    assert same_until(answer(1, 2, 3), answer(1, 9, 3)) == 1
    assert same_until(answer(1, 2, 3), answer(9, 2, 3)) == 0


def test_what_was_not_loaded_is_counted_by_why_and_nothing_else_is():
    page = """# TYPE contextcache_connector_events_total counter
contextcache_connector_events_total{engine="0",event="missed_loads",reason="slower_than_computing"} 11.0
contextcache_connector_events_total{engine="0",event="failed_loads",reason=""} 1.0
contextcache_connector_events_total{engine="0",event="loads",reason=""} 188.0
"""
    assert not_loaded(page) == {"missed_loads slower_than_computing": 11, "failed_loads": 1}
