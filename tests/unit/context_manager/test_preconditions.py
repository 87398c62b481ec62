"""What Redis must be set to: judged from INFO, told once, shown as metrics."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from context_manager.metrics import ManagerMetrics
from context_manager.preconditions import NAMES, StoreWatch, judged
from contextcache.errors import ContextCacheError, StoreUnavailable

WELL = {
    "redis_version": "7.2.4",
    "maxmemory": 0,
    "maxmemory_policy": "noeviction",
    "evicted_keys": 0,
    "aof_enabled": 1,
    "connected_slaves": 1,
}
MIB = 1 << 20


class Rig:
    def __init__(self, *infos: dict[str, Any]) -> None:
        self.infos = list(infos) or [dict(WELL)]
        self.error: Exception | None = None
        self.registry = CollectorRegistry()
        self.watch = StoreWatch(
            self._read, metrics=ManagerMetrics(self.registry), tenant_bytes_max=128 * MIB, wait_replicas=1
        )

    async def _read(self) -> list[dict[str, Any]]:
        if self.error is not None:
            raise self.error
        return self.infos

    def gauge(self, name: str) -> float:
        value = self.registry.get_sample_value("contextcache_manager_redis_precondition", {"name": name})
        assert value is not None
        return value

    def evicted(self) -> float | None:
        return self.registry.get_sample_value("contextcache_manager_redis_evicted_keys")


def unmet(info: dict[str, Any], *, wait_replicas: int = 1) -> dict[str, str]:
    found = judged(info, tenant_bytes_max=128 * MIB, wait_replicas=wait_replicas)
    return {one.name: one.told for one in found if not one.is_met}


def test_a_redis_that_is_set_as_it_must_be_lacks_nothing() -> None:
    assert unmet(WELL) == {}
    assert {one.name for one in judged(WELL, tenant_bytes_max=1, wait_replicas=1)} == set(NAMES)


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        ("eviction_policy", {"maxmemory_policy": "allkeys-lru"}, "allkeys-lru"),
        ("eviction_policy", {"maxmemory_policy": "volatile-ttl"}, "noeviction"),
        ("version", {"redis_version": "6.0.16"}, "6.2"),
        ("version", {"redis_version": "5.9.0"}, "5.9"),
        ("append_only_file", {"aof_enabled": 0}, "appendonly"),
        ("memory", {"maxmemory": 255 * MIB}, "MANAGER_TENANT_BYTES_MAX"),
        ("replicas", {"connected_slaves": 0}, "MANAGER_REDIS_WAIT_REPLICAS"),
    ],
)
def test_each_setting_that_is_not_as_it_must_be_is_named(name: str, more: dict[str, Any], told: str) -> None:
    found = unmet(WELL | more)

    assert list(found) == [name]
    assert told in found[name]


@pytest.mark.parametrize("more", [{"redis_version": "6.2.0"}, {"redis_version": "10.0"}, {"maxmemory": 256 * MIB}])
def test_what_just_suffices_is_enough(more: dict[str, Any]) -> None:
    assert unmet(WELL | more) == {}


def test_without_a_limit_for_tenants_one_of_them_may_fill_a_redis_that_has_one() -> None:
    (memory,) = (one for one in judged(WELL | {"maxmemory": MIB}, tenant_bytes_max=0, wait_replicas=0)
                 if one.name == "memory")  # fmt: skip

    assert not memory.is_met


def test_what_redis_does_not_say_is_not_judged() -> None:
    assert judged({}, tenant_bytes_max=1, wait_replicas=1) == []


async def test_what_is_wrong_is_told_once_and_again_when_it_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    rig = Rig(WELL | {"maxmemory_policy": "allkeys-lru"})
    for _ in range(3):
        await rig.watch.look()
    assert [record.message for record in caplog.records] == [
        "redis may evict contexts: maxmemory-policy is allkeys-lru, it must be noeviction"
    ]
    assert (rig.gauge("eviction_policy"), rig.gauge("version")) == (0.0, 1.0)

    rig.infos = [dict(WELL)]
    await rig.watch.look()
    assert rig.gauge("eviction_policy") == 1.0
    rig.infos = [WELL | {"maxmemory_policy": "allkeys-lru"}]
    await rig.watch.look()
    assert len(caplog.records) == 2


async def test_of_several_primaries_one_is_enough_to_be_wrong_and_all_evictions_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(WELL | {"evicted_keys": 3}, WELL | {"evicted_keys": 4, "maxmemory_policy": "volatile-lru"})
    await rig.watch.look()
    await rig.watch.look()

    assert rig.gauge("eviction_policy") == 0.0
    assert rig.evicted() == 7
    assert [record.levelname for record in caplog.records if "contexts are lost" in record.message] == ["ERROR"]


@pytest.mark.parametrize(
    ("error", "wait_s", "num_told"), [(StoreUnavailable("away"), 1.0, 0), (ContextCacheError("NOPERM"), 600.0, 1)]
)
async def test_what_redis_cannot_or_may_not_tell_is_unknown(
    error: Exception, wait_s: float, num_told: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    await rig.watch.look()
    rig.error = error
    for _ in range(2):
        assert await rig.watch.look() == wait_s

    assert all(math.isnan(rig.gauge(name)) for name in NAMES)
    evicted = rig.evicted()
    assert evicted is not None
    assert math.isnan(evicted)
    assert len(caplog.records) == num_told
    rig.error = None
    assert await rig.watch.look() == 60.0
    assert rig.gauge("eviction_policy") == 1.0
