"""What an answer has to be: the same ids and log-probabilities as the same prompt gets with no KV from anywhere.

The cold answer comes from the same weights in the same engine process, asked past gateway and plugin with the whole
token ids and a cache salt nobody has used: no block of the engine's prefix cache matches, and without an order the
connector loads nothing. That it really computed every token is checked, not assumed.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.kit.stack import MODEL

LOGPROB_TOLERANCE = 1e-3
"""float32: what summing in another order may change. A wrong byte of KV moves the tiny model's by far more."""
_SALTS = itertools.count()


class Difference(AssertionError):
    """An answer, or what the receipt says of it, is not what it has to be."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a turn or of the cold engine, streamed or not, completion or chat."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    usage: dict[str, Any]
    session_id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def read_answer(response: httpx.Response) -> Answer:
    """Read a whole answer of any of the four shapes. Raises Difference for a stream that does not end as it must."""
    if response.headers["content-type"].startswith("text/event-stream"):
        return _joined(_events(response.text), response.headers)
    return _joined([response.json()], response.headers)


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    if lines.count("[DONE]") != 1 or lines[-1] != "[DONE]":
        raise Difference(f"[DONE] came {lines.count('[DONE]')} times, or not last")
    return [json.loads(line) for line in lines[:-1]]


def _joined(events: Iterable[dict[str, Any]], headers: Mapping[str, str]) -> Answer:
    prompt_ids: list[int] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    text = finish_reason = session_id = ""
    usage: dict[str, Any] = {}
    for event in events:
        prompt_ids = event.get("prompt_token_ids") or prompt_ids
        usage, session_id = event.get("usage") or usage, event.get("session_id") or session_id
        for choice in event.get("choices") or ():
            prompt_ids = choice.get("prompt_token_ids") or prompt_ids
            token_ids += choice.get("token_ids") or []
            logprobs += _logprobs(choice.get("logprobs") or {})
            part = choice.get("message") or choice.get("delta") or {}
            text += choice.get("text") or part.get("content") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
    return Answer(prompt_ids, token_ids, logprobs, text, finish_reason, usage, session_id, headers)


def _logprobs(found: dict[str, Any]) -> list[float]:
    if "content" in found:
        return [token["logprob"] for token in found["content"] or ()]
    return list(found.get("token_logprobs") or ())


class ColdEngine:
    """An engine asked directly."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=300)

    def close(self) -> None:
        self._http.close()

    def answer(self, prompt_ids: list[int], *, max_tokens: int, **sampling: Any) -> Answer:
        """Return what the weights alone say to these ids, greedily."""
        body = {
            "model": MODEL,
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 1,
            "return_token_ids": True,
            "cache_salt": f"cold {next(_SALTS)} {secrets.token_hex(8)}",
            **sampling,
        }
        response = self._http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer = read_answer(response)
        cached = (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        assert cached == 0, f"the cold answer was not cold: {cached} tokens cached"
        return answer


def compare(warm: Answer, cold: Answer) -> None:
    """Raise Difference unless both have the same tokens with the same log-probabilities."""
    if warm.token_ids != cold.token_ids:
        raise Difference(f"tokens {warm.token_ids}, cold {cold.token_ids}")
    if len(warm.logprobs) != len(cold.logprobs):
        raise Difference(f"{len(warm.logprobs)} log-probabilities, cold {len(cold.logprobs)}")
    furthest = max((abs(one - other) for one, other in zip(warm.logprobs, cold.logprobs, strict=True)), default=0.0)
    if not furthest <= LOGPROB_TOLERANCE:
        raise Difference(f"log-probabilities {warm.logprobs}, cold {cold.logprobs}: {furthest:.2g} apart")


def check_usage(warm: Answer, *, prompt_tokens: int, context_tokens: int, prefill_only: bool) -> None:
    """Raise Difference unless the receipt adds up: cached + computed = context + new, and what follows from it."""
    usage = warm.usage
    context = usage["context"]
    cached, completion = context["cached_tokens"], 0 if prefill_only else len(warm.token_ids)
    facts = {
        "computed + cached": (context["computed_tokens"] + cached, prompt_tokens),
        "saved_tokens": (context["saved_tokens"], cached),
        "prompt_tokens": (
            usage["prompt_tokens"],
            prompt_tokens if usage.get("prompt_tokens_details") else context["computed_tokens"],
        ),
        "context_tokens": (context["context_tokens"], context_tokens),
        "completion_tokens": (usage["completion_tokens"], completion),
        "total_tokens": (usage["total_tokens"], usage["prompt_tokens"] + completion),
        "nothing cached and source": (cached == 0, context["source"] in ("recompute", "none")),
    }
    wrong = {what: pair for what, pair in facts.items() if pair[0] != pair[1]}
    if wrong or not 0 <= cached < prompt_tokens:
        raise Difference(f"usage {usage} of {prompt_tokens} prompt tokens: {wrong}")
