"""Cost and reuse of a turn: the usage object and the receipt headers. Pure.

Invariant: cached + computed = context + new. At least one token is always computed: vLLM counts a full hit as all
tokens cached although it recomputes the last, so cached = min(cached, prompt - 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from contextcache.identity import COMPUTED_SOON, SOON_MS
from contextcache.model import NO_SAVE, LoadedKV, UsageFormat, saved_share

if TYPE_CHECKING:
    from vllm_plugin.turn.turn import Turn

TIER_SOURCES = {"host", "disk", "peer", "object"}


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """Counts of one turn, in tokens."""

    prompt_tokens: int
    """The whole prompt."""
    context_tokens: int
    """Leading prompt tokens that were already in the transcript."""
    engine_cached_tokens: int
    """As the engine counts them: its own prefix cache plus the tokens that the connector injected."""
    completion_tokens: int
    loaded: LoadedKV | None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return max(0, min(self.engine_cached_tokens, self.prompt_tokens - 1))

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed; at least 1."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def restore_ms(self) -> float | None:
        """Time to bring cached tokens back; None: unknown, or none were."""
        return None if self.loaded is None else self.loaded.restore_ms

    @property
    def saved_ms(self) -> int | None:
        """Time to compute the cached tokens, less the time to bring them back; None: unknown."""
        if self.loaded is None or not self.loaded.compute_us_per_token:
            return None
        compute_ms = self.cached_tokens * self.loaded.compute_us_per_token / 1000
        return max(0, round(compute_ms - (self.restore_ms or 0.0)))

    @property
    def source(self) -> str:
        """Where most of the cached tokens came from."""
        if self.cached_tokens == 0:
            return "recompute" if self.context_tokens else "none"
        loaded = self.loaded
        if loaded is not None and not loaded.failed and loaded.tier in TIER_SOURCES:
            from_engine = self.cached_tokens - loaded.loaded_tokens
            if loaded.loaded_tokens > from_engine:
                return loaded.tier
        return "device"

    @property
    def verdict(self) -> str:
        """`X-Context-Cache`: hit, partial, miss or recomputed (a load was tried and failed)."""
        wanted = min(self.context_tokens, self.prompt_tokens - 1)
        if self.cached_tokens >= max(wanted - 1, 1) or self._is_soon(wanted - self.cached_tokens):
            # One token short is a hit: the last token a model samples has never been through the model.
            return "hit"
        if self.loaded is not None and self.loaded.failed:
            return "recomputed"
        return "partial" if self.cached_tokens else "miss"

    def _is_soon(self, num_tokens: int) -> bool:
        """Return whether so many tokens were left to the engine, which had most, as sooner computed than loaded."""
        if self.loaded is None or self.loaded.reason != COMPUTED_SOON or self.cached_tokens <= num_tokens:
            return False
        return num_tokens * self.loaded.compute_us_per_token < SOON_MS * 1000


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """How the turn ended for the session."""

    committed: bool
    generation: int
    """The session's generation now."""
    expires_at_ms: int
    reason: str = ""
    """Error code when a commit was refused, `read_only` when none was asked for."""


def usage_object(turn: Turn, usage: TurnUsage, outcome: CommitOutcome) -> dict[str, Any]:
    """Return the answer's `usage`: `prompt_tokens` counts computed tokens, or in OpenAI's format the whole prompt."""
    openai_format = turn.usage is UsageFormat.OPENAI
    prompt_tokens = usage.prompt_tokens if openai_format else usage.computed_tokens
    context: dict[str, Any] = {
        "computed_tokens": usage.computed_tokens,
        "cached_tokens": usage.cached_tokens,
        "saved_tokens": usage.cached_tokens,
        "saved_share": saved_share(usage.computed_tokens, usage.cached_tokens),
        "context_tokens": usage.context_tokens,
        "source": usage.source,
        "restore_ms": None if usage.restore_ms is None else round(usage.restore_ms, 1),
        "committed": outcome.committed,
    }
    at = turn.prompt.diverged
    rarer = {
        "saved_ms": usage.saved_ms,
        "match": turn.match or None,
        "diverged": at and {"message": at.message, "token": usage.context_tokens, "why": at.why.value},
        "truncated_tokens": turn.prompt.truncated_tokens or None,
        "reason": outcome.reason or turn.no_kv or None,
        "resumed": turn.resumed or None,
        "hints": turn.request.hints.answers(
            turn.saved if outcome.committed else NO_SAVE,
            retain_ms=turn.retain_ms,
            expires_at_ms=outcome.expires_at_ms,
        )
        or None,
    }
    context |= {name: value for name, value in rarer.items() if value is not None}
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} if openai_format else None,
        "context": context,
    }


def receipt_headers(turn: Turn, usage: TurnUsage, *, generation: int, expires_at_ms: int) -> list[tuple[str, str]]:
    """Return the headers every answer to a session call carries.

    In a stream they are sent with the first chunk: cached tokens are the plan then, the usage chunk has the truth.
    """
    timings = turn.timings_ms | ({} if usage.restore_ms is None else {"restore": usage.restore_ms})
    return [
        ("x-session-id", turn.session.session_id),
        ("x-context-cache", usage.verdict),
        ("x-context-cached-tokens", str(usage.cached_tokens)),
        ("x-context-mode", turn.prompt.outcome.context_mode),
        ("x-context-generation", str(generation)),
        ("x-context-expires-at", str(expires_at_ms // 1000)),
        ("server-timing", ", ".join(f"{name};dur={ms:.1f}" for name, ms in timings.items())),
    ]
