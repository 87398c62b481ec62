"""Why a prompt could not reuse the KV of an earlier answer's prompt, in the words of each API. Pure.

Formats: `Response.prompt_cache_diagnostics` of the package `openai` 3.57, `Message.diagnostics` of `anthropic` 2.14.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm_plugin.turn.prompt.matching import Why


class Cause(Enum):
    """Result of a comparison with the prompt of an earlier answer."""

    NONE = "none"
    """The prompt begins with the earlier one."""
    NOT_FOUND = "not_found"
    """The tenant has no such answer."""
    UNKNOWN = "unknown"
    """The earlier prompt cannot be read, or the template shows equal messages and tools in another way."""
    MODEL = "model"
    TOOLS = "tools"
    EFFORT = "effort"
    """Another reasoning effort."""
    SYSTEM = "system"
    """Another system prompt."""
    COMPACTED = "compacted"
    MESSAGES = "messages"


CAUSE_OF_WHY: Mapping[Why, Cause] = dict.fromkeys(Why, Cause.MESSAGES) | {
    Why.HEAD_CHANGED: Cause.SYSTEM,
    Why.COMPACTED: Cause.COMPACTED,
}
OPENAI_REASONS: Mapping[Cause, str] = {
    Cause.MODEL: "model_changed",
    Cause.TOOLS: "tools_changed",
    Cause.EFFORT: "reasoning_effort_changed",
    Cause.SYSTEM: "input_changed",
    Cause.COMPACTED: "context_compacted",
    Cause.MESSAGES: "input_changed",
}
"""Reasons of a `cache_miss`."""
OPENAI_TYPES: Mapping[Cause, str] = dict.fromkeys(OPENAI_REASONS, "cache_miss") | {
    Cause.NONE: "cache_hit",
    Cause.NOT_FOUND: "comparison_response_not_found",
    Cause.UNKNOWN: "unavailable",
}
ANTHROPIC_TYPES: Mapping[Cause, str] = {
    Cause.NOT_FOUND: "previous_message_not_found",
    Cause.UNKNOWN: "unavailable",
    Cause.MODEL: "model_changed",
    Cause.TOOLS: "tools_changed",
    Cause.EFFORT: "unavailable",
    Cause.SYSTEM: "system_changed",
    Cause.COMPACTED: "messages_changed",
    Cause.MESSAGES: "messages_changed",
}
"""Types of a `cache_miss_reason`. Equal prompts have none."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prompt beside that of an earlier answer. Counts are tokens."""

    cause: Cause
    prompt_tokens: int = 0
    compared_tokens: int = 0
    """Length of the earlier prompt."""
    shared_tokens: int = 0
    """Leading tokens that both have and that one model computes alike."""


def openai_diagnostics(found: Comparison, *, cached_tokens: int) -> dict[str, Any]:
    """Return `prompt_cache_diagnostics`. Equal prompts are no hit without a cached token, and OpenAI has no reason."""
    kind = OPENAI_TYPES[found.cause]
    if found.cause is Cause.NONE and not cached_tokens:
        kind = OPENAI_TYPES[Cause.UNKNOWN]
    if found.cause not in OPENAI_REASONS:
        return {"type": kind}
    return {
        "type": kind,
        "reason": OPENAI_REASONS[found.cause],
        "cache_missed_tokens": found.prompt_tokens - found.shared_tokens,
        "comparison_reusable_tokens": found.shared_tokens,
    }


def anthropic_diagnostics(found: Comparison | None) -> dict[str, Any] | None:
    """Return `diagnostics`; None: the prompts are equal as far as both go, or the client named no earlier answer."""
    if found is None or found.cause is Cause.NONE:
        return None
    kind = ANTHROPIC_TYPES[found.cause]
    missed = {"cache_missed_input_tokens": found.compared_tokens - found.shared_tokens}
    return {"cache_miss_reason": {"type": kind} | (missed if kind.endswith("_changed") else {})}
