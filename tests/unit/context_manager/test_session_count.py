"""The gauge of live sessions."""

from __future__ import annotations

import asyncio
import math

import pytest
from prometheus_client import CollectorRegistry

from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from context_manager.sweeper import count_forever
from contextcache.errors import StoreUnavailable
from contextcache.model import NewSession
from tests.kit.session_store import BlockingConnection


@pytest.mark.looptime
async def test_the_gauge_says_how_many_sessions_live_and_nothing_when_nobody_knows():
    registry = CollectorRegistry()
    metrics, redis = ManagerMetrics(registry), BlockingConnection()
    manager = ContextCacheManager(redis, metrics=metrics)
    for number in range(3):
        await manager.reserve(NewSession("demo", f"ctx_{number}", "m", ttl_s=600), lease_id="l", lease_ttl_ms=10_000)
    counting = asyncio.create_task(count_forever(manager, metrics=metrics))
    await asyncio.sleep(1)
    assert registry.get_sample_value("contextcache_manager_sessions") == 3

    def away() -> None:
        raise StoreUnavailable("away")

    redis.before = away
    await asyncio.sleep(30)
    assert math.isnan(registry.get_sample_value("contextcache_manager_sessions"))
    counting.cancel()
    await asyncio.wait([counting])
