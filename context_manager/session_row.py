"""One session as it is stored, and the rules for reading it at a moment. Pure.

States are stored as `creating`, `ready` or `tombstone`. BUSY is not stored: a row is busy while its lease lives, so
a lease that ends needs nobody to notice. In the same way a row is expired as soon as `expires_at_ms` has come,
whether or not a sweep has passed.

Marks say which leading segments of a transcript somebody who saw an earlier state of it still has. Each commit mints
one, the name of the transcript as it leaves it, and cuts what earlier marks stand for to the segments it keeps.
Segments are never changed in their place: whoever was told a mark has the leading segments that stand behind it,
whatever happened since. A row has the marks of its last commits, and beside them the generation they were written at:
a manager of the release before commits without them, and they then say nothing any more.

`scripts/row.lua` and `scripts/transcript.lua` state the same rules for Redis.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from context_manager import refusals
from context_manager.generations import Runs, runs_field, runs_of, segments_at
from contextcache.model import (
    CacheRef,
    CacheSessionMetadata,
    NewSession,
    SessionId,
    SessionMode,
    SessionState,
    TtlPolicy,
)

TOMBSTONE = "tombstone"
_MAX_DIGITS = 15
HOLDERS_MAX = 16
"""Endpoints a row names; of a session that was at more it is not known where KV of it is."""
_ANY_HOLDER = "*"
Marks: TypeAlias = tuple[tuple[str, int], ...]
"""Mark and leading segments behind it, the newest first; that of the newest is the whole transcript."""

MARKS_CHARS_MAX = 64
"""Redis keeps a small hash in one compact piece as long as no value is longer (hash-max-listpack-value)."""


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
    marks: Marks = ()
    """Of the transcript."""
    runs: Runs = ()
    """Where in the transcript each generation ended."""
    is_tombstone: bool = False

    @property
    def due_at_ms(self) -> int:
        """When the sweep takes the row: the end of the lease while creating, else the end of its life."""
        return self.lease_until_ms if self.session.state is SessionState.CREATING else self.session.expires_at_ms

    @property
    def is_branch(self) -> bool:
        """Whether the row is a fork that waits for its first turn to commit (BRANCH_LEASE_ID)."""
        return self.session.state is SessionState.CREATING and self.session.generation > 0

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

    def segments_at(self, generation: int | None) -> int:
        """Return how many leading segments of the transcript a generation was; None: the current one.

        Raises GenerationGone for one that is not there, any more or yet.
        """
        current = self.session.generation
        if generation is None or generation == current:
            return self.num_segments
        found = segments_at(self.runs, generation)
        if found is None:
            raise refusals.generation_gone(current)
        return found

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
        holders=(),
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


def with_holder(holders: tuple[str, ...] | None, name: str) -> tuple[str, ...] | None:
    """Return the endpoints that may have KV of a session once `name` may too."""
    if holders is None or name in holders:
        return holders
    return (*holders, name) if name and len(holders) < HOLDERS_MAX else None


def row_to_fields(row: SessionRow) -> dict[str, str]:
    """Return the Redis hash of a row; tenant and id are in its key."""
    session = row.session
    forked_from = {} if session.forked_from is None else {"forked_from": forked_from_field(session.forked_from)}
    return forked_from | {
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
        "holders": _ANY_HOLDER if session.holders is None else "\n".join(session.holders),
        "lease_id": row.lease_id,
        "lease_until_ms": str(row.lease_until_ms),
        "committed_lease_id": row.committed_lease_id,
        "num_segments": str(row.num_segments),
        "marks": marks_field(row.marks, session.generation),
        "generations": runs_field(row.runs, session.generation),
    }


def forked_from_field(forked_from: tuple[SessionId, int]) -> str:
    """Return what a session was forked from as one hash field."""
    return f"{forked_from[0]}@{forked_from[1]}"


def _forked_from(field: str) -> tuple[SessionId, int] | None:
    source, _, generation = field.partition("@")
    return (source, _number(generation)) if source else None


def row_from_fields(tenant: str, session_id: str, fields: Mapping[str, str]) -> SessionRow:
    """Return the row of a Redis hash. A tombstone has only `state`, `created_at_ms` and `expires_at_ms`.

    Raises KeyError or ValueError for one that is damaged.
    """
    is_tombstone = fields["state"] == TOMBSTONE
    generation = _number(fields.get("generation", "0"))
    marks = marks_of(fields.get("marks", ""), generation)
    session = CacheSessionMetadata(
        session_id=session_id,
        tenant=tenant,
        model_id=fields.get("model_id", ""),
        mode=SessionMode(fields.get("mode", SessionMode.SESSION.value)),
        state=SessionState.READY if is_tombstone else SessionState(fields["state"]),
        generation=generation,
        cache_ref=fields.get("cache_ref", ""),
        previous_cache_ref=fields.get("previous_cache_ref", ""),
        holder=fields.get("holder", ""),
        created_at_ms=_number(fields["created_at_ms"]),
        expires_at_ms=_number(fields["expires_at_ms"]),
        ttl_s=_number(fields.get("ttl_s", "0")),
        ttl_policy=TtlPolicy(fields.get("ttl_policy", TtlPolicy.FIXED.value)),
        num_tokens=_number(fields.get("num_tokens", "0")),
        num_turns=_number(fields.get("num_turns", "0")),
        mark=marks[0][0] if marks else "",
        metadata=json.loads(fields.get("metadata", "{}")),
        holders=_holders(fields),
        forked_from=_forked_from(fields.get("forked_from", "")),
    )
    return SessionRow(
        session,
        lease_id=fields.get("lease_id", ""),
        lease_until_ms=_number(fields.get("lease_until_ms", "0")),
        committed_lease_id=fields.get("committed_lease_id", ""),
        num_segments=_number(fields.get("num_segments", "0")),
        marks=marks,
        runs=runs_of(fields.get("generations", ""), generation),
        is_tombstone=is_tombstone,
    )


def _number(text: str) -> int:
    # What row.lua takes for one.
    if not (len(text) <= _MAX_DIGITS and text.isascii() and text.isdigit()):
        raise ValueError("the number is out of range")
    return int(text)


def _holders(fields: Mapping[str, str]) -> tuple[str, ...] | None:
    named, holder = fields.get("holders", _ANY_HOLDER), fields.get("holder", "")
    holders = tuple(named.split("\n")) if named else ()
    # Without the field, or without the last holder in it, a manager wrote the row that is of a release without it.
    return None if named == _ANY_HOLDER or (holder and holder not in holders) else holders


def metadata_to_field(metadata: Mapping[str, str]) -> str:
    """Return the client's metadata as one hash field."""
    return json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":"))


def new_mark() -> str:
    """Mint a mark: 48 random bits, told apart from four others of the same session and from no more."""
    return secrets.token_urlsafe(6)


def marks_of(field: str, generation: int) -> Marks:
    """Return the marks of a row's field; none when they were written at another generation."""
    written_at, *entries = field.split(" ")
    if written_at != str(generation):
        return ()
    pairs = (entry.split(":") for entry in entries)
    return tuple((mark, int(num_segments)) for mark, num_segments in pairs)


def marks_field(marks: Marks, generation: int) -> str:
    """Return a row's field: as many marks as fit, the oldest left out."""
    field = str(generation)
    for mark, num_segments in marks:
        longer = f"{field} {mark}:{num_segments}"
        if len(longer) > MARKS_CHARS_MAX:
            break
        field = longer
    return field


def marks_after(marks: Marks, mark: str, *, keep_segments: int, num_segments: int) -> Marks:
    """Return the marks behind a commit that kept `keep_segments` and left `num_segments`."""
    older = tuple((name, min(known, keep_segments)) for name, known in marks)
    return ((mark, num_segments), *older)


def known_segments(marks: Marks, mark: str) -> int:
    """Return how many leading segments whoever shows `mark` has; 0 for one that is not there."""
    return dict(marks).get(mark, 0)
