"""`SessionStore`: what the manager needs from a store. No Redis, no gRPC, no validation here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from context_manager.segments import unpack_transcript
from contextcache.model import (
    CacheSessionMetadata,
    HeldCacheRef,
    KeptAnswer,
    NewSession,
    Repeatable,
    Segment,
    SessionId,
    SessionPage,
    TenantId,
    TtlPolicy,
    TurnCommit,
    TurnReceipt,
    Usage,
    UsageReport,
)

SWEEP_BATCH = 100
"""Sessions one script call takes at most, so that no call keeps Redis busy for longer than a few ms."""
LIST_ROWS_MAX = 400
"""Rows one call of a list reads at most: with a filter that matches few a page is short, or empty, and says where to go
on. Some 30 ms of a manager's time."""
ANSWER_KEPT_MS = 86_400_000
"""A day: for so long a request that was committed is not run again."""
TENANT_BYTES_MAX = 128 << 20
"""Default limit of a tenant's bytes: a quarter of the chart's Valkey (512 MB), so that one tenant cannot fill it."""
CONTEXT_BYTES = 4096
"""Bytes counted for a context beside its segments and metadata: row, receipts and entries in sets take 1 to 4 KB."""
SEGMENT_BYTES = 16
"""Bytes counted for a segment beside its own: the list's entry."""
ANSWER_BYTES = 512
"""Bytes counted for a kept answer beside its own: the key and the digest of the request."""
PLACE_BYTES = 256
"""Bytes counted for a tombstone or a place in lists, for as long as it is remembered."""
USAGE_KEPT_MS = 400 * 86_400_000
"""More than a year, so that a year can be compared with the one before."""
KEY_GRACE_MS = 86_400_000
"""A day: how long Redis keeps a key after the end of what is in it and the time of its tombstone, in case all managers
are away. Then it goes by itself (ADR 0029)."""
HOUR_MS = 3_600_000
"""Bytes count until the hour in which they end is over."""
DAY_MS = 86_400_000
BATCH_KNOWN_MS = 600_000
"""Ten minutes: a batch of usage without a sender comes again within seconds, or never. A sender's number is known for a
day."""


def day_of(now_ms: int) -> int:
    """Return the day, UTC, counted from 1970-01-01."""
    return now_ms // DAY_MS


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A session's full name."""

    tenant: TenantId
    session_id: SessionId


class Fate(Enum):
    """What a sweep did to a session."""

    EXPIRED = "expired"
    """Its life ended: now it is a tombstone."""
    ABANDONED = "abandoned"
    """It was CREATING and its lease ended: removed."""
    DAMAGED = "damaged"
    """Nobody can read it: taken out of index and lists, left for Redis to let go."""


@dataclass(frozen=True, slots=True)
class Swept:
    """One session that a sweep took."""

    key: SessionKey | None
    """None where not even the name could be read."""
    fate: Fate


@dataclass(frozen=True, slots=True)
class BegunTurn:
    """What a turn is built on: the row, and what its transcript has behind what the caller knows already."""

    session: CacheSessionMetadata
    known_segments: int
    """Leading segments of the transcript that the caller has under the mark it showed."""
    packed: tuple[bytes, ...]
    """The segments after those, as they lie in the store: whoever reads them finds out whether they are whole."""

    def transcript(self) -> tuple[Segment, ...]:
        """Read the segments that were sent. Raises ContextCacheError for bytes that are none."""
        return unpack_transcript(self.packed)


def last_page(found: Sequence[CacheSessionMetadata]) -> SessionPage:
    """Return the page behind which nothing follows."""
    return SessionPage(tuple(found), has_more=False, last_id=found[-1].session_id if found else "")


class SessionStore(Protocol):
    """Sessions and their transcripts; each method is one atomic step at `now_ms` (Unix ms).

    Redis keys. All keys of one session carry the hash tag `{s<shard>}` and so lie in one cluster slot; tenant and id
    match the patterns of contextcache.model, which hold neither ':' nor braces.

    | key                               | type                        | holds                                      |
    | --------------------------------- | --------------------------- | ------------------------------------------ |
    | cc:{s17}:session:<tenant>:<id>    | hash                        | the row (session_row.py)                   |
    | cc:{s17}:transcript:<tenant>:<id> | list                        | segments, oldest first (segments.py)       |
    | cc:{s17}:trunk:<tenant>:<name>    | list                        | segments that forks share (trunks.lua)     |
    | cc:{s17}:expiry                   | sorted set of <tenant>:<id> | score: when the sweep may take the session |
    | cc:{s17}:tenant:<tenant>          | sorted set of <id>          | score: created_at_ms; for list and quota   |
    | cc:sweeper                        | hash                        | there while one manager sweeps for all     |
    | cc:{s17}:turns:<tenant>:<id>      | list                        | receipts of the last turns, oldest first   |
    | cc:{s17}:place:<tenant>:<id>      | hash                        | created_at_ms of one removed, for lists    |
    | cc:{s17}:answer:<tenant>:<id>:<key> | hash                      | what a repeated request is answered        |
    | cc:bytes:<tenant>                 | hash of hour -> bytes       | the tenant's ledger, for its limit         |
    | cc:{s17}:usage:<tenant>:<day>     | hash of <key>:<what> -> sum | what was used on a day, by API key's name  |
    | cc:{s17}:counted:<tenant>:<sender> | hash                       | number of the last batch that was counted  |

    The ledger counts a tenant's bytes by the hour in which they end (scripts/bytes.lua). A Cluster has one a shard,
    `cc:{s17}:bytes:<tenant>`.

    The expiry score of a CREATING row is the end of its lease, of any other row the end of its life. A tombstone is
    a hash with `state`, `created_at_ms` and `expires_at_ms` alone, in neither sorted set.

    Redis lets every key go by itself: a tombstone and a place after the time a store remembers expired sessions for;
    row and transcript that time and KEY_GRACE_MS after the row's expiry score, which moves them with it; a set when
    the last of its members would go, or later. Each script that writes a row ends with the step that dates its keys.

    Every method raises ContextNotFound or ContextExpired for a session that is not there, unless it says otherwise,
    and StoreUnavailable when the store does not answer in time. Repeating a call with the same lease_id answers the
    same, so a caller whose reply was lost may repeat it.
    """

    async def reserve(
        self,
        new: NewSession,
        *,
        lease_id: str,
        lease_ttl_ms: int,
        repeatable: Repeatable | None = None,
        now_ms: int,
    ) -> CacheSessionMetadata:
        """Create a CREATING row; a tombstone or a CREATING row whose lease ended is replaced.

        `repeatable`: a request that was committed before under this key raises AlreadyAnswered, another one
        IdempotencyKeyReused; ContextBusy while the row is CREATING.
        Raises ContextExists, and ContextQuotaExceeded when the tenant's bytes leave no room for CONTEXT_BYTES, or for
        one context more than it may have: a row counts until it is removed or swept, a tombstone does not. No race lets
        more be reserved than that; in a Cluster, where nobody sees all shards at one moment, calls racing for the last
        places may all be refused.
        """
        ...

    async def get(self, key: SessionKey, *, now_ms: int) -> CacheSessionMetadata:
        """Return the row; one read, no transcript."""
        ...

    async def read_turns(self, key: SessionKey) -> tuple[TurnReceipt, ...]:
        """Return the receipts of a session's last turns, at most TURNS_KEPT, the oldest first. Never raises not found.

        Only to be looked at: one that is damaged is left out. A fork begins without any.
        """
        ...

    async def begin_turn(  # noqa: PLR0913  # what a turn begins with, by name
        self,
        key: SessionKey,
        *,
        lease_id: str,
        lease_ttl_ms: int,
        read_only: bool,
        expected_generation: int | None,
        known_mark: str = "",
        repeatable: Repeatable | None = None,
        now_ms: int,
    ) -> BegunTurn:
        """Take the lease and read the transcript behind what `known_mark` stands for; a sliding life starts again.

        A branch gives its own lease (BRANCH_LEASE_ID) to the first turn. An empty mark, and one that is none of the
        row's last ones, stands for nothing: the whole transcript is read. `read_only` and sessions of mode PREFIX take
        no lease. `repeatable` is looked up first, also where there is no session any more, and raises as in `reserve`.
        Raises GenerationMismatch, ContextBusy. A turn that takes the lease raises ContextQuotaExceeded when the
        tenant has no room for CONTEXT_BYTES.
        """
        ...

    async def renew_lease(self, key: SessionKey, *, lease_id: str, lease_ttl_ms: int, now_ms: int) -> None:
        """Let the caller's living lease end `lease_ttl_ms` from now; a sliding life starts again. Raises LeaseLost."""
        ...

    async def note_holder(self, key: SessionKey, *, holder: str, instead_of: str = "", now_ms: int) -> None:
        """Add an endpoint to those that may have KV of the session; it takes the place of a holder `instead_of`."""
        ...

    async def commit_turn(self, commit: TurnCommit, *, now_ms: int) -> CacheSessionMetadata:
        """Replace the transcript behind `keep_segments`, grow the generation by one, release the lease.

        What `commit.repeatable` is answered is kept for ANSWER_KEPT_MS in the same step, `commit.usage` counted, and
        `commit.receipt` kept with the last turns.
        A lease that ended and that nobody else took still commits, except the first one: a CREATING row is gone with
        its lease. Raises LeaseLost, GenerationMismatch, InvalidRequest (keep_segments). Raises ContextQuotaExceeded
        when the new segments and the kept answer are more bytes than the tenant has left.
        """
        ...

    async def find_answer(self, key: SessionKey, *, repeat_key: str, now_ms: int) -> KeptAnswer | None:
        """Return what is kept of a request that was committed; None: nothing. Never raises not found."""
        ...

    async def rewind(
        self, key: SessionKey, *, generation: int, expected_generation: int | None, now_ms: int
    ) -> CacheSessionMetadata:
        """Cut the transcript to what it was at `generation`, as a generation of its own; a sliding life starts again.

        A session that stands there already stays as it is, so that a repeat changes nothing. The KV it names stays
        too: of a longer conversation, it serves the beginning. Raises ContextBusy while a turn runs,
        GenerationMismatch, GenerationGone.
        """
        ...

    async def fork(
        self, source: SessionKey, *, generation: int | None, commit: TurnCommit, now_ms: int
    ) -> CacheSessionMetadata:
        """Commit a reserved session with the transcript of another one, as it is, or was at `generation`.

        In the shard of its source a fork shares the segments; in another one it copies them, and they count anew.
        Two steps, in this order: the source is read, as a turn that commits nothing reads it, and the fork committed.
        A commit under BRANCH_LEASE_ID leaves the fork CREATING: it ends with its lease or an abort, unless a turn
        begins on it and commits. `commit` has no segments. Raises as `begin_turn` of the source, GenerationGone,
        InvalidRequest, and as `commit_turn`.
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
        """Change what is not None; `ttl_s` starts the life again from now.

        Raises ContextBusy while CREATING, ContextQuotaExceeded for metadata that the tenant has no room for.
        """
        ...

    async def unregister(self, key: SessionKey, *, now_ms: int) -> CacheSessionMetadata:
        """Remove row and transcript, even while a turn runs; return the row as it was."""
        ...

    async def list_sessions(
        self, tenant: TenantId, *, limit: int, after: SessionId, model_id: str, now_ms: int
    ) -> SessionPage:
        """Return one page, newest first (ids descending within one ms).

        The work is bounded whatever `model_id` matches: a page may be short, even empty, and more may follow. `after`
        may have been removed or have expired meanwhile, for as long as expired sessions are remembered. Raises
        InvalidRequest when it is neither empty nor known.
        """
        ...

    async def take_expired(self, shard: int, *, now_ms: int, limit: int) -> tuple[Swept, ...]:
        """Take up to `limit` due sessions of one shard; of callers at the same time each session goes to one.

        An expired session becomes a tombstone, an abandoned CREATING row is removed, a damaged one set aside, so that
        it is in nobody's way. Never raises not found.
        """
        ...

    async def claim_sweep(self, *, for_ms: int) -> bool:
        """Return whether the caller is to sweep: of all that ask within `for_ms` one is. It only saves work."""
        ...

    async def review(self, *, now_ms: int) -> tuple[Swept, ...]:
        """Look at the next few sessions, in a round over all: what says when they end is put right.

        For what another release wrote: it may have given keys no end, or one that does not move with the session's.
        Who turns out to be due is taken.
        """
        ...

    async def check_refs(self, held: Sequence[HeldCacheRef], *, now_ms: int) -> tuple[int, ...]:
        """Return the positions in `held` that no session names (SessionRow.names); not atomic over the sessions.

        Never raises not found: a session that is absent, expired or a tombstone names nothing, a damaged one all.
        """
        ...

    async def add_usage(
        self, tenant: TenantId, sender: str, usage: Sequence[Usage], *, number: int | None = None, now_ms: int
    ) -> bool:
        """Count what no commit counts, today; False, and nothing counted, for a number that is not above the last one.

        A sender's last number is known for a day after it; without one, `sender` is a batch's own name, and known for
        BATCH_KNOWN_MS. Never raises not found.
        """
        ...

    async def read_usage(self, tenant: TenantId, days: Sequence[int], *, now_ms: int) -> UsageReport:
        """Return what was counted on these days; not atomic over the shards. Never raises not found."""
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
