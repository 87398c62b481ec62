"""The sweeper's task: it sweeps on time, outlives errors and ends when told to. Time is virtual."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from typing_extensions import override

from context_manager.manager import ContextCacheManager, Swept
from context_manager.metrics import ManagerMetrics
from context_manager.sweeper import SessionSweeper
from contextcache.clock import ManualClock
from contextcache.errors import StoreUnavailable
from contextcache.model import NewSession
from tests.kit.session_store import BlockingConnection

NEW = NewSession("demo", "ctx_1", "smol", ttl_s=60)


class FlakyManager(ContextCacheManager):
    """A manager whose sweep fails while `is_away`."""

    is_away = False
    is_anothers: bool | None = False
    """None: the claim is unknown."""

    @override
    async def claim_sweep(self, *, for_ms: int) -> bool:
        if self.is_anothers is None:
            raise StoreUnavailable("away")
        return not self.is_anothers

    @override
    async def _take_expired(self, shard: int, *, limit: int) -> tuple[Swept, ...]:
        if self.is_away:
            raise StoreUnavailable("away")
        return await super()._take_expired(shard, limit=limit)


class Rig:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry = CollectorRegistry()
        metrics = ManagerMetrics(self.registry)
        self.manager = FlakyManager(BlockingConnection(), clock=self.clock, metrics=metrics)
        self.sweeper = SessionSweeper(self.manager, metrics=metrics, interval_s=5.0)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self.sweeper.sweep_forever())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def sample(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"contextcache_manager_{name}_total")

    async def reserve(self, session_id: str) -> None:
        await self.manager.reserve(replace(NEW, session_id=session_id), lease_id="x", lease_ttl_ms=1000)


@pytest.mark.looptime
async def test_it_sweeps_at_once_and_then_every_interval() -> None:
    rig = Rig()
    await rig.reserve("ctx_1")
    rig.clock.advance(s=60)
    rig.start()
    await asyncio.sleep(1)
    assert rig.sample("sessions_abandoned") == 1
    await rig.reserve("ctx_2")
    rig.clock.advance(s=60)
    await asyncio.sleep(3)
    assert rig.sample("sessions_abandoned") == 1
    await asyncio.sleep(2)

    assert rig.sample("sessions_abandoned") == 2
    await rig.stop()


@pytest.mark.looptime
async def test_it_outlives_a_store_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    await rig.reserve("ctx_1")
    rig.clock.advance(s=60)
    rig.manager.is_away = True
    rig.start()
    await asyncio.sleep(7)
    assert (rig.sample("sweep_failures"), rig.sample("sessions_abandoned")) == (2, 0)
    rig.manager.is_away = False
    await asyncio.sleep(5)

    assert rig.sample("sessions_abandoned") == 1
    swept = [record for record in caplog.records if record.name == "context_manager.sweeper"]
    told = ["sweep failed"]
    assert [record.message for record in swept if record.levelno >= logging.WARNING] == told
    assert not any(record.exc_info for record in swept)
    rig.manager.is_away = True
    await asyncio.sleep(60)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == told * 2
    assert rig.sample("sweep_failures") == 14
    await rig.stop()


@pytest.mark.looptime
async def test_a_fault_of_our_own_is_told_with_its_traceback_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()

    async def broken(shard: int) -> int:
        raise KeyError("broken")

    monkeypatch.setattr(rig.manager, "sweep", broken)
    rig.start()
    await asyncio.sleep(60)

    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.message for record in errors] == ["sweep failed"]
    assert errors[0].exc_info
    assert rig.sample("sweep_failures") == 12
    await rig.stop()


async def test_a_pass_repeats_until_nothing_is_due() -> None:
    rig = Rig()
    for number in range(35):
        await rig.reserve(f"ctx_{number}")
    rig.clock.advance(s=60)

    assert await rig.sweeper.sweep_pass() == 35


@pytest.mark.looptime
async def test_who_is_not_the_one_does_nothing_until_it_is() -> None:
    rig = Rig()
    await rig.reserve("ctx_1")
    rig.clock.advance(s=60)
    rig.manager.is_anothers = True
    rig.start()
    await asyncio.sleep(60)
    assert rig.sample("sessions_abandoned") == 0
    rig.manager.is_anothers = False
    await asyncio.sleep(5)

    assert rig.sample("sessions_abandoned") == 1
    await rig.stop()


@pytest.mark.looptime
async def test_who_cannot_know_sweeps() -> None:
    rig = Rig()
    await rig.reserve("ctx_1")
    rig.clock.advance(s=60)
    rig.manager.is_anothers = None
    rig.start()
    await asyncio.sleep(1)

    assert rig.sample("sessions_abandoned") == 1
    await rig.stop()
