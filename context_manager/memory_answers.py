"""Answers that `MemorySessionStore` keeps for requests that come again: the same promises as Redis, in memory."""

from __future__ import annotations

from context_manager import refusals
from context_manager.store import ANSWER_KEPT_MS, SessionKey, shard_of
from contextcache.model import CacheSessionMetadata, KeptAnswer, Repeatable, TurnCommit

_HOUR_MS = 3_600_000


class MemoryAnswers:
    """By session and key, each for ANSWER_KEPT_MS."""

    def __init__(self, *, bytes_max: int) -> None:
        """`bytes_max`: of one tenant in one shard, counted by the hour."""
        self._bytes_max = bytes_max
        self._kept: dict[tuple[SessionKey, str], tuple[KeptAnswer, int]] = {}
        """And when it was kept."""

    def check(self, key: SessionKey, repeatable: Repeatable | None, now_ms: int) -> None:
        """Raise AlreadyAnswered, IdempotencyKeyReused, ContextQuotaExceeded; nothing for what may be run."""
        if repeatable is None:
            return
        self._forget_old(now_ms)
        known = self._kept.get((key, repeatable.key))
        if known is not None:
            raise refusals.already_answered() if known[0].request == repeatable.request else refusals.key_reused()
        shard, since_ms = shard_of(key.tenant, key.session_id), now_ms - now_ms % _HOUR_MS - ANSWER_KEPT_MS
        sizes = (
            len(kept.answer)
            for (other, _), (kept, kept_at_ms) in self._kept.items()
            if other.tenant == key.tenant
            and shard_of(other.tenant, other.session_id) == shard
            and kept_at_ms - kept_at_ms % _HOUR_MS > since_ms
        )
        if sum(sizes) >= self._bytes_max:
            raise refusals.too_many_answers()

    def keep(self, key: SessionKey, commit: TurnCommit, session: CacheSessionMetadata, now_ms: int) -> None:
        """Keep the answer of a commit, if it may come again."""
        if commit.repeatable is not None:
            said = commit.repeatable
            kept = KeptAnswer(commit.answer, session.generation, session.expires_at_ms, said.request)
            self._kept[key, said.key] = (kept, now_ms)

    def find(self, key: SessionKey, repeat_key: str, now_ms: int) -> KeptAnswer | None:
        """Return what is kept; None: nothing."""
        self._forget_old(now_ms)
        known = self._kept.get((key, repeat_key))
        return None if known is None else known[0]

    def _forget_old(self, now_ms: int) -> None:
        for name, (_, kept_at_ms) in list(self._kept.items()):
            if kept_at_ms + ANSWER_KEPT_MS <= now_ms:
                del self._kept[name]
