"""Orphans: sealed KV that no session names any more, as the context manager says. Frees nothing itself.

A delete that did not reach this sidecar, a crash between seal and commit, a session that moved to another pod and a
Redis that lost its data leave such KV. Each pass of the collector asks the manager about it. Rules:
1. Only the answer of a manager frees anything. Without an answer, or after an impossible one, all KV stays.
2. KV is asked about `after_s` after its seal. A create commits before that, or its row is gone with its lease. A turn
   in flight names everything saved for its session, so a seal before its commit is no orphan.
3. A turn that outlives its lease may still commit KV that was freed as an orphan. Its next turn gets a miss, computes
   the prompt and names the new KV.
4. A pass is bounded in time and in names. It begins with the KV of the oldest question.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from contextcache.errors import ContextCacheError, InvalidRequest, StoreUnavailable
from contextcache.model import CacheRef, HeldCacheRef, SessionId, TenantId, Usage
from contextcache.names import prompt_ref
from contextcache.v1 import context_manager_pb2 as pb
from contextcache.wire.channels import ServiceClient
from contextcache.wire.rpc import cause_of
from contextcache.wire.tls import WatchedTls
from kv_sidecar.runtime import Runtime
from kv_sidecar.sealed.manifests import ManifestRecord

log = logging.getLogger(__name__)

QUESTION_REFS = 500
"""Names in one question; the manager takes no more."""
PASS_REFS = 20 * QUESTION_REFS
"""Names in one pass; the rest come first in the next."""
CALL_S = 2.0
"""Deadline of one call in seconds; the manager answers in milliseconds."""
PASS_S = 10.0
"""Seconds that the questions of one pass may take together."""


class ManagerQuestions(ServiceClient):
    """Calls of the context manager over one connection, made at the first call. Each has a deadline.

    Every call raises StoreUnavailable without an answer, another ContextCacheError for a refusal.
    """

    def __init__(self, address: str, *, timeout_s: float = CALL_S, tls: WatchedTls | None = None) -> None:
        """`address`: host:port or unix:///path; `timeout_s`: deadline of every call."""
        service = "contextcache.v1.ContextManagerService"
        super().__init__(address, pb=pb, service=service, timeout_s=timeout_s, tls=tls, unavailable=StoreUnavailable)

    async def orphans(self, held: Sequence[HeldCacheRef]) -> Sequence[int]:
        """Return the positions in `held` (at most `QUESTION_REFS`) that no session names."""
        return tuple((await self._call("CheckCacheRefs", held=held)).orphans)

    async def note_holder(self, tenant: TenantId, session_id: SessionId, *, holder: str, instead_of: str = "") -> None:
        """Record the pod that holds a session's KV."""
        await self._call("NoteHolder", tenant=tenant, session_id=session_id, holder=holder, instead_of=instead_of)

    async def add_usage(self, tenant: TenantId, usage: Sequence[Usage], *, sender: str, number: int) -> None:
        """Count a batch once: its number is above that of every former batch of this sender."""
        await self._call("AddUsage", tenant=tenant, batch_id=sender, usage=usage, sender=sender, number=number)


@dataclass
class Orphans:
    """Remembers the next question's time for each sealed KV. Used from one event loop."""

    manager: ManagerQuestions
    runtime: Runtime
    written_at_ms: Callable[[CacheRef], int | None]
    """Reads the time of a manifest's seal or last touch from its file, which outlives a restart."""
    after_ms: int
    """Time from the seal to the first question, and between two questions about the same KV."""
    _due_ms: dict[CacheRef, int] = field(default_factory=dict)
    _is_silent: bool = False
    """The last question had no answer: an outage is logged once."""

    async def find(self, records: Sequence[ManifestRecord]) -> list[ManifestRecord]:
        """Return the sealed records that no session names, as far as the manager says so."""
        await self._learn(records)
        now_ms = self.runtime.clock.now_ms()
        # KV saved at the end of a context's prompt has no name of its own in a session: one question covers both, and
        # one name keeps both.
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
        """Forget KV that is gone, and set the time of the first question about new KV."""
        known = self._due_ms
        self._due_ms = {ref: known[ref] for ref in (record.cache_ref for record in records) if ref in known}
        new = [record.cache_ref for record in records if record.cache_ref not in known]
        now_ms = self.runtime.clock.now_ms()
        written = await self.runtime.threads.run(lambda: [self.written_at_ms(ref) for ref in new])
        for ref, written_at_ms in zip(new, written, strict=True):
            # A time in the future comes from another clock: then the wait begins now.
            self._due_ms[ref] = min(now_ms if written_at_ms is None else written_at_ms, now_ms) + self.after_ms

    async def _ask(self, records: Sequence[ManifestRecord]) -> list[ManifestRecord]:
        """Ask one question. A refusal is counted and dropped. Raises StoreUnavailable without an answer."""
        held = [HeldCacheRef(record.tenant, record.session_id, record.cache_ref) for record in records]
        positions: Sequence[int] = ()
        try:
            positions = await self.manager.orphans(held)
            self._is_silent = False
            if not all(0 <= position < len(held) for position in positions):
                raise InvalidRequest("positions out of range")
        except StoreUnavailable:
            raise
        except ContextCacheError as exc:
            self.runtime.metrics.failed_questions.inc()
            log.warning("no usable answer from the manager about stored KV", extra={"reason": exc.message})
            positions = ()
        now_ms = self.runtime.clock.now_ms()
        for record in records:
            # Also after a refusal: the next pass begins with other KV.
            self._due_ms[record.cache_ref] = now_ms + self.after_ms
        return [records[position] for position in sorted(set(positions))]

    def _note_silence(self, reason: str) -> None:
        self.runtime.metrics.failed_questions.inc()
        if not self._is_silent:
            log.warning("no answer from the manager about stored KV, none is freed", extra={"reason": reason})
        self._is_silent = True
