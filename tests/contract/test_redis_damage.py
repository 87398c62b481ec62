"""Damage in Redis stays where it is: one bad row, name or set, and everything else is swept, listed and counted."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
import redis
from prometheus_client import CollectorRegistry

from context_manager.layout import DAY_MS, counted_key, day_of, expiry_key, place_key, usage_key
from context_manager.limits import SessionKey
from context_manager.listing import LIST_ROWS_MAX
from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from context_manager.redis_connection import RedisConnection
from context_manager.sweeper import SessionSweeper
from contextcache.clock import ManualClock
from contextcache.errors import ContextCacheError
from contextcache.model import HeldCacheRef, SessionPage, Usage
from contextcache.names import NUM_SHARDS, shard_of
from tests.contract.session_store_contract import LEASE_MS, NEW, NOW, REF_1, TOMBSTONE_S, TTL_MS, first_commit
from tests.kit.session_store import SessionStore, script_keys
from tests.kit.valkey import ValkeyServer

Raw = redis.Redis
Damage = Callable[[Raw, list[str]], object]


def _field(name: str, text: str) -> Damage:
    return lambda raw, keys: raw.hset(keys[0], name, text)


def _other_type(position: int) -> Damage:
    return lambda raw, keys: (raw.delete(keys[position]), raw.set(keys[position], "nothing of ours"))


ROWS: dict[str, Damage] = {
    "another type": _other_type(0),
    "no state": lambda raw, keys: raw.hdel(keys[0], "state"),
    "a state nobody knows": _field("state", "resting"),
    "no end": lambda raw, keys: raw.hdel(keys[0], "expires_at_ms"),
    "no creation": lambda raw, keys: raw.hdel(keys[0], "created_at_ms"),
    "a word for a number": _field("expires_at_ms", "soon"),
    "no number": _field("expires_at_ms", ""),
    "infinity": _field("expires_at_ms", "inf"),
    "a number beyond all": _field("expires_at_ms", "9" * 40),
    "a broken lease": _field("lease_until_ms", "nan"),
}
NAMES = (b"garbage", b"\xff\xfe:ctx", b"demo:ctx:1", b":", b"demo:ctx_{}", b"demo:elsewhere")


@pytest.fixture
def raw(server: ValkeyServer) -> Iterator[Raw]:
    with redis.Redis(port=server.port) as raw:
        raw.flushall()
        yield raw


@dataclass
class Rig:
    store: SessionStore
    raw: Raw
    clock: ManualClock
    registry: CollectorRegistry
    sweeper: SessionSweeper

    async def fill(self, num_shards: int = NUM_SHARDS) -> dict[int, list[str]]:
        """Create four sessions in each shard; return their ids."""
        ids: dict[int, list[str]] = {shard: [] for shard in range(num_shards)}
        for name in (f"ctx_{number}" for number in range(2000)):
            names = ids.get(shard_of("demo", name))
            if names is None or len(names) == 4:
                continue
            names.append(name)
            await self.store.reserve(
                replace(NEW, session_id=name), lease_id="create", lease_ttl_ms=LEASE_MS, now_ms=NOW
            )
            await self.store.commit_turn(first_commit(SessionKey("demo", name)), now_ms=NOW)
        return ids

    def total(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"contextcache_manager_{name}_total")


@pytest.fixture
async def rig(server: ValkeyServer, raw: Raw) -> AsyncIterator[Rig]:
    connection = RedisConnection(server.url, timeout_s=10.0, max_connections=8)
    store = SessionStore(connection, tombstone_s=TOMBSTONE_S)
    clock, registry = ManualClock(NOW), CollectorRegistry()
    metrics = ManagerMetrics(registry)
    manager = ContextCacheManager(connection, clock=clock, metrics=metrics)
    yield Rig(store, raw, clock, registry, SessionSweeper(manager, metrics=metrics, interval_s=5.0))
    await store.close()


async def test_one_damaged_row_a_shard_and_all_others_are_swept(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    ids = await rig.fill()
    damages = list(ROWS.values())
    for shard, names in ids.items():
        damages[shard % len(damages)](rig.raw, script_keys(SessionKey("demo", names[0])))
    rig.clock.advance(s=TTL_MS // 1000)

    assert await rig.sweeper.sweep_pass() == 4 * NUM_SHARDS
    assert rig.total("sessions_expired") == 3 * NUM_SHARDS
    assert rig.total("sessions_damaged") == NUM_SHARDS
    assert rig.total("sweep_failures") == 0
    left = list(rig.raw.scan_iter())
    assert [key for key in left if key.endswith(b":expiry") or b":tenant:" in key] == []
    assert [key for key in left if rig.raw.pttl(key) < 0] == []
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert {record.message for record in told} == {"damaged sessions set aside"}
    assert "nothing of ours" not in caplog.text
    assert await rig.sweeper.sweep_pass() == 0
    assert rig.total("sessions_damaged") == NUM_SHARDS


async def test_names_that_are_none_of_ours_are_taken_out_of_the_index(rig: Rig) -> None:
    ids = await rig.fill()
    for shard in range(NUM_SHARDS):
        rig.raw.zadd(expiry_key(shard), {NAMES[shard % len(NAMES)]: 1})
    rig.clock.advance(s=TTL_MS // 1000)

    assert shard_of("demo", "elsewhere") not in range(5, NUM_SHARDS, len(NAMES))
    assert await rig.sweeper.sweep_pass() == 5 * len(ids)
    assert rig.total("sessions_expired") == 4 * len(ids)
    assert rig.total("sessions_damaged") == NUM_SHARDS


async def test_a_shard_whose_index_is_spoilt_costs_the_others_nothing(rig: Rig) -> None:
    await rig.fill()
    _other_type(0)(rig.raw, [expiry_key(7)])
    rig.clock.advance(s=TTL_MS // 1000)

    assert await rig.sweeper.sweep_pass() == 4 * (NUM_SHARDS - 1)
    assert rig.total("sweep_failures") == 1
    assert rig.registry.get_sample_value("contextcache_manager_last_sweep_timestamp_seconds") == 0


async def test_a_spoilt_place_of_an_abandoned_create_stops_no_sweep(rig: Rig) -> None:
    """Seen failing with `call` for `pcall`."""
    await rig.store.reserve(NEW, lease_id="create", lease_ttl_ms=LEASE_MS, now_ms=NOW)
    rig.raw.set(place_key(SessionKey(NEW.tenant, NEW.session_id)), "nothing of ours")
    rig.clock.advance(s=LEASE_MS / 1000)

    assert await rig.sweeper.sweep_pass() == 1


async def test_a_spoilt_set_of_a_tenant_or_a_transcript_stops_no_sweep(rig: Rig) -> None:
    ids = await rig.fill()
    for shard, names in ids.items():
        _other_type(3 if shard % 2 else 1)(rig.raw, script_keys(SessionKey("demo", names[0])))
    rig.clock.advance(s=TTL_MS // 1000)

    assert await rig.sweeper.sweep_pass() == 4 * NUM_SHARDS


@pytest.mark.parametrize("spoilt", ["a word", "another type", "a string"])
async def test_usage_is_counted_over_what_was_spoilt(rig: Rig, spoilt: str) -> None:
    """Seen failing: a sidecar told the same batch again and again, and those of the tenants behind it never."""
    counted = counted_key(shard_of("demo", "me"), "demo", "me")
    if spoilt == "a word":
        rig.raw.hset(counted, "number", "many")
    elif spoilt == "a string":
        rig.raw.set(counted, "7")
    else:
        rig.raw.rpush(counted, "many")
    tell = partial(rig.store.add_usage, "demo", "me", [Usage("app", {"turns": 1})], now_ms=NOW)

    assert [await tell(number=number) for number in (1, 1, 2)] == [True, False, True]
    assert 0 < rig.raw.pttl(counted) <= DAY_MS


@pytest.mark.parametrize("said", ["many", "-5", "1e9", "9" * 30, "9" * 5000])
async def test_a_number_of_usage_that_is_none_hides_no_other(rig: Rig, said: str) -> None:
    """Seen failing: a question about the day broke off."""
    for shard in range(NUM_SHARDS):
        rig.raw.hset(usage_key(shard, "demo", day_of(NOW)), mapping={"app:turns": said, "app:contexts": 2})

    report = await rig.store.read_usage("demo", [day_of(NOW)], now_ms=NOW)
    assert [(one.key, one.counts) for one in report.days[day_of(NOW)]] == [("app", {"contexts": 2 * NUM_SHARDS})]


@pytest.mark.parametrize("damage", [lambda raw, keys: raw.delete(keys[0]), ROWS["another type"], ROWS["no creation"]])
async def test_a_page_goes_on_behind_hundreds_of_names_whose_rows_are_gone(rig: Rig, damage: Damage) -> None:
    """As when Redis evicts. Seen failing: the page said that more follows, behind nobody; clients began anew."""
    names = [f"ctx_{number}" for number in range(LIST_ROWS_MAX + 20)]
    for number, name in enumerate(names):
        new = replace(NEW, session_id=name)
        await rig.store.reserve(new, lease_id="create", lease_ttl_ms=LEASE_MS, now_ms=NOW + number)
    for name in names[10:]:
        damage(rig.raw, script_keys(SessionKey("demo", name)))
    seen: list[str] = []
    page = SessionPage((), has_more=True, last_id="")
    for _ in range(3):
        page = await rig.store.list_sessions("demo", limit=20, after=page.last_id, model_id="", now_ms=NOW)
        seen += [session.session_id for session in page.sessions]
        if not page.has_more:
            break

    assert (seen, page.has_more) == (names[:10][::-1], False)


@pytest.mark.parametrize("damage", ROWS.values(), ids=ROWS)
async def test_a_damaged_row_is_refused_and_hides_no_other(rig: Rig, damage: Damage) -> None:
    ids = await rig.fill(2)
    damaged, *sound = [SessionKey("demo", name) for name in ids[0]]
    damage(rig.raw, script_keys(damaged))

    with pytest.raises(ContextCacheError) as refused:
        await rig.store.begin_turn(
            damaged, lease_id="turn", lease_ttl_ms=LEASE_MS, read_only=False, expected_generation=None, now_ms=NOW
        )
    assert refused.value.code == "internal_error"
    listed = (await rig.store.list_sessions("demo", limit=100, after="", model_id="", now_ms=NOW)).sessions
    assert len(listed) == 7
    held = [HeldCacheRef("demo", key.session_id, REF_1) for key in (damaged, *sound)]
    assert await rig.store.check_refs(held, now_ms=NOW) == ()
    rig.clock.advance(s=TTL_MS // 1000)
    assert await rig.sweeper.sweep_pass() == 8
    assert (rig.total("sessions_damaged"), rig.total("sessions_expired")) == (1, 7)
    assert await rig.store.count_sessions() == 0
