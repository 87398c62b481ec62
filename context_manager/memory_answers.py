"""Answers that `MemorySessionStore` keeps for requests that come again: the same promises as Redis, in memory."""

from __future__ import annotations

from context_manager import refusals
from context_manager.store import ANSWER_BYTES, ANSWER_KEPT_MS, SessionKey
from contextcache.model import CacheSessionMetadata, KeptAnswer, Repeatable, TenantId, TurnCommit


class MemoryAnswers:
    """By session and key, each for ANSWER_KEPT_MS."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._kept: dict[tuple[SessionKey, str], tuple[KeptAnswer, int]] = {}
        """And when it was kept."""

    def check(self, key: SessionKey, repeatable: Repeatable | None, now_ms: int) -> None:
        """Raise AlreadyAnswered or IdempotencyKeyReused; return if the request may run."""
        if repeatable is None:
            return
        self._forget_old(now_ms)
        known = self._kept.get((key, repeatable.key))
        if known is not None:
            raise refusals.already_answered() if known[0].request == repeatable.request else refusals.key_reused()

    def bytes_of(self, tenant: TenantId, now_ms: int) -> int:
        """Return the bytes counted for a tenant's answers."""
        self._forget_old(now_ms)
        return sum(
            ANSWER_BYTES + len(kept.answer) for (key, _), (kept, _) in self._kept.items() if key.tenant == tenant
        )

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
