"""What each tenant holds here over time, told to the manager: KiB times seconds, by tier.

Between two looks a tenant is taken to have held the mean of both. What was not taken by the manager is told again under
the same name, so it is counted once; what a process holds when it is killed is lost: one interval's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, InvalidRequest
from contextcache.model import TenantId, Usage

log = logging.getLogger(__name__)

PASS_S = 10.0
"""Seconds that one pass may take; tenants that were not told of come first in the next."""
_LONGEST_MS = 600_000
"""Of what is counted between two looks: a clock that was set, or a process that stood still, held nothing known."""
Held = Mapping[str, Mapping[TenantId, int]]
"""Bytes by tier (`memory`, `disk`) and tenant."""


class UsageSink(Protocol):
    """Whoever adds up."""

    async def add_usage(
        self, tenant: TenantId, batch_id: str, usage: Sequence[Usage], *, sender: str, number: int
    ) -> None:
        """Count a batch, once: its number is above that of every one before it of this sender.

        Ends in bounded time. Raises ContextCacheError.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Batch:
    batch_id: str
    """For managers that know no numbers."""
    number: int
    counts: Mapping[str, int]


class UsageMeter:
    """Adds up and tells. Used from one event loop."""

    def __init__(self, sink: UsageSink, *, clock: Clock) -> None:
        self._sink = sink
        self._clock = clock
        self._before: Held = {}
        self._at_ms: int | None = None
        self._counted: dict[TenantId, Counter[str]] = {}
        """KiB times ms by tenant and tier, not in a batch yet."""
        self._unsent: dict[TenantId, _Batch] = {}
        self._sender, self._last_number = secrets.token_hex(16), 0

    async def look(self, held: Held, *, store_kib_s: Mapping[TenantId, int] | None = None) -> None:
        """Count what was held since the last look, and tell. `store_kib_s`: of the shared store, by who collects it."""
        now_ms = self._clock.now_ms()
        if self._at_ms is not None:
            self._add(held, min(max(now_ms - self._at_ms, 0), _LONGEST_MS))
        self._before, self._at_ms = held, now_ms
        for tenant, kib_s in (store_kib_s or {}).items():
            self._counted.setdefault(tenant, Counter())["store"] += kib_s * 1000
        for tenant in [tenant for tenant in self._counted if tenant not in self._unsent]:
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
                self._counted.setdefault(tenant, Counter())[tier] += mean_kib * elapsed_ms

    def _make_batch(self, tenant: TenantId) -> None:
        counted = self._counted.pop(tenant)
        counts = {f"{tier}_kib_s": kib_ms // 1000 for tier, kib_ms in counted.items() if kib_ms >= 1000}
        if rest := Counter({tier: kib_ms % 1000 for tier, kib_ms in counted.items() if kib_ms % 1000}):
            self._counted[tenant] = rest
        if counts:
            self._last_number += 1
            self._unsent[tenant] = _Batch(secrets.token_hex(16), self._last_number, counts)

    async def _tell(self) -> None:
        for tenant, batch in list(self._unsent.items()):
            # Behind all others until it is counted: one whose shard is away, or that hangs, is not always the first.
            del self._unsent[tenant]
            self._unsent[tenant] = batch
            try:
                usage = [Usage("", batch.counts)]
                await self._sink.add_usage(tenant, batch.batch_id, usage, sender=self._sender, number=batch.number)
            except InvalidRequest as exc:
                # It would be refused for ever, and every tenant's behind it would wait.
                log.warning("refused usage dropped", extra={"error": str(exc)})
            del self._unsent[tenant]
