"""The story of the question before a load: which stored KV serves most of a prompt. Read `Resolver.answer` first.

1. The refs that the turn names are opened in order, after KV of interrupted turns of their session. A ref that is
   being saved or pulled is waited for.
2. Where they leave much of the prompt, the tenant's other KV is searched: here, at the peer that the gateway named, in
   the shared store. Pulls that this starts are waited for as long as they may pay.
3. The answer is the manifest that serves the most tokens, or the reason for none.

Waits end with an event: a seal, the end of a save, the end of a pull. The question's own times bound them. A wait for a
pull ends early when the engine is estimated to compute the tokens before they arrive.
A fault of the cache is a reason. Another tenant's refs are reported like refs that do not exist.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from contextcache.errors import (
    CacheRefNotFound,
    CacheRefPending,
    ContextCacheError,
    FingerprintMismatch,
    InvalidRequest,
)
from contextcache.model import CacheRef, Manifest, TenantId
from contextcache.names import check_cache_refs, prompt_ref
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.messages import value_of
from kv_sidecar.format.ids import TOKEN_BYTES, pack_token_ids
from kv_sidecar.format.manifest import restorable_tokens
from kv_sidecar.moving.borrowing import Prefixes
from kv_sidecar.moving.pulling import MAX_REFS, Wanted
from kv_sidecar.recent import Beginnings
from kv_sidecar.refs import Phase
from kv_sidecar.sealed.prefixes import Found, PrefixQuestion, common

REFS_MAX = 16
WAIT_MS_MAX = 30_000
BEGINNING_CHARS_MAX = 64
NOTHING_LIKE_IT = "no_manifest"
NOTHING_IN_COMMON = "other_tokens"
"""A context was named, and the KV under its name begins otherwise."""
WORLD_SIZE_DIFFERS = "world_size_mismatch"
_NEW_SHARE = 4
"""Text behind a whole context that the turn names counts as new up to this part of the context. No search follows."""
_WAIT_SHARE = 2
"""Wait for the KV of a prefix at most twice as long as computing would take: the engine's rate is its best."""
_WAIT_MS_MIN = 20
"""Shortest wait for the KV of a prefix: estimates below are noise."""
_LOOK_AGAIN_S = 0.5
"""Interval between two estimates of a pull that is under way."""
_INTERRUPTED_MAX = 2
"""Manifests of interrupted turns that one question reads: clients retry one after the other."""
_MATCH_S = 1.0
_MATCH_WITH_KV_S = 0.1
"""Longest search for other KV, without and with KV that the turn names."""


@dataclass(slots=True)
class Resolution:
    """The answer, while it is sought and when it is given."""

    question: pb.ResolveRequest
    manifest: Manifest | None = None
    num_shared: int = 0
    """Leading tokens that prompt and manifest share."""
    num_usable: int = 0
    """Tokens that the manifest saves the engine."""
    reason: str = NOTHING_LIKE_IT
    """Reason for no manifest."""
    missing: list[CacheRef] = field(default_factory=list)
    """Named refs that are neither here nor expected."""
    coming_ms: int = 0
    """Time after which a pull will have brought more, if that pays: the engine may ask again. 0: nothing comes."""
    whole: set[CacheRef] = field(default_factory=set)
    """Contexts that serve all they share: the checkpoint at their prompt's end adds nothing."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.question.token_ids) // TOKEN_BYTES

    def take(self, manifest: Manifest) -> bool:
        """Keep a manifest that serves more than the best so far; return whether a search can bring nothing more."""
        question, length = self.question, len(manifest.token_ids)
        if manifest.fingerprint != question.fingerprint or manifest.world_size != question.world_size:
            is_other = manifest.fingerprint != question.fingerprint
            self.reason = FingerprintMismatch.code if is_other else WORLD_SIZE_DIFFERS
            return False
        shared = common(pack_token_ids(manifest.token_ids), question.token_ids) // TOKEN_BYTES
        if not shared:
            self.reason = NOTHING_IN_COMMON
            return False
        most = min(shared, max(self.num_tokens - 1, 1))  # the engine always computes the last one
        usable = restorable_tokens(manifest, most)
        if usable == most:
            self.whole.add(manifest.cache_ref)
        if self.manifest is None or usable > self.num_usable:
            self.manifest, self.num_shared, self.num_usable = manifest, shared, usable
        is_whole = usable == length and self.num_tokens - usable <= usable // _NEW_SHARE
        return usable >= self.num_tokens - 1 or is_whole


class Resolver:
    """Answers questions. Used from one event loop."""

    def __init__(self, prefixes: Prefixes) -> None:
        self._prefixes, self._pulls = prefixes, prefixes.pulls
        self._catalog = prefixes.pulls.catalog
        self._clock = prefixes.pulls.runtime.clock
        self.beginnings = Beginnings(self._clock)

    async def answer(self, question: pb.ResolveRequest) -> Resolution:
        """Return the KV that serves most of a prompt. Raises InvalidRequest."""
        _check(question)
        best = Resolution(question)
        await self._seek(best)
        best.coming_ms = self._coming_ms(best)
        return best

    async def _seek(self, best: Resolution) -> None:
        question, began_at_ms = best.question, self._clock.now_ms()
        checkpoints = {prompt_ref(ref): ref for ref in question.cache_refs}
        for ref in [*self._interrupted(question), *question.cache_refs]:
            if checkpoints.get(ref) in best.whole:
                continue
            is_enough = await self._consider(best, ref, began_at_ms + question.pull_wait_ms, began_at_ms)
            if is_enough and not self._coming_ms(best):  # the engine would ask again at once
                return
        ends_at_ms = began_at_ms + max(question.wait_ms, question.pull_wait_ms, round(1000 * _MATCH_S))
        for found in await self._like(best, ends_at_ms):
            # The longest KV that is here ends no search: a peer's, which stands last, may be of a newer turn.
            gained = min(found.num_tokens, best.num_tokens - 1) - best.num_usable
            if gained > 0 and found.cache_ref not in question.cache_refs:
                # The engine waits for the answer no longer than this.
                by_ms = min(self._clock.now_ms() + _worth_ms(question, gained), ends_at_ms)
                await self._consider(best, found.cache_ref, by_ms, began_at_ms)

    def _coming_ms(self, best: Resolution) -> int:
        """Return when a pull of named KV will end, if computing what it adds takes twice as long."""
        question = best.question
        pulls = (self._pulls.coming(question.tenant, ref) for ref in question.cache_refs)
        for coming in filter(None, pulls):
            added = min(coming.num_tokens, best.num_tokens - 1) - best.num_usable
            if _WAIT_SHARE * coming.left_ms * 1000 <= added * question.compute_us_per_token:
                return math.ceil(coming.left_ms)
        return 0

    def _interrupted(self, question: pb.ResolveRequest) -> list[CacheRef]:
        """Return the latest KV of interrupted turns of the session: a retry has no other name for it."""
        manifests = self._catalog.manifests
        named = filter(None, (manifests.live(question.tenant, ref) for ref in question.cache_refs[:1]))
        found = [it for one in named for it in manifests.of_session(one.tenant, one.session_id) if it.interrupted]
        return [it.cache_ref for it in found[-_INTERRUPTED_MAX:]]

    async def manifest(self, tenant: TenantId, cache_ref: CacheRef, *, bring: bool = False) -> Manifest:
        """Return a sealed manifest as `ContextCatalog.open` does; the shared store learns of the use.

        `bring`: KV that is not here is fetched from the store, and pending. Raises CacheRefNotFound, CacheRefPending.
        """
        try:
            manifest = await self._catalog.open(tenant, cache_ref)
        except CacheRefPending:
            raise
        except CacheRefNotFound:
            is_deleted = self._catalog.refs.get(tenant, cache_ref).phase is Phase.DELETED
            if not bring or is_deleted or not self.bring(tenant, [cache_ref]):
                raise
            raise CacheRefPending("the KV is not sealed yet") from None
        if self._pulls.shared is not None:
            self._pulls.shared.note_use(tenant, manifest.session_id, cache_ref)
        return manifest

    def bring(self, tenant: TenantId, cache_refs: Sequence[CacheRef]) -> bool:
        """Begin to fetch KV that is not here from the shared store; return whether it may come."""
        if self._pulls.shared is None or not cache_refs:
            return False
        return self._pulls.start(Wanted(tenant, tuple(cache_refs)[:MAX_REFS], peer="")).outcome == "started"

    async def _consider(self, best: Resolution, cache_ref: CacheRef, by_ms: int, began_at_ms: int) -> bool:
        """Open KV, once it is there, and take it; return whether a search can bring nothing more."""
        named = cache_ref in best.question.cache_refs
        try:
            manifest = await self._settled(best, cache_ref, by_ms, began_at_ms, bring=named)
        except ContextCacheError as exc:
            if named and best.manifest is None:
                best.reason = exc.code
            if named and isinstance(exc, CacheRefNotFound) and not isinstance(exc, CacheRefPending):
                best.missing.append(cache_ref)
            return False
        return await self._pulls.runtime.threads.run(best.take, manifest)

    async def _settled(
        self, best: Resolution, cache_ref: CacheRef, by_ms: int, began_at_ms: int, *, bring: bool
    ) -> Manifest:
        """Return a manifest, after its seal at the latest `by_ms`. Raises CacheRefNotFound, CacheRefPending."""
        question = best.question
        tenant, bring = question.tenant, bring and question.bring and cache_ref not in question.saving
        while True:
            try:
                return await self.manifest(tenant, cache_ref, bring=bring)
            except CacheRefPending as exc:
                pending: CacheRefNotFound = exc
                left_ms = by_ms - self._clock.now_ms()
                misses = self._pulls.will_miss(tenant, cache_ref, left_ms, question.compute_us_per_token)
                if misses and not self._coming_ms(best):
                    raise
            except CacheRefNotFound as exc:
                pending = exc
                left_ms = began_at_ms + question.wait_ms - self._clock.now_ms()
                if cache_ref not in question.saving or self._catalog.refs.get(tenant, cache_ref).failure:
                    raise
            if left_ms <= 0:
                raise pending
            await self._catalog.refs.wait(tenant, [cache_ref], timeout_s=min(left_ms / 1000, _LOOK_AGAIN_S))

    async def _like(self, best: Resolution, ends_at_ms: int) -> Sequence[Found]:
        """Return other KV of the tenant that begins like the prompt and adds enough; KV on its way stands last."""
        question = best.question
        tokens_min = best.num_usable + question.tokens_min
        left_s = (ends_at_ms - self._clock.now_ms()) / 1000
        if not question.tokens_min or best.num_tokens <= tokens_min or left_s <= 0:
            return ()
        wanted = replace(value_of(PrefixQuestion, question), tokens_min=tokens_min)
        self.beginnings.note(question.beginning)
        try:
            async with asyncio.timeout(min(_MATCH_WITH_KV_S if best.num_usable else _MATCH_S, left_s)):
                return await self._prefixes.find(wanted, peer=question.peer)
        except (ContextCacheError, TimeoutError):
            return ()


def _check(question: pb.ResolveRequest) -> None:
    """Raise InvalidRequest for a field out of range."""
    value_of(PrefixQuestion, question).check()
    check_cache_refs(question.cache_refs)
    if len(question.cache_refs) > REFS_MAX:
        raise InvalidRequest(f"a question may name at most {REFS_MAX} cache_refs", param="cache_refs")
    if len(question.beginning) > BEGINNING_CHARS_MAX:
        raise InvalidRequest(f"beginning may have at most {BEGINNING_CHARS_MAX} characters", param="beginning")
    if not (0 <= question.wait_ms <= WAIT_MS_MAX and 0 <= question.pull_wait_ms <= WAIT_MS_MAX):
        raise InvalidRequest(f"wait_ms and pull_wait_ms must be 0 to {WAIT_MS_MAX}", param="wait_ms")
    if not 0 <= question.compute_us_per_token < math.inf:
        raise InvalidRequest("compute_us_per_token must be a finite number from 0 on", param="compute_us_per_token")


def _worth_ms(question: pb.ResolveRequest, num_tokens: int) -> int:
    """Return how long the KV of so many tokens is worth waiting for."""
    if not question.compute_us_per_token:
        return question.pull_wait_ms
    compute_ms = int(num_tokens * question.compute_us_per_token) // 1000
    return min(max(_WAIT_SHARE * compute_ms, _WAIT_MS_MIN), question.pull_wait_ms)
