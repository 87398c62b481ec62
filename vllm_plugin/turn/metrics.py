"""What the turn middleware counts; shown on vLLM's own /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contextcache.process.metrics import CertificateMetrics
from vllm_plugin.turn.history import Divergence
from vllm_plugin.turn.matching import Outcome
from vllm_plugin.turn.usage import TurnUsage

_PREFIX = "contextcache_turn_"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class TurnMetrics:
    """All metrics of the turn middleware; labels are closed sets."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register everything in `registry`."""
        self.certificates = CertificateMetrics("contextcache_turn", registry)
        self.turns = Counter(
            f"{_PREFIX}turns_total",
            "Answered turns, by kind, verdict and source",
            ["kind", "verdict", "source"],
            registry=registry,
        )
        self.outcomes = Counter(
            f"{_PREFIX}matches_total",
            "Relation of prompts to their transcripts, by outcome: append, exact, extend, diverge",
            ["outcome"],
            registry=registry,
        )
        self.divergences = Counter(
            f"{_PREFIX}divergences_total",
            "Replays that differ from their stored transcript, by reason (as in `usage.context.diverged`)",
            ["why"],
            registry=registry,
        )
        self.tokens = Counter(
            f"{_PREFIX}prompt_tokens_total", "Prompt tokens, cached or computed", ["how"], registry=registry
        )
        self.refused_commits = Counter(
            f"{_PREFIX}refused_commits_total",
            "Delivered answers without a commit, by reason",
            ["reason"],
            registry=registry,
        )
        self.refused_requests = Counter(
            f"{_PREFIX}refused_requests_total",
            "Creates, turns and unrouted requests that this middleware answered with an error, by code",
            ["code"],
            registry=registry,
        )
        self.aborts = Counter(
            f"{_PREFIX}aborts_total",
            "Turns that ended early, by reason. `engine`: it failed or reached its time limit. `client`: it "
            "stopped reading. `turn`: every lease given back",
            ["reason"],
            registry=registry,
        )
        self.unsealed_creates = Counter(
            f"{_PREFIX}unsealed_creates_total", "Creates that answered before their KV was durable", registry=registry
        )
        self.refusals = Counter(
            f"{_PREFIX}tenant_refusals_total",
            "Requests refused at a limit of their tenant, by limit: requests, bytes, quota",
            ["limit"],
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            f"{_PREFIX}first_token_seconds",
            "Seconds from the lease to the first token of streamed turns, by kind and by source of most cached tokens",
            ["kind", "source"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.timed_tokens = Counter(
            f"{_PREFIX}timed_prompt_tokens_total",
            "Prompt tokens of the turns in first_token_seconds, cached or computed",
            ["how", "source"],
            registry=registry,
        )
        self.restore_seconds = Histogram(
            f"{_PREFIX}restore_seconds",
            "Seconds from the engine's first look-up of a context's KV until its load ended, by tier",
            ["source"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.kept_requests = Counter(
            f"{_PREFIX}kept_requests_total",
            "Requests whose key keeps their KV, by verdict (`hit`, `miss`, `recomputed`, `unknown`) and "
            "reason of a miss",
            ["verdict", "reason"],
            registry=registry,
        )
        self.transcript_segments = Counter(
            f"{_PREFIX}transcript_segments_total",
            "Segments of the transcripts that turns began with: `known` in this process, or `sent` by the "
            "manager. Mostly sent: most turns run in another process than the turn before, or after a pause "
            "of ten minutes",
            ["how"],
            registry=registry,
        )
        self.transcript_memory = Gauge(
            f"{_PREFIX}transcript_memory_bytes",
            "Bytes of transcripts in the memory of this process, at most 128 MiB",
            registry=registry,
        )
        self.expired_identities = Counter(
            f"{_PREFIX}expired_identities_total",
            "Requests whose identity had expired on arrival, because the clocks of pod and gateway differ. "
            "Turns and creates get a 503. The KV of others is not kept",
            registry=registry,
        )
        self.gateway_clock_skew = Gauge(
            f"{_PREFIX}gateway_clock_skew_seconds",
            "Clock of this machine minus the clock of the gateway that signed the last request, in seconds, "
            "transit included",
            registry=registry,
        )
        self.lost_spans = Counter(
            f"{_PREFIX}lost_spans_total", "Trace spans that did not reach the collector", registry=registry
        )

    def count_match(self, outcome: Outcome, diverged: Divergence | None) -> None:
        """Count how one prompt stood to its transcript."""
        self.outcomes.labels(outcome=outcome.value).inc()
        if diverged is not None:
            self.divergences.labels(why=diverged.why.value).inc()

    def time_turn(self, usage: TurnUsage, *, created: bool, first_token_s: float | None) -> None:
        """Note how soon a turn answered; None: it was not streamed, so nobody saw the first token."""
        loaded = usage.loaded
        if loaded is not None and not loaded.failed and loaded.tier and loaded.restore_ms is not None:
            self.restore_seconds.labels(source=loaded.tier).observe(loaded.restore_ms / 1000)
        if first_token_s is None:
            return
        kind = "create" if created else "continue"
        self.first_token_seconds.labels(kind=kind, source=usage.source).observe(first_token_s)
        self.timed_tokens.labels(how="cached", source=usage.source).inc(usage.cached_tokens)
        self.timed_tokens.labels(how="computed", source=usage.source).inc(usage.computed_tokens)

    def count_kept(self, verdict: str, reason: str) -> None:
        """Count one kept request; `reason`: the connector's, a short fixed phrase."""
        self.kept_requests.labels(verdict=verdict, reason=reason).inc()

    def count_transcript(self, known: int, sent: int) -> None:
        """Count the segments of the transcript of a turn that began."""
        self.transcript_segments.labels(how="known").inc(known)
        self.transcript_segments.labels(how="sent").inc(sent)

    def count_turn(self, usage: TurnUsage, *, created: bool) -> None:
        """Count one answered turn."""
        kind = "create" if created else "continue"
        self.turns.labels(kind=kind, verdict=usage.verdict, source=usage.source).inc()
        self.tokens.labels(how="cached").inc(usage.cached_tokens)
        self.tokens.labels(how="computed").inc(usage.computed_tokens)
