"""What the manager accepts: checked here once, before any store is asked. Pure.

Tenant and ids end up in Redis keys, so their patterns are what keeps one tenant out of another's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contextcache.errors import InvalidRequest, TtlOutOfRange
from contextcache.model import (
    CACHE_REF_PATTERN,
    KEPT_PREFIX,
    MAX_GENERATION,
    MAX_LIST_LIMIT,
    MAX_TTL_S,
    MIN_TTL_S,
    SESSION_ID_PATTERN,
    TENANT_PATTERN,
    HeldCacheRef,
    NewSession,
    Repeatable,
    TurnCommit,
)
from contextcache.repeats import DIGEST_PATTERN
from contextcache.terms import check_metadata

MAX_LEASE_ID_CHARS = 128
MAX_LEASE_TTL_MS = 3_600_000
"""An hour: longer than any answer takes, short enough that a crashed pod's lease is not for ever."""
MAX_NAME_CHARS = 256
"""Longest model id and holder."""
MAX_COMMIT_SEGMENTS = 1000
"""A turn has two; a transcript that is written anew in one commit has more."""
MAX_ANSWER_BYTES = 256 << 10
"""Of one answer that is kept, packed."""
MAX_HELD_REFS = 500
"""In one question of a sidecar: one round trip, and a few ms of Redis' time."""


@dataclass(frozen=True, slots=True)
class TtlBounds:
    """The lives a deployment grants, in seconds, both ends included."""

    min_s: int = MIN_TTL_S
    max_s: int = MAX_TTL_S

    def check(self, ttl_s: int) -> None:
        """Raise TtlOutOfRange; a life is never clamped."""
        if not self.min_s <= ttl_s <= self.max_s:
            raise TtlOutOfRange(f"ttl must be {self.min_s} to {self.max_s} seconds", param="ttl")


def check_session(tenant: str, session_id: str) -> None:
    """Raise InvalidRequest unless both could be somebody's."""
    check_tenant(tenant)
    if not SESSION_ID_PATTERN.fullmatch(session_id):
        raise InvalidRequest("session_id must be 1 to 128 letters, digits, '_', '-' or '.'", param="session_id")


def check_tenant(tenant: str) -> None:
    """Raise InvalidRequest for a tenant that cannot be part of a key."""
    if not TENANT_PATTERN.fullmatch(tenant):
        raise InvalidRequest("tenant must be 1 to 64 letters, digits, '_', '-' or '.'", param="tenant")


def check_lease(lease_id: str, lease_ttl_ms: int | None = None) -> None:
    """Raise InvalidRequest for a lease nobody could hold."""
    if not (1 <= len(lease_id) <= MAX_LEASE_ID_CHARS and lease_id.isascii() and lease_id.isprintable()):
        raise InvalidRequest(f"lease_id must be 1 to {MAX_LEASE_ID_CHARS} printable characters", param="lease_id")
    if lease_ttl_ms is not None and not 1 <= lease_ttl_ms <= MAX_LEASE_TTL_MS:
        raise InvalidRequest(f"lease_ttl_ms must be 1 to {MAX_LEASE_TTL_MS}", param="lease_ttl_ms")


def check_new_session(new: NewSession, bounds: TtlBounds) -> None:
    """Raise InvalidRequest or TtlOutOfRange for a session that may not be created."""
    check_session(new.tenant, new.session_id)
    if new.session_id.startswith(KEPT_PREFIX):
        raise InvalidRequest(f"no context is called {KEPT_PREFIX}…: kept conversations are", param="session_id")
    if not 1 <= len(new.model_id) <= MAX_NAME_CHARS:
        raise InvalidRequest(f"model must have 1 to {MAX_NAME_CHARS} characters", param="model")
    bounds.check(new.ttl_s)
    check_metadata(new.metadata)


def check_commit(commit: TurnCommit) -> None:
    """Raise InvalidRequest for a commit that no turn can have made."""
    check_session(commit.tenant, commit.session_id)
    check_lease(commit.lease_id)
    if commit.expected_generation < 0:
        raise InvalidRequest("expected_generation is never negative", param="expected_generation")
    if commit.keep_segments < 0:
        raise InvalidRequest("keep_segments is never negative", param="keep_segments")
    if len(commit.segments) > MAX_COMMIT_SEGMENTS:
        raise InvalidRequest(f"a commit has at most {MAX_COMMIT_SEGMENTS} segments", param="segments")
    if commit.cache_ref and not CACHE_REF_PATTERN.fullmatch(commit.cache_ref):
        raise InvalidRequest("cache_ref is not one of ours", param="cache_ref")
    if commit.holder:
        check_holder(commit.holder)
    check_repeatable(commit.repeatable)
    if len(commit.answer) > MAX_ANSWER_BYTES:
        raise InvalidRequest(f"an answer of {MAX_ANSWER_BYTES} bytes at most is kept", param="answer")


def check_repeatable(repeatable: Repeatable | None) -> None:
    """Raise InvalidRequest for digests that are none."""
    if repeatable is not None and not all(
        DIGEST_PATTERN.fullmatch(digest) for digest in (repeatable.key, repeatable.request)
    ):
        raise InvalidRequest("a repeatable request is named by two digests", param="repeatable")


def check_generation(generation: int) -> None:
    """Raise InvalidRequest for what can be no generation of a context that was created."""
    if not 1 <= generation <= MAX_GENERATION:
        raise InvalidRequest("generation must be a whole number, 1 or more", param="generation")


def check_holder(holder: str) -> None:
    """Raise InvalidRequest for what can be no endpoint's name."""
    if not (1 <= len(holder) <= MAX_NAME_CHARS and holder.isprintable()):
        raise InvalidRequest(f"holder has at most {MAX_NAME_CHARS} printable characters", param="holder")


def check_page(tenant: str, limit: int, after: str) -> None:
    """Raise InvalidRequest for a page that cannot be listed."""
    check_tenant(tenant)
    if not 1 <= limit <= MAX_LIST_LIMIT:
        raise InvalidRequest(f"limit must be 1 to {MAX_LIST_LIMIT}", param="limit")
    if after and not SESSION_ID_PATTERN.fullmatch(after):
        raise InvalidRequest("after is not a session id", param="after")


def check_held(held: Sequence[HeldCacheRef]) -> None:
    """Raise InvalidRequest for more KVs than one question may name, or for one that no session could name."""
    if len(held) > MAX_HELD_REFS:
        raise InvalidRequest(f"one question names at most {MAX_HELD_REFS} KVs", param="held")
    for one in held:
        check_session(one.tenant, one.session_id)
        if not CACHE_REF_PATTERN.fullmatch(one.cache_ref):
            raise InvalidRequest("cache_ref is not one of ours", param="cache_ref")
