"""What the turn middleware counts; shown on vLLM's own /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from vllm_plugin.turn.usage import TurnUsage

_PREFIX = "contextcache_turn_"


class TurnMetrics:
    """All metrics of the turn middleware; labels are closed sets."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register everything in `registry`."""
        self.turns = Counter(
            f"{_PREFIX}turns_total", "Turns answered", ["kind", "verdict", "source"], registry=registry
        )
        self.outcomes = Counter(
            f"{_PREFIX}matches_total", "How prompts stood to their transcript", ["outcome"], registry=registry
        )
        self.tokens = Counter(
            f"{_PREFIX}prompt_tokens_total", "Prompt tokens, cached or computed", ["how"], registry=registry
        )
        self.refused_commits = Counter(
            f"{_PREFIX}refused_commits_total", "Answers delivered without a commit", ["reason"], registry=registry
        )
        self.aborts = Counter(f"{_PREFIX}aborts_total", "Turns that ended early", ["reason"], registry=registry)
        self.unsealed_creates = Counter(
            f"{_PREFIX}unsealed_creates_total", "Creates that answered before their KV was durable", registry=registry
        )

    def count_turn(self, usage: TurnUsage, *, created: bool) -> None:
        """Count one answered turn."""
        kind = "create" if created else "continue"
        self.turns.labels(kind=kind, verdict=usage.verdict, source=usage.source).inc()
        self.tokens.labels(how="cached").inc(usage.cached_tokens)
        self.tokens.labels(how="computed").inc(usage.computed_tokens)
