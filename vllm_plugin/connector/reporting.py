"""Load reports on their way to the sidecar: sent in order by one thread, never by the engine's. Decides nothing."""

from __future__ import annotations

from contextcache.errors import ContextCacheError
from contextcache.v1 import kv_sidecar_pb2 as pb
from vllm_plugin.connector.counters import Counters
from vllm_plugin.connector.sidecar_link import LazySidecar
from vllm_plugin.connector.transfer import TransferPool


class LoadReporter:
    """A receipt that cannot be delivered is counted and forgotten; the answer is then without one."""

    def __init__(self, sidecar: LazySidecar, counters: Counters, *, queue_limit: int) -> None:
        self._sidecar = sidecar
        self._counters = counters
        self._pool = TransferPool("reports", threads=1, queue_limit=queue_limit)

    def send(self, report: pb.LoadReport) -> None:
        """Queue a report. Never waits."""

        def deliver() -> None:
            try:
                self._sidecar.get().report_load(report)
            except ContextCacheError:
                self._counters.add("lost_reports")

        if self._pool.try_submit(deliver) is None:
            self._counters.add("lost_reports")

    def close(self, timeout_s: float) -> bool:
        """Drop what waits; return whether the thread has ended."""
        return self._pool.close(timeout_s)
