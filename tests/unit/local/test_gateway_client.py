"""What the measuring client reads out of an answer."""

import httpx
import pytest

from deploy.local.gateway_client import Answer, GatewayClient, _take_chunk
from deploy.local.progress import StepFailed


@pytest.mark.parametrize("counted", [1, 1450], ids=["as computed", "as OpenAI does"])
def test_a_context_answer_says_what_was_computed_however_its_usage_counts(counted):
    context = {"computed_tokens": 1, "cached_tokens": 1449, "source": "disk", "restore_ms": 40.5}
    answer = Answer(usage={"prompt_tokens": counted, "context": context})

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
    assert len(answer.arrivals_ms) == 2


def test_each_token_of_a_chunk_has_come_with_it():
    answer = Answer()
    _take_chunk(answer, {"choices": [{"text": "Hel", "token_ids": [1]}]}, 0.0)
    _take_chunk(answer, {"choices": [{"text": "lo you", "token_ids": [2, 3]}]}, 0.0)
    _take_chunk(answer, {"choices": [{"text": "", "token_ids": []}]}, 0.0)

    first_ms, second_ms, third_ms, _ = answer.arrivals_ms
    assert first_ms < second_ms == third_ms


def test_an_error_in_the_stream_is_an_error():
    with pytest.raises(StepFailed, match="engine died"):
        _take_chunk(Answer(), {"error": {"message": "engine died"}}, 0.0)


STREAM = b"""data: {"choices": [{"text": "Hel"}], "session_id": "ctx_1"}

data: {"choices": [{"text": "lo"}]}

data: {"choices": [], "usage": {"prompt_tokens": 3}}

data: [DONE]

"""


@pytest.fixture
def gateway():
    """A client whose gateway answers by path."""
    answers = {
        "/stream": httpx.Response(200, content=STREAM, headers={"X-Context-Cache": "hit"}),
        "/cut": httpx.Response(200, content=STREAM[:60]),
        "/refused": httpx.Response(503, json={"detail": "away"}),
        "/no-json": httpx.Response(200, content=b"<html>"),
    }
    client = GatewayClient("http://gateway", "key")
    client._http._transport = httpx.MockTransport(lambda request: answers[request.url.path])
    yield client
    client._http.close()


def test_a_streamed_answer_is_read_to_its_end_with_its_headers(gateway):
    answer = gateway.stream("/stream", {"prompt": "x"})

    assert (answer.text, answer.session_id, answer.usage) == ("Hello", "ctx_1", {"prompt_tokens": 3})
    assert answer.headers["x-context-cache"] == "hit"
    assert 0 < answer.ttft_ms <= answer.total_ms


@pytest.mark.parametrize(("path", "said"), [("/cut", "without usage"), ("/refused", "HTTP 503: .*away")])
def test_a_stream_that_is_refused_or_has_no_end_is_an_error(gateway, path, said):
    with pytest.raises(StepFailed, match=said):
        gateway.stream(path, {})


def test_a_plain_call_is_an_error_unless_it_succeeds_and_may_be_tried(gateway):
    assert gateway.try_call("GET", "/refused") == (503, {"detail": "away"})
    with pytest.raises(StepFailed, match="GET /refused: HTTP 503"):
        gateway.call("GET", "/refused")
    with pytest.raises(StepFailed, match="GET /no-json: no answer"):
        gateway.call("GET", "/no-json")
