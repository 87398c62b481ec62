"""The gauge of live sessions."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry

from context_manager.manager import ContextCacheManager
from context_manager.memory_store import MemorySessionStore
from context_manager.metrics import ManagerMetrics
from context_manager.sweeper import SessionCount
from contextcache.clock import ManualClock
from contextcache.errors import StoreUnavailable
from contextcache.model import NewSession


class _Store(MemorySessionStore):
    away = False

    async def count_sessions(self) -> int:
        if self.away:
            raise StoreUnavailable("away")
        return await super().count_sessions()


async def test_the_gauge_says_how_many_sessions_live_and_nothing_when_nobody_knows():
    registry = CollectorRegistry()
    metrics = ManagerMetrics(registry)
    store = _Store()
    manager = ContextCacheManager(store, clock=ManualClock(), metrics=metrics)
    count = SessionCount(manager, metrics=metrics)
    for number in range(3):
        await manager.reserve(NewSession("demo", f"ctx_{number}", "m", ttl_s=600), lease_id="l", lease_ttl_ms=10_000)

    await count.count()
    assert registry.get_sample_value("contextcache_manager_sessions") == 3

    store.away = True
    await count.count()
    assert math.isnan(registry.get_sample_value("contextcache_manager_sessions"))
