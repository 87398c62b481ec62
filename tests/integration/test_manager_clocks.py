"""Managers whose machines disagree about the time, over one Valkey: never two holders of a lease, one serial order.

The first test moves its own time and lets hypothesis choose the steps; the second sets the machine's clock wrong. Seen
to fail with each machine's own clock in place of Redis's: sessions not found, or expired, at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from context_manager.__main__ import serve
from context_manager.client import ContextManagerClient
from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from context_manager.redis_connection import RedisConnection
from context_manager.settings import ManagerSettings
from contextcache.clock import ManualClock
from contextcache.errors import ContextBusy, ContextCacheError, LeaseLost, StoreUnavailable
from contextcache.model import NewSession, Segment, SegmentKind, SessionState, TurnCommit
from contextcache.names import shard_of
from tests.kit.valkey import ValkeyServer

HOUR_MS = 3_600_000
SKEWS_MS = (0, 30_000, -30_000, HOUR_MS, -HOUR_MS)
LEASE_MS = 10_000


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@dataclass
class Holder:
    """A turn that has taken the lease and believes to have it until then."""

    number: int
    until_ms: int
    generation: int
    num_segments: int


class World:
    """One session, several managers, one time that is Redis's."""

    def __init__(self, redis: RedisConnection) -> None:
        self.true = ManualClock()
        self.managers = [
            ContextCacheManager(redis, clock=self.true, metrics=ManagerMetrics(CollectorRegistry())) for _ in SKEWS_MS
        ]
        self.holders: dict[int, Holder] = {}
        self.committed: list[int] = []
        self.num_turns = 0

    async def begin(self, manager: ContextCacheManager) -> None:
        self.num_turns += 1
        number = self.num_turns
        now_ms = self.true.now_ms()
        living = [holder for holder in self.holders.values() if holder.until_ms > now_ms + 1]
        try:
            begun = await manager.begin_turn("demo", "ctx_1", lease_id=f"turn-{number}", lease_ttl_ms=LEASE_MS)
        except ContextBusy:
            return
        assert living == [], f"two holders at {now_ms}"
        self.holders[number] = Holder(number, now_ms + LEASE_MS, begun.session.generation, len(begun.packed))

    async def renew(self, manager: ContextCacheManager, holder: Holder) -> None:
        try:
            await manager.renew_lease("demo", "ctx_1", lease_id=f"turn-{holder.number}", lease_ttl_ms=LEASE_MS)
        except LeaseLost:
            self.holders.pop(holder.number)
        else:
            holder.until_ms = self.true.now_ms() + LEASE_MS

    async def commit(self, manager: ContextCacheManager, holder: Holder) -> None:
        said = Segment(SegmentKind.PROMPT, (holder.number,), text="x")
        commit = TurnCommit(
            *("demo", "ctx_1", f"turn-{holder.number}", holder.generation, holder.num_segments, (said,), "", "pod")
        )
        self.holders.pop(holder.number)
        try:
            session = await manager.commit_turn(commit)
        except ContextCacheError:
            # Nobody whose lease lives may be refused.
            assert holder.until_ms <= self.true.now_ms() + 1, "a living lease was taken away"
            return
        self.committed.append(holder.number)
        assert session.generation == len(self.committed) + 1


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "renew", "commit", "abort", "advance", "advance"]),
        st.integers(0, len(SKEWS_MS) - 1),
        st.integers(0, 12_000),
    ),
    max_size=40,
)


async def played(valkey: ValkeyServer, steps: list[tuple[str, int, int]]) -> None:
    valkey.command("FLUSHALL")
    connection = RedisConnection(valkey.url, timeout_s=30, max_connections=1)
    try:
        world = World(connection)
        new = NewSession("demo", "ctx_1", "smol", ttl_s=86_400)
        await world.managers[0].reserve(new, lease_id="create", lease_ttl_ms=30_000)
        said = Segment(SegmentKind.PROMPT, (0,), text="x")
        await world.managers[1].commit_turn(TurnCommit("demo", "ctx_1", "create", 0, 0, (said,), "", "pod"))
        for step, which, amount in steps:
            manager = world.managers[which]
            holders = list(world.holders.values())
            if step == "begin":
                await world.begin(manager)
            elif step == "advance":
                world.true.advance(ms=amount)
            elif holders:
                holder = holders[amount % len(holders)]
                if step == "renew":
                    await world.renew(manager, holder)
                elif step == "commit":
                    await world.commit(manager, holder)
                else:
                    world.holders.pop(holder.number)
                    await manager.abort_turn("demo", "ctx_1", lease_id=f"turn-{holder.number}")
            assert await manager.sweep(shard_of("demo", "ctx_1")) == 0, "a session was buried early"
        begun = await world.managers[2].begin_turn(
            "demo", "ctx_1", lease_id="reader", lease_ttl_ms=1000, read_only=True
        )
        assert [segment.token_ids[0] for segment in begun.transcript()] == [0, *world.committed]
    finally:
        await connection.close()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS)
def test_managers_of_any_clock_never_let_two_hold_a_lease(
    valkey: ValkeyServer, steps: list[tuple[str, int, int]]
) -> None:
    asyncio.run(played(valkey, steps))


@asynccontextmanager
async def whole_manager(url: str) -> AsyncIterator[ContextManagerClient]:
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    values = {"listen": "127.0.0.1:0", "redis_url": url, "sweep_interval_s": 0.05, "redis_timeout_s": 20.0}
    serving = asyncio.create_task(serve(ManagerSettings.model_validate(values), stop, on_started=port.set_result))
    await asyncio.wait([serving, port], return_when=asyncio.FIRST_COMPLETED)
    client = ContextManagerClient(f"127.0.0.1:{port.result()}", timeout_s=60)
    try:
        yield client
    finally:
        await client.close()
        stop.set()
        await serving


@pytest.fixture
def skewed(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set this machine's clock wrong by so many ms."""
    true_ns = time.time_ns

    def skew(ms: int) -> None:
        monkeypatch.setattr(time, "time_ns", lambda: true_ns() + ms * 1_000_000)

    return skew


async def test_a_manager_that_is_an_hour_ahead_or_behind_does_the_others_no_harm(
    valkey: ValkeyServer, skewed: Callable[[int], None]
) -> None:
    """Its sweeps bury nothing, its sessions live as long as others', it leaves others' leases alone."""
    valkey.command("FLUSHALL")
    async with whole_manager(valkey.url) as client:
        created = []
        for number, skew_ms in enumerate(SKEWS_MS):
            skewed(skew_ms)
            name = f"ctx_{number}"
            await client.reserve(NewSession("demo", name, "smol", ttl_s=600), lease_id="c", lease_ttl_ms=60_000)
            said = Segment(SegmentKind.PROMPT, (0,), text="x")
            await client.register_session_cache(TurnCommit("demo", name, "c", 0, 0, (said,), "", "pod"))
            created.append((await client.begin_turn("demo", name, lease_id="turn", lease_ttl_ms=60_000))[0])
        for skew_ms in SKEWS_MS:
            skewed(skew_ms)
            for number in range(len(SKEWS_MS)):
                session = await client.locate("demo", f"ctx_{number}")
                assert session.state is SessionState.BUSY
                with pytest.raises(ContextBusy):
                    await client.begin_turn("demo", f"ctx_{number}", lease_id="other", lease_ttl_ms=60_000)

    times_ms = [session.created_at_ms for session in created]
    assert times_ms == sorted(times_ms)
    assert times_ms[-1] - times_ms[0] < HOUR_MS // 2


async def test_nobody_is_served_with_a_guessed_time(tmp_path: Path) -> None:
    valkey = ValkeyServer(tmp_path)
    async with whole_manager(valkey.url) as client:
        with pytest.raises(StoreUnavailable):
            await client.locate("demo", "ctx_1")
