"""Accounts of a sidecar: each request's load, for the turn's receipt, and each tenant's bytes over time.

Both are bounded: reports by count and age, usage by one batch per tenant that the manager has not counted yet.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from contextcache.clock import Clock
from contextcache.errors import CacheRefNotFound, ContextCacheError, InvalidRequest
from contextcache.model import TenantId, Usage
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.format.manifest import check_rank
from kv_sidecar.orphans import ManagerQuestions

log = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 256
MAX_SIZE_BYTES = 1 << 50
"""Bytes of one rank's load: the sum over all ranks fits 64 bits."""
PASS_S = 10.0
"""Seconds that one pass may take; the next one begins with the remaining tenants."""
_LONGEST_MS = 600_000
"""Longest time counted between two looks: after a changed clock or a pause of the process the bytes are unknown."""
Held = Mapping[str, Mapping[TenantId, int]]
"""Bytes by tier (`memory`, `disk`) and tenant."""


@dataclass(slots=True)
class _Kept:
    """Report of one request so far."""

    kept_at_ms: int
    report: pb.LoadReport
    ranks: set[int]

    @property
    def is_whole(self) -> bool:
        """No further rank can make it worse."""
        return self.report.outcome == pb.LOAD_OUTCOME_FAILED or len(self.ranks) >= self.report.world_size

    def add(self, report: pb.LoadReport) -> None:
        """Add a rank's report. A failure stays; of two loads the slower tier and time count.

        All ranks compute the blocks that one rank lacks, so the worst outcome is the request's.
        """
        before, is_other = self.report, report.rank not in self.ranks
        self.ranks.add(report.rank)
        if pb.LOAD_OUTCOME_FAILED in {before.outcome, report.outcome}:
            self.report = before if before.outcome == pb.LOAD_OUTCOME_FAILED else report
            return
        self.report = merged = pb.LoadReport()
        merged.CopyFrom(report)
        if is_other and before.outcome == report.outcome:
            merged.tier = max(before.tier, report.tier)
            merged.restore_ms = max(before.restore_ms, report.restore_ms)
            merged.size_bytes = before.size_bytes + report.size_bytes


@dataclass
class LoadReports:
    """Reports by request id; the oldest are forgotten first."""

    clock: Clock
    max_reports: int = 4096
    """More than an engine has requests."""
    keep_ms: int = 60_000
    """Longer than an answer."""
    _reports: OrderedDict[str, _Kept] = field(default_factory=OrderedDict)
    _next: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the next report comes."""

    def __len__(self) -> int:
        return len(self._reports)

    def put(self, report: pb.LoadReport) -> None:
        """Keep a rank's report beside those of the other ranks. Raises InvalidRequest."""
        if not 0 < len(report.request_id) <= MAX_REQUEST_ID_CHARS:
            raise InvalidRequest(f"request_id must have 1 to {MAX_REQUEST_ID_CHARS} characters", param="request_id")
        if not 0 <= report.size_bytes <= MAX_SIZE_BYTES:
            raise InvalidRequest(f"size_bytes must be from 0 to {MAX_SIZE_BYTES}", param="size_bytes")
        check_rank(report.rank, max(report.world_size, 1))
        self.forget_old()
        kept = self._reports.get(report.request_id)
        if kept is None:
            kept = self._reports[report.request_id] = _Kept(self.clock.now_ms(), report, {report.rank})
        else:
            kept.add(report)
        while len(self._reports) > self.max_reports:
            self._reports.popitem(last=False)
        self._next.set()
        self._next = asyncio.Event()

    async def get(self, request_id: str, *, timeout_s: float) -> pb.LoadReport:
        """Return a request's report, after at most `timeout_s` for all ranks. Raises CacheRefNotFound without one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (kept := self._reports.get(request_id)) is None or not kept.is_whole:
                    await self._next.wait()
        self.forget_old()
        kept = self._reports.get(request_id)
        if kept is None:
            raise CacheRefNotFound("no load report for this request")
        return kept.report

    def forget_old(self) -> None:
        """Forget reports that were not asked for in time."""
        now_ms = self.clock.now_ms()
        while self._reports:
            request_id, kept = next(iter(self._reports.items()))
            if now_ms - kept.kept_at_ms < self.keep_ms:
                break
            del self._reports[request_id]


@dataclass
class UsageMeter:
    """Adds up KiB times seconds by tier and tells the manager. Used from one event loop.

    Between two looks a tenant counts as holding the mean of both. A batch keeps its number until the manager counts
    it, so it counts once. A killed process loses the usage of one interval.
    """

    manager: ManagerQuestions
    clock: Clock
    _before: Held = field(default_factory=dict)
    _at_ms: int | None = None
    _counted: dict[TenantId, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """KiB times ms by tenant and tier that are in no batch yet."""
    _unsent: dict[TenantId, tuple[int, Mapping[str, int]]] = field(default_factory=dict)
    """Number and counts of a tenant's batch."""
    _sender: str = field(default_factory=lambda: secrets.token_hex(16))
    _last_number: int = 0

    async def look(self, held: Held, *, store_kib_s: Mapping[TenantId, int] | None = None) -> None:
        """Count the bytes held since the last look, and tell. `store_kib_s`: usage of the shared store."""
        now_ms = self.clock.now_ms()
        if self._at_ms is not None:
            self._add(held, min(max(now_ms - self._at_ms, 0), _LONGEST_MS))
        self._before, self._at_ms = held, now_ms
        for tenant, kib_s in (store_kib_s or {}).items():
            self._counted[tenant]["store"] += kib_s * 1000
        for tenant in self._counted.keys() - self._unsent.keys():
            self._make_batch(tenant)
        try:
            async with asyncio.timeout(PASS_S):
                await self._tell()
        except (ContextCacheError, TimeoutError) as exc:
            log.warning("usage not counted by the manager, will retry", extra={"reason": type(exc).__name__})

    def _add(self, held: Held, elapsed_ms: int) -> None:
        for tier in {*held, *self._before}:
            now, before = held.get(tier, {}), self._before.get(tier, {})
            for tenant in {*now, *before}:
                mean_kib = (now.get(tenant, 0) + before.get(tenant, 0)) // 2048
                self._counted[tenant][tier] += mean_kib * elapsed_ms

    def _make_batch(self, tenant: TenantId) -> None:
        counted = self._counted.pop(tenant)
        counts = {f"{tier}_kib_s": kib_ms // 1000 for tier, kib_ms in counted.items() if kib_ms >= 1000}
        if rest := Counter({tier: kib_ms % 1000 for tier, kib_ms in counted.items() if kib_ms % 1000}):
            self._counted[tenant] = rest
        if counts:
            self._last_number += 1
            self._unsent[tenant] = (self._last_number, counts)

    async def _tell(self) -> None:
        for tenant in list(self._unsent):
            # A tenant moves to the end until it is counted, so that a shard that hangs does not delay the others again.
            number, counts = self._unsent[tenant] = self._unsent.pop(tenant)
            try:
                await self.manager.add_usage(tenant, [Usage("", counts)], sender=self._sender, number=number)
            except InvalidRequest as exc:
                # A retry would be refused again and hold up the other tenants.
                log.warning("refused usage dropped", extra={"error": str(exc)})
            del self._unsent[tenant]
