"""KV that no session names any more: which to ask the manager about, and when. Frees nothing itself.

A delete that did not reach this sidecar, a crash between seal and commit, a session that moved to another pod, a Redis
that lost its data: each leaves sealed KV that nobody will ever load. The manager is asked about it in the collector's
pass. Rules:
1. Only the word of a manager that answers frees anything. No answer, one that cannot be, an older manager: all stays.
2. What is asked about was sealed `after_s` ago at least. A create commits before that, or its row is gone with its
   lease; a turn in flight names everything saved for its session, so a seal before its commit is no orphan.
3. A turn that outlives its lease may still commit what was freed as nobody's. The session then names KV that is gone,
   which is a miss like any other: its next turn computes it and names what it saves.
4. A pass is bounded in time and in names, and begins with what was not asked about for longest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import grpc

from contextcache.errors import ContextCacheError, StoreUnavailable
from contextcache.model import CacheRef, CacheSessionMetadata, HeldCacheRef, SessionId, TenantId, Usage
from contextcache.names import prompt_ref
from contextcache.v1 import context_manager_pb2 as pb
from contextcache.v1 import context_manager_pb2_grpc as pb_grpc
from contextcache.wire.channels import Connection
from contextcache.wire.messages import message_of, value_of
from contextcache.wire.rpc import Answer, cause_of, error_from_rpc, within
from contextcache.wire.tls import WatchedTls
from kv_sidecar.runtime import Runtime
from kv_sidecar.sealed.index import ManifestRecord

log = logging.getLogger(__name__)

QUESTION_REFS = 500
"""Names in one question; the manager takes no more."""
PASS_REFS = 20 * QUESTION_REFS
"""Names in one pass; the rest come first in the next."""
CALL_S = 2.0
"""Deadline of one call in seconds; the manager answers in milliseconds."""
PASS_S = 10.0
"""Seconds that the questions of one pass may take together."""


class Manager(Protocol):
    """Whoever knows the sessions."""

    async def orphans(self, held: Sequence[HeldCacheRef]) -> Sequence[int]:
        """Return the positions in `held` (at most `QUESTION_REFS`) that no session names. Ends in bounded time.

        Raises ContextCacheError: StoreUnavailable without an answer, any other for a question that was refused.
        """
        ...


class Orphans:
    """Remembers for each sealed KV when to ask about it next. Used from one event loop."""

    def __init__(
        self,
        manager: Manager,
        runtime: Runtime,
        *,
        written_at_ms: Callable[[CacheRef], int | None],
        after_s: float,
    ) -> None:
        """`written_at_ms` tells from the file when a manifest was sealed, or touched since: it outlives a restart.

        `after_s` is also the time between two questions about the same KV.
        """
        self._manager = manager
        self._written_at_ms = written_at_ms
        self._threads = runtime.threads
        self._clock = runtime.clock
        self._after_ms = round(after_s * 1000)
        self._metrics = runtime.metrics
        self._due_ms: dict[CacheRef, int] = {}
        self._is_silent = False
        """Whether the last question had no answer: an outage is logged once."""

    async def find(self, records: Sequence[ManifestRecord]) -> list[ManifestRecord]:
        """Return those of all sealed records that no session names, as far as the manager says so."""
        await self._learn(records)
        now_ms = self._clock.now_ms()
        # What was saved at the end of a context's prompt has no name of its own in a session: both are asked about
        # together, and one name keeps both.
        refs = {record.cache_ref for record in records if self._due_ms[record.cache_ref] <= now_ms}
        refs |= {prompt_ref(ref) for ref in refs}
        due = [record for record in records if record.cache_ref in refs]
        due.sort(key=lambda record: self._due_ms[record.cache_ref])
        found: list[ManifestRecord] = []
        try:
            async with asyncio.timeout(PASS_S):
                for start in range(0, min(len(due), PASS_REFS), QUESTION_REFS):
                    found += await self._ask(due[start : start + QUESTION_REFS][: PASS_REFS - start])
        except StoreUnavailable as exc:
            self._note_silence(cause_of(exc) or exc.message)
        except TimeoutError:
            self._note_silence("the calls of one pass reached their time limit")
        alone = refs - {record.cache_ref for record in records} | {record.cache_ref for record in found}
        return [record for record in found if prompt_ref(record.cache_ref) in alone]

    async def _learn(self, records: Sequence[ManifestRecord]) -> None:
        """Forget what is not here any more, and set when to ask first about what is new."""
        known = self._due_ms
        self._due_ms = {ref: known[ref] for ref in (record.cache_ref for record in records) if ref in known}
        new = [record.cache_ref for record in records if record.cache_ref not in known]
        now_ms = self._clock.now_ms()
        for ref, written_at_ms in zip(new, await self._threads.run(self._written, new), strict=True):
            # A time that has not come yet is another clock's: then the wait begins now.
            self._due_ms[ref] = min(now_ms if written_at_ms is None else written_at_ms, now_ms) + self._after_ms

    def _written(self, cache_refs: Sequence[CacheRef]) -> list[int | None]:
        return [self._written_at_ms(ref) for ref in cache_refs]

    async def _ask(self, records: Sequence[ManifestRecord]) -> list[ManifestRecord]:
        """Ask one question. Raises StoreUnavailable when nobody answers; a refused question is counted and left."""
        held = [HeldCacheRef(record.tenant, record.session_id, record.cache_ref) for record in records]
        try:
            positions = await self._manager.orphans(held)
        except StoreUnavailable:
            raise
        except ContextCacheError as exc:
            self._refused(exc.code)
            positions = ()
        else:
            self._is_silent = False
            if not all(0 <= position < len(held) for position in positions):
                self._refused("positions out of range")
                positions = ()
        now_ms = self._clock.now_ms()
        for record in records:
            # Also after a refusal: the next pass begins with others.
            self._due_ms[record.cache_ref] = now_ms + self._after_ms
        return [records[position] for position in sorted(set(positions))]

    def _refused(self, reason: str) -> None:
        self._metrics.failed_questions.inc()
        log.warning("no usable answer from the manager about stored KV", extra={"reason": reason})

    def _note_silence(self, reason: str) -> None:
        self._metrics.failed_questions.inc()
        if not self._is_silent:
            log.warning("no answer from the manager about stored KV, none is freed", extra={"reason": reason})
        self._is_silent = True


class ManagerQuestions:
    """Satisfies orphans.Manager, warming.Sessions, usage.UsageSink, over one connection, made at the first question."""

    def __init__(self, address: str, *, timeout_s: float = CALL_S, tls: WatchedTls | None = None) -> None:
        """`address`: host:port or unix:///path; `timeout_s`: deadline of every question."""
        self._connection = Connection(address, tls=tls)
        self._timeout_s = timeout_s

    async def orphans(self, held: Sequence[HeldCacheRef]) -> Sequence[int]:
        """See orphans.Manager. A manager of a release that does not know the question counts as silent."""
        request = message_of(pb.CheckCacheRefsRequest, held=held)
        answer = await self._ask(self._stub().CheckCacheRefs, request)
        return tuple(answer.orphans)

    async def note_holder(self, tenant: TenantId, session_id: SessionId, *, holder: str, instead_of: str = "") -> None:
        """See leaving.Sessions."""
        request = pb.NoteHolderRequest(tenant=tenant, session_id=session_id, holder=holder, instead_of=instead_of)
        await self._ask(self._stub().NoteHolder, request)

    async def locate(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """See warming.Sessions."""
        request = pb.LocateSessionRequest(tenant=tenant, session_id=session_id)
        answer = await self._ask(self._stub().LocateSession, request)
        return value_of(CacheSessionMetadata, answer.session)

    async def add_usage(
        self, tenant: TenantId, batch_id: str, usage: Sequence[Usage], *, sender: str, number: int
    ) -> None:
        """See usage.UsageSink."""
        request = message_of(
            pb.AddUsageRequest, tenant=tenant, batch_id=batch_id, usage=usage, sender=sender, number=number
        )
        await self._ask(self._stub().AddUsage, request)

    def _stub(self) -> pb_grpc.ContextManagerServiceAsyncStub:
        return pb_grpc.ContextManagerServiceStub(self._connection.channel())

    async def _ask(self, method: Callable[..., Awaitable[Answer]], request: object) -> Answer:
        try:
            return await within(method(request, timeout=self._timeout_s), self._timeout_s)
        except grpc.RpcError as exc:
            raise error_from_rpc(exc, unavailable=StoreUnavailable) from exc

    async def close(self) -> None:
        """Close the connection; a question in flight fails."""
        await self._connection.close()
