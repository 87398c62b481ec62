"""One session as it is stored, and the rules for reading it at a moment. Pure.

States are stored as `creating`, `ready` or `tombstone`. BUSY is not stored: a row is busy while its lease lives, so
a lease that ends needs nobody to notice. In the same way a row is expired as soon as `expires_at_ms` has come,
whether or not a sweep has passed. `scripts/row.lua` states the same rules for Redis.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from context_manager import refusals
from contextcache.model import CacheRef, CacheSessionMetadata, NewSession, SessionMode, SessionState, TtlPolicy

TOMBSTONE = "tombstone"


class Standing(Enum):
    """What a row is at a moment."""

    ABSENT = "absent"
    EXPIRED = "expired"
    CREATING = "creating"
    LIVE = "live"


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A stored row: what callers see (`session`, its state CREATING or READY) and what only stores know."""

    session: CacheSessionMetadata
    lease_id: str = ""
    """Empty when no turn holds the row."""
    lease_until_ms: int = 0
    committed_lease_id: str = ""
    """Lease of the last commit, so that a commit whose reply was lost can be repeated."""
    num_segments: int = 0
    """Length of the transcript: checked against the list before a turn is built on it."""
    is_tombstone: bool = False

    @property
    def due_at_ms(self) -> int:
        """When the sweep takes the row: the end of the lease while creating, else the end of its life."""
        return self.lease_until_ms if self.session.state is SessionState.CREATING else self.session.expires_at_ms

    def lease_lives(self, now_ms: int) -> bool:
        """Return whether a turn holds the row now."""
        return bool(self.lease_id) and self.lease_until_ms > now_ms

    def standing(self, now_ms: int, tombstone_ms: int) -> Standing:
        """Return what the row is at `now_ms`; an expired row is remembered for `tombstone_ms`, then absent."""
        creating = self.session.state is SessionState.CREATING and not self.is_tombstone
        if creating and self.lease_until_ms <= now_ms:
            return Standing.ABSENT
        expires_at_ms = self.session.expires_at_ms
        if self.is_tombstone or expires_at_ms <= now_ms:
            return Standing.EXPIRED if now_ms < expires_at_ms + tombstone_ms else Standing.ABSENT
        return Standing.CREATING if creating else Standing.LIVE

    def names(self, cache_ref: CacheRef, *, now_ms: int, tombstone_ms: int) -> bool:
        """Return whether the session needs this KV, or may soon: one that a turn writes to names all saved for it.

        A lease that ended names nothing more, although its turn may still commit while nobody takes the row: a turn
        commits right after its KV is sealed, and only KV that was sealed long ago is asked about.
        """
        standing = self.standing(now_ms, tombstone_ms)
        if standing is Standing.CREATING:
            return True
        return standing is Standing.LIVE and (self.lease_lives(now_ms) or cache_ref in self.session.cache_refs)

    def metadata_at(self, now_ms: int) -> CacheSessionMetadata:
        """Return what a caller sees at `now_ms`: BUSY while a lease on a ready row lives."""
        if self.session.state is SessionState.READY and self.lease_lives(now_ms):
            return replace(self.session, state=SessionState.BUSY)
        return self.session


def new_row(new: NewSession, *, lease_id: str, lease_ttl_ms: int, now_ms: int) -> SessionRow:
    """Return the row of a reserved session: CREATING, generation 0, its life counted from now."""
    session = CacheSessionMetadata(
        session_id=new.session_id,
        tenant=new.tenant,
        model_id=new.model_id,
        mode=new.mode,
        state=SessionState.CREATING,
        generation=0,
        cache_ref="",
        previous_cache_ref="",
        holder="",
        created_at_ms=now_ms,
        expires_at_ms=now_ms + new.ttl_s * 1000,
        ttl_s=new.ttl_s,
        ttl_policy=new.ttl_policy,
        metadata=dict(new.metadata),
    )
    return SessionRow(session, lease_id=lease_id, lease_until_ms=now_ms + lease_ttl_ms)


def existing_row(row: SessionRow | None, *, now_ms: int, tombstone_ms: int) -> SessionRow:
    """Return the row if it is creating or live. Raises ContextNotFound or ContextExpired."""
    standing = Standing.ABSENT if row is None else row.standing(now_ms, tombstone_ms)
    if row is None or standing is Standing.ABSENT:
        raise refusals.not_found()
    if standing is Standing.EXPIRED:
        raise refusals.expired()
    return row


def row_to_fields(row: SessionRow) -> dict[str, str]:
    """Return the Redis hash of a row; tenant and id are in its key."""
    session = row.session
    return {
        "state": session.state.value,
        "model_id": session.model_id,
        "mode": session.mode.value,
        "generation": str(session.generation),
        "cache_ref": session.cache_ref,
        "previous_cache_ref": session.previous_cache_ref,
        "holder": session.holder,
        "created_at_ms": str(session.created_at_ms),
        "expires_at_ms": str(session.expires_at_ms),
        "ttl_s": str(session.ttl_s),
        "ttl_policy": session.ttl_policy.value,
        "num_tokens": str(session.num_tokens),
        "num_turns": str(session.num_turns),
        "metadata": metadata_to_field(session.metadata),
        "lease_id": row.lease_id,
        "lease_until_ms": str(row.lease_until_ms),
        "committed_lease_id": row.committed_lease_id,
        "num_segments": str(row.num_segments),
    }


def row_from_fields(tenant: str, session_id: str, fields: Mapping[str, str]) -> SessionRow:
    """Return the row of a Redis hash. A tombstone has only `state`, `created_at_ms` and `expires_at_ms`."""
    is_tombstone = fields["state"] == TOMBSTONE
    session = CacheSessionMetadata(
        session_id=session_id,
        tenant=tenant,
        model_id=fields.get("model_id", ""),
        mode=SessionMode(fields.get("mode", SessionMode.SESSION.value)),
        state=SessionState.READY if is_tombstone else SessionState(fields["state"]),
        generation=int(fields.get("generation", 0)),
        cache_ref=fields.get("cache_ref", ""),
        previous_cache_ref=fields.get("previous_cache_ref", ""),
        holder=fields.get("holder", ""),
        created_at_ms=int(fields["created_at_ms"]),
        expires_at_ms=int(fields["expires_at_ms"]),
        ttl_s=int(fields.get("ttl_s", 0)),
        ttl_policy=TtlPolicy(fields.get("ttl_policy", TtlPolicy.FIXED.value)),
        num_tokens=int(fields.get("num_tokens", 0)),
        num_turns=int(fields.get("num_turns", 0)),
        metadata=json.loads(fields.get("metadata", "{}")),
    )
    return SessionRow(
        session,
        lease_id=fields.get("lease_id", ""),
        lease_until_ms=int(fields.get("lease_until_ms", 0)),
        committed_lease_id=fields.get("committed_lease_id", ""),
        num_segments=int(fields.get("num_segments", 0)),
        is_tombstone=is_tombstone,
    )


def metadata_to_field(metadata: Mapping[str, str]) -> str:
    """Return the client's metadata as one hash field."""
    return json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":"))
