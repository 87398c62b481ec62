"""What the end-to-end tests read from an engine's answers, and what they ask."""

from __future__ import annotations

from typing import Any

LOGPROB_TOLERANCE = 1e-3


def ids_of_length(count: int, *, seed: int = 0) -> list[int]:
    """Return token ids of SmolLM2 that make no sense and do not repeat soon; another seed, other ids."""
    return [1000 + ((index + 31 * seed) * 7919) % 20_000 for index in range(count)]


def tokens(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def prompt_ids(answer: dict[str, Any]) -> list[int]:
    choice = answer["choices"][0]
    return choice.get("prompt_token_ids") or answer["prompt_token_ids"]


def logprobs(answer: dict[str, Any]) -> list[float]:
    return answer["choices"][0]["logprobs"]["token_logprobs"]
