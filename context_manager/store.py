"""`SessionStore`: what the manager needs from a store. No Redis, no gRPC, no validation here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from contextcache.model import (
    CacheSessionMetadata,
    HeldCacheRef,
    NewSession,
    Segment,
    SessionId,
    TenantId,
    TtlPolicy,
    TurnCommit,
)

NUM_SHARDS = 64
"""Fixed for the life of a deployment's data: the shard is part of every key."""
SWEEP_BATCH = 100
"""Sessions one script call takes at most, so that no call keeps Redis busy for longer than a few ms."""


def shard_of(tenant: TenantId, session_id: SessionId) -> int:
    """Return the shard of a session, 0 to 63; the same on every machine and in every version."""
    digest = blake2b(f"{tenant}:{session_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % NUM_SHARDS


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A session's full name."""

    tenant: TenantId
    session_id: SessionId


@dataclass(frozen=True, slots=True)
class Swept:
    """One session that a sweep took."""

    key: SessionKey
    is_abandoned: bool
    """True: it was CREATING and its lease ended. False: a session's life ended and it is now a tombstone."""


class SessionStore(Protocol):
    """Sessions and their transcripts; each method is one atomic step at `now_ms` (Unix ms).

    Redis keys. All keys of one session carry the hash tag `{s<shard>}` and so lie in one cluster slot; tenant and id
    match the patterns of contextcache.model, which hold neither ':' nor braces.

    | key                               | type                        | holds                                      |
    | --------------------------------- | --------------------------- | ------------------------------------------ |
    | cc:{s17}:session:<tenant>:<id>    | hash                        | the row (session_row.py)                   |
    | cc:{s17}:transcript:<tenant>:<id> | list                        | segments, oldest first (segment_codec.py)  |
    | cc:{s17}:expiry                   | sorted set of <tenant>:<id> | score: when the sweep may take the session |
    | cc:{s17}:tenant:<tenant>          | sorted set of <id>          | score: created_at_ms; for list and quota   |

    The expiry score of a CREATING row is the end of its lease, of any other row the end of its life. A tombstone is
    a hash with `state`, `created_at_ms` and `expires_at_ms` alone, in neither sorted set, and Redis lets it go by
    itself after the time a store remembers expired sessions for.

    Every method raises ContextNotFound or ContextExpired for a session that is not there, unless it says otherwise,
    and StoreUnavailable when the store does not answer in time. Repeating a call with the same lease_id answers the
    same, so a caller whose reply was lost may repeat it.
    """

    async def reserve(self, new: NewSession, *, lease_id: str, lease_ttl_ms: int, now_ms: int) -> CacheSessionMetadata:
        """Create a CREATING row; a tombstone or a CREATING row whose lease ended is replaced.

        Raises ContextExists, and ContextQuotaExceeded for one more than the tenant may have: a row counts until it is
        removed or swept, a tombstone does not. No race lets more be reserved than that; in a Cluster, where nobody
        sees all shards at one moment, calls racing for the last places may all be refused.
        """
        ...

    async def get(self, key: SessionKey, *, now_ms: int) -> CacheSessionMetadata:
        """Return the row; one read, no transcript."""
        ...

    async def begin_turn(
        self,
        key: SessionKey,
        *,
        lease_id: str,
        lease_ttl_ms: int,
        read_only: bool,
        expected_generation: int | None,
        now_ms: int,
    ) -> tuple[CacheSessionMetadata, tuple[Segment, ...]]:
        """Take the lease and read the transcript; a sliding life starts again.

        `read_only` and sessions of mode PREFIX take no lease. Raises GenerationMismatch, ContextBusy.
        """
        ...

    async def renew_lease(self, key: SessionKey, *, lease_id: str, lease_ttl_ms: int, now_ms: int) -> None:
        """Let the caller's living lease end `lease_ttl_ms` from now. Raises LeaseLost."""
        ...

    async def commit_turn(self, commit: TurnCommit, *, now_ms: int) -> CacheSessionMetadata:
        """Replace the transcript behind `keep_segments`, grow the generation by one, release the lease.

        A lease that ended and that nobody else took still commits, except the first one: a CREATING row is gone with
        its lease. Raises LeaseLost, GenerationMismatch, InvalidRequest (keep_segments).
        """
        ...

    async def abort_turn(self, key: SessionKey, *, lease_id: str, now_ms: int) -> None:
        """Release the caller's lease, or remove its CREATING row. Raises nothing when there is none of either."""
        ...

    async def touch(
        self,
        key: SessionKey,
        *,
        ttl_s: int | None,
        ttl_policy: TtlPolicy | None,
        metadata: Mapping[str, str] | None,
        now_ms: int,
    ) -> CacheSessionMetadata:
        """Change what is not None; `ttl_s` starts the life again from now. Raises ContextBusy while CREATING."""
        ...

    async def unregister(self, key: SessionKey, *, now_ms: int) -> CacheSessionMetadata:
        """Remove row and transcript, even while a turn runs; return the row as it was."""
        ...

    async def list_sessions(
        self, tenant: TenantId, *, limit: int, after: SessionId, model_id: str, now_ms: int
    ) -> tuple[tuple[CacheSessionMetadata, ...], bool]:
        """Return one page, newest first (ids descending within one ms), and whether more follow.

        Raises InvalidRequest when `after` is neither empty nor a session that is there or remembered.
        """
        ...

    async def take_expired(self, shard: int, *, now_ms: int, limit: int) -> tuple[Swept, ...]:
        """Take up to `limit` due sessions of one shard; of callers at the same time each session goes to one.

        An expired session becomes a tombstone, an abandoned CREATING row is removed. Never raises not found.
        """
        ...

    async def check_refs(self, held: Sequence[HeldCacheRef], *, now_ms: int) -> tuple[int, ...]:
        """Return the positions in `held` that no session names (SessionRow.names); not atomic over the sessions.

        Never raises not found: a session that is absent, expired or a tombstone names nothing.
        """
        ...

    async def count_sessions(self) -> int:
        """Return how many sessions are not tombstones, of all tenants; one cheap look, not atomic over the shards."""
        ...

    async def read_clock(self) -> int:
        """Return the store's own time, Unix ms: one for all managers. Raises StoreUnavailable."""
        ...

    async def close(self) -> None:
        """Give back connections."""
        ...
