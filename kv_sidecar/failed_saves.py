"""Saves that ended without a manifest: whose they were, and why. Pure, bounded by count and age.

All ranks of one attempt name the same start: what one of them gave up is refused to the others, whoever comes first.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass

from contextcache.errors import ERRORS_BY_CODE, InvalidRequest
from contextcache.model import CACHE_REF_PATTERN, TENANT_PATTERN, CacheRef, TenantId

HOLD_DEADLINE = "hold_deadline"
"""The connector could not hold the engine's blocks until all were copied; those that came are whole."""
_REASON = re.compile(r"[a-z][a-z_]{0,39}", re.ASCII)
_COUNTED = frozenset(ERRORS_BY_CODE) | {
    # The connector's own words.
    "blocks_gone",
    HOLD_DEADLINE,
    "not_computed",
    "null_block",
    "pipeline_parallel",
    "overtaken",
    "prepare_deadline",
    "queue_full",
    "ranks_unknown",
    "staging_error",
    "staging_full",
    "state_ahead",
    "unsupported_request",
    "weights_changed",
    # Its words for engines that it leaves alone.
    "context_parallel",
    "encoder_decoder",
    "failure_policy",
    "no_layers",
    "ranks_differ",
    "several_groups",
    "unsupported_layers",
    # Ours.
    "pull_failed",
    "save_deadline",
}


@dataclass(frozen=True, slots=True)
class FailedSave:
    """One attempt that came to nothing."""

    tenant: TenantId
    cache_ref: CacheRef
    reason: str
    """A short fixed phrase, such as `staging_full` or the code of an error."""
    started_at_ms: int = 0
    """Unix time in ms when its turn began; 0: not known."""

    def check(self) -> None:
        """Raise InvalidRequest for a field that cannot be."""
        if not TENANT_PATTERN.fullmatch(self.tenant):
            raise InvalidRequest("not a tenant", param="tenant")
        if not CACHE_REF_PATTERN.fullmatch(self.cache_ref):
            raise InvalidRequest("not a cache_ref", param="cache_ref")
        if not _REASON.fullmatch(self.reason):
            raise InvalidRequest("a reason is one short fixed phrase", param="reason")


def counted_reason(reason: str) -> str:
    """Return the reason as a metric's label: those of a later release are one."""
    return reason if reason in _COUNTED else "other"


class FailedSaves:
    """At most `max_names`, each for `keep_ms`; the oldest go first."""

    def __init__(self, *, keep_ms: int, max_names: int) -> None:
        self._keep_ms = keep_ms
        self._max_names = max_names
        self._saves: OrderedDict[CacheRef, tuple[int, FailedSave]] = OrderedDict()

    def add(self, failed: FailedSave, now_ms: int) -> None:
        """Remember a failure from now on. The first reason of an attempt stays: what follows comes of it."""
        before = self.get(failed.cache_ref, now_ms)
        same = before is not None and (before.tenant, before.started_at_ms) == (failed.tenant, failed.started_at_ms)
        if before is not None and same and failed.started_at_ms:
            return
        self._saves[failed.cache_ref] = (now_ms, failed)
        self._saves.move_to_end(failed.cache_ref)
        while len(self._saves) > self._max_names:
            self._saves.popitem(last=False)

    def get(self, cache_ref: CacheRef, now_ms: int) -> FailedSave | None:
        """Return what failed under a name, or None when nothing did, or nothing is remembered."""
        while self._saves:
            oldest, (added_at_ms, _) = next(iter(self._saves.items()))
            if now_ms - added_at_ms < self._keep_ms:
                break
            del self._saves[oldest]
        kept = self._saves.get(cache_ref)
        return None if kept is None else kept[1]

    def is_over(self, cache_ref: CacheRef, started_at_ms: int, now_ms: int) -> bool:
        """Return whether this very attempt has failed already."""
        failed = self.get(cache_ref, now_ms)
        return failed is not None and started_at_ms > 0 and failed.started_at_ms == started_at_ms

    def discard(self, cache_ref: CacheRef) -> None:
        """Forget a failure: a new attempt has begun."""
        self._saves.pop(cache_ref, None)
