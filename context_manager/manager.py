"""`ContextCacheManager`: who has which context, until when, and whose turn it is. Read this first.

A conversation's life: `reserve` → `register_session_cache` → (`begin_turn` → `renew_lease`… → `commit_turn` or
`abort_turn`)… → `unregister_session_cache`, or its TTL ends and `sweep` buries it. The names are the EP's where it
has one. What is checked before the store is asked: limits.py; what the store promises: store.py. No wire here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from context_manager.limits import (
    TtlBounds,
    check_batch,
    check_commit,
    check_days,
    check_held,
    check_holder,
    check_lease,
    check_new_session,
    check_page,
    check_repeatable,
    check_session,
    check_usage,
)
from context_manager.metrics import ManagerMetrics
from context_manager.store import SWEEP_BATCH, BegunTurn, Fate, SessionKey, SessionStore, Swept, day_of
from contextcache.clock import Clock
from contextcache.errors import InvalidRequest
from contextcache.model import (
    CacheSessionMetadata,
    HeldCacheRef,
    KeptAnswer,
    NewSession,
    Repeatable,
    SessionId,
    SessionPage,
    TenantId,
    TurnCommit,
    TurnReceipt,
    Usage,
    UsageReport,
)
from contextcache.names import check_generation, check_metadata, check_tenant
from contextcache.terms import Terms

log = logging.getLogger(__name__)


class ContextCacheManager:
    """Sessions over a store. Every call is atomic and may be repeated with the same lease_id.

    Every method raises InvalidRequest for what limits.py refuses and StoreUnavailable when the store is silent; those
    about an existing session raise ContextNotFound and ContextExpired.
    """

    def __init__(
        self, store: SessionStore, *, clock: Clock, metrics: ManagerMetrics, ttl_bounds: TtlBounds | None = None
    ) -> None:
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._ttl_bounds = ttl_bounds or TtlBounds()

    async def reserve(
        self, new: NewSession, *, lease_id: str, lease_ttl_ms: int, repeatable: Repeatable | None = None
    ) -> CacheSessionMetadata:
        """Create a session in state CREATING that dies with the lease.

        `repeatable`: the request, if it may come again. Raises ContextExists, TtlOutOfRange, ContextQuotaExceeded,
        AlreadyAnswered for a request that was committed before, IdempotencyKeyReused for another one under its key.
        """
        check_new_session(new, self._ttl_bounds)
        check_lease(lease_id, lease_ttl_ms)
        check_repeatable(repeatable)
        with self._metrics.store_call("reserve"):
            session = await self._store.reserve(
                new,
                lease_id=lease_id,
                lease_ttl_ms=lease_ttl_ms,
                repeatable=repeatable,
                now_ms=self._clock.now_ms(),
            )
        self._metrics.sessions_reserved.inc()
        self._log("session reserved", session)
        return session

    async def register_session_cache(self, commit: TurnCommit) -> CacheSessionMetadata:
        """Commit the create: CREATING to READY, generation 1. Raises as `commit_turn`."""
        if commit.expected_generation != 0:
            raise InvalidRequest("the first commit of a context must expect generation 0", param="expected_generation")
        return await self.commit_turn(commit)

    async def locate(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """Return what a router needs: holder, model, state. One round trip."""
        return await self._get("locate", tenant, session_id)

    async def get_session_metadata(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """Return the row, its TTL checked now."""
        return await self._get("get", tenant, session_id)

    async def get_with_turns(
        self, tenant: TenantId, session_id: SessionId
    ) -> tuple[CacheSessionMetadata, tuple[TurnReceipt, ...]]:
        """Return the row, and the receipts of the last turns, the oldest first: two looks, not one."""
        session = await self._get("get", tenant, session_id)
        with self._metrics.store_call("read_turns"):
            return session, await self._store.read_turns(SessionKey(tenant, session_id))

    async def begin_turn(  # noqa: PLR0913  # what a turn begins with, by name
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
    ) -> BegunTurn:
        """Take the lease and return session and transcript; neither `read_only` nor mode PREFIX takes one.

        `known_mark`: `CacheSessionMetadata.mark` of the transcript as the caller has it; what it still has of it is not
        sent again. A mark that says nothing any more is no error: the whole transcript is sent.

        Raises ContextBusy (`retry_after_s`: when the other lease ends), GenerationMismatch, and for `repeatable` as
        `reserve`.
        """
        check_session(tenant, session_id)
        check_lease(lease_id, lease_ttl_ms)
        check_repeatable(repeatable)
        with self._metrics.store_call("begin_turn"):
            return await self._store.begin_turn(
                SessionKey(tenant, session_id),
                lease_id=lease_id,
                lease_ttl_ms=lease_ttl_ms,
                read_only=read_only,
                expected_generation=expected_generation,
                known_mark=known_mark,
                repeatable=repeatable,
                now_ms=self._clock.now_ms(),
            )

    async def renew_lease(self, tenant: TenantId, session_id: SessionId, *, lease_id: str, lease_ttl_ms: int) -> None:
        """Let the caller's lease end `lease_ttl_ms` from now; a sliding life starts again.

        Raises LeaseLost when it has ended or is another's.
        """
        check_session(tenant, session_id)
        check_lease(lease_id, lease_ttl_ms)
        with self._metrics.store_call("renew_lease"):
            await self._store.renew_lease(
                SessionKey(tenant, session_id),
                lease_id=lease_id,
                lease_ttl_ms=lease_ttl_ms,
                now_ms=self._clock.now_ms(),
            )

    async def note_holder(self, tenant: TenantId, session_id: SessionId, *, holder: str, instead_of: str = "") -> None:
        """Add an endpoint to those that may have KV of a session, before KV is sent there.

        `instead_of`: the holder that it takes the place of once it has the KV, where that still is the holder.
        """
        check_session(tenant, session_id)
        check_holder(holder)
        if instead_of:
            check_holder(instead_of)
        key, now_ms = SessionKey(tenant, session_id), self._clock.now_ms()
        with self._metrics.store_call("note_holder"):
            await self._store.note_holder(key, holder=holder, instead_of=instead_of, now_ms=now_ms)

    async def commit_turn(self, commit: TurnCommit) -> CacheSessionMetadata:
        """Make a turn durable and release its lease, in one step. Raises LeaseLost, GenerationMismatch."""
        check_commit(commit)
        with self._metrics.store_call("commit_turn"):
            session = await self._store.commit_turn(commit, now_ms=self._clock.now_ms())
        self._metrics.turns_committed.inc()
        if commit.usage is not None:
            self._metrics.count_usage([commit.usage])
        self._log("turn committed", session)
        return session

    async def find_answer(self, tenant: TenantId, session_id: SessionId, *, repeat_key: str) -> KeptAnswer | None:
        """Return what is kept of a request that was committed, also when its session is gone; None: nothing is."""
        check_session(tenant, session_id)
        check_repeatable(Repeatable(repeat_key, repeat_key))
        with self._metrics.store_call("find_answer"):
            key = SessionKey(tenant, session_id)
            return await self._store.find_answer(key, repeat_key=repeat_key, now_ms=self._clock.now_ms())

    async def rewind(
        self, tenant: TenantId, session_id: SessionId, *, generation: int, expected_generation: int | None = None
    ) -> CacheSessionMetadata:
        """Take a session back to an earlier generation, as a new one; one that stands there already stays as it is.

        Raises ContextBusy, GenerationMismatch, GenerationGone for what was replaced since.
        """
        check_session(tenant, session_id)
        check_generation(generation)
        with self._metrics.store_call("rewind"):
            session = await self._store.rewind(
                SessionKey(tenant, session_id),
                generation=generation,
                expected_generation=expected_generation,
                now_ms=self._clock.now_ms(),
            )
        self._log("session rewound", session)
        return session

    async def fork(
        self, source_id: SessionId, *, generation: int | None = None, commit: TurnCommit
    ) -> CacheSessionMetadata:
        """Commit a reserved session with the transcript that another one of its tenant has, or had at `generation`.

        `commit` says whose, under which lease, and which KV it has; it brings no segments. Raises GenerationGone,
        ContextBusy while the source is being created, and as `commit_turn`.
        """
        check_session(commit.tenant, source_id)
        check_commit(commit)
        if generation is not None:
            check_generation(generation)
        if commit.segments or commit.expected_generation or commit.keep_segments:
            raise InvalidRequest("a fork must not have segments", param="segments")
        with self._metrics.store_call("fork"):
            session = await self._store.fork(
                SessionKey(commit.tenant, source_id), generation=generation, commit=commit, now_ms=self._clock.now_ms()
            )
        self._log("session forked", session)
        return session

    async def abort_turn(self, tenant: TenantId, session_id: SessionId, *, lease_id: str) -> None:
        """Release the caller's lease and change nothing else; a CREATING row is removed. Silent when there is none."""
        check_session(tenant, session_id)
        check_lease(lease_id)
        with self._metrics.store_call("abort_turn"):
            await self._store.abort_turn(SessionKey(tenant, session_id), lease_id=lease_id, now_ms=self._clock.now_ms())
        self._metrics.turns_aborted.inc()

    async def touch(self, tenant: TenantId, session_id: SessionId, terms: Terms) -> CacheSessionMetadata:
        """Change the given terms; a ttl starts the life again from now. Raises TtlOutOfRange."""
        check_session(tenant, session_id)
        if terms.ttl_s is not None:
            self._ttl_bounds.check(terms.ttl_s)
        if terms.metadata is not None:
            check_metadata(terms.metadata)
        with self._metrics.store_call("touch"):
            return await self._store.touch(
                SessionKey(tenant, session_id),
                ttl_s=terms.ttl_s,
                ttl_policy=terms.ttl_policy,
                metadata=terms.metadata,
                now_ms=self._clock.now_ms(),
            )

    async def unregister_session_cache(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """Remove a session, also while a turn runs; return the row as it was, so that its KV can be deleted."""
        check_session(tenant, session_id)
        with self._metrics.store_call("unregister"):
            session = await self._store.unregister(SessionKey(tenant, session_id), now_ms=self._clock.now_ms())
        self._metrics.sessions_unregistered.inc()
        self._log("session unregistered", session)
        return session

    async def list_sessions(
        self, tenant: TenantId, *, limit: int, after: SessionId = "", model_id: str = ""
    ) -> SessionPage:
        """Return up to `limit` (1 to 100) live sessions, newest first, behind `after`; fewer where few match."""
        check_page(tenant, limit, after)
        with self._metrics.store_call("list"):
            return await self._store.list_sessions(
                tenant, limit=limit, after=after, model_id=model_id, now_ms=self._clock.now_ms()
            )

    async def check_cache_refs(self, held: Sequence[HeldCacheRef]) -> tuple[int, ...]:
        """Return the positions in `held` (at most 500) that no session names: KV that can be freed.

        A session that is being created, or has a turn in flight, names everything saved for it.
        """
        check_held(held)
        with self._metrics.store_call("check_refs"):
            return await self._store.check_refs(held, now_ms=self._clock.now_ms())

    async def add_usage(
        self, tenant: TenantId, batch_id: str, usage: Sequence[Usage], *, sender: str = "", number: int = 0
    ) -> None:
        """Count, today, what no commit counts; a batch that is repeated within BATCH_KNOWN_MS counts nothing.

        Who tells batch after batch says a `sender` and numbers that grow, so that one key remembers all of them, and
        for a day.
        """
        check_tenant(tenant)
        check_batch(batch_id, sender, number)
        check_usage(usage)
        with self._metrics.store_call("add_usage"):
            counted = await self._store.add_usage(
                tenant, sender or batch_id, usage, number=number if sender else None, now_ms=self._clock.now_ms()
            )
        if counted:
            self._metrics.count_usage(usage)

    async def read_usage(
        self, tenant: TenantId, *, first_day: int | None = None, last_day: int | None = None
    ) -> UsageReport:
        """Return what was counted of a tenant from one day to another, today where none is said."""
        now_ms = self._clock.now_ms()
        last_day = day_of(now_ms) if last_day is None else last_day
        first_day = last_day if first_day is None else first_day
        check_tenant(tenant)
        check_days(first_day, last_day)
        with self._metrics.store_call("read_usage"):
            return await self._store.read_usage(tenant, range(first_day, last_day + 1), now_ms=now_ms)

    async def count_sessions(self) -> int:
        """Return how many sessions live, those due and not swept yet included."""
        with self._metrics.store_call("count"):
            return await self._store.count_sessions()

    async def sweep(self, shard: int) -> int:
        """Take up to SWEEP_BATCH due sessions of one shard and return how many; 0 means that none is left there.

        Any number of managers may sweep at once: each session is taken by exactly one.
        """
        with self._metrics.store_call("sweep"):
            taken = await self._store.take_expired(shard, now_ms=self._clock.now_ms(), limit=SWEEP_BATCH)
        return self._count_swept(taken)

    async def claim_sweep(self, *, for_ms: int) -> bool:
        """Return whether this manager is to sweep: one of all that ask within `for_ms`."""
        with self._metrics.store_call("claim_sweep"):
            return await self._store.claim_sweep(for_ms=for_ms)

    async def review(self) -> int:
        """Look at the next few sessions, put right when Redis lets them go; take those that are due, return how many.

        The sweep needs none of it: it is for what other releases wrote.
        """
        with self._metrics.store_call("review"):
            taken = await self._store.review(now_ms=self._clock.now_ms())
        return self._count_swept(taken)

    def _count_swept(self, taken: Sequence[Swept]) -> int:
        counts = Counter(swept.fate for swept in taken)
        self._metrics.sessions_abandoned.inc(counts[Fate.ABANDONED])
        self._metrics.sessions_expired.inc(counts[Fate.EXPIRED])
        self._metrics.sessions_damaged.inc(counts[Fate.DAMAGED])
        if counts[Fate.DAMAGED]:
            keys = [swept.key for swept in taken if swept.fate is Fate.DAMAGED and swept.key is not None]
            ids = [f"{key.tenant}:{key.session_id}" for key in keys]
            log.warning("damaged sessions set aside", extra={"num_sessions": counts[Fate.DAMAGED], "sessions": ids})
        return len(taken)

    async def _get(self, operation: str, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        check_session(tenant, session_id)
        with self._metrics.store_call(operation):
            return await self._store.get(SessionKey(tenant, session_id), now_ms=self._clock.now_ms())

    @staticmethod
    def _log(event: str, session: CacheSessionMetadata) -> None:
        log.info(
            event,
            extra={
                "session_id": session.session_id,
                "tenant": session.tenant,
                "cache_ref": session.cache_ref,
                "generation": session.generation,
            },
        )
