"""What the measuring client reads out of an answer."""

import pytest

from deploy.local.gateway_client import Answer, _take_chunk
from deploy.local.progress import StepFailed


def test_a_context_answer_counts_prompt_tokens_as_computed():
    usage = {"prompt_tokens": 1, "context": {"cached_tokens": 1449, "source": "disk", "restore_ms": 40.5}}
    answer = Answer(usage=usage)

    assert (answer.computed_tokens, answer.cached_tokens, answer.source) == (1, 1449, "disk")
    assert answer.restore_ms == 40.5


def test_a_stateless_answer_counts_what_the_prefix_cache_did_not_have():
    answer = Answer(usage={"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 64}})

    assert (answer.computed_tokens, answer.cached_tokens, answer.source) == (36, 64, "device")


def test_a_stateless_answer_without_details_is_all_computed():
    answer = Answer(usage={"prompt_tokens": 100, "prompt_tokens_details": None})

    assert (answer.computed_tokens, answer.cached_tokens, answer.source) == (100, 0, "none")
    assert answer.restore_ms is None


def test_text_session_and_usage_are_gathered_over_chunks():
    answer = Answer()
    _take_chunk(answer, {"choices": [{"text": "Hel"}], "session_id": "ctx_1"}, 0.0)
    first_ms = answer.ttft_ms
    _take_chunk(answer, {"choices": [{"text": "lo"}]}, 0.0)
    _take_chunk(answer, {"choices": [], "usage": {"prompt_tokens": 3}}, 0.0)

    assert (answer.text, answer.session_id, answer.usage) == ("Hello", "ctx_1", {"prompt_tokens": 3})
    assert answer.ttft_ms == first_ms > 0


def test_an_error_in_the_stream_is_an_error():
    with pytest.raises(StepFailed, match="engine died"):
        _take_chunk(Answer(), {"error": {"message": "engine died"}}, 0.0)
