"""What the connector did for each request, kept until the answer's receipt is written. Bounded by count and age."""

from __future__ import annotations

from collections import OrderedDict

from contextcache.clock import Clock
from contextcache.errors import CacheRefNotFound, InvalidRequest
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.announcements import Announcements

MAX_REQUEST_ID_CHARS = 256


class LoadReports:
    """Reports by request id; the oldest go first."""

    def __init__(self, *, clock: Clock, max_reports: int, keep_ms: int, max_waiters: int) -> None:
        self._clock = clock
        self._max_reports = max_reports
        self._keep_ms = keep_ms
        self._reports: OrderedDict[str, tuple[int, pb.LoadReport]] = OrderedDict()
        self._arrivals = Announcements(max_waiters=max_waiters)

    def __len__(self) -> int:
        return len(self._reports)

    def put(self, report: pb.LoadReport) -> None:
        """Keep a report; it replaces an earlier one of the same request. Raises InvalidRequest."""
        if not 0 < len(report.request_id) <= MAX_REQUEST_ID_CHARS:
            raise InvalidRequest("a report needs a request_id of 1 to 256 characters", param="request_id")
        self._reports[report.request_id] = (self._clock.now_ms(), report)
        self._reports.move_to_end(report.request_id)
        self.forget_old()
        while len(self._reports) > self._max_reports:
            self._reports.popitem(last=False)
        self._arrivals.announce(report.request_id)

    async def get(self, request_id: str, *, timeout_s: float) -> pb.LoadReport:
        """Return a request's report, waiting at most `timeout_s` for it. Raises CacheRefNotFound when none came."""
        if request_id not in self._reports:
            await self._arrivals.wait(request_id, timeout_s=timeout_s)
        self.forget_old()
        kept = self._reports.get(request_id)
        if kept is None:
            raise CacheRefNotFound("no load report for this request")
        return kept[1]

    def forget_old(self) -> None:
        """Forget reports nobody asked for in time."""
        now_ms = self._clock.now_ms()
        while self._reports:
            request_id, (kept_at_ms, _) = next(iter(self._reports.items()))
            if now_ms - kept_at_ms < self._keep_ms:
                break
            del self._reports[request_id]
