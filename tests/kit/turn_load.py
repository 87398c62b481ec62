"""Turns without engines: sessions that are created and continued through managers, and what was acknowledged of them.

Each session has one worker, each turn one number. Every call is repeated with the same lease until it is answered, as
long as the answer is "unavailable". So of a session's transcript one knows which turns must be in it, and which may be.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from context_manager.client import ContextManagerClient
from contextcache.errors import (
    ContextBusy,
    ContextCacheError,
    ContextExists,
    ContextExpired,
    ContextNotFound,
    GenerationMismatch,
    LeaseLost,
    StoreUnavailable,
)
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit
from contextcache.names import new_cache_ref, new_session_id
from tests.kit.until import until

AnswerT = TypeVar("AnswerT")
TENANT = "demo"
LEASE_MS = 15_000


@dataclass
class SessionRecord:
    """What a worker knows of its session."""

    session_id: str
    acknowledged: list[int] = field(default_factory=list)
    """Turns whose commit was acknowledged, in order."""
    in_doubt: set[int] = field(default_factory=set)
    """Turns whose commit got no answer, or another one after none."""
    gone: bool = False
    """The store said that there is no such session."""


class TurnLoad:
    """`start` begins as many sessions as asked for, `stop` ends their workers; `check` compares with the store."""

    def __init__(
        self, addresses: Sequence[str], *, num_sessions: int, timeout_s: float = 10.0, lease_ms: int = LEASE_MS
    ):
        """`addresses`: managers, asked in turn. `timeout_s` is generous: what bounds the wait is the manager."""
        self._clients = [ContextManagerClient(address, timeout_s=timeout_s) for address in addresses]
        self._lease_ms = lease_ms
        self.records = [SessionRecord(new_session_id()) for _ in range(num_sessions)]
        self.refused_s: list[float] = []
        """How long each call took that ended as unavailable."""
        self.faults: list[str] = []
        """What must not be."""
        self._stopping = False
        self._workers: list[asyncio.Task[None]] = []

    @property
    def num_acknowledged(self) -> int:
        return sum(len(record.acknowledged) for record in self.records)

    def start(self) -> None:
        self._workers = [asyncio.create_task(self._work(record)) for record in self.records]

    async def until_acknowledged(self, num_more: int, *, within_s: float = 120.0) -> None:
        """Wait until so many more turns have been acknowledged."""
        wanted = self.num_acknowledged + num_more
        await until(
            lambda: self.num_acknowledged >= wanted or all(worker.done() for worker in self._workers),
            what=f"{wanted} acknowledged turns",
            deadline_s=within_s,
        )

    async def until_refused(self, num_more: int, *, within_s: float = 120.0) -> None:
        """Wait until so many more calls have ended as unavailable."""
        wanted = len(self.refused_s) + num_more
        await until(lambda: len(self.refused_s) >= wanted, what=f"{wanted} refused calls", deadline_s=within_s)

    async def until_gone(self, *, within_s: float = 120.0) -> None:
        """Wait until every session has been said not to be there."""
        await until(lambda: all(record.gone for record in self.records), what="all are gone", deadline_s=within_s)

    async def stop(self, *, within_s: float = 120.0) -> None:
        """Let every worker end its turn; who cannot is cancelled, its turn in doubt."""
        self._stopping = True
        _, late = await asyncio.wait(self._workers, timeout=within_s)
        for worker in late:
            worker.cancel()
        if late:
            await asyncio.wait(late)
            self.faults.append(f"{len(late)} turns did not end")
        self.faults += [
            repr(error) for worker in self._workers if not worker.cancelled() and (error := worker.exception())
        ]

    async def close(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for client in self._clients:
            await client.close()

    async def check(self, client: ContextManagerClient) -> int:
        """Return how many acknowledged turns are lost; whatever else is wrong is added to `faults`."""
        num_lost = 0
        for record in self.records:
            try:
                session, transcript = await client.begin_turn(
                    TENANT, record.session_id, lease_id="check", lease_ttl_ms=1000, read_only=True
                )
            except (ContextNotFound, ContextExpired):
                num_lost += len(record.acknowledged)
                continue
            stored = [segment.token_ids[0] for segment in transcript]
            num_lost += len(set(record.acknowledged) - set(stored))
            told = f"{record.session_id}: stored {stored[-5:]}, acknowledged {record.acknowledged[-5:]}"
            if stored != sorted(set(stored)):
                self.faults.append(f"not one serial order: {told}")
            if session.generation != len(stored):
                self.faults.append(f"generation {session.generation}: {told}")
            if not set(stored) <= set(record.acknowledged) | record.in_doubt:
                self.faults.append(f"nobody committed some of it: {told}")
        return num_lost

    async def _work(self, record: SessionRecord) -> None:
        number = 0
        while not self._stopping and not record.gone:
            try:
                await (self._turn(record, number) if number else self._create(record))
            except (ContextNotFound, ContextExpired):
                record.gone = True
            except (LeaseLost, GenerationMismatch):
                pass  # Redis lost our lease, or the turns before: the next turn sees what is there
            number += 1

    async def _create(self, record: SessionRecord) -> None:
        lease_id = secrets.token_hex(8)
        new = NewSession(TENANT, record.session_id, "toy", ttl_s=3600)
        try:
            await self._asked(lambda c: c.reserve(new, lease_id=lease_id, lease_ttl_ms=self._lease_ms))
        except ContextExists:
            self.faults.append("a repeated reservation was refused")
        await self._commit(record, 0, self._commit_of(record, lease_id, 0, generation=0))

    async def _turn(self, record: SessionRecord, number: int) -> None:
        lease_id = secrets.token_hex(8)
        try:
            session, transcript = await self._asked(
                lambda c: c.begin_turn(TENANT, record.session_id, lease_id=lease_id, lease_ttl_ms=self._lease_ms)
            )
        except ContextBusy:
            await asyncio.sleep(0.1)
            return
        commit = self._commit_of(record, lease_id, number, generation=session.generation)
        await self._commit(record, number, replace(commit, keep_segments=len(transcript)))

    async def _commit(self, record: SessionRecord, number: int, commit: TurnCommit) -> None:
        record.in_doubt.add(number)
        await self._asked(
            lambda c: c.commit_turn(commit) if commit.expected_generation else c.register_session_cache(commit)
        )
        record.acknowledged.append(number)
        record.in_doubt.discard(number)

    def _commit_of(self, record: SessionRecord, lease_id: str, number: int, *, generation: int) -> TurnCommit:
        said = Segment(SegmentKind.PROMPT, (number, 7, 7), text=f"turn {number}")
        return TurnCommit(TENANT, record.session_id, lease_id, generation, 0, (said,), new_cache_ref(), "pod")

    async def _asked(self, call: Callable[[ContextManagerClient], Awaitable[AnswerT]]) -> AnswerT:
        """Ask one manager after the other until one gives an answer."""
        while True:
            for client in secrets.SystemRandom().sample(self._clients, len(self._clients)):
                began_s = time.monotonic()
                try:
                    return await call(client)
                except StoreUnavailable as exc:
                    self.refused_s.append(time.monotonic() - began_s)
                    if not exc.retry_after_s:
                        self.faults.append("unavailable without Retry-After")
                except ContextCacheError as exc:
                    if exc.http_status >= 500:
                        self.faults.append(f"{exc.code}: {exc.message}")
                    raise
            await asyncio.sleep(0.05)
