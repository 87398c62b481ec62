"""The story of a prompt of which another pod has more KV: the shared beginning is fetched.

1. The search begins here. If enough of the prompt is left, the sidecar asks the peer that the gateway named.
2. The peer names its longest match. A pull of its first tokens begins, in whole blocks, or of the whole match if the
   prompt begins with all of it. Its name follows from the tokens, so the next question finds it pending or here. It is
   kept KV, so a context's save takes its room. Without a conversation it stays for a minute, until the request's own
   save holds the same blocks.
3. The answer names it behind the local matches. A load waits for it as for any pull, and falls back to them.

A peer that is gone, slow or refuses the question costs this request `ask_s`.

Without a named peer the sidecar asks the shared store for the conversation, because its pod may be gone. It does not if
it knows at least half of the prompt. The sidecar reads the manifests used last there and fetches the one that shares
most. If the prompt begins with all of it, the KV keeps its own name. A new conversation is looked for once, and not
again for `ABSENT_MS`. A store without an answer within `_STORE_ASKS` times `ask_s` is not asked for as long.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from contextcache.errors import ContextCacheError
from contextcache.model import CacheRef, SessionId, TenantId
from contextcache.names import KEPT_PREFIX, SESSION_ID_PATTERN
from contextcache.requests import TenantShares
from kv_sidecar.format.ids import TOKEN_BYTES
from kv_sidecar.moving.pulling import ABSENT_MAX, ABSENT_MS, Peer, Prefix, Pulls, Wanted
from kv_sidecar.recent import RecentNames
from kv_sidecar.sealed.manifests import STAYS_MS
from kv_sidecar.sealed.prefixes import Found, PrefixQuestion

log = logging.getLogger(__name__)

_STORE_ASKS = 3
"""Waits `ask_s` for a listing and a manifest, each of tens of milliseconds: under half of the engine's own wait."""
_STORE_QUESTIONS_MAX = 16
"""Questions to the store at once; further ones get the local matches only."""


@dataclass
class Prefixes:
    """Finds KV that begins like a prompt: here, at a peer and in the store. Used from one event loop."""

    pulls: Pulls
    ask_s: float = 0.1
    """Longest wait for a peer's answer: a connection and an answer within one network."""
    _absent: RecentNames[tuple[TenantId, SessionId]] = field(
        default_factory=lambda: RecentNames(keep_ms=ABSENT_MS, max_names=ABSENT_MAX)
    )
    """Conversations that the store did not have a moment ago."""
    _questions: TenantShares = field(default_factory=lambda: TenantShares(_STORE_QUESTIONS_MAX))
    _silent_until_ms: int = 0

    async def find(self, question: PrefixQuestion, *, peer: str = "") -> Sequence[Found]:
        """Return matches as ContextCatalog.match_prefix, then a match that is on its way from elsewhere.

        `peer`: `host:port` of a sidecar that may have more; empty: none. Raises InvalidRequest.
        """
        pulls = self.pulls
        found = await pulls.catalog.match_prefix(question)
        known = found[0].num_tokens if found else 0
        # Less than a block file is computed about as soon as that file, the least that can come, is here.
        tokens_min = known + max(question.tokens_min, pulls.limits.block_tokens)
        begun = None
        if question.num_tokens > tokens_min:
            if pulls.rules.allow(peer):
                begun = await self._at_peer(question, tokens_min, peer)
            elif pulls.store is not None and self._may_be_stored(question, known):
                begun = await self._at_store(pulls.store, question, tokens_min)
        return [*found, *(begun or ())]

    async def _at_peer(self, question: PrefixQuestion, tokens_min: int, address: str) -> list[Found] | None:
        peer = self.pulls.connect(address, self.ask_s)
        try:
            return await self._ask(peer, question, tokens_min, address=address, timeout_s=self.ask_s)
        finally:
            await peer.close()

    async def _at_store(self, store: Peer, question: PrefixQuestion, tokens_min: int) -> list[Found] | None:
        self._questions.add(question.tenant, 1)
        begun = None
        try:
            begun = await self._ask(store, question, tokens_min, address="", timeout_s=_STORE_ASKS * self.ask_s)
        finally:
            self._questions.add(question.tenant, -1)
            if begun is None:  # also when the engine has given up the question
                self._silent_until_ms = self.pulls.runtime.clock.now_ms() + ABSENT_MS
        if begun == []:
            self._absent.add((question.tenant, question.group), self.pulls.runtime.clock.now_ms())
        return begun

    async def _ask(
        self, source: Peer, question: PrefixQuestion, tokens_min: int, *, address: str, timeout_s: float
    ) -> list[Found] | None:
        """Return the match that begins to come; None: no answer. `address`: the peer's; empty: the store."""
        matches: Sequence[Found] | None = None
        begun: list[Found] = []
        try:
            async with asyncio.timeout(timeout_s):
                matches = await source.match(question, tokens_min)
            begun = self._begin(question, matches, tokens_min, peer=address)
        except (ContextCacheError, TimeoutError) as exc:
            fields = {"peer": address or "shared store", "reason": type(exc).__name__}
            log.info("no answer to a prefix look-up", extra=fields)
        verdict = "silent" if matches is None else "some" if begun else "none"
        self.pulls.runtime.metrics.peer_matches.labels("peer" if address else "object", verdict).inc()
        return None if matches is None else begun

    def _may_be_stored(self, question: PrefixQuestion, known: int) -> bool:
        conversation, now_ms = (question.tenant, question.group), self.pulls.runtime.clock.now_ms()
        if not (question.group.startswith(KEPT_PREFIX) and SESSION_ID_PATTERN.fullmatch(question.group)):
            return False
        if self.pulls.catalog.manifests.of_session(*conversation) and 2 * known >= question.num_tokens:
            return False
        is_open = now_ms >= self._silent_until_ms and self._questions.takes(question.tenant)
        return is_open and self._absent.added_at_ms(conversation, now_ms) is None

    def _begin(self, question: PrefixQuestion, matches: Sequence[Found], tokens_min: int, *, peer: str) -> list[Found]:
        """Begin to fetch the first match; return none if it is refused or shares too few tokens."""
        if not matches:
            return []
        there = matches[0]
        num_tokens = min(there.num_tokens, question.num_tokens)
        if not there.is_whole:
            # Only whole blocks come: prompts that part within one have one name.
            num_tokens = num_tokens // self.pulls.limits.block_tokens * self.pulls.limits.block_tokens
        if num_tokens < tokens_min:
            return []
        name = there.cache_ref
        if peer or not there.is_whole:
            prompt = question.token_ids[: num_tokens * TOKEN_BYTES]
            name = f"ref_{_digest(question.tenant.encode(), question.fingerprint.encode(), prompt)}"
        begins = question.token_ids[: question.tokens_min * TOKEN_BYTES]
        prefix = Prefix(
            cache_ref=name,
            num_tokens=num_tokens,
            group=question.group or KEPT_PREFIX + _digest(question.tenant.encode(), begins),
            expires_at_ms=question.expires_at_ms or self.pulls.runtime.clock.now_ms() + STAYS_MS,
        )
        self.pulls.start(Wanted(question.tenant, (there.cache_ref,), peer, prefix=prefix))
        # Not where it was refused, or did not come a moment ago.
        return [Found(name, num_tokens)] if self.pulls.catalog.holds(question.tenant, name) else []


def _digest(*parts: bytes) -> CacheRef:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
