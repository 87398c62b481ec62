"""Managers whose machines disagree about the time, over one Valkey: never two holders of a lease, one serial order.

The first test moves its own time and lets hypothesis choose what happens; the second starts whole managers with wrong
clocks. Seen to fail with each machine's own clock in place of Redis's: sessions not found, or expired, at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
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
from context_manager.redis_store import RedisSessionStore
from context_manager.settings import ManagerSettings
from context_manager.store_clock import StoreClock
from contextcache.clock import ManualClock, SystemClock
from contextcache.errors import ContextBusy, ContextCacheError, LeaseLost, StoreUnavailable
from contextcache.model import NewSession, Segment, SegmentKind, SessionState, TurnCommit
from contextcache.names import shard_of
from tests.kit.valkey import ValkeyServer

HOUR_MS = 3_600_000
SKEWS_MS = (0, 30_000, -30_000, HOUR_MS, -HOUR_MS)
LEASE_MS = 10_000


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


@dataclass
class Skewed:
    """A machine's clock."""

    true: ManualClock
    skew_ms: int

    def now_ms(self) -> int:
        return self.true.now_ms() + self.skew_ms


@dataclass
class Holder:
    """A turn that has taken the lease and believes to have it until then."""

    number: int
    until_ms: int
    generation: int
    num_segments: int


class World:
    """One session, managers with clocks of their own, one true time that is Redis's."""

    def __init__(self, store: RedisSessionStore) -> None:
        self.true = ManualClock()
        self.managers: list[ContextCacheManager] = []
        self.clocks: list[StoreClock] = []
        for skew_ms in SKEWS_MS:
            metrics = ManagerMetrics(CollectorRegistry())
            clock = StoreClock(
                self._redis_time,
                metrics=metrics,
                wall=Skewed(self.true, skew_ms),
                # Machines were started at different times.
                uptime_s=lambda boot_ms=skew_ms * 7: (self.true.now_ms() - boot_ms) / 1000,
            )
            self.managers.append(ContextCacheManager(store, clock=clock, metrics=metrics))
            self.clocks.append(clock)
        self.holders: dict[int, Holder] = {}
        self.committed: list[int] = []
        self.num_turns = 0

    async def _redis_time(self) -> int:
        return self.true.now_ms()

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
        st.sampled_from(["begin", "begin", "renew", "commit", "abort", "advance", "advance", "measure"]),
        st.integers(0, len(SKEWS_MS) - 1),
        st.integers(0, 12_000),
    ),
    max_size=40,
)


async def played(valkey: ValkeyServer, steps: list[tuple[str, int, int]]) -> None:
    valkey.command("FLUSHALL")
    connection = RedisConnection(valkey.url, timeout_s=30, max_connections=1)
    store = RedisSessionStore(connection, tombstone_s=3600)
    try:
        world = World(store)
        for clock in world.clocks:
            await clock.measure()
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
            elif step == "measure":
                await world.clocks[which].measure()
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
        await store.close()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS)
def test_managers_of_any_clock_never_let_two_hold_a_lease(
    valkey: ValkeyServer, steps: list[tuple[str, int, int]]
) -> None:
    asyncio.run(played(valkey, steps))


class WrongClock:
    """The machine's clock, `skew_ms` ahead."""

    def __init__(self, skew_ms: int) -> None:
        self._skew_ms = skew_ms

    def now_ms(self) -> int:
        return SystemClock().now_ms() + self._skew_ms


@asynccontextmanager
async def whole_manager(url: str, skew_ms: int) -> AsyncIterator[ContextManagerClient]:
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    values = {"listen": "127.0.0.1:0", "redis_url": url, "sweep_interval_s": 0.05, "redis_timeout_s": 20.0}
    serving = asyncio.create_task(
        serve(ManagerSettings.model_validate(values), stop, on_started=port.set_result, wall=WrongClock(skew_ms))
    )
    await asyncio.wait([serving, port], return_when=asyncio.FIRST_COMPLETED)
    client = ContextManagerClient(f"127.0.0.1:{port.result()}", timeout_s=60)
    try:
        yield client
    finally:
        await client.close()
        stop.set()
        await serving


async def test_a_manager_that_is_an_hour_ahead_or_behind_does_the_others_no_harm(valkey: ValkeyServer) -> None:
    """Its sweeps bury nothing, its sessions live as long as others', it leaves others' leases alone."""
    valkey.command("FLUSHALL")
    async with AsyncExitStack() as stack:
        clients, slack_ms = [], 1000
        for skew in SKEWS_MS:
            started_ms = SystemClock().now_ms()
            clients.append(await stack.enter_async_context(whole_manager(valkey.url, skew)))
            # It takes Redis's time from an answer that was at most this late.
            slack_ms = max(slack_ms, SystemClock().now_ms() - started_ms)
        begun_ms = SystemClock().now_ms()
        for number, client in enumerate(clients):
            name = f"ctx_{number}"
            await client.reserve(NewSession("demo", name, "smol", ttl_s=600), lease_id="c", lease_ttl_ms=60_000)
            said = Segment(SegmentKind.PROMPT, (0,), text="x")
            await client.register_session_cache(TurnCommit("demo", name, "c", 0, 0, (said,), "", "pod"))
            await client.begin_turn("demo", name, lease_id="turn", lease_ttl_ms=60_000)
        took_ms = SystemClock().now_ms() - begun_ms
        for number in range(len(clients)):
            for client in clients:
                session = await client.locate("demo", f"ctx_{number}")
                assert session.state is SessionState.BUSY
                assert -slack_ms <= session.created_at_ms - begun_ms <= took_ms + slack_ms
                with pytest.raises(ContextBusy):
                    await client.begin_turn("demo", f"ctx_{number}", lease_id="other", lease_ttl_ms=60_000)


async def test_nobody_is_served_with_a_guessed_time(tmp_path: Path) -> None:
    valkey = ValkeyServer(tmp_path)
    async with whole_manager(valkey.url, HOUR_MS) as client:
        with pytest.raises(StoreUnavailable):
            await client.locate("demo", "ctx_1")
