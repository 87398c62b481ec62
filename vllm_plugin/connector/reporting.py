"""Reports of loads and saves to the sidecar, sent in order by one thread. Decides nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from contextcache.errors import ContextCacheError, SidecarUnavailable
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import EngineSidecarClient
from vllm_plugin.connector.sidecar_link import Arena
from vllm_plugin.connector.telemetry import Counters
from vllm_plugin.connector.transfer import TransferPool


class Reporter:
    """Counts and forgets reports that cannot be delivered: a receipt says less, a create waits for its deadline."""

    def __init__(self, sidecar: EngineSidecarClient, counters: Counters, *, queue_limit: int) -> None:
        self._sidecar = sidecar
        self._counters = counters
        self._pool = TransferPool("reports", threads=1, queue_limit=queue_limit)
        self._lock = threading.Lock()
        self._owed: WeakKeyDictionary[Arena, set[int]] = WeakKeyDictionary()
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

    def return_slots(self, arena: Arena, slot_ids: Sequence[int]) -> None:
        """Queue the return of slots that no thread writes to. Never waits; lost, the next one tells it too."""
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
            except ContextCacheError:
                self._counters.add("lost_reports")

        if self._pool.try_submit(deliver) is None:
            self._counters.add("lost_reports")

    def close(self, timeout_s: float) -> bool:
        """Drop queued reports; return whether the thread has ended."""
        return self._pool.close(timeout_s)
