"""Metrics of the turn process, shown at its /metrics. Labels are closed sets."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contextcache.process.metrics import ProcessMetrics
from vllm_plugin.turn.answer.receipt import TurnUsage
from vllm_plugin.turn.prompt.matching import Divergence, Outcome

_PREFIX = "contextcache_turn_"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class TurnMetrics:
    """All metrics of one turn process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register everything in `registry`."""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}{name}_total", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{_PREFIX}{name}", text, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"{_PREFIX}{name}", text, labels, buckets=_SECONDS, registry=registry)

        self.process = ProcessMetrics("contextcache_turn", registry)
        self.turns = counter("turns", "Answered turns, by kind, verdict and source", "kind", "verdict", "source")
        self.outcomes = counter(
            "matches",
            "Relation of prompts to their transcripts, by outcome: append, exact, extend, diverge",
            "outcome",
        )
        self.divergences = counter(
            "divergences",
            "Replays that differ from their stored transcript, by reason (as in `usage.context.diverged`)",
            "why",
        )
        self.tokens = counter("prompt_tokens", "Prompt tokens, cached or computed", "how")
        self.refused_commits = counter("refused_commits", "Delivered answers without a commit, by reason", "reason")
        self.refused_requests = counter(
            "refused_requests",
            "Creates, turns and unrouted requests that the turn process answered with an error, by code",
            "code",
        )
        self.aborts = counter(
            "aborts",
            "Turns that ended early, by reason. `engine`: it failed or reached its time limit. `client`: it "
            "left or stopped reading. `turn`: every lease given back",
            "reason",
        )
        self.resumed_answers = counter(
            "resumed_answers",
            "Answers whose engine broke off, by outcome: `standby` or `own` for each engine that continued one, else "
            "the reason why none did",
            "outcome",
        )
        self.unsealed_creates = counter("unsealed_creates", "Creates that answered before their KV was durable")
        self.refusals = counter(
            "tenant_refusals", "Requests refused at a limit of their tenant, by limit: requests, bytes, quota", "limit"
        )
        self.first_token_seconds = histogram(
            "first_token_seconds",
            "Seconds from the lease to the first token of streamed turns, by kind and by source of most cached tokens",
            "kind",
            "source",
        )
        self.restore_seconds = histogram(
            "restore_seconds",
            "Seconds from the engine's first look-up of a context's KV until its load ended, by tier",
            "source",
        )
        self.kept_requests = counter(
            "kept_requests",
            "Requests whose key keeps their KV, by verdict (`hit`, `miss`, `recomputed`, `unknown`) and "
            "reason of a miss",
            "verdict",
            "reason",
        )
        self.transcript_segments = counter(
            "transcript_segments",
            "Segments of the transcripts that turns began with: `known` in this process, or `sent` by the "
            "manager. Mostly sent: most turns run in another process than the turn before, or after a pause "
            "of ten minutes",
            "how",
        )
        self.transcript_memory = gauge(
            "transcript_memory_bytes", "Bytes of transcripts in the memory of this process, at most 128 MiB"
        )
        self.expired_identities = counter(
            "expired_identities",
            "Requests whose identity had expired on arrival, because the clocks of pod and gateway differ. "
            "Turns and creates get a 503. The KV of others is not kept",
        )
        self.gateway_clock_skew = gauge(
            "gateway_clock_skew_seconds",
            "Clock of this machine minus the clock of the gateway that signed the last request, in seconds, "
            "transit included",
        )

    def count_match(self, outcome: Outcome, diverged: Divergence | None) -> None:
        """Count the relation of one prompt to its transcript."""
        self.outcomes.labels(outcome=outcome.value).inc()
        if diverged is not None:
            self.divergences.labels(why=diverged.why.value).inc()

    def count_transcript(self, known: int, sent: int) -> None:
        """Count the segments of the transcript of a turn that began."""
        self.transcript_segments.labels(how="known").inc(known)
        self.transcript_segments.labels(how="sent").inc(sent)

    def count_turn(self, usage: TurnUsage, *, created: bool, first_token_s: float | None) -> None:
        """Count one answered turn and its times. `first_token_s` is None for an answer without a stream."""
        kind, source, loaded = "create" if created else "continue", usage.source, usage.loaded
        self.turns.labels(kind=kind, verdict=usage.verdict, source=source).inc()
        if loaded is not None and not loaded.failed and loaded.tier and loaded.restore_ms is not None:
            self.restore_seconds.labels(source=loaded.tier).observe(loaded.restore_ms / 1000)
        if first_token_s is not None:
            self.first_token_seconds.labels(kind=kind, source=source).observe(first_token_s)
        for how, tokens in (("cached", usage.cached_tokens), ("computed", usage.computed_tokens)):
            self.tokens.labels(how=how).inc(tokens)
