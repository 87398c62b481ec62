"""The story of a prompt that another pod knows better, or knew: what both begin with is fetched.

1. What is here is found first; a peer that the gateway named is asked only where enough of the prompt is left.
2. The peer names its longest. A pull of as many tokens of it begins, in whole blocks, or of all of it where the prompt
   begins with all of it, under a name that follows from the tokens: who asks next finds it coming, or here. It is kept
   KV, so a context's save takes its room; where no conversation asked, it stays for a minute, until what was asked for
   has been saved over the same blocks.
3. The answer names it behind what is here. Whoever loads it hears that it is pending, and waits as for any pull; in
   vain, there is still what is here.

A peer that is gone, slow or of a release that cannot be asked costs this request the question's `ask_s`, and no answer.

Where no peer was named, the shared store is asked for the conversation, if that is not known here, or by less than half
of the prompt: its pod may be gone. Of the manifests used last there the one that shares most is fetched: all of it,
under its own name, where the prompt begins with it. A conversation that is new is looked for once, and not again for
`ABSENT_MS`; a store that does not answer within `_STORE_ASKS` times `ask_s` is left alone for as long.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import Literal, TypeAlias

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError
from contextcache.model import CacheRef, SessionId, TenantId
from contextcache.names import KEPT_PREFIX, SESSION_ID_PATTERN
from kv_sidecar.catalog import ContextCatalog
from kv_sidecar.format.ids import TOKEN_BYTES
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.moving.peers import PeerRules
from kv_sidecar.moving.pulling import ABSENT_MAX, ABSENT_MS, ConnectPeer, Peer, Prefix, Pulls, Wanted
from kv_sidecar.sealed.index import RecentNames
from kv_sidecar.sealed.matching import STAYS_MS, Beginnings, PrefixQuestion
from kv_sidecar.sealed.prefixes import Found

log = logging.getLogger(__name__)

_STORE_ASKS = 3
"""A listing and a manifest: calls that take tens of milliseconds each. Less than half of what the engine waits."""
_STORE_QUESTIONS_MAX = 16
"""At once; more are answered with what is here."""


class Prefixes:
    """Answers what a prompt can start from, here, at a peer and in the store. Used from one event loop."""

    def __init__(  # noqa: PLR0913  # whom it asks, by name
        self,
        catalog: ContextCatalog,
        pulls: Pulls,
        *,
        rules: PeerRules,
        connect: ConnectPeer,
        block_tokens: int,
        clock: Clock,
        metrics: SidecarMetrics,
        store: Peer | None = None,
    ) -> None:
        """`block_tokens`: least tokens in a block file here. `store`: what all pods share; None: there is none."""
        self._catalog = catalog
        self._pulls = pulls
        self._rules = rules
        self._connect = connect
        self._block_tokens = block_tokens
        self._clock = clock
        self._metrics = metrics
        self._store = store
        self._absent: RecentNames[tuple[TenantId, SessionId]] = RecentNames(keep_ms=ABSENT_MS, max_names=ABSENT_MAX)
        """Conversations that the store did not have, not long ago."""
        self._num_questions = 0
        self._silent_until_ms = 0
        self.beginnings = Beginnings(clock)

    async def find(self, question: PrefixQuestion) -> Sequence[Found]:
        """See ContextCatalog.match_prefix; what comes from elsewhere stands last. Raises InvalidRequest."""
        found = await self._catalog.match_prefix(question)
        self.beginnings.note(question.beginning)
        known = found[0].num_tokens if found else 0
        # Less than a block file is computed about as soon as that file, the least that can come, is here.
        tokens_min = known + max(question.tokens_min, self._block_tokens)
        if question.num_tokens <= tokens_min:
            return found
        if self._rules.allow(question.peer):
            verdict, begun = await self._at_peer(question, tokens_min)
            self._metrics.peer_matches.labels("peer", verdict).inc()
        elif self._store is not None and self._may_be_stored(question, known):
            verdict, begun = await self._at_store(self._store, question, tokens_min)
            self._metrics.peer_matches.labels("object", verdict).inc()
        else:
            return found
        return [*found, *begun]

    async def _at_peer(self, question: PrefixQuestion, tokens_min: int) -> tuple[_Verdict, list[Found]]:
        try:
            async with asyncio.timeout(question.ask_s):
                matches = await self._ask(question, tokens_min)
            begun = self._begin(question, matches, tokens_min, peer=question.peer)
        except (ContextCacheError, TimeoutError) as exc:
            log.info(
                "no answer from the peer to a prefix look-up",
                extra={"peer": question.peer, "reason": type(exc).__name__},
            )
            return "silent", []
        return "some" if begun else "none", begun

    def _may_be_stored(self, question: PrefixQuestion, known: int) -> bool:
        conversation, now_ms = (question.tenant, question.group), self._clock.now_ms()
        if not (question.group.startswith(KEPT_PREFIX) and SESSION_ID_PATTERN.fullmatch(question.group)):
            return False
        if self._catalog.of_session(*conversation) and 2 * known >= question.num_tokens:
            return False
        is_open = now_ms >= self._silent_until_ms and self._num_questions < _STORE_QUESTIONS_MAX
        return is_open and self._absent.added_at_ms(conversation, now_ms) is None

    async def _at_store(self, store: Peer, question: PrefixQuestion, tokens_min: int) -> tuple[_Verdict, list[Found]]:
        self._num_questions += 1
        is_told = False
        try:
            async with asyncio.timeout(_STORE_ASKS * question.ask_s):
                matches = await store.match(question, tokens_min)
            is_told = True
            begun = self._begin(question, matches, tokens_min, peer="")
        except (ContextCacheError, TimeoutError) as exc:
            log.info("no answer from the shared store to a prefix look-up", extra={"reason": type(exc).__name__})
            return "silent", []
        finally:
            self._num_questions -= 1
            if not is_told:  # also when the engine has given up the question
                self._silent_until_ms = self._clock.now_ms() + ABSENT_MS
        if not begun:
            self._absent.add((question.tenant, question.group), self._clock.now_ms())
        return "some" if begun else "none", begun

    async def _ask(self, question: PrefixQuestion, tokens_min: int) -> Sequence[Found]:
        peer = self._connect(question.peer, question.ask_s)
        try:
            return await peer.match(question, tokens_min)
        finally:
            await peer.close()

    def _begin(self, question: PrefixQuestion, matches: Sequence[Found], tokens_min: int, *, peer: str) -> list[Found]:
        """Begin to fetch the first; none where that cannot be, or what would come has fewer tokens."""
        if not matches:
            return []
        there = matches[0]
        num_tokens = min(there.num_tokens, question.num_tokens)
        if not there.is_whole:
            # Only whole blocks come: prompts that part within one have one name.
            num_tokens = num_tokens // self._block_tokens * self._block_tokens
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
            expires_at_ms=question.expires_at_ms or self._clock.now_ms() + STAYS_MS,
        )
        self._pulls.start(Wanted(question.tenant, (there.cache_ref,), peer, prefix=prefix))
        # Not where it was refused, or did not come a moment ago.
        return [Found(name, num_tokens)] if self._catalog.holds(question.tenant, name) else []


_Verdict: TypeAlias = Literal["some", "none", "silent"]


def _digest(*parts: bytes) -> CacheRef:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
