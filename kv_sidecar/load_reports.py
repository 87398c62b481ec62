"""What the connector did for each request, kept until the answer's receipt is written. Bounded by count and age.

With several ranks the worst outcome is told, whichever comes last: blocks that one rank lacks are computed by all.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from contextcache.clock import Clock
from contextcache.errors import CacheRefNotFound, InvalidRequest
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.format.manifest import MAX_WORLD_SIZE
from kv_sidecar.sealed.index import Announcements

MAX_REQUEST_ID_CHARS = 256
MAX_SIZE_BYTES = 1 << 50
"""Of one rank's load: those of all ranks together stay a 64-bit number."""


@dataclass(slots=True)
class _Kept:
    """What is known of one request."""

    kept_at_ms: int
    report: pb.LoadReport
    ranks: set[int]

    @property
    def is_whole(self) -> bool:
        """Whether no rank can make it worse."""
        return self.report.outcome == pb.LOAD_OUTCOME_FAILED or len(self.ranks) >= self.report.world_size

    def add(self, report: pb.LoadReport) -> None:
        """Take a rank's word: a failure stays, of two loads the slower tier and time count."""
        before, is_other = self.report, report.rank not in self.ranks
        self.ranks.add(report.rank)
        if pb.LOAD_OUTCOME_FAILED in {before.outcome, report.outcome}:
            self.report = before if before.outcome == pb.LOAD_OUTCOME_FAILED else report
        elif is_other and before.outcome == report.outcome:
            merged = pb.LoadReport()
            merged.CopyFrom(report)
            merged.tier = max(before.tier, report.tier)
            merged.restore_ms = max(before.restore_ms, report.restore_ms)
            merged.size_bytes = before.size_bytes + report.size_bytes
            self.report = merged
        else:
            self.report = report


class LoadReports:
    """Reports by request id; the oldest go first."""

    def __init__(
        self, clock: Clock, *, max_reports: int = 4096, keep_ms: int = 60_000, max_waiters: int = 4096
    ) -> None:
        """Keep at most `max_reports`, each for `keep_ms`: more than an engine has requests, longer than an answer."""
        self._clock = clock
        self._max_reports = max_reports
        self._keep_ms = keep_ms
        self._reports: OrderedDict[str, _Kept] = OrderedDict()
        self._arrivals = Announcements(max_waiters=max_waiters)

    def __len__(self) -> int:
        return len(self._reports)

    def put(self, report: pb.LoadReport) -> None:
        """Keep a rank's report beside those of the other ranks. Raises InvalidRequest."""
        if not 0 < len(report.request_id) <= MAX_REQUEST_ID_CHARS:
            raise InvalidRequest(f"request_id must have 1 to {MAX_REQUEST_ID_CHARS} characters", param="request_id")
        if not 0 <= report.size_bytes <= MAX_SIZE_BYTES:
            raise InvalidRequest(f"size_bytes must be from 0 to {MAX_SIZE_BYTES}", param="size_bytes")
        if not 0 <= report.rank < max(report.world_size, 1) <= MAX_WORLD_SIZE:
            raise InvalidRequest(
                f"rank must be below world_size, and world_size at most {MAX_WORLD_SIZE}", param="rank"
            )
        self.forget_old()
        kept = self._reports.get(report.request_id)
        if kept is None:
            kept = self._reports[report.request_id] = _Kept(self._clock.now_ms(), report, {report.rank})
        else:
            kept.add(report)
        while len(self._reports) > self._max_reports:
            self._reports.popitem(last=False)
        if kept.is_whole:
            self._arrivals.announce(report.request_id)

    async def get(self, request_id: str, *, timeout_s: float) -> pb.LoadReport:
        """Return a request's report, waiting at most `timeout_s` for all ranks. Raises CacheRefNotFound: none came."""
        kept = self._reports.get(request_id)
        if kept is None or not kept.is_whole:
            await self._arrivals.wait(request_id, timeout_s=timeout_s)
        self.forget_old()
        kept = self._reports.get(request_id)
        if kept is None:
            raise CacheRefNotFound("no load report for this request")
        return kept.report

    def forget_old(self) -> None:
        """Forget reports nobody asked for in time."""
        now_ms = self._clock.now_ms()
        while self._reports:
            request_id, kept = next(iter(self._reports.items()))
            if now_ms - kept.kept_at_ms < self._keep_ms:
                break
            del self._reports[request_id]
