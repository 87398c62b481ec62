"""Checks of the manager's arguments, made once, before Redis is called. Pure.

Tenant and ids become parts of Redis keys: their patterns keep one tenant out of another's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contextcache.errors import InvalidRequest, TtlOutOfRange
from contextcache.model import (
    MAX_LIST_LIMIT,
    MAX_TTL_S,
    MAX_USAGE_DAYS,
    MAX_WORD_CHARS,
    MIN_TTL_S,
    USAGE_COUNTS,
    HeldCacheRef,
    NewSession,
    Repeatable,
    SessionId,
    TenantId,
    TurnCommit,
    TurnReceipt,
    Usage,
)
from contextcache.names import (
    DIGEST_PATTERN,
    KEY_NAME_PATTERN,
    check_cache_refs,
    check_metadata,
    check_session_id,
    check_tenant,
    context_id,
)

MAX_LEASE_ID_CHARS = 128
MAX_LEASE_TTL_MS = 3_600_000
"""An hour: longer than any answer takes, and the lease of a crashed pod ends."""
MAX_NAME_CHARS = 256
"""Maximum length of a model id and of a holder."""
MAX_COMMIT_SEGMENTS = 1000
"""Maximum number of segments of a commit. A turn has two; a commit that replaces a transcript has more."""
MAX_ANSWER_BYTES = 256 << 10
"""Maximum size of a kept answer, packed."""
MAX_USAGE_KEYS = 1000
"""Maximum number of pairs of an API key and a model in one batch of a tenant."""
MAX_COUNT = 1 << 50
"""Maximum of one count in one batch. Thousands of such sums fit into a counter of Redis."""
MAX_HELD_REFS = 500
"""Maximum number of KVs in one call of a sidecar: one round trip, and a few ms of Redis' time."""


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A session's full name."""

    tenant: TenantId
    session_id: SessionId


@dataclass(frozen=True, slots=True)
class TtlBounds:
    """Bounds of a session's life in a deployment, in seconds, both included."""

    min_s: int = MIN_TTL_S
    max_s: int = MAX_TTL_S

    def check(self, ttl_s: int) -> None:
        """Raise TtlOutOfRange. A ttl is never clamped."""
        if not self.min_s <= ttl_s <= self.max_s:
            raise TtlOutOfRange(f"ttl must be from {self.min_s} to {self.max_s} seconds", param="ttl")


def check_session(tenant: TenantId, session_id: SessionId) -> SessionKey:
    """Return the full name of a session. Raises InvalidRequest for a tenant or an id that no session can have."""
    check_tenant(tenant)
    check_session_id(session_id)
    return SessionKey(tenant, session_id)


def check_lease(lease_id: str, lease_ttl_ms: int | None = None) -> None:
    """Raise InvalidRequest for a malformed lease."""
    _check_name("lease_id", lease_id)
    if lease_ttl_ms is not None and not 1 <= lease_ttl_ms <= MAX_LEASE_TTL_MS:
        raise InvalidRequest(f"lease_ttl_ms must be from 1 to {MAX_LEASE_TTL_MS}", param="lease_ttl_ms")


def check_batch(batch_id: str, sender: str, number: int) -> None:
    """Raise InvalidRequest for a batch of usage with a malformed name or number."""
    _check_name("batch_id", batch_id)
    if sender:
        _check_name("sender", sender)
    if not 0 <= number < 1 << 53:
        raise InvalidRequest("number must be from 0 to 2^53 - 1", param="number")


def _check_name(param: str, said: str) -> None:
    if not (1 <= len(said) <= MAX_LEASE_ID_CHARS and said.isascii() and said.isprintable()):
        raise InvalidRequest(f"{param} must have 1 to {MAX_LEASE_ID_CHARS} printable ASCII characters", param=param)


def check_new_session(new: NewSession, bounds: TtlBounds) -> None:
    """Raise InvalidRequest or TtlOutOfRange for a session that may not be created."""
    check_tenant(new.tenant)
    context_id(new.session_id)
    _check_model(new.model_id)
    bounds.check(new.ttl_s)
    check_metadata(new.metadata)
    if new.parent:
        context_id(new.parent)


def _check_model(model_id: str) -> None:
    if len(model_id) > MAX_NAME_CHARS:
        raise InvalidRequest(f"model must have at most {MAX_NAME_CHARS} characters", param="model")


def check_commit(commit: TurnCommit) -> SessionKey:
    """Return the session of a commit. Raises InvalidRequest for a commit that no turn can have made."""
    key = check_session(commit.tenant, commit.session_id)
    check_lease(commit.lease_id)
    if commit.expected_generation < 0:
        raise InvalidRequest("expected_generation must be 0 or more", param="expected_generation")
    if commit.keep_segments < 0:
        raise InvalidRequest("keep_segments must be 0 or more", param="keep_segments")
    if len(commit.segments) > MAX_COMMIT_SEGMENTS:
        raise InvalidRequest(f"a commit may have at most {MAX_COMMIT_SEGMENTS} segments", param="segments")
    if commit.cache_ref:
        check_cache_refs([commit.cache_ref])
    if commit.holder:
        check_holder(commit.holder)
    check_repeatable(commit.repeatable)
    if commit.usage is not None:
        check_usage([commit.usage])
    if commit.receipt is not None:
        check_receipt(commit.receipt)
    if len(commit.answer) > MAX_ANSWER_BYTES:
        raise InvalidRequest(f"a stored answer may have at most {MAX_ANSWER_BYTES} bytes", param="answer")
    return key


def check_receipt(receipt: TurnReceipt) -> None:
    """Raise InvalidRequest for a malformed receipt."""
    words = (receipt.source, receipt.match, receipt.reason)
    if not all(isinstance(w, str) and len(w) <= MAX_WORD_CHARS and w.isascii() and w.isprintable() for w in words):
        raise InvalidRequest(
            f"source, match and reason of a receipt must have at most {MAX_WORD_CHARS} printable ASCII characters",
            param="receipt",
        )
    restore_ms, first_token_ms = receipt.restore_ms or 0, receipt.first_token_ms or 0
    counts = (receipt.generation, receipt.at_ms, receipt.took_ms, restore_ms, first_token_ms, *_tokens(receipt))
    if not all(isinstance(number, int) and 0 <= number <= MAX_COUNT for number in counts):
        raise InvalidRequest(f"the counts of a receipt must be whole numbers from 0 to {MAX_COUNT}", param="receipt")


def _tokens(receipt: TurnReceipt) -> tuple[int, ...]:
    return receipt.computed_tokens, receipt.cached_tokens, receipt.context_tokens, receipt.completion_tokens


def check_usage(usage: Sequence[Usage]) -> None:
    """Raise InvalidRequest for malformed usage."""
    if not 1 <= len(usage) <= MAX_USAGE_KEYS or len({(one.key, one.model) for one in usage}) != len(usage):
        raise InvalidRequest(f"usage must have 1 to {MAX_USAGE_KEYS} keys, each once with a model", param="usage")
    for one in usage:
        if one.key and not KEY_NAME_PATTERN.fullmatch(one.key):
            raise InvalidRequest("the name of a key must be 1 to 64 letters, digits, '_', '-' or '.'", param="usage")
        _check_model(one.model)
        if not set(one.counts) <= set(USAGE_COUNTS) or not all(0 <= n <= MAX_COUNT for n in one.counts.values()):
            raise InvalidRequest(f"usage must have known counts only, each from 0 to {MAX_COUNT}", param="usage")


def check_days(first_day: int, last_day: int) -> None:
    """Raise InvalidRequest for a range of days that is reversed or too long."""
    if not 0 <= first_day <= last_day or last_day - first_day >= MAX_USAGE_DAYS:
        raise InvalidRequest(
            f"`from` must not be after `to`, and both must span at most {MAX_USAGE_DAYS} days", param="from"
        )


def check_repeatable(repeatable: Repeatable | None) -> None:
    """Raise InvalidRequest for malformed digests."""
    if repeatable is not None and not all(
        DIGEST_PATTERN.fullmatch(digest) for digest in (repeatable.key, repeatable.request)
    ):
        raise InvalidRequest("a repeatable request must have two SHA-256 digests", param="repeatable")


def check_holder(holder: str) -> None:
    """Raise InvalidRequest for a malformed name of an endpoint."""
    if not (1 <= len(holder) <= MAX_NAME_CHARS and holder.isprintable()):
        raise InvalidRequest(f"holder must have 1 to {MAX_NAME_CHARS} printable characters", param="holder")


def check_page(tenant: str, limit: int, after: str) -> None:
    """Raise InvalidRequest for a malformed page."""
    check_tenant(tenant)
    if not 1 <= limit <= MAX_LIST_LIMIT:
        raise InvalidRequest(f"limit must be from 1 to {MAX_LIST_LIMIT}", param="limit")
    if after:
        check_session_id(after, param="after")


def check_held(held: Sequence[HeldCacheRef]) -> None:
    """Raise InvalidRequest for too many KVs, or a malformed one."""
    if len(held) > MAX_HELD_REFS:
        raise InvalidRequest(f"one call may name at most {MAX_HELD_REFS} cache_refs", param="held")
    check_cache_refs(one.cache_ref for one in held)
    for one in held:
        check_session(one.tenant, one.session_id)
