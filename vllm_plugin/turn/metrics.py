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
            f"{_PREFIX}turns_total", "Turns answered", ["kind", "verdict", "source"], registry=registry
        )
        self.outcomes = Counter(
            f"{_PREFIX}matches_total",
            "How prompts stood to their transcript: append, exact, extend, diverge",
            ["outcome"],
            registry=registry,
        )
        self.divergences = Counter(
            f"{_PREFIX}divergences_total",
            "Resends that left what was stored, by why: the words of `usage.context.diverged`",
            ["why"],
            registry=registry,
        )
        self.tokens = Counter(
            f"{_PREFIX}prompt_tokens_total", "Prompt tokens, cached or computed", ["how"], registry=registry
        )
        self.refused_commits = Counter(
            f"{_PREFIX}refused_commits_total", "Answers delivered without a commit", ["reason"], registry=registry
        )
        self.refused_requests = Counter(
            f"{_PREFIX}refused_requests_total",
            "Creates, turns and unrouted requests answered with an error of ours, by code",
            ["code"],
            registry=registry,
        )
        self.aborts = Counter(
            f"{_PREFIX}aborts_total",
            "Turns that ended early, by reason: `engine` broke off, fell silent or was given up, `client` read "
            "nothing, `turn` for every lease given back",
            ["reason"],
            registry=registry,
        )
        self.unsealed_creates = Counter(
            f"{_PREFIX}unsealed_creates_total", "Creates that answered before their KV was durable", registry=registry
        )
        self.refusals = Counter(
            f"{_PREFIX}tenant_refusals_total",
            "Requests refused because their tenant has as much as it may, by limit: requests, bytes, quota",
            ["limit"],
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            f"{_PREFIX}first_token_seconds",
            "Streamed turns: from the lease to the first token, by kind and by where most cached tokens came from",
            ["kind", "source"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.timed_tokens = Counter(
            f"{_PREFIX}timed_prompt_tokens_total",
            "Prompt tokens of those turns, cached or computed: seconds per computed token say what the cached saved",
            ["how", "source"],
            registry=registry,
        )
        self.restore_seconds = Histogram(
            f"{_PREFIX}restore_seconds",
            "From the engine's first question about a context's KV until it was injected, by tier",
            ["source"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.kept_requests = Counter(
            f"{_PREFIX}kept_requests_total",
            "Requests of keys that have their KV kept, by `hit`, `miss`, `recomputed` or `unknown`, and why not",
            ["verdict", "reason"],
            registry=registry,
        )
        self.transcript_segments = Counter(
            f"{_PREFIX}transcript_segments_total",
            "Segments of the transcripts that turns began with: `known` in this process already, or `sent` by the "
            "manager. Mostly sent: conversations change processes at nearly every turn, or pause over ten minutes",
            ["how"],
            registry=registry,
        )
        self.transcript_memory = Gauge(
            f"{_PREFIX}transcript_memory_bytes",
            "Transcripts remembered in this process; 128 MiB at most",
            registry=registry,
        )
        self.expired_identities = Counter(
            f"{_PREFIX}expired_identities_total",
            "Requests whose identity had expired when they came: turns and creates get 503, others pass without being "
            "kept. The clocks of pod and gateway differ",
            registry=registry,
        )
        self.gateway_clock_skew = Gauge(
            f"{_PREFIX}gateway_clock_skew_seconds",
            "This machine's clock less that of the gateway that signed the last request, its way here included",
            registry=registry,
        )
        self.lost_spans = Counter(
            f"{_PREFIX}lost_spans_total", "Spans of traces that did not reach the collector", registry=registry
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
