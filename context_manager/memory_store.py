"""`MemorySessionStore`: the same promises as Redis in one process's memory; for tests and single-process trials.

Each method runs without awaiting in between, so it is atomic in its event loop. Nothing survives the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from context_manager import refusals
from context_manager.generations import runs_after
from context_manager.memory_answers import MemoryAnswers
from context_manager.segments import pack_segment, unpack_segment
from context_manager.session_row import (
    SessionRow,
    Standing,
    existing_row,
    known_segments,
    marks_after,
    marks_field,
    marks_of,
    metadata_to_field,
    new_mark,
    new_row,
    with_holder,
)
from context_manager.store import (
    ANSWER_BYTES,
    BATCH_KNOWN_MS,
    CONTEXT_BYTES,
    DAY_MS,
    HOUR_MS,
    LIST_ROWS_MAX,
    PLACE_BYTES,
    SEGMENT_BYTES,
    TENANT_BYTES_MAX,
    BegunTurn,
    Fate,
    SessionKey,
    SessionStore,
    Swept,
    day_of,
    last_page,
)
from contextcache.clock import SystemClock
from contextcache.model import (
    BRANCH_LEASE_ID,
    TURNS_KEPT,
    CacheSessionMetadata,
    HeldCacheRef,
    KeptAnswer,
    NewSession,
    Repeatable,
    SessionId,
    SessionMode,
    SessionPage,
    SessionState,
    TenantId,
    TtlPolicy,
    TurnCommit,
    TurnReceipt,
    Usage,
    UsageReport,
)
from contextcache.names import shard_of


class MemorySessionStore(SessionStore):
    """Sessions in dictionaries, transcripts as the same bytes that Redis would hold."""

    def __init__(
        self,
        *,
        tombstone_s: int = 3600,
        tenant_contexts_max: int = 0,
        tenant_bytes_max: int = TENANT_BYTES_MAX,
    ) -> None:
        """`tombstone_s`: how long an expired session answers ContextExpired rather than ContextNotFound.

        `tenant_contexts_max`, `tenant_bytes_max`: 0 for no limit.
        """
        self._tenant_bytes_max = tenant_bytes_max
        self._tenant_contexts_max = tenant_contexts_max
        self._tombstone_ms = tombstone_s * 1000
        self._rows: dict[SessionKey, SessionRow] = {}
        self._transcripts: dict[SessionKey, list[bytes]] = {}
        self._turns: dict[SessionKey, tuple[TurnReceipt, ...]] = {}
        self._answers = MemoryAnswers()
        self._places: dict[SessionKey, tuple[int, int]] = {}
        """Of those removed: when they were created, and until when that is remembered."""
        self._used: dict[SessionKey, Usage | None] = {}
        """Usage of each branch, which is counted with its first turn."""
        self._usage: dict[tuple[TenantId, int], dict[str, Counter[str]]] = {}
        self._counted: dict[tuple[TenantId, str], tuple[int, int]] = {}
        """By tenant and who told its usage: the last number, and until when it is known."""

    @override
    async def reserve(
        self,
        new: NewSession,
        *,
        lease_id: str,
        lease_ttl_ms: int,
        repeatable: Repeatable | None = None,
        now_ms: int,
    ) -> CacheSessionMetadata:
        key = SessionKey(new.tenant, new.session_id)
        self._answers.check(key, repeatable, now_ms)
        row = self._rows.get(key)
        standing = Standing.ABSENT if row is None else row.standing(now_ms, self._tombstone_ms)
        if row is not None and standing is Standing.CREATING and row.lease_id == lease_id:
            return row.session
        if row is not None and standing is Standing.CREATING and repeatable is not None:
            raise refusals.busy(row.lease_until_ms - now_ms)
        if standing in (Standing.CREATING, Standing.LIVE):
            raise refusals.exists()
        if 0 < self._tenant_contexts_max <= self._count_others(key):
            raise refusals.too_many_contexts(self._tenant_contexts_max)
        self._check_room(key.tenant, CONTEXT_BYTES, now_ms)
        row = new_row(new, lease_id=lease_id, lease_ttl_ms=lease_ttl_ms, now_ms=now_ms)
        self._rows[key] = row
        self._transcripts[key] = []
        return row.session

    @override
    async def get(self, key: SessionKey, *, now_ms: int) -> CacheSessionMetadata:
        return self._existing(key, now_ms).metadata_at(now_ms)

    @override
    async def read_turns(self, key: SessionKey) -> tuple[TurnReceipt, ...]:
        return self._turns.get(key, ())

    @override
    async def begin_turn(
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
        self._answers.check(key, repeatable, now_ms)
        row = self._existing(key, now_ms)
        if not row.is_branch:
            row = self._committed(key, now_ms)
        if expected_generation is not None and row.session.generation != expected_generation:
            raise refusals.generation_mismatch(row.session.generation)
        takes_lease = not read_only and row.session.mode is SessionMode.SESSION
        if takes_lease and row.lease_lives(now_ms) and row.lease_id not in (lease_id, BRANCH_LEASE_ID):
            raise refusals.busy(row.lease_until_ms - now_ms)
        transcript = self._whole_transcript(key, row)
        if takes_lease:
            self._check_room(key.tenant, CONTEXT_BYTES, now_ms)
            row = replace(row, lease_id=lease_id, lease_until_ms=now_ms + lease_ttl_ms)
        row = _life_restarted_if_sliding(row, now_ms)
        self._rows[key] = row
        known = known_segments(row.marks, known_mark)
        return BegunTurn(row.metadata_at(now_ms), known, tuple(transcript[known:]))

    @override
    async def renew_lease(self, key: SessionKey, *, lease_id: str, lease_ttl_ms: int, now_ms: int) -> None:
        row = self._existing(key, now_ms)
        if row.lease_id != lease_id or not row.lease_lives(now_ms):
            raise refusals.lease_lost()
        self._rows[key] = _life_restarted_if_sliding(replace(row, lease_until_ms=now_ms + lease_ttl_ms), now_ms)

    @override
    async def note_holder(self, key: SessionKey, *, holder: str, instead_of: str = "", now_ms: int) -> None:
        row = self._existing(key, now_ms)
        session = replace(row.session, holders=with_holder(row.session.holders, holder))
        if instead_of and session.holder == instead_of:
            session = replace(session, holder=holder)
        self._rows[key] = replace(row, session=session)

    @override
    async def commit_turn(self, commit: TurnCommit, *, now_ms: int) -> CacheSessionMetadata:
        return self._commit(commit, [pack_segment(segment) for segment in commit.segments], now_ms)

    @override
    async def fork(
        self, source: SessionKey, *, generation: int | None, commit: TurnCommit, now_ms: int
    ) -> CacheSessionMetadata:
        child = self._existing(SessionKey(commit.tenant, commit.session_id), now_ms)
        if child.committed_lease_id == commit.lease_id:
            return child.metadata_at(now_ms)
        row = self._committed(source, now_ms)
        packed = self._whole_transcript(source, row)[: row.segments_at(generation)]
        self._rows[source] = _life_restarted_if_sliding(row, now_ms)
        forked_from = source.session_id, row.session.generation if generation is None else generation
        return self._commit(commit, packed, now_ms, forked_from=forked_from)

    def _commit(
        self,
        commit: TurnCommit,
        added: list[bytes],
        now_ms: int,
        *,
        forked_from: tuple[SessionId, int] | None = None,
    ) -> CacheSessionMetadata:
        key = SessionKey(commit.tenant, commit.session_id)
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
        more = 0 if forked_from else sum(SEGMENT_BYTES + len(segment) for segment in added)
        if commit.repeatable is not None:
            more += ANSWER_BYTES + len(commit.answer)
        self._check_room(key.tenant, more, now_ms)
        is_branch = commit.lease_id == BRANCH_LEASE_ID
        if is_branch:
            self._used[key] = commit.usage
        lease_until_ms = row.lease_until_ms
        session = replace(
            row.session,
            state=SessionState.CREATING if is_branch else SessionState.READY,
            cache_ref=commit.cache_ref,
            previous_cache_ref=row.session.cache_ref,
            holder=commit.holder,
            holders=with_holder(row.session.holders, commit.holder),
            num_turns=row.session.num_turns + 1,
            forked_from=forked_from or row.session.forked_from,
        )
        row = replace(row, session=session, committed_lease_id=commit.lease_id)
        committed = self._advance(key, row, stored[: commit.keep_segments], added, now_ms)
        self._answers.keep(key, commit, committed, now_ms)
        turns = () if generation == 1 else self._turns.get(key, ())
        self._turns[key] = (*turns, *([] if commit.receipt is None else [commit.receipt]))[-TURNS_KEPT:]
        if is_branch:
            self._rows[key] = replace(self._rows[key], lease_id=commit.lease_id, lease_until_ms=lease_until_ms)
            return committed
        for usage in (self._used.pop(key, None), commit.usage):
            if usage is not None:
                self._count(key.tenant, usage, now_ms)
        return committed

    def _count(self, tenant: TenantId, usage: Usage, now_ms: int) -> None:
        by_key = self._usage.setdefault((tenant, day_of(now_ms)), {})
        counts = {name: number for name, number in usage.counts.items() if number}
        by_key.setdefault(usage.key, Counter()).update(counts)

    @override
    async def find_answer(self, key: SessionKey, *, repeat_key: str, now_ms: int) -> KeptAnswer | None:
        return self._answers.find(key, repeat_key, now_ms)

    @override
    async def rewind(
        self, key: SessionKey, *, generation: int, expected_generation: int | None, now_ms: int
    ) -> CacheSessionMetadata:
        row = self._committed(key, now_ms)
        if expected_generation is not None and row.session.generation != expected_generation:
            raise refusals.generation_mismatch(row.session.generation)
        if row.lease_lives(now_ms):
            raise refusals.busy(row.lease_until_ms - now_ms)
        stored, keep = self._whole_transcript(key, row), row.segments_at(generation)
        if keep == len(stored):
            return row.metadata_at(now_ms)
        return self._advance(key, replace(row, committed_lease_id=""), stored[:keep], [], now_ms)

    @override
    async def abort_turn(self, key: SessionKey, *, lease_id: str, now_ms: int) -> None:
        row = self._rows.get(key)
        if row is None or row.is_tombstone or row.lease_id != lease_id:
            return
        if row.session.state is SessionState.CREATING:
            self._remove(key, now_ms)
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
        more = 0 if metadata is None else _size_of(metadata) - _size_of(session.metadata)
        self._check_room(key.tenant, max(more, 0), now_ms)
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
        self._remove(key, now_ms)
        return row.metadata_at(now_ms)

    @override
    async def list_sessions(
        self, tenant: TenantId, *, limit: int, after: SessionId, model_id: str, now_ms: int
    ) -> SessionPage:
        below = (self._created_at_ms(SessionKey(tenant, after), now_ms), after) if after else None
        rows = {
            (row.session.created_at_ms, key.session_id): row
            for key, row in self._rows.items()
            if key.tenant == tenant and (below is None or (row.session.created_at_ms, key.session_id) < below)
        }
        found: list[CacheSessionMetadata] = []
        last_id = ""
        for position in sorted(rows, reverse=True)[:LIST_ROWS_MAX]:
            row = rows[position]
            live = row.standing(now_ms, self._tombstone_ms) in (Standing.CREATING, Standing.LIVE)
            if live and row.lease_id != BRANCH_LEASE_ID and model_id in ("", row.session.model_id):
                if len(found) == limit:
                    return SessionPage(tuple(found), has_more=True, last_id=last_id)
                found.append(row.metadata_at(now_ms))
            last_id = position[1]
        if len(rows) <= LIST_ROWS_MAX:
            return last_page(found)
        return SessionPage(tuple(found), has_more=True, last_id=last_id)

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
                    self._remove(key, now_ms)  # what PEXPIRE does in Redis
            elif row.due_at_ms <= now_ms:
                creating = row.session.state is SessionState.CREATING
                self._remove(key, now_ms)
                if not creating:
                    self._rows[key] = SessionRow(row.session, is_tombstone=True)
                taken.append(Swept(key, Fate.ABANDONED if creating else Fate.EXPIRED))
        return tuple(taken)

    @override
    async def claim_sweep(self, *, for_ms: int) -> bool:
        return True  # nobody else is there

    @override
    async def review(self, *, now_ms: int) -> tuple[Swept, ...]:
        return ()

    @override
    async def check_refs(self, held: Sequence[HeldCacheRef], *, now_ms: int) -> tuple[int, ...]:
        rows = (self._rows.get(SessionKey(one.tenant, one.session_id)) for one in held)
        return tuple(
            position
            for position, (one, row) in enumerate(zip(held, rows, strict=True))
            if row is None or not row.names(one.cache_ref, now_ms=now_ms, tombstone_ms=self._tombstone_ms)
        )

    @override
    async def add_usage(
        self, tenant: TenantId, sender: str, usage: Sequence[Usage], *, number: int | None = None, now_ms: int
    ) -> bool:
        self._counted = {who: last for who, last in self._counted.items() if last[1] > now_ms}
        if (tenant, sender) in self._counted and (number or 0) <= self._counted[tenant, sender][0]:
            return False
        self._counted[tenant, sender] = number or 0, now_ms + (BATCH_KNOWN_MS if number is None else DAY_MS)
        for one in usage:
            self._count(tenant, one, now_ms)
        return True

    @override
    async def read_usage(self, tenant: TenantId, days: Sequence[int], *, now_ms: int) -> UsageReport:
        found = {
            day: [Usage(key, dict(counts)) for key, counts in sorted(self._usage[tenant, day].items())]
            for day in sorted(days)
            if (tenant, day) in self._usage
        }
        of_tenant = (row for key, row in self._rows.items() if key.tenant == tenant)
        return UsageReport(found, sum(not row.is_tombstone for row in of_tenant), day_of(now_ms))

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

    def _advance(
        self, key: SessionKey, row: SessionRow, kept: list[bytes], added: list[bytes], now_ms: int
    ) -> CacheSessionMetadata:
        """Write the next generation: its transcript, and what every new one changes."""
        transcript, mark, generation = kept + added, new_mark(), row.session.generation + 1
        marks = marks_after(row.marks, mark, keep_segments=len(kept), num_segments=len(transcript))
        runs = runs_after(row.runs, generation, keep_segments=len(kept), num_segments=len(transcript))
        num_tokens = sum(unpack_segment(packed).num_tokens for packed in transcript)
        advanced = replace(
            row,
            session=replace(row.session, generation=generation, num_tokens=num_tokens, mark=mark),
            lease_id="",
            lease_until_ms=0,
            num_segments=len(transcript),
            # As many as Redis keeps.
            marks=marks_of(marks_field(marks, generation), generation),
            runs=runs,
        )
        self._transcripts[key] = transcript
        self._rows[key] = _life_restarted_if_sliding(advanced, now_ms)
        return self._rows[key].session

    def _created_at_ms(self, key: SessionKey, now_ms: int) -> int:
        if (row := self._rows.get(key)) is not None:
            return row.session.created_at_ms
        created_at_ms, until_ms = self._places.get(key, (0, 0))
        if now_ms >= until_ms:
            raise refusals.unknown_after()
        return created_at_ms

    def _count_others(self, key: SessionKey) -> int:
        of_tenant = (other for other, row in self._rows.items() if other.tenant == key.tenant and not row.is_tombstone)
        return sum(other != key for other in of_tenant)

    def _check_room(self, tenant: TenantId, more: int, now_ms: int) -> None:
        """Raise ContextQuotaExceeded for more bytes than the tenant has left."""
        if self._tenant_bytes_max and more and self.bytes_of(tenant, now_ms) + more > self._tenant_bytes_max:
            raise refusals.too_many_bytes(self._tenant_bytes_max)

    def bytes_of(self, tenant: TenantId, now_ms: int) -> int:
        """Return the bytes that count of a tenant; a segment that forks share counts once."""
        hour = now_ms // HOUR_MS
        segments: dict[int, int] = {}
        sum_bytes = self._answers.bytes_of(tenant, now_ms)
        for key, row in self._rows.items():
            if key.tenant != tenant:
                continue
            if row.is_tombstone:
                sum_bytes += PLACE_BYTES * (row.standing(now_ms, self._tombstone_ms) is Standing.EXPIRED)
            elif row.due_at_ms // HOUR_MS >= hour:
                sum_bytes += CONTEXT_BYTES + _size_of(row.session.metadata)
                segments |= {id(segment): SEGMENT_BYTES + len(segment) for segment in self._transcripts[key]}
        remembered = (until_ms for key, (_, until_ms) in self._places.items() if key.tenant == tenant)
        return sum_bytes + sum(
            (PLACE_BYTES for until_ms in remembered if until_ms // HOUR_MS >= hour), start=sum(segments.values())
        )

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

    def _remove(self, key: SessionKey, now_ms: int) -> None:
        row = self._rows.pop(key, None)
        if row is not None:
            self._places[key] = (row.session.created_at_ms, now_ms + self._tombstone_ms)
        self._transcripts.pop(key, None)
        self._turns.pop(key, None)
        self._used.pop(key, None)


def _size_of(metadata: Mapping[str, str]) -> int:
    return len(metadata_to_field(metadata).encode())


def _life_restarted_if_sliding(row: SessionRow, now_ms: int) -> SessionRow:
    if row.session.ttl_policy is not TtlPolicy.SLIDING:
        return row
    return replace(row, session=replace(row.session, expires_at_ms=now_ms + row.session.ttl_s * 1000))
