"""Usage keeps its invariant and says where cached tokens came from."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextcache.hints import NO_HINTS
from contextcache.model import NO_SAVE, LoadedKV, UsageFormat
from vllm_plugin.turn.answer.receipt import CommitOutcome, TurnUsage, usage_object

COMMITTED = CommitOutcome(committed=True, generation=2, expires_at_ms=1000)


def usage(prompt, context, cached, loaded=None):
    return TurnUsage(
        prompt_tokens=prompt, context_tokens=context, engine_cached_tokens=cached, completion_tokens=3, loaded=loaded
    )


def told(counts, outcome=COMMITTED, usage_format=UsageFormat.CONTEXT):
    prompt = SimpleNamespace(diverged=None, truncated_tokens=0)
    request = SimpleNamespace(hints=NO_HINTS)
    turn = SimpleNamespace(usage=usage_format, match="", no_kv="", prompt=prompt, resumed=[], request=request)
    turn.saved, turn.retain_ms = NO_SAVE, 0
    return usage_object(turn, counts, outcome)


def loaded(tokens, tier="disk", *, device=0, failed=False, reason=""):
    return LoadedKV(failed, device, tokens, tier, restore_ms=1.0, reason=reason, compute_us_per_token=50.0)


def test_a_full_hit_still_computes_one_token():
    whole = usage(5, 5, 5)

    assert (whole.cached_tokens, whole.computed_tokens) == (4, 1)
    assert told(whole)["prompt_tokens"] == 1


@pytest.mark.parametrize("usage_format", UsageFormat)
def test_both_formats_tell_computed_cached_and_saved_tokens(usage_format):
    """Cached tokens are saved, also those of new text that the engine had cached for another request."""
    context = told(usage(10, 6, 8), usage_format=usage_format)["context"]

    assert (context["computed_tokens"], context["cached_tokens"], context["saved_tokens"]) == (2, 8, 8)
    assert context["saved_share"] == 0.8


def test_the_openai_format_counts_the_whole_prompt():
    answer = told(usage(10, 8, 8), usage_format=UsageFormat.OPENAI)

    assert answer["prompt_tokens"] == 10
    assert answer["prompt_tokens_details"] == {"cached_tokens": 8}
    assert answer["total_tokens"] == 13


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 2000))
def test_cached_plus_computed_is_context_plus_new(prompt, context, cached):
    context = min(context, prompt)
    turn = usage(prompt, context, cached)

    new = prompt - context
    assert turn.cached_tokens + turn.computed_tokens == context + new
    assert turn.computed_tokens >= 1


@pytest.mark.parametrize(
    ("turn", "source", "verdict"),
    [
        (usage(10, 0, 0), "none", "miss"),
        (usage(10, 8, 0), "recompute", "miss"),
        (usage(10, 8, 0, loaded(0, failed=True)), "recompute", "recomputed"),
        (usage(10, 8, 8, loaded(8)), "disk", "hit"),
        (usage(100, 98, 98, loaded(2, "host", device=96)), "device", "hit"),
        (usage(100, 98, 98, loaded(66, "host", device=32)), "host", "hit"),
        (usage(100, 98, 32, loaded(0, failed=True)), "device", "recomputed"),
        (usage(100, 98, 97, loaded(97)), "disk", "hit"),
        (usage(100, 98, 64, loaded(64)), "disk", "partial"),
        (usage(100, 98, 90, loaded(0, "", device=90, reason="computed_soon")), "device", "hit"),
        (usage(100, 98, 90, loaded(0, "", device=90, reason="no_manifest")), "device", "partial"),
        (usage(10_020, 10_000, 9_900, loaded(0, "", device=9_900, reason="computed_soon")), "device", "partial"),
        (usage(100, 98, 32, loaded(0, "", device=32, reason="computed_soon")), "device", "partial"),
    ],
)
def test_source_and_verdict_follow_what_really_was_reused(turn, source, verdict):
    assert (turn.source, turn.verdict) == (source, verdict)


def test_a_refused_commit_is_told_with_its_reason():
    refused = CommitOutcome(committed=False, generation=1, expires_at_ms=0, reason="lease_lost")

    context = told(usage(10, 8, 8), refused)["context"]

    assert (context["committed"], context["reason"]) == (False, "lease_lost")
