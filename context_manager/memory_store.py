"""`MemorySessionStore`: the same promises as Redis in one process's memory; for tests and single-process trials.

Each method runs without awaiting in between, so it is atomic in its event loop. Nothing survives the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from context_manager import refusals
from context_manager.segment_codec import pack_segment, unpack_segment
from context_manager.session_row import SessionRow, Standing, existing_row, new_row
from context_manager.store import SessionKey, SessionStore, Swept, shard_of
from contextcache.clock import SystemClock
from contextcache.model import (
    CacheSessionMetadata,
    HeldCacheRef,
    NewSession,
    Segment,
    SessionId,
    SessionMode,
    SessionState,
    TenantId,
    TtlPolicy,
    TurnCommit,
)


class MemorySessionStore(SessionStore):
    """Sessions in dictionaries, transcripts as the same bytes that Redis would hold."""

    def __init__(self, *, tombstone_s: int = 3600, tenant_contexts_max: int = 0) -> None:
        """`tombstone_s`: how long an expired session answers ContextExpired rather than ContextNotFound.

        `tenant_contexts_max`: 0 for no limit.
        """
        self._tenant_contexts_max = tenant_contexts_max
        self._tombstone_ms = tombstone_s * 1000
        self._rows: dict[SessionKey, SessionRow] = {}
        self._transcripts: dict[SessionKey, list[bytes]] = {}

    @override
    async def reserve(self, new: NewSession, *, lease_id: str, lease_ttl_ms: int, now_ms: int) -> CacheSessionMetadata:
        key = SessionKey(new.tenant, new.session_id)
        row = self._rows.get(key)
        standing = Standing.ABSENT if row is None else row.standing(now_ms, self._tombstone_ms)
        if row is not None and standing is Standing.CREATING and row.lease_id == lease_id:
            return row.session
        if standing in (Standing.CREATING, Standing.LIVE):
            raise refusals.exists()
        if 0 < self._tenant_contexts_max <= self._count_others(key):
            raise refusals.too_many_contexts(self._tenant_contexts_max)
        row = new_row(new, lease_id=lease_id, lease_ttl_ms=lease_ttl_ms, now_ms=now_ms)
        self._rows[key] = row
        self._transcripts[key] = []
        return row.session

    @override
    async def get(self, key: SessionKey, *, now_ms: int) -> CacheSessionMetadata:
        return self._existing(key, now_ms).metadata_at(now_ms)

    @override
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
        row = self._committed(key, now_ms)
        if expected_generation is not None and row.session.generation != expected_generation:
            raise refusals.generation_mismatch(row.session.generation)
        takes_lease = not read_only and row.session.mode is SessionMode.SESSION
        if takes_lease and row.lease_lives(now_ms) and row.lease_id != lease_id:
            raise refusals.busy(row.lease_until_ms - now_ms)
        transcript = self._whole_transcript(key, row)
        if takes_lease:
            row = replace(row, lease_id=lease_id, lease_until_ms=now_ms + lease_ttl_ms)
        row = _life_restarted_if_sliding(row, now_ms)
        self._rows[key] = row
        return row.metadata_at(now_ms), tuple(unpack_segment(packed) for packed in transcript)

    @override
    async def renew_lease(self, key: SessionKey, *, lease_id: str, lease_ttl_ms: int, now_ms: int) -> None:
        row = self._existing(key, now_ms)
        if row.lease_id != lease_id or not row.lease_lives(now_ms):
            raise refusals.lease_lost()
        self._rows[key] = replace(row, lease_until_ms=now_ms + lease_ttl_ms)

    @override
    async def commit_turn(self, commit: TurnCommit, *, now_ms: int) -> CacheSessionMetadata:
        key = SessionKey(commit.tenant, commit.session_id)
        added = [pack_segment(segment) for segment in commit.segments]
        row = self._existing(key, now_ms)
        generation = commit.expected_generation + 1
        if row.committed_lease_id == commit.lease_id and row.session.generation == generation:
            return row.metadata_at(now_ms)
        if row.lease_id != commit.lease_id:
            raise refusals.lease_lost()
        if row.session.generation != commit.expected_generation:
            raise refusals.generation_mismatch(row.session.generation)
        stored = self._whole_transcript(key, row)
        if commit.keep_segments > len(stored):
            raise refusals.keeps_too_much(len(stored))
        transcript = stored[: commit.keep_segments] + added
        session = replace(
            row.session,
            state=SessionState.READY,
            generation=generation,
            cache_ref=commit.cache_ref,
            previous_cache_ref=row.session.cache_ref,
            holder=commit.holder,
            num_tokens=sum(len(unpack_segment(packed).token_ids) for packed in transcript),
            num_turns=row.session.num_turns + 1,
        )
        self._transcripts[key] = transcript
        committed = SessionRow(session, committed_lease_id=commit.lease_id, num_segments=len(transcript))
        self._rows[key] = _life_restarted_if_sliding(committed, now_ms)
        return self._rows[key].session

    @override
    async def abort_turn(self, key: SessionKey, *, lease_id: str, now_ms: int) -> None:
        row = self._rows.get(key)
        if row is None or row.is_tombstone or row.lease_id != lease_id:
            return
        if row.session.state is SessionState.CREATING:
            self._remove(key)
        else:
            self._rows[key] = replace(row, lease_id="", lease_until_ms=0)

    @override
    async def touch(
        self,
        key: SessionKey,
        *,
        ttl_s: int | None,
        ttl_policy: TtlPolicy | None,
        metadata: Mapping[str, str] | None,
        now_ms: int,
    ) -> CacheSessionMetadata:
        row = self._committed(key, now_ms)
        session = row.session
        if ttl_s is not None:
            session = replace(session, ttl_s=ttl_s, expires_at_ms=now_ms + ttl_s * 1000)
        if ttl_policy is not None:
            session = replace(session, ttl_policy=ttl_policy)
        if metadata is not None:
            session = replace(session, metadata=dict(metadata))
        self._rows[key] = replace(row, session=session)
        return self._rows[key].metadata_at(now_ms)

    @override
    async def unregister(self, key: SessionKey, *, now_ms: int) -> CacheSessionMetadata:
        row = self._existing(key, now_ms)
        self._remove(key)
        return row.metadata_at(now_ms)

    @override
    async def list_sessions(
        self, tenant: TenantId, *, limit: int, after: SessionId, model_id: str, now_ms: int
    ) -> tuple[tuple[CacheSessionMetadata, ...], bool]:
        last = self._rows.get(SessionKey(tenant, after))
        if after and last is None:
            raise refusals.unknown_after()
        below = (last.session.created_at_ms, after) if last is not None else None
        shown = {
            (row.session.created_at_ms, key.session_id): row.metadata_at(now_ms)
            for key, row in self._rows.items()
            if key.tenant == tenant
            and row.standing(now_ms, self._tombstone_ms) in (Standing.CREATING, Standing.LIVE)
            and model_id in ("", row.session.model_id)
        }
        page = [shown[position] for position in sorted(shown, reverse=True) if below is None or position < below]
        return tuple(page[:limit]), len(page) > limit

    @override
    async def take_expired(self, shard: int, *, now_ms: int, limit: int) -> tuple[Swept, ...]:
        taken: list[Swept] = []
        for key, row in list(self._rows.items()):
            if len(taken) == limit:
                break
            if shard_of(key.tenant, key.session_id) != shard:
                continue
            if row.is_tombstone:
                if row.standing(now_ms, self._tombstone_ms) is Standing.ABSENT:
                    self._remove(key)  # what PEXPIRE does in Redis
            elif row.due_at_ms <= now_ms:
                abandoned = row.session.state is SessionState.CREATING
                self._remove(key)
                if not abandoned:
                    self._rows[key] = SessionRow(row.session, is_tombstone=True)
                taken.append(Swept(key, is_abandoned=abandoned))
        return tuple(taken)

    @override
    async def check_refs(self, held: Sequence[HeldCacheRef], *, now_ms: int) -> tuple[int, ...]:
        rows = (self._rows.get(SessionKey(one.tenant, one.session_id)) for one in held)
        return tuple(
            position
            for position, (one, row) in enumerate(zip(held, rows, strict=True))
            if row is None or not row.names(one.cache_ref, now_ms=now_ms, tombstone_ms=self._tombstone_ms)
        )

    @override
    async def count_sessions(self) -> int:
        return sum(not row.is_tombstone for row in self._rows.values())

    @override
    async def read_clock(self) -> int:
        return SystemClock().now_ms()

    @override
    async def close(self) -> None:
        self._rows.clear()
        self._transcripts.clear()

    def _count_others(self, key: SessionKey) -> int:
        of_tenant = (other for other, row in self._rows.items() if other.tenant == key.tenant and not row.is_tombstone)
        return sum(other != key for other in of_tenant)

    def _existing(self, key: SessionKey, now_ms: int) -> SessionRow:
        return existing_row(self._rows.get(key), now_ms=now_ms, tombstone_ms=self._tombstone_ms)

    def _committed(self, key: SessionKey, now_ms: int) -> SessionRow:
        row = self._existing(key, now_ms)
        if row.session.state is SessionState.CREATING:
            raise refusals.busy(row.lease_until_ms - now_ms)
        return row

    def _whole_transcript(self, key: SessionKey, row: SessionRow) -> list[bytes]:
        transcript = self._transcripts[key]
        if len(transcript) != row.num_segments:
            raise refusals.damaged()
        return transcript

    def _remove(self, key: SessionKey) -> None:
        self._rows.pop(key, None)
        self._transcripts.pop(key, None)


def _life_restarted_if_sliding(row: SessionRow, now_ms: int) -> SessionRow:
    if row.session.ttl_policy is not TtlPolicy.SLIDING:
        return row
    return replace(row, session=replace(row.session, expires_at_ms=now_ms + row.session.ttl_s * 1000))
