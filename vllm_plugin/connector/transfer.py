"""Bounded threads, the box of results, and the reports to the sidecar, which loads and saves share in a worker.

The engine's thread only puts work in and takes results out; both take a lock for the length of a few set operations.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, SidecarUnavailable
from contextcache.model import TenantId
from contextcache.requests import OVERLOAD_MAX, TenantShares
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.tracing import NO_TRACER, Tracer
from kv_sidecar.client import EngineSidecarClient, MappedArena
from vllm_plugin.connector.copies.pages import PagedLayers
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import RankLink
from vllm_plugin.connector.telemetry import Counters

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Results:
    """Transfers that have ended since the engine last asked. Request ids are the engine's own."""

    sent: set[str] = field(default_factory=set)
    """Finished requests whose blocks may be freed."""
    received: set[str] = field(default_factory=set)
    """Requests whose load has ended, well or badly."""
    failed: set[str] = field(default_factory=set)
    """Requests of `received` that must be computed."""
    ended_saves: set[str] = field(default_factory=set)
    """cache_refs that were sealed, skipped or given up."""


class ResultBox:
    """Filled by transfer threads, emptied by the engine's thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._results = Results()

    def release_blocks(self, engine_request_id: str) -> None:
        """Let the engine free a finished request's blocks."""
        with self._changed:
            self._results.sent.add(engine_request_id)
            self._changed.notify()

    def end_save(self, cache_ref: str) -> None:
        """Tell that this save needs no more waiting."""
        with self._changed:
            self._results.ended_saves.add(cache_ref)

    def end_load(self, engine_request_id: str, *, is_failed: bool = False) -> None:
        """Note the end of a load."""
        with self._changed:
            self._changed.notify()
            self._results.received.add(engine_request_id)
            if is_failed:
                self._results.failed.add(engine_request_id)

    def wait(self, timeout_s: float) -> None:
        """Wait until a load has ended, or blocks may be freed."""
        with self._changed:
            self._changed.wait_for(lambda: self._results.received or self._results.sent, timeout_s)

    def take(self) -> Results:
        """Return everything since the last call."""
        with self._changed:
            taken, self._results = self._results, Results()
        return taken


class TransferPool:
    """A few threads behind a bounded queue; started at the first piece of work.

    Tenants share threads and queue (`TenantShares`). The next piece is of the tenant that has the fewest running.
    """

    def __init__(self, name: str, *, threads: int, queue_limit: int) -> None:
        self._executor = ThreadPoolExecutor(OVERLOAD_MAX * threads, thread_name_prefix=f"context-cache-{name}")
        self._lock = threading.Lock()
        self._live: dict[Future[None], TenantId] = {}
        self._waiting: dict[TenantId, dict[Future[None], Callable[[], None]]] = {}
        """Work that no thread has taken, oldest first; tenants in the order in which they are next."""
        self._in_hand, self._running = TenantShares(threads + queue_limit), TenantShares(threads)

    def try_submit(self, work: Callable[[], None], tenant: TenantId = "") -> Future[None] | None:
        """Queue `work`, or return None at once when the queue is full or the pool is closed. Never waits.

        `tenant`: owner of the work; empty: the engine itself.
        """
        future: Future[None] = Future()
        with self._lock:
            if not self._in_hand.take(tenant):
                return None
            self._live[future] = tenant
            self._waiting.setdefault(tenant, {})[future] = work
        future.add_done_callback(self._forget)
        try:
            self._executor.submit(self._work)
        except RuntimeError:
            # Closed, or no thread could be started. A thread that is there may have taken the work all the same.
            # Work that none has taken must not run: the caller is told so, and frees the memory that it uses.
            if future.cancel():
                return None
        return future

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            future, tenant, work = taken
            _carry_out(future, work)
            self._running.add(tenant, -1)

    def _take(self) -> tuple[Future[None], TenantId, Callable[[], None]] | None:
        """Return the next piece of work; None: nothing waits, or only tenants wait that have their share of threads."""
        with self._lock:
            tenant = min(self._waiting, key=lambda one: self._running.get(one, 0), default=None)
            if tenant is None or not self._running.take(tenant):
                return None
            works = self._waiting.pop(tenant)
            future = next(iter(works))
            work = works.pop(future)
            if works:
                self._waiting[tenant] = works
            return future, tenant, work

    def run_all(self, works: Sequence[Callable[[], None]]) -> None:
        """Run pieces of work at once. When this returns or raises, each has ended or will never begin.

        Raises the first error of the work, RuntimeError when no thread takes a piece.
        """
        errors: list[Exception] = []

        def run(work: Callable[[], None]) -> None:
            try:
                work()
            except Exception as exc:  # noqa: BLE001  # raised below, in the thread of the caller
                errors.append(exc)

        ended = threading.Semaphore(0)  # `wait` never ends for a future that was dropped from the queue
        taken = [future for work in works if (future := self.try_submit(partial(run, work))) is not None]
        for future in taken:
            future.add_done_callback(lambda _: ended.release())
        for _ in taken:
            ended.acquire()
        if errors:
            raise errors[0]
        if len(taken) < len(works) or any(future.cancelled() for future in taken):
            raise RuntimeError("no thread takes the work")

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            tenant = self._live.pop(future)
            self._in_hand.add(tenant, -1)
            works = self._waiting.get(tenant, {})
            if works.pop(future, None) is not None and not works:
                del self._waiting[tenant]
        if not future.cancelled() and (error := future.exception()) is not None:
            log.error("transfer thread failed", exc_info=error)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything there is now has ended, for `timeout_s` at most; return whether there was anything."""
        with self._lock:
            live = list(self._live)
        wait(live, timeout_s)
        return bool(live)

    def close(self, timeout_s: float) -> bool:
        """Drop what waits, and return whether everything running has ended within `timeout_s`."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            live = list(self._live)
        running = [future for future in live if not future.cancel()]
        return not wait(running, timeout_s).not_done


def _carry_out(future: Future[None], work: Callable[[], None]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        work()
    except BaseException as exc:  # noqa: BLE001  # as an executor does: whoever waits for it gets it
        future.set_exception(exc)
    else:
        future.set_result(None)


class Reporter:
    """Sends reports in order, by one thread; those that cannot be delivered are counted and forgotten.

    Without one, a receipt says less, or a create waits for its deadline.
    """

    def __init__(self, sidecar: EngineSidecarClient, counters: Counters, *, queue_limit: int) -> None:
        self._sidecar = sidecar
        self._counters = counters
        self._pool = TransferPool("reports", threads=1, queue_limit=queue_limit)
        self._lock = threading.Lock()
        self._owed: WeakKeyDictionary[MappedArena, set[int]] = WeakKeyDictionary()
        """Slots that the sidecar has not been told of; with their arena they are forgotten, and free."""

    def send(self, report: pb.LoadReport, *, lease_id: str = "") -> None:
        """Queue a report, and the end of a lease as `end_load`. Never waits."""
        self._queue(lambda sidecar: sidecar.report_load(report, lease_id=lease_id))

    def end_load(self, lease_id: str) -> None:
        """Queue the word that a load's blocks are wanted no more. Never waits; lost, the lease ends by its time."""
        self._queue(lambda sidecar: sidecar.end_load(lease_id))

    def abandon_save(self, tenant: str, cache_ref: str, reason: str, *, started_at_ms: int) -> None:
        """Queue the word that nothing is saved under a name, and why. Never waits.

        `reason`: a short fixed phrase. `started_at_ms`: as in the save's plan, the same on all ranks.
        """
        self._queue(lambda sidecar: sidecar.abandon_save(tenant, cache_ref, reason, started_at_ms=started_at_ms))

    def return_slots(self, arena: MappedArena, slot_ids: Sequence[int]) -> None:
        """Queue the return of slots that no thread writes to. Never waits; lost, the next report tells it."""
        with self._lock:
            self._owed.setdefault(arena, set()).update(slot_ids)
        self._queue(self._return_slots)

    def _return_slots(self, sidecar: EngineSidecarClient) -> None:
        with self._lock:
            owed, self._owed = self._owed, WeakKeyDictionary()
        is_lost = False
        for arena, slot_ids in owed.items():
            try:
                sidecar.return_slots(arena.borrower, sorted(slot_ids))
            except ContextCacheError:
                is_lost = True  # kept itself, the error would keep this frame, and with it the arena
                with self._lock:
                    self._owed.setdefault(arena, set()).update(slot_ids)
        if is_lost:
            raise SidecarUnavailable("slots could not be returned to the sidecar")

    def _queue(self, call: Callable[[EngineSidecarClient], None]) -> None:
        def deliver() -> None:
            try:
                call(self._sidecar)
                if self._owed:
                    self._return_slots(self._sidecar)
            except ContextCacheError:
                self._counters.add("lost_reports")

        if self._pool.try_submit(deliver) is None:
            self._counters.add("lost_reports")

    def close(self, timeout_s: float) -> bool:
        """Drop queued reports; return whether the thread has ended."""
        return self._pool.close(timeout_s)


@dataclass(eq=False, kw_only=True)
class RankParts:
    """Parts of a rank that its loads and its saves share."""

    settings: ConnectorSettings
    link: RankLink
    layers: PagedLayers
    results: ResultBox
    reporter: Reporter
    counters: Counters
    clock: Clock
    tracer: Tracer = NO_TRACER
