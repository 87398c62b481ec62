"""The story of a prompt that another pod knows better: its sidecar is asked, and what both begin with is fetched.

1. What is here is found first; a peer that the gateway named is asked only where enough of the prompt is left.
2. The peer names its longest. A pull of as many tokens of it begins, in whole blocks, under a name that follows from
   the tokens: who asks next finds it coming, or here. It is kept KV, so a context's save takes its room; where no
   conversation asked, it stays for a minute, until what was asked for has been saved over the same blocks.
3. The answer names it behind what is here. Whoever loads it hears that it is pending, and waits as for any pull; in
   vain, there is still what is here.

A peer that is gone, slow or of a release that cannot be asked costs this request the question's `ask_s`, and no answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError
from contextcache.model import KEPT_PREFIX, CacheRef
from kv_sidecar.catalog import ContextCatalog
from kv_sidecar.format.ids import TOKEN_BYTES
from kv_sidecar.matching import STAYS_MS, Beginnings, PrefixQuestion
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.peers import PeerRules
from kv_sidecar.prefixes import Found
from kv_sidecar.pulling import ConnectPeer, Prefix, Pulls, Wanted

log = logging.getLogger(__name__)


class Prefixes:
    """Answers what a prompt can start from, here and at a peer. Used from one event loop."""

    def __init__(
        self,
        catalog: ContextCatalog,
        pulls: Pulls,
        *,
        rules: PeerRules,
        connect: ConnectPeer,
        block_tokens: int,
        clock: Clock,
        metrics: SidecarMetrics,
    ) -> None:
        """`block_tokens`: least tokens in a block file here."""
        self._catalog = catalog
        self._pulls = pulls
        self._rules = rules
        self._connect = connect
        self._block_tokens = block_tokens
        self._clock = clock
        self._metrics = metrics
        self.beginnings = Beginnings(clock)

    async def find(self, question: PrefixQuestion) -> Sequence[Found]:
        """See ContextCatalog.match_prefix; what comes from a peer stands last. Raises InvalidRequest."""
        found = await self._catalog.match_prefix(question)
        self.beginnings.note(question.beginning)
        known = found[0].num_tokens if found else 0
        if question.num_tokens - known <= question.tokens_min or not self._rules.allow(question.peer):
            return found
        try:
            async with asyncio.timeout(question.ask_s):
                matches = await self._ask(question, known + question.tokens_min)
            begun = [one for there in matches[:1] if (one := self._begin(question, there, known)) is not None]
        except (ContextCacheError, TimeoutError) as exc:
            self._metrics.peer_matches.labels("silent").inc()
            log.info("peer did not say what it has", extra={"peer": question.peer, "reason": type(exc).__name__})
            return found
        self._metrics.peer_matches.labels("some" if begun else "none").inc()
        return [*found, *begun]

    async def _ask(self, question: PrefixQuestion, tokens_min: int) -> Sequence[Found]:
        peer = self._connect(question.peer, question.ask_s)
        try:
            return await peer.match(question, tokens_min)
        finally:
            await peer.close()

    def _begin(self, question: PrefixQuestion, there: Found, known: int) -> Found | None:
        """Begin to fetch it; None where that cannot be, or whole blocks of it are not worth a load."""
        # Only whole blocks come: prompts that part within one have one name.
        num_tokens = min(there.num_tokens, question.num_tokens) // self._block_tokens * self._block_tokens
        if num_tokens < known + question.tokens_min:
            return None
        prompt = question.token_ids[: num_tokens * TOKEN_BYTES]
        name = _digest(question.tenant.encode(), question.fingerprint.encode(), prompt)
        begins = question.token_ids[: question.tokens_min * TOKEN_BYTES]
        prefix = Prefix(
            cache_ref=f"ref_{name}",
            num_tokens=num_tokens,
            group=question.group or KEPT_PREFIX + _digest(question.tenant.encode(), begins),
            expires_at_ms=question.expires_at_ms or self._clock.now_ms() + STAYS_MS,
        )
        reply = self._pulls.start(Wanted(question.tenant, (there.cache_ref,), question.peer, prefix=prefix))
        return None if reply.outcome == "refused" else Found(prefix.cache_ref, num_tokens)


def _digest(*parts: bytes) -> CacheRef:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
