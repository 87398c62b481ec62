"""Look-up of stored KV that a request can start from: one question to the sidecar, in a background thread.

The sidecar waits for seals, pulls and prefix matches (kv_sidecar/resolve.py). This side bounds the wait, and compares
every token of the answer with the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, FingerprintMismatch, SidecarUnavailable
from contextcache.identity import KVTransfer
from contextcache.model import CacheRef, Manifest
from contextcache.names import prompt_ref
from contextcache.requests import TenantShares
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.tracing import Tracer
from kv_sidecar.client import EngineSidecarClient
from vllm_plugin.connector.metadata import RankFacts, common_prefix, refusal
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.telemetry import Counters
from vllm_plugin.connector.transfer import TransferPool

_GRACE_SHARE = 8
"""Time for the way there and back, as a part of the sidecar's own limit: it answers by that limit with the best KV."""
_SILENT_SHARE = 10
"""Part of the limit that a request waits for a sidecar that left the last question without an answer."""
_PULL_SHARE = 2
"""A pull that moves is waited for up to this part of the time to compute the rest of the prompt (ADR 0148)."""
NOTHING_IN_COMMON = "other_tokens"
"""Reason for no load: the KV under the name begins with other tokens."""


@dataclass(frozen=True, slots=True)
class Match:
    """Manifest that serves most of the prompt, and the tokens that both share; without a manifest, the reason."""

    manifest: Manifest | None
    num_tokens: int = 0
    reason: str = ""
    tier: pb.Tier.ValueType = pb.TIER_UNSPECIFIED
    """Tier that would serve most of it."""
    missing: frozenset[CacheRef] = frozenset()
    """Named refs that the sidecar neither has nor expects."""
    coming_ms: int = 0
    """Estimated time until a pull has brought more; 0: none that pays."""


class PendingSaves:
    """cache_refs that this engine saves now. Each entry goes when its save ends, or is too old to wait for.

    Used by the engine's thread only.
    """

    def __init__(self, clock: Clock, *, life_ms: int, limit: int = 1024) -> None:
        self._clock = clock
        self._life_ms = life_ms
        self._limit = limit
        self._live: dict[CacheRef, tuple[int, int]] = {}
        """Time at which each is too old, and its number of tokens."""

    def add(self, cache_ref: CacheRef, num_tokens: int = 0) -> bool:
        """Note a save that has begun; False when a save under this name is in flight."""
        if cache_ref in self:
            return False
        while len(self._live) >= self._limit:
            self._live.pop(next(iter(self._live)))
        self._live[cache_ref] = (self._clock.now_ms() + self._life_ms, num_tokens)
        return True

    def num_tokens(self, cache_ref: CacheRef) -> int:
        """Return the number of tokens of a save in flight; 0: none is, or its number is unknown."""
        return self._live[cache_ref][1] if cache_ref in self else 0

    def end(self, cache_ref: CacheRef) -> None:
        """Note the end of a save."""
        self._live.pop(cache_ref, None)

    def clear(self) -> None:
        """Forget all."""
        self._live.clear()

    def __contains__(self, cache_ref: CacheRef) -> bool:
        return self._clock.now_ms() < self._live.get(cache_ref, (0, 0))[0]


class Lookup:
    """One request's question, in flight or answered."""

    def __init__(self, deadline_ms: int) -> None:
        self.future = Future[None]()
        """Done once the thread that asks has ended."""
        self.answer: Match | None = None
        self.deadline_ms = deadline_ms
        self.device_tokens = 0
        """Tokens of the prompt that the engine has by itself, as last known."""
        self.is_over = False
        """The request waits no longer."""

    def end(self) -> None:
        """Stop asking; a question in flight runs to its end."""
        self.is_over = True
        self.future.cancel()

    def result(self, now_ms: int) -> Match | None:
        """Return the match, None while it may still come, or a miss after the deadline. Never waits."""
        is_done = self.future.done()  # read before the answer, which the thread sets first
        if self.answer is not None:
            return self.answer
        if is_done:
            return Match(None, reason="internal_error")
        return Match(None, reason="manifest_deadline") if now_ms >= self.deadline_ms else None


@dataclass(eq=False, kw_only=True)
class Lookups:
    """Asks for all requests, with a few threads."""

    settings: ConnectorSettings
    sidecar: EngineSidecarClient
    saves: PendingSaves
    counters: Counters
    clock: Clock
    tracer: Tracer
    is_silent: bool = False
    """Whether the last question ran out of time. Any answer, however late, ends the silence."""

    def __post_init__(self) -> None:
        num_threads, limit = self.settings.lookup_threads, self.settings.queue_limit
        self._pool = TransferPool("lookups", threads=num_threads, queue_limit=limit)
        # Pulls hold half of the threads at most: questions of other requests go on.
        self._pulls = TenantShares(max(1, num_threads // 2))

    def start(
        self, transfer: KVTransfer, token_ids: Sequence[int], facts: RankFacts, compute_us_per_token: float
    ) -> Lookup:
        """Ask for the KV that serves most of a prompt. Never waits."""
        settings = self.settings
        wait_ms = settings.lookup_wait_ms
        compute_ms = int(len(token_ids) * compute_us_per_token / 1000)
        if compute_us_per_token:
            # An answer that comes later than the tokens would be computed is of no use.
            wait_ms = min(wait_ms, max(compute_ms, settings.lookup_wait_min_ms))
        refs = [name for ref in transfer.load for name in ((ref, prompt_ref(ref)) if facts.has_checkpoints else (ref,))]
        saving = [ref for ref in refs if ref in self.saves]
        question = pb.ResolveRequest(
            tenant=transfer.tenant,
            fingerprint=facts.fingerprint,
            world_size=facts.world_size,
            cache_refs=refs,
            saving=saving,
            wait_ms=wait_ms if saving else 0,
            pull_wait_ms=wait_ms,
            compute_us_per_token=compute_us_per_token,
            bring=True,
            tokens_min=settings.match_tokens_min if settings.match_prefix else 0,
            # Kept KV lives on for requests of its conversation, not for as long as a context that begins like it.
            expires_at_ms=transfer.expires_at_ms if transfer.is_kept else 0,
            group=transfer.session_id if transfer.is_kept else "",
            beginning=transfer.beginning,
            peer=transfer.prefix_at,
        )
        limit_ms = wait_ms + wait_ms // _GRACE_SHARE
        asked_at_ms = self.clock.now_ms()
        lookup = Lookup(asked_at_ms + (limit_ms // _SILENT_SHARE if self.is_silent else limit_ms))
        # Longer than the request waits: a late answer still ends the silence.
        timeout_s = (limit_ms + settings.manifest_deadline_ms) / 1000

        def until_ms() -> int:
            rest_us = (len(token_ids) - lookup.device_tokens) * compute_us_per_token
            return asked_at_ms + int(rest_us / 1000) // _PULL_SHARE

        def ask() -> None:
            with self.tracer.continued("connector lookup", parent=transfer.traceparent) as span:
                prompt = np.asarray(token_ids, dtype=np.int64)
                question.token_ids = prompt.astype("<u4").tobytes()
                found = self._ask(question, prompt, facts, lookup.deadline_ms, timeout_s)
                if found.coming_ms > 0 and self._pulls.take(transfer.tenant):
                    try:
                        while self._comes_in_time(found, lookup, until_ms(), limit_ms):
                            found = self._ask(question, prompt, facts, lookup.deadline_ms, timeout_s)
                    finally:
                        self._pulls.add(transfer.tenant, -1)
                span.set_attribute("contextcache.matched_tokens", found.num_tokens)
                span.set_attribute("contextcache.reason", found.reason)
            lookup.answer = found

        if (future := self._pool.try_submit(ask, transfer.tenant)) is not None:
            lookup.future = future
        else:
            lookup.answer = Match(None, reason="queue_full")
            lookup.future.cancel()
        return lookup

    def _comes_in_time(self, found: Match, lookup: Lookup, until_ms: int, limit_ms: int) -> bool:
        """Return whether a pull brings more before `until_ms`. Then the request waits for one more answer."""
        now_ms = self.clock.now_ms()
        comes = 0 < found.coming_ms <= until_ms - now_ms
        if not comes or lookup.is_over or lookup.result(now_ms) is not None:
            return False
        lookup.deadline_ms = now_ms + limit_ms
        return True

    def close(self, timeout_s: float) -> bool:
        """End the threads; return whether they have ended in time."""
        return self._pool.close(timeout_s)

    def _ask(
        self, question: pb.ResolveRequest, prompt: np.ndarray, facts: RankFacts, deadline_ms: int, timeout_s: float
    ) -> Match:
        try:
            manifest, answer = self.sidecar.resolve(question, timeout_s)
        except ContextCacheError as exc:
            self.is_silent = isinstance(exc, SidecarUnavailable) and self.clock.now_ms() >= deadline_ms
            self.counters.add("failed_matches", exc.code)
            return Match(None, reason=exc.code)
        self.is_silent = False
        missing, coming_ms = frozenset(answer.missing), answer.coming_ms
        found = Match(manifest, reason=answer.reason, tier=answer.tier, missing=missing, coming_ms=coming_ms)
        if manifest is None:
            if answer.reason == FingerprintMismatch.code:
                self.counters.add("refused_manifests", answer.reason)
            return found
        if (reason := refusal(manifest, facts)) is not None:
            self.counters.add("refused_manifests", reason)
            return replace(found, manifest=None, reason=reason)
        shared = common_prefix(np.asarray(manifest.token_ids, dtype=np.int64), prompt)
        return replace(found, num_tokens=shared) if shared else replace(found, manifest=None, reason=NOTHING_IN_COMMON)
