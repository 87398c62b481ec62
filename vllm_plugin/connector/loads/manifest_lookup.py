"""Which saved KV a request can start from: asks the sidecar in background threads. Decides no load.

First what the turn names, then, where that leaves much to compute, whatever else of the tenant's begins like the
prompt.

A lookup goes through the candidates in order and keeps the longest common prefix with the prompt. A candidate that
this engine is itself still saving is asked for again, for a bounded time: the next turn often comes before the seal.
So is one that the sidecar says it is pulling from another pod; only its word makes the engine wait longer. Of what does
not come in that time the sidecar names the first tokens, as many as have come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from contextcache.clock import Clock
from contextcache.errors import CacheRefNotFound, CacheRefPending, ContextCacheError, SidecarUnavailable
from contextcache.identity import KVTransfer
from contextcache.model import CacheRef, Manifest
from contextcache.names import prompt_ref
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.tracing import NO_TRACER, Tracer
from vllm_plugin.connector.metadata import RankFacts, common_prefix, refusal, restorable_tokens
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import LazySidecar
from vllm_plugin.connector.telemetry import Counters
from vllm_plugin.connector.transfer import TransferPool

_ASK_AGAIN_S = 0.01
_SILENT_SHARE = 10
"""The part of the deadline that is waited for a sidecar that let the last question run out."""
_LAST_SHARE = 20
"""The part of the wait for a pull that is kept for an answer with what has come of it."""

NOTHING_LIKE_IT = "no_manifest"
NOTHING_IN_COMMON = "other_tokens"
"""A context was named, and what is stored under its name begins otherwise."""
_NEW_SHARE = 4
"""What follows a whole context that the turn names is taken for new up to this part of it: another question would find
nothing."""
_WAIT_SHARE = 2
"""Times as long as computing would take that a peer's KV is waited for: what is known of that is an engine's best."""


@dataclass(frozen=True, slots=True)
class Match:
    """The best manifest and how many tokens it shares with the prompt; without one, why."""

    manifest: Manifest | None
    num_tokens: int
    reason: str = ""
    tier: pb.Tier.ValueType = pb.TIER_UNSPECIFIED
    """Tier that would serve most of it."""
    missing: frozenset[CacheRef] = frozenset()
    """Candidates that the sidecar said it does not have and does not expect."""


class PendingSaves:
    """cache_refs that this engine is still saving, each until it is known to have ended or is too old to wait for."""

    def __init__(self, clock: Clock, *, life_ms: int, limit: int = 1024) -> None:
        self._clock = clock
        self._life_ms = life_ms
        self._limit = limit
        self._lock = threading.Lock()
        self._live: dict[CacheRef, tuple[int, int]] = {}
        """When each is too old, and of how many tokens it is."""

    def add(self, cache_ref: CacheRef, num_tokens: int = 0) -> bool:
        """Note a save that has begun; False when one under this name is already going on."""
        if cache_ref in self:
            return False
        with self._lock:
            while len(self._live) >= self._limit:
                self._live.pop(next(iter(self._live)))
            self._live[cache_ref] = (self._clock.now_ms() + self._life_ms, num_tokens)
        return True

    def num_tokens(self, cache_ref: CacheRef) -> int:
        """Return how many tokens a save is of that is going on; 0: none is, or nobody said."""
        with self._lock:
            ends_at_ms, num_tokens = self._live.get(cache_ref, (0, 0))
        return num_tokens if self._clock.now_ms() < ends_at_ms else 0

    def end(self, cache_ref: CacheRef) -> None:
        """Note that a save was sealed or given up."""
        with self._lock:
            self._live.pop(cache_ref, None)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._live.clear()

    def __contains__(self, cache_ref: CacheRef) -> bool:
        with self._lock:
            ends_at_ms, _ = self._live.get(cache_ref, (0, 0))
        return self._clock.now_ms() < ends_at_ms


class Patience:
    """How long one lookup is waited for: a time set at its start, and put off once when KV is known to be coming.

    Written by the lookup's thread, read by the engine's; each field is read and written whole.
    """

    def __init__(self, ends_at_ms: int) -> None:
        self.answer_by_ms = ends_at_ms
        """Until when the sidecar has to have answered: what was asked for at the start, whatever came later."""
        self.ends_at_ms = ends_at_ms
        """Until when the engine waits."""
        self.is_pulling = False
        """Whether the sidecar said that it is pulling."""

    def pull_begins(self, until_ms: int) -> None:
        """Wait until `until_ms` if that is longer; only the first call counts."""
        if not self.is_pulling:
            self.ends_at_ms = max(self.ends_at_ms, until_ms)
            self.is_pulling = True


class Lookup:
    """One request's question, being answered."""

    def __init__(
        self, future: Future[None] | None, answer: list[Match], named: list[Match], patience: Patience
    ) -> None:
        self.future = future
        """Done once the thread that asks has ended; None: there is none."""
        self._answer = answer
        self._named = named
        """The best so far, of what the turn names and of what is here: it serves where the rest takes too long."""
        self._patience = patience

    def result(self, now_ms: int) -> Match | None:
        """Return the match, None while it may still come, or a miss after the deadline. Never waits."""
        if self._answer:
            return self._answer[0]
        if self.future is None:
            return Match(None, 0, "queue_full")
        if self.future.done():
            # The thread may have answered between the two looks.
            return self._answer[0] if self._answer else Match(None, 0, "internal_error")
        if now_ms >= self._patience.ends_at_ms:
            if self._named:
                return self._named[0]
            return Match(None, 0, CacheRefPending.code if self._patience.is_pulling else "manifest_deadline")
        return None

    def cancel(self) -> None:
        """Forget it if no thread has begun."""
        if self.future is not None:
            self.future.cancel()


class ManifestLookup:
    """Answers lookups with a few threads."""

    def __init__(
        self,
        *,
        settings: ConnectorSettings,
        sidecar: LazySidecar,
        saves: PendingSaves,
        counters: Counters,
        clock: Clock,
        compute_us_per_token: Callable[[], float] = lambda: 0.0,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """`compute_us_per_token` is asked in the threads; 0: not known."""
        self._tracer = tracer
        self._compute_us_per_token = compute_us_per_token
        self._settings = settings
        self._sidecar = sidecar
        self._saves = saves
        self._counters = counters
        self._clock = clock
        self._stopping = threading.Event()
        self._is_silent = False
        """Whether the last question ran out of time. Any answer, however late, ends the silence."""
        self._pool = TransferPool("lookups", threads=settings.lookup_threads, queue_limit=settings.queue_limit)

    def start(self, transfer: KVTransfer, token_ids: Sequence[int], facts: RankFacts) -> Lookup:
        """Begin a lookup of a prompt. Never waits."""
        wait_ms = self._settings.manifest_deadline_ms
        if self._is_silent:
            wait_ms //= _SILENT_SHARE
        elif any(ref in self._saves for ref in transfer.load):
            wait_ms = self._settings.own_save_wait_ms
        patience = Patience(self._clock.now_ms() + wait_ms)
        answer: list[Match] = []
        named: list[Match] = []

        def look_up() -> None:
            with self._tracer.continued("connector lookup", parent=transfer.traceparent) as span:
                found = self._best(transfer, token_ids, facts, patience, named)
                span.set_attribute("contextcache.matched_tokens", found.num_tokens)
                span.set_attribute("contextcache.reason", found.reason)
            answer.append(found)

        return Lookup(self._pool.try_submit(look_up), answer, named, patience)

    def close(self, timeout_s: float) -> bool:
        """End the threads; return whether they have ended in time."""
        self._stopping.set()
        return self._pool.close(timeout_s)

    def _best(
        self,
        transfer: KVTransfer,
        token_ids: Sequence[int],
        facts: RankFacts,
        patience: Patience,
        named: list[Match],
    ) -> Match:
        best = _Best(np.asarray(token_ids, dtype=np.int64), facts, self._counters)
        for cache_ref in self._candidates(transfer.load, facts, best.whole):
            if self._consider(best, transfer, cache_ref, patience):
                return best.match
        if best.num_usable:
            named.append(best.match)
        for match in self._like(best, transfer, facts, patience):
            # The longest of what is here ends no search: a peer's, which stands last, may be of a newer turn.
            gained = min(match.num_tokens, len(best.prompt) - 1) - best.num_usable
            if gained <= 0 or match.cache_ref in transfer.load:
                continue
            wait_ms = self._pull_wait_ms(gained * self._compute_us_per_token())
            self._consider(best, transfer, match.cache_ref, patience, wait_ms)
            if best.num_usable:
                named[:] = [best.match]
        return best.match

    def _pull_wait_ms(self, compute_us: float) -> int:
        """Return how long to wait for a peer's KV of tokens that take so long to compute; 0: nobody knows how long.

        What has not come by then still comes, for the next turn.
        """
        if not compute_us:
            return self._settings.pull_wait_ms
        worth_ms = max(_WAIT_SHARE * int(compute_us) // 1000, self._settings.load_always_ms)
        return min(worth_ms, self._settings.pull_wait_ms)

    def _consider(
        self,
        best: _Best,
        transfer: KVTransfer,
        cache_ref: CacheRef,
        patience: Patience,
        pull_wait_ms: int | None = None,
    ) -> bool:
        """Return whether what there is under a name leaves nothing to look for. `pull_wait_ms` None: as for any."""
        try:
            manifest, answer = self._manifest(transfer.tenant, cache_ref, patience, pull_wait_ms)
        except ContextCacheError as exc:
            if cache_ref in transfer.load:
                best.fail(cache_ref, exc)
            return False
        is_enough = best.take(cache_ref, manifest, answer.tier)
        # A beginning has the blocks of all that is here and begins like it; the rest is computed now.
        return is_enough or (answer.coming and best.num_usable > 0)

    def _like(
        self, best: _Best, transfer: KVTransfer, facts: RankFacts, patience: Patience
    ) -> Sequence[pb.PrefixMatch]:
        """Return whatever else of the tenant's begins like the prompt, and brings enough to matter."""
        tokens_min = best.num_usable + self._settings.match_tokens_min
        if not self._settings.match_prefix or len(best.prompt) <= tokens_min:
            return ()
        wait_ms = self._settings.manifest_deadline_ms
        question = pb.MatchPrefixRequest(
            tenant=transfer.tenant,
            fingerprint=facts.fingerprint,
            token_ids=best.prompt.astype("<u4").tobytes(),
            tokens_min=tokens_min,
            # What is kept lives on for what uses it as such, not for as long as a context that begins like it.
            expires_at_ms=transfer.expires_at_ms if transfer.is_kept else 0,
            group=transfer.session_id if transfer.is_kept else "",
            beginning=transfer.beginning,
            peer=transfer.prefix_at,
        )
        timeout_s = (wait_ms // _SILENT_SHARE if best.num_usable else wait_ms) / 1000
        try:
            found = self._sidecar.get().match_prefix(question, timeout_s)
            self._is_silent = False
            return found
        except SidecarUnavailable as exc:
            self._is_silent = self._is_silent or self._clock.now_ms() >= patience.answer_by_ms
            self._counters.add("failed_matches", exc.code)
            return ()
        except ContextCacheError as exc:
            self._counters.add("failed_matches", exc.code)
            return ()

    @staticmethod
    def _candidates(cache_refs: Sequence[CacheRef], facts: RankFacts, whole: Set[CacheRef]) -> Iterator[CacheRef]:
        """Yield the contexts, and after each that is not in `whole` by then what was saved at its prompt's end."""
        for cache_ref in cache_refs:
            yield cache_ref
            if cache_ref not in whole and facts.has_checkpoints:
                yield prompt_ref(cache_ref)

    def _manifest(
        self, tenant: str, cache_ref: CacheRef, patience: Patience, pull_wait_ms: int | None
    ) -> tuple[Manifest, pb.GetManifestResponse]:
        """Return a manifest and what is said of it; while our own save or a pull of it goes on, ask again.

        Raises ContextCacheError.
        """
        # Not cut to what is left: a late answer serves nobody, but tells that the sidecar is not silent any more.
        timeout_s = self._settings.manifest_deadline_ms / 1000
        wait_ms = self._settings.pull_wait_ms if pull_wait_ms is None else pull_wait_ms
        until_ms = 0
        while True:
            # Read before asking: a save that ends in between is then found by the question.
            was_pending = cache_ref in self._saves
            try:
                by_ms = until_ms or self._clock.now_ms() + wait_ms
                question = self._question(tenant, cache_ref, patience, by_ms, wait_ms)
                manifest, answer = self._sidecar.get().find_manifest(question, timeout_s)
            except SidecarUnavailable:
                self._is_silent = self._clock.now_ms() >= patience.answer_by_ms
                raise
            except CacheRefPending:
                self._is_silent = False
                until_ms = until_ms or self._clock.now_ms() + wait_ms
                patience.pull_begins(until_ms)
                if self._has_waited(min(until_ms, patience.ends_at_ms)):
                    raise
            except CacheRefNotFound:
                self._is_silent = False
                if not was_pending or self._has_waited(patience.answer_by_ms):
                    raise
            else:
                self._is_silent = False
                self._saves.end(cache_ref)
                return manifest, answer

    def _question(
        self, tenant: str, cache_ref: CacheRef, patience: Patience, until_ms: int, wait_ms: int
    ) -> pb.GetManifestRequest:
        by_ms = min(until_ms, patience.ends_at_ms) if patience.is_pulling else until_ms
        return pb.GetManifestRequest(
            tenant=tenant,
            cache_ref=cache_ref,
            bring=True,
            wait_ms=max(by_ms - self._clock.now_ms() - wait_ms // _LAST_SHARE, 0),
            compute_us_per_token=self._compute_us_per_token(),
        )

    def _has_waited(self, until_ms: int) -> bool:
        """Wait a moment before the next question; True when there is no time for one."""
        return self._clock.now_ms() >= until_ms or self._stopping.wait(_ASK_AGAIN_S)


class _Best:
    """The best of the manifests that were looked at so far, for one prompt."""

    def __init__(self, prompt: npt.NDArray[np.int64], facts: RankFacts, counters: Counters) -> None:
        self.prompt = prompt
        self.num_usable = 0
        """Tokens that the best one saves."""
        self.whole: set[CacheRef] = set()
        """Contexts that serve all they share: what was saved at their prompt's end has nothing to add."""
        self._facts = facts
        self._counters = counters
        self._match = Match(None, 0, NOTHING_LIKE_IT)
        self._missing: set[CacheRef] = set()

    @property
    def match(self) -> Match:
        """What was found."""
        return replace(self._match, missing=frozenset(self._missing))

    def fail(self, cache_ref: CacheRef, error: ContextCacheError) -> None:
        """Note that a context that was named cannot be had."""
        if isinstance(error, CacheRefNotFound) and not isinstance(error, CacheRefPending):
            self._missing.add(cache_ref)
        self._miss(error.code)

    def take(self, cache_ref: CacheRef, manifest: Manifest, tier: pb.Tier.ValueType) -> bool:
        """Keep a manifest that serves more than any before; return whether there is nothing left to look for."""
        if (reason := refusal(manifest, self._facts)) is not None:
            self._counters.add("refused_manifests", reason)
            self._miss(reason)
            return False
        shared = common_prefix(np.asarray(manifest.token_ids, dtype=np.int64), self.prompt)
        if not shared:
            self._miss(NOTHING_IN_COMMON)
            return False
        limit = min(shared, max(len(self.prompt) - 1, 1))
        usable = restorable_tokens(manifest, self._facts, limit)
        if usable == limit:
            self.whole.add(cache_ref)
        if self._match.manifest is None or usable > self.num_usable:
            self._match, self.num_usable = Match(manifest, shared, tier=tier), usable
        # The rest of a prompt that goes on where a context ends is new: the context before has none of it.
        is_whole = usable == len(manifest.token_ids) and len(self.prompt) - usable <= usable // _NEW_SHARE
        return usable >= len(self.prompt) - 1 or is_whole

    def _miss(self, reason: str) -> None:
        if self._match.manifest is None:
            self._match = Match(None, 0, reason)
