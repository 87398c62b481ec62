"""`ContextCacheManager`: each operation on sessions in one place: check, script, answer. Read this first.

A conversation's life: `reserve` → `register_session_cache` → (`begin_turn` → `renew_lease`… → `commit_turn` or
`abort_turn`)… → `unregister_session_cache`, or its TTL ends and `sweep` makes it a tombstone. The names are the EP's
where it has one.

Every change is one Lua script (scripts/), so it is atomic. Every script is about one shard, so it runs in a Cluster.
Scripts read the time of Redis, so managers with different clocks agree (ADR 0104). limits.py has the checks, layout.py
the keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from context_manager import layout, limits, refusals
from context_manager.limits import SessionKey, TtlBounds
from context_manager.listing import read_page
from context_manager.metrics import ManagerMetrics
from context_manager.redis_bytes import TenantBytes
from context_manager.redis_connection import RedisConnection
from context_manager.row import (
    NAMING_FIELDS,
    new_mark,
    receipt_text,
    receipts_of_reply,
    row_of_reply,
    row_of_values,
    stored_fields,
    usage_of_replies,
    usage_text,
)
from context_manager.segments import num_tokens_of, pack_segment, unpack_transcript
from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, InvalidRequest
from contextcache.model import (
    BRANCH_LEASE_ID,
    CacheSessionMetadata,
    HeldCacheRef,
    KeptAnswer,
    NewSession,
    Repeatable,
    Segment,
    SessionId,
    SessionPage,
    TenantId,
    TurnCommit,
    TurnReceipt,
    Usage,
    UsageReport,
)
from contextcache.names import NUM_SHARDS, check_generation, check_metadata, check_tenant, shard_of
from contextcache.process.crash_points import crash_point
from contextcache.terms import Terms

log = logging.getLogger(__name__)

SWEEP_BATCH = 100
"""Maximum number of sessions that one script call takes, so that no call keeps Redis busy for longer than a few ms."""


@dataclass(frozen=True, slots=True)
class BegunTurn:
    """The base of a turn: the session, and the part of its transcript that the caller does not have."""

    session: CacheSessionMetadata
    known_segments: int
    """Leading segments of the transcript that the caller has under the mark it showed."""
    packed: tuple[bytes, ...]
    """The segments after those, as they are stored. The reader finds out whether they are whole."""

    def transcript(self) -> tuple[Segment, ...]:
        """Read the segments that were sent. Raises ContextCacheError for damaged bytes."""
        return unpack_transcript(self.packed)


class Fate(Enum):
    """Outcome of a sweep for one session."""

    EXPIRED = "expired"
    """Its life ended: it is a tombstone now."""
    ABANDONED = "abandoned"
    """It was CREATING and its lease ended: removed."""
    DAMAGED = "damaged"
    """It cannot be read: taken out of index and lists, left in Redis until its end."""


@dataclass(frozen=True, slots=True)
class Swept:
    """One session that a sweep took."""

    key: SessionKey | None
    """None where even the name cannot be read."""
    fate: Fate


class ContextCacheManager:
    """Sessions and their transcripts in Redis. Each method is one atomic step, unless it says otherwise.

    A caller whose reply was lost may repeat a call: with the same lease_id the answer is the same. Every method raises
    InvalidRequest for arguments that limits.py refuses, and StoreUnavailable when Redis does not answer in time.
    Methods about an existing session raise ContextNotFound and ContextExpired.
    """

    def __init__(  # noqa: PLR0913  # limits of a deployment, by name
        self,
        redis: RedisConnection,
        *,
        metrics: ManagerMetrics,
        ttl_bounds: TtlBounds | None = None,
        tombstone_s: int = 3600,
        tenant_contexts_max: int = 0,
        tenant_bytes_max: int = layout.TENANT_BYTES_MAX,
        grace_ms: int = layout.KEY_GRACE_MS,
        clock: Clock | None = None,
    ) -> None:
        """`tombstone_s`: time for which an expired session answers ContextExpired instead of ContextNotFound.

        `tenant_contexts_max`, `tenant_bytes_max`: 0 for no limit. `grace_ms`: see KEY_GRACE_MS. `clock`: replaces the
        time of Redis in tests.
        """
        self._redis = redis
        self._metrics = metrics
        self._ttl_bounds = ttl_bounds or TtlBounds()
        self._tombstone_ms = tombstone_s * 1000
        self._tenant_contexts_max = tenant_contexts_max
        self._bytes = TenantBytes(redis, bytes_max=tenant_bytes_max, now_ms=self._now_ms)
        self._scripts = layout.load_scripts(grace_ms=grace_ms)
        self._clock = clock

    async def reserve(
        self, new: NewSession, *, lease_id: str, lease_ttl_ms: int, repeatable: Repeatable | None = None
    ) -> CacheSessionMetadata:
        """Create a CREATING session that ends with its lease. Replaces a tombstone, and a row whose lease ended.

        `repeatable`: a request that may come again. Raises AlreadyAnswered for a request that was committed under its
        key, IdempotencyKeyReused for another request under that key, ContextBusy while the row is CREATING. Raises
        ContextExists, TtlOutOfRange, and ContextQuotaExceeded when the tenant has no room for CONTEXT_BYTES or for one
        more context. A row counts until it is removed or swept, a tombstone does not count. No race exceeds the limit.
        In a Cluster no step sees all shards, so calls racing for the last places may all be refused.
        """
        key = SessionKey(new.tenant, new.session_id)
        limits.check_new_session(new, self._ttl_bounds)
        limits.check_lease(lease_id, lease_ttl_ms)
        limits.check_repeatable(repeatable)
        limit, others = self._tenant_contexts_max, set(range(NUM_SHARDS)) - {shard_of(new.tenant, new.session_id)}
        with self._metrics.store_call("reserve"):
            answer = await self._change(
                "reserve",
                key,
                repeatable,
                lease_id=lease_id,
                lease_ttl_ms=lease_ttl_ms,
                # No script sees all shards of a Cluster: there the row waits for a count of them.
                pending=bool(limit) and self._redis.is_cluster,
                contexts_max=0 if self._redis.is_cluster else limit,
                tenant_sets=[layout.tenant_key(shard, new.tenant) for shard in others],
                room=await self._bytes.room(key, layout.CONTEXT_BYTES),
                **stored_fields(new),
            )
            if b"pending" in answer[1][::2]:
                num_contexts = await self._count(layout.tenant_key(shard, new.tenant) for shard in range(NUM_SHARDS))
                answer = await self._change(
                    "admit", key, lease_id=lease_id, contexts_max=limit, num_contexts=num_contexts
                )
        self._metrics.sessions_reserved.inc()
        return self._logged("session reserved", _session(key, answer))

    async def register_session_cache(self, commit: TurnCommit) -> CacheSessionMetadata:
        """Commit the create: CREATING to READY, generation 1. Raises as `commit_turn`."""
        if commit.expected_generation != 0:
            raise InvalidRequest("the first commit of a context must expect generation 0", param="expected_generation")
        return await self.commit_turn(commit)

    async def locate(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """Return the session for a router: holder, model, state. One round trip."""
        return await self._get("locate", tenant, session_id)

    async def get_session_metadata(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """Return the session, its TTL checked now."""
        return await self._get("get", tenant, session_id)

    async def get_with_turns(
        self, tenant: TenantId, session_id: SessionId
    ) -> tuple[CacheSessionMetadata, tuple[TurnReceipt, ...]]:
        """Return the session, and the receipts of its last turns, the oldest first. Two steps.

        At most TURNS_KEPT receipts; damaged ones are left out. A fork begins without any.
        """
        session = await self._get("get", tenant, session_id)
        with self._metrics.store_call("read_turns"):
            return session, await self._read_turns(SessionKey(tenant, session_id))

    async def begin_turn(  # noqa: PLR0913  # the arguments of a turn, by name
        self,
        tenant: TenantId,
        session_id: SessionId,
        *,
        lease_id: str,
        lease_ttl_ms: int,
        read_only: bool = False,
        expected_generation: int | None = None,
        known_mark: str = "",
        repeatable: Repeatable | None = None,
        at_generation: int | None = None,
    ) -> BegunTurn:
        """Take the lease and read the transcript. A sliding life starts again.

        `read_only` turns and sessions of mode PREFIX take no lease. `known_mark`: `CacheSessionMetadata.mark` of the
        transcript that the caller has; its segments are not sent again. With an unknown mark all segments are sent. A
        branch gives its own lease (BRANCH_LEASE_ID) to the first turn. `at_generation`: the transcript ends where that
        generation did; raises GenerationGone. `repeatable` is looked up first, also where the session is gone, and
        raises as in `reserve`. Raises ContextBusy (`retry_after_s`: until the other lease ends),
        GenerationMismatch, and ContextQuotaExceeded when the turn takes the lease and the tenant has no room for
        CONTEXT_BYTES.
        """
        key = limits.check_session(tenant, session_id)
        limits.check_lease(lease_id, lease_ttl_ms)
        limits.check_repeatable(repeatable)
        with self._metrics.store_call("begin_turn"):
            answer = await self._change(
                "begin",
                key,
                repeatable,
                lease_id=lease_id,
                lease_ttl_ms=lease_ttl_ms,
                read_only=read_only,
                expected_generation=expected_generation,
                known_mark=known_mark,
                at_generation=at_generation,
                room=await self._bytes.room(key, layout.CONTEXT_BYTES),
            )
        return BegunTurn(_session(key, answer), answer[3], tuple(answer[4]))

    async def renew_lease(self, tenant: TenantId, session_id: SessionId, *, lease_id: str, lease_ttl_ms: int) -> None:
        """Let the caller's living lease end `lease_ttl_ms` from now. A sliding life starts again. Raises LeaseLost."""
        key = limits.check_session(tenant, session_id)
        limits.check_lease(lease_id, lease_ttl_ms)
        with self._metrics.store_call("renew_lease"):
            await self._change("renew", key, lease_id=lease_id, lease_ttl_ms=lease_ttl_ms)

    async def note_holder(self, tenant: TenantId, session_id: SessionId, *, holder: str, instead_of: str = "") -> None:
        """Add an endpoint to those that may have KV of a session, before KV is sent there.

        `instead_of`: a holder that the endpoint replaces, if it still is the session's holder.
        """
        key = limits.check_session(tenant, session_id)
        limits.check_holder(holder)
        if instead_of:
            limits.check_holder(instead_of)
        with self._metrics.store_call("note_holder"):
            await self._change("note_holder", key, holder=holder, instead_of=instead_of)

    async def commit_turn(self, commit: TurnCommit) -> CacheSessionMetadata:
        """Replace the transcript behind `keep_segments`, add one to the generation, release the lease.

        The same step keeps the answer to `commit.repeatable` for ANSWER_KEPT_MS, counts `commit.usage`, and adds
        `commit.receipt` to the last turns. An ended lease that no other turn took still commits, except the first
        commit: a CREATING row is gone with its lease. Raises LeaseLost, GenerationMismatch, InvalidRequest
        (keep_segments), and ContextQuotaExceeded when the tenant has no room for the new segments and the kept answer.
        """
        key = limits.check_commit(commit)
        with self._metrics.store_call("commit_turn"):
            session = await self._commit(key, commit, [pack_segment(segment) for segment in commit.segments])
        self._metrics.turns_committed.inc()
        if commit.usage is not None:
            self._metrics.count_usage([commit.usage])
        return self._logged("turn committed", session)

    async def find_answer(self, tenant: TenantId, session_id: SessionId, *, repeat_key: str) -> KeptAnswer | None:
        """Return the kept answer to a committed request, also when its session is gone; None: there is none."""
        key = limits.check_session(tenant, session_id)
        limits.check_repeatable(Repeatable(repeat_key, repeat_key))
        fields = ("answer", "generation", "expires_at_ms", "request")
        with self._metrics.store_call("find_answer"):
            (values,) = await self._redis.batch([("HMGET", layout.answer_key(key, repeat_key), *fields)])
        told: Sequence[Any] = values or (None,) * len(fields)
        answer, generation, expires_at_ms, request = told
        if answer is None:
            return None
        try:
            return KeptAnswer(bytes(answer), int(generation), int(expires_at_ms), request.decode())
        except (AttributeError, TypeError, ValueError) as exc:
            raise refusals.damaged() from exc

    async def rewind(
        self, tenant: TenantId, session_id: SessionId, *, generation: int, expected_generation: int | None = None
    ) -> CacheSessionMetadata:
        """Cut the transcript to an earlier generation, as a new generation. A sliding life starts again.

        A session that is at `generation` already stays as it is, so a repeat changes nothing. The named KV stays too:
        KV of a longer conversation serves its beginning. Raises ContextBusy while a turn runs, GenerationMismatch, and
        GenerationGone for a generation that was replaced since.
        """
        key = limits.check_session(tenant, session_id)
        check_generation(generation)
        with self._metrics.store_call("rewind"):
            answer = await self._change(
                "rewind",
                key,
                durable=True,
                generation=generation,
                expected_generation=expected_generation,
                mark=new_mark(),
            )
        return self._logged("session rewound", _session(key, answer))

    async def fork(
        self, source_id: SessionId, *, generation: int | None = None, commit: TurnCommit
    ) -> CacheSessionMetadata:
        """Commit a reserved session with the transcript of another session of its tenant, now or at `generation`.

        In the shard of its source a fork shares the segments. In another shard it copies them, and they count anew. Two
        steps: the source is read, then the fork is committed. A commit under BRANCH_LEASE_ID leaves the fork CREATING:
        it ends with its lease or an abort, unless a turn begins on it and commits. `commit` brings no segments. Raises
        GenerationGone, ContextBusy while the source is CREATING, and as `commit_turn`.
        """
        source, key = limits.check_session(commit.tenant, source_id), limits.check_commit(commit)
        if generation is not None:
            check_generation(generation)
        if commit.segments or commit.expected_generation or commit.keep_segments:
            raise InvalidRequest("a fork must not have segments", param="segments")
        with self._metrics.store_call("fork"):
            session = await self._fork(source, key, generation, commit)
        return self._logged("session forked", session)

    async def abort_turn(self, tenant: TenantId, session_id: SessionId, *, lease_id: str) -> None:
        """Release the caller's lease; remove a CREATING row. Changes nothing when the lease is another's, or ended."""
        key = limits.check_session(tenant, session_id)
        limits.check_lease(lease_id)
        with self._metrics.store_call("abort_turn"):
            await self._change("abort", key, lease_id=lease_id)
        self._metrics.turns_aborted.inc()

    async def touch(self, tenant: TenantId, session_id: SessionId, terms: Terms) -> CacheSessionMetadata:
        """Change the given terms. A ttl starts the life again from now.

        Raises TtlOutOfRange, ContextBusy while CREATING, ContextQuotaExceeded for metadata that the tenant has no room
        for.
        """
        key = limits.check_session(tenant, session_id)
        if terms.ttl_s is not None:
            self._ttl_bounds.check(terms.ttl_s)
        if terms.metadata is not None:
            check_metadata(terms.metadata)
        changed = stored_fields(terms)
        with self._metrics.store_call("touch"):
            room = await self._bytes.room(key, len(changed["metadata"] or ""))
            return _session(key, await self._change("touch", key, durable=True, room=room, **changed))

    async def unregister_session_cache(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """Remove a session, also while a turn runs. Returns the row as it was, so that its KV can be deleted."""
        key = limits.check_session(tenant, session_id)
        with self._metrics.store_call("unregister"):
            # Not repeated after a lost reply: the second answer would be "not found" for a session that was removed.
            session = _session(key, await self._change("unregister", key, durable=True, repeats=False))
        self._metrics.sessions_unregistered.inc()
        return self._logged("session unregistered", session)

    async def list_sessions(
        self, tenant: TenantId, *, limit: int, after: SessionId = "", model_id: str = ""
    ) -> SessionPage:
        """Return up to `limit` (1 to 100) live sessions, newest first, behind `after`; ids descend within one ms.

        The work is bounded whatever `model_id` matches: a page may be short, even empty, and more may follow. `after`
        may be removed or expired, for as long as expired sessions are remembered. Raises InvalidRequest when it is
        unknown. Not atomic.
        """
        limits.check_page(tenant, limit, after)
        with self._metrics.store_call("list"):
            now_ms = await self._now_ms()

            def shown(key: SessionKey, fields: Mapping[bytes, bytes]) -> CacheSessionMetadata | None:
                try:
                    row = row_of_reply(key, fields)
                except ContextCacheError:
                    return None  # damaged
                # Expired rows wait for the sweep. A branch is in no list before its first turn.
                if not row.is_there(now_ms) or row.lease_id == BRANCH_LEASE_ID:
                    return None
                return row.metadata_at(now_ms) if model_id in ("", row.session.model_id) else None

            return await read_page(self._redis, tenant, limit=limit, after=after, shown=shown)

    async def check_cache_refs(self, held: Sequence[HeldCacheRef]) -> tuple[int, ...]:
        """Return the positions in `held` (at most 500) that no session names: KV that can be freed. Not atomic.

        A session that is being created, or has a turn in flight, names all KV saved for it. A damaged session does too.
        """
        limits.check_held(held)
        keys = list(dict.fromkeys(SessionKey(one.tenant, one.session_id) for one in held))
        with self._metrics.store_call("check_refs"):
            commands = [("HMGET", layout.session_key(key), *NAMING_FIELDS) for key in keys]
            now_ms, replies = await asyncio.gather(self._now_ms(), self._redis.batch(commands))
        answers = dict(zip(keys, replies, strict=True))

        def is_named(one: HeldCacheRef) -> bool:
            key = SessionKey(one.tenant, one.session_id)
            try:
                row = row_of_values(key, answers[key])
            except ContextCacheError:
                return True  # damaged: its names are unknown
            return row is not None and row.names(one.cache_ref, now_ms=now_ms)

        return tuple(position for position, one in enumerate(held) if not is_named(one))

    async def add_usage(
        self, tenant: TenantId, batch_id: str, usage: Sequence[Usage], *, sender: str = "", number: int = 0
    ) -> None:
        """Count, today, usage that no commit counts. A batch that is repeated within BATCH_KNOWN_MS counts nothing.

        A caller of many batches gives a `sender` and growing numbers. Then one key remembers all of them, for a day.
        """
        check_tenant(tenant)
        limits.check_batch(batch_id, sender, number)
        limits.check_usage(usage)
        with self._metrics.store_call("add_usage"):
            counted = await self._count_usage(tenant, sender or batch_id, usage, number if sender else None)
        if counted:
            self._metrics.count_usage(usage)

    async def read_usage(
        self, tenant: TenantId, *, first_day: int | None = None, last_day: int | None = None
    ) -> UsageReport:
        """Return the usage of a tenant from one day to another; the default is today. Not atomic over the shards."""
        check_tenant(tenant)
        with self._metrics.store_call("read_usage"):
            today = layout.day_of(await self._now_ms())
            last_day = today if last_day is None else last_day
            first_day = last_day if first_day is None else first_day
            limits.check_days(first_day, last_day)
            days: dict[int, Sequence[Usage]] = {}
            for day in range(first_day, last_day + 1):
                names = [layout.usage_key(shard, tenant, day) for shard in range(NUM_SHARDS)]
                if usage := usage_of_replies(await self._redis.batch([("HGETALL", name) for name in names])):
                    days[day] = usage
            num_contexts = await self._count(layout.tenant_key(shard, tenant) for shard in range(NUM_SHARDS))
        return UsageReport(days, num_contexts, today)

    async def count_sessions(self) -> int:
        """Return the number of sessions that are no tombstones, of all tenants. Not atomic over the shards."""
        with self._metrics.store_call("count"):
            return await self._count(map(layout.expiry_key, range(NUM_SHARDS)))

    async def claim_sweep(self, *, for_ms: int) -> bool:
        """Return whether this manager sweeps: one of all that ask within `for_ms`. The claim only saves work."""
        with self._metrics.store_call("claim_sweep"):
            return bool(await self._run("claim", [layout.SWEEPER_KEY], {"for_ms": for_ms}, repeats=False))

    async def sweep(self, shard: int) -> int:
        """Take up to SWEEP_BATCH due sessions of one shard and return their number; 0: none is due.

        Any number of managers may sweep at once: each session is taken by exactly one.
        """
        with self._metrics.store_call("sweep"):
            taken = await self._take_expired(shard, limit=SWEEP_BATCH)
        counts = Counter(swept.fate for swept in taken)
        self._metrics.sessions_abandoned.inc(counts[Fate.ABANDONED])
        self._metrics.sessions_expired.inc(counts[Fate.EXPIRED])
        self._metrics.sessions_damaged.inc(counts[Fate.DAMAGED])
        if counts[Fate.DAMAGED]:
            ids = [layout.member(swept.key) for swept in taken if swept.fate is Fate.DAMAGED and swept.key is not None]
            log.warning("damaged sessions set aside", extra={"num_sessions": counts[Fate.DAMAGED], "sessions": ids})
        return len(taken)

    async def _get(self, operation: str, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        key = limits.check_session(tenant, session_id)
        with self._metrics.store_call(operation):
            return _session(key, self._accepted(await self._run("get", [layout.session_key(key)], {})))

    async def _read_turns(self, key: SessionKey) -> tuple[TurnReceipt, ...]:
        (reply,) = await self._redis.batch([("LRANGE", layout.turns_key(key), 0, -1)])
        return receipts_of_reply(reply)

    async def _commit(
        self, key: SessionKey, commit: TurnCommit, packed: Sequence[bytes], *, forked_from: str | None = None
    ) -> CacheSessionMetadata:
        answer = await self._change(
            "commit",
            key,
            commit.repeatable,
            raw=[commit.answer, *packed],
            durable=True,
            lease_id=commit.lease_id,
            expected_generation=commit.expected_generation,
            keep=commit.keep_segments,
            cache_ref=commit.cache_ref,
            holder=commit.holder,
            added_tokens=sum(map(num_tokens_of, packed)),
            mark=new_mark(),
            usage=layout.usage_key(shard_of(key.tenant, key.session_id), key.tenant, ""),
            said="" if commit.usage is None else usage_text([commit.usage]),
            receipt=receipt_text(commit.receipt),
            model_id=commit.model_id,
            forked_from=forked_from,
            room=await self._bytes.room(key, sum(map(len, packed)) + len(commit.answer)),
        )
        return _session(key, answer)

    async def _fork(
        self, source: SessionKey, key: SessionKey, generation: int | None, commit: TurnCommit
    ) -> CacheSessionMetadata:
        if shard_of(source.tenant, source.session_id) == shard_of(key.tenant, key.session_id):
            answer = await self._change(
                "share",
                key,
                lease_id=commit.lease_id,
                generation=generation,
                source={"keys": self._keys(source), "member": layout.member(source), "id": source.session_id},
                name=new_mark(),
            )
            if answer[0] == b"ok":
                return await self._commit(key, replace(commit, keep_segments=int(answer[3])), [])
        answer = await self._change(
            "begin", source, lease_id=commit.lease_id, read_only=True, for_fork=True, at_generation=generation
        )
        current = _session(source, answer).generation
        forked_from = f"{source.session_id}@{current if generation is None else generation}"
        return await self._commit(key, commit, answer[4], forked_from=forked_from)

    async def _count_usage(self, tenant: TenantId, sender: str, usage: Sequence[Usage], number: int | None) -> bool:
        """Count a batch; return False for a number that is not above the sender's last one.

        `number`: None when `sender` is the batch's own name, which is known for BATCH_KNOWN_MS.
        """
        shard = shard_of(tenant, sender)
        arguments = {
            "known_ms": layout.BATCH_KNOWN_MS if number is None else layout.DAY_MS,
            "number": number or 0,
            "usage": layout.usage_key(shard, tenant, ""),
            "said": usage_text(usage),
        }
        answer = await self._run("count", [layout.counted_key(shard, tenant, sender)], arguments, durable=True)
        return bool(answer[1])

    async def _take_expired(self, shard: int, *, limit: int) -> tuple[Swept, ...]:
        """Take up to `limit` due sessions of a shard. Of callers at the same time each session goes to one.

        An expired session becomes a tombstone, an abandoned one is removed, a damaged one is set aside.
        """
        expiry, now_ms = layout.expiry_key(shard), await self._now_ms()
        members = await self._redis.call("ZRANGEBYSCORE", expiry, "-inf", now_ms, "LIMIT", 0, min(limit, SWEEP_BATCH))
        keys = {name: key for name in members if (key := layout.key_of_member(name, shard=shard)) is not None}
        nameless = [name for name in members if name not in keys]
        # Several managers may sweep at once: the one that removes a member counts it.
        num_removed = await self._redis.call("ZREM", expiry, *nameless) if nameless else 0
        swept = [Swept(None, Fate.DAMAGED) for _ in range(num_removed)]
        if keys:
            names, candidates = [expiry], list[str]()
            for key in keys.values():
                session, transcript, _, tenant, ledger, turns, place = self._keys(key)
                names += [session, transcript, tenant, ledger, turns, place]
                candidates += [layout.member(key), key.session_id]
            taken = await self._run("sweep", names, {"names": candidates}, repeats=False)
            swept += [
                Swept(keys[name], Fate(fate.decode())) for name, fate in zip(taken[::2], taken[1::2], strict=True)
            ]
        return tuple(swept)

    async def _count(self, sets: Any) -> int:
        """Return the number of members of sorted sets."""
        return sum(number or 0 for number in await self._redis.batch([("ZCARD", name) for name in sets]))

    async def _now_ms(self) -> int:
        """Return the time of Redis, Unix ms."""
        return await self._redis.time_ms() if self._clock is None else self._clock.now_ms()

    def _keys(self, key: SessionKey) -> list[str]:
        return layout.session_keys(key, ledger=self._bytes.ledger(key))

    async def _change(
        self,
        script: str,
        key: SessionKey,
        repeatable: Repeatable | None = None,
        *,
        raw: Sequence[bytes] = (),
        durable: bool = False,
        repeats: bool = True,
        **arguments: Any,
    ) -> Sequence[Any]:
        """Run a script about one session. Raises its refusal.

        `repeatable`: a request that may come again. `raw`, `durable`, `repeats`: as in `_run`.
        """
        keys = self._keys(key)
        arguments |= {"member": layout.member(key), "id": key.session_id}
        if repeatable is not None:
            keys.append(layout.answer_key(key, repeatable.key))
            arguments["request"] = repeatable.request
        answer: Sequence[Any] = await self._run(script, keys, arguments, raw=raw, durable=durable, repeats=repeats)
        if answer[0] == b"answered":
            # The kept answer acknowledges a commit: each of its readers waits for replicas as the first one did.
            answer = await self._run(script, keys, arguments, raw=raw, durable=True, repeats=repeats)
        return self._accepted(answer)

    def _accepted(self, answer: Sequence[Any]) -> Sequence[Any]:
        """Return the answer of a script about one session. Raises its refusal."""
        code = answer[0].decode()
        if code in ("ok", "copy"):
            return answer
        raise refusals.refusal(code, self._bytes.bytes_max if code == "bytes" else int((*answer[1:], 0)[0]))

    async def _run(
        self,
        script: str,
        keys: Sequence[str],
        arguments: Mapping[str, Any],
        *,
        raw: Sequence[bytes] = (),
        durable: bool = False,
        repeats: bool = True,
    ) -> Any:
        """Run a script with arguments by name.

        `raw`: arguments in bytes. `durable`: for a change that is acknowledged to a client; leases are not. `repeats`:
        whether the connection runs it again after a lost reply.
        """
        given = {**arguments, "tombstone_ms": self._tombstone_ms}
        if self._clock is not None:
            given["now_ms"] = self._clock.now_ms()
        crash_point(f"manager.{script}.before")
        answer = await self._redis.script(
            self._scripts[script], keys, [layout.script_arguments(given), *raw], repeatable=repeats, durable=durable
        )
        crash_point(f"manager.{script}.after")
        return answer

    @staticmethod
    def _logged(event: str, session: CacheSessionMetadata) -> CacheSessionMetadata:
        names = ("session_id", "tenant", "cache_ref", "generation")
        log.info(event, extra={name: getattr(session, name) for name in names})
        return session


def _session(key: SessionKey, answer: Sequence[Any]) -> CacheSessionMetadata:
    """Return the session of a script's answer: {'ok', row, time, ...}."""
    return row_of_reply(key, answer[1]).metadata_at(int(answer[2]))
