"""No key of ours lies in Redis for ever: whatever is done, each ends by itself, and none too early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import astuple, replace
from random import Random

import pytest
import redis

from context_manager.layout import HOUR_MS, KEY_GRACE_MS, turns_key
from context_manager.limits import SessionKey
from context_manager.redis_connection import RedisConnection
from contextcache.errors import ContextCacheError
from contextcache.model import NewSession, SessionMode, TtlPolicy
from contextcache.names import NUM_SHARDS, shard_of
from tests.contract.session_changes_contract import beside
from tests.contract.session_store_contract import (
    LEASE_MS,
    NEW,
    NOW,
    TOMBSTONE_MS,
    TOMBSTONE_S,
    TTL_MS,
    first_commit,
    receipt,
)
from tests.kit.seed import SEED
from tests.kit.session_store import SessionStore, script_keys
from tests.kit.until import until
from tests.kit.valkey import ValkeyServer

KEY = SessionKey(NEW.tenant, NEW.session_id)
NAMES = [KEY.session_id, *beside(KEY, 2), *[f"other_{number}" for number in range(2)]]
_SLACK_MS = 60_000
"""Time that a test may take between a write and a look at what is left."""


@pytest.fixture
def raw(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port, decode_responses=True) as raw:
        raw.flushall()
        yield raw


@pytest.fixture
async def store(server: ValkeyServer, raw: redis.Redis) -> AsyncIterator[SessionStore]:
    store = SessionStore(_connection(server), tombstone_s=TOMBSTONE_S)
    yield store
    await store.close()


def _connection(server: ValkeyServer) -> RedisConnection:
    return RedisConnection(server.url, timeout_s=60.0, max_connections=8)


def left_ms(raw: redis.Redis) -> dict[str, int]:
    """Return how long each key has; -1: for ever."""
    keys = list(raw.scan_iter(count=1000))
    with raw.pipeline(transaction=False) as at_once:
        for key in keys:
            at_once.pttl(key)
        return {key: left for key, left in zip(keys, at_once.execute(), strict=True) if left != -2}


class RandomWork:
    """One operation after the other, the clock going on in between, on three ids of two tenants."""

    def __init__(self, store: SessionStore, seed: int) -> None:
        self._store = store
        self._random = Random(seed)
        self.now_ms = NOW

    async def step(self) -> str:
        pick = self._random
        self.now_ms += pick.choice((*[0, 1, 500] * 3, 40_000, 700_000))
        key = SessionKey(pick.choice(("demo", "other")), pick.choice(NAMES))
        names = "reserve create create fork fork begin turn turn commit rewind renew abort touch touch remove sweep"
        name = pick.choice(names.split())
        with suppress(ContextCacheError):
            await getattr(self, f"_{name}")(key)
        return f"{name} {key}"

    async def _reserve(self, key: SessionKey) -> None:
        pick = self._random
        new = NewSession(
            key.tenant,
            key.session_id,
            "smol",
            mode=pick.choice(tuple(SessionMode)),
            ttl_s=pick.choice((1, 60, 600, 86_400)),
            ttl_policy=pick.choice(tuple(TtlPolicy)),
        )
        await self._store.reserve(new, lease_id=self._lease(), lease_ttl_ms=LEASE_MS, now_ms=self.now_ms)

    async def _begin(self, key: SessionKey) -> None:
        await self._store.begin_turn(
            key,
            lease_id=self._lease(),
            lease_ttl_ms=LEASE_MS,
            read_only=self._random.random() < 0.3,
            expected_generation=None,
            now_ms=self.now_ms,
        )

    async def _commit(self, key: SessionKey) -> None:
        generation = (await self._store.get(key, now_ms=self.now_ms)).generation
        commit = replace(
            first_commit(key, self._lease()), expected_generation=generation, receipt=receipt(generation + 1)
        )
        await self._store.commit_turn(commit, now_ms=self.now_ms)

    async def _rewind(self, key: SessionKey) -> None:
        await self._store.rewind(key, generation=1, expected_generation=None, now_ms=self.now_ms)

    async def _create(self, key: SessionKey) -> None:
        await self._reserve(key)
        await self._commit(key)

    async def _fork(self, key: SessionKey) -> None:
        """Into a context of the same shard, or of another one."""
        child = SessionKey(key.tenant, self._random.choice([name for name in NAMES if name != key.session_id]))
        await self._reserve(child)
        commit = replace(first_commit(child, self._lease()), segments=())
        generation = self._random.choice((None, 1))
        await self._store.fork(key, generation=generation, commit=commit, now_ms=self.now_ms)

    async def _turn(self, key: SessionKey) -> None:
        await self._begin(key)
        await self._commit(key)

    async def _renew(self, key: SessionKey) -> None:
        await self._store.renew_lease(key, lease_id=self._lease(), lease_ttl_ms=LEASE_MS, now_ms=self.now_ms)

    async def _abort(self, key: SessionKey) -> None:
        await self._store.abort_turn(key, lease_id=self._lease(), now_ms=self.now_ms)

    async def _touch(self, key: SessionKey) -> None:
        ttl_s = self._random.choice((None, 1, 600, 86_400))
        await self._store.touch(key, ttl_s=ttl_s, ttl_policy=None, metadata={"a": "b"}, now_ms=self.now_ms)

    async def _remove(self, key: SessionKey) -> None:
        await self._store.unregister(key, now_ms=self.now_ms)

    async def _sweep(self, _key: SessionKey) -> None:
        for shard in range(NUM_SHARDS):
            await self._store.take_expired(shard, now_ms=self.now_ms, limit=100)

    def _lease(self) -> str:
        return self._random.choice(("one", "two"))


def what_is_wrong(raw: redis.Redis, now_ms: int) -> list[str]:
    """Return which keys have no end, or one that does not fit the end of what is in them."""
    left = left_ms(raw)
    wrong = [f"for ever: {key}" for key, ms in left.items() if ms < 0]
    for key in (key for key in left if ":bytes:" in key):
        ledger = raw.hgetall(key)
        del ledger["first"]
        total = int(ledger.pop("sum"))
        wrong += [f"{key} says {total}, its hours {ledger}"] * (total != sum(map(int, ledger.values())))
    wrong += [
        f"of no session: {key}" for key in left if ":turns:" in key and key.replace(":turns:", ":session:") not in left
    ]
    for row_key in (key for key in left if ":session:" in key):
        row = raw.hgetall(row_key)
        key = SessionKey(*row_key.rsplit(":", 2)[1:])
        turns = turns_key(key)
        if row["state"] in ("tombstone", "creating"):
            wrong += [f"{turns} outlives its session"] * (turns in left)
        if row["state"] == "tombstone":
            continue
        due_ms = int(row["lease_until_ms" if row["state"] == "creating" else "expires_at_ms"])
        wanted_ms = max(due_ms - now_ms, 0) + TOMBSTONE_MS + KEY_GRACE_MS
        _, transcript, *sets = script_keys(key)
        tag = row_key.partition(":session:")[0]
        for name in (named.split(":")[0] for named in row.get("trunks", "").split()):
            trunk = f"{tag}:trunk:{key.tenant}:{name}"
            wrong += [f"{trunk} ends before {row_key}"] * (left.get(trunk, 0) < wanted_ms - _SLACK_MS)
        # The clock of the test went on since the row's last change, Redis's own did not.
        kept = [one for one in (row_key, transcript, turns) if one in left]
        wrong += [f"{one} ends too early" for one in kept if left[one] < wanted_ms - _SLACK_MS]
        wrong += [f"{one} ends before {row_key}" for one in sets if left[one] < left[row_key] - 400]
    return wrong


@pytest.mark.parametrize("seed", [SEED, *(pytest.param(SEED + more, marks=pytest.mark.thorough) for more in (1, 2))])
async def test_whatever_is_done_every_key_ends_and_none_too_early(
    server: ValkeyServer, raw: redis.Redis, seed: int
) -> None:
    store = SessionStore(_connection(server), tombstone_s=TOMBSTONE_S, tenant_contexts_max=7)
    work = RandomWork(store, seed)
    for _ in range(250):
        done = await work.step()

        assert what_is_wrong(raw, work.now_ms) == [], done
    await store.close()


async def test_a_key_ends_a_tombstone_and_a_day_after_its_session(store: SessionStore, raw: redis.Redis) -> None:
    (row, transcript, expiry, tenant), turns = script_keys(KEY), turns_key(KEY)

    def left(key: str) -> int:
        return round((raw.pttl(key) - TOMBSTONE_MS - KEY_GRACE_MS) / _SLACK_MS)

    await store.reserve(NEW, lease_id="create", lease_ttl_ms=10 * _SLACK_MS, now_ms=NOW)
    assert [left(key) for key in (row, expiry, tenant)] == [10, 10, 10]
    await store.commit_turn(replace(first_commit(), receipt=receipt(1)), now_ms=NOW)
    assert [left(key) for key in (row, transcript, turns, expiry, tenant)] == [TTL_MS // _SLACK_MS] * 5
    await store.touch(KEY, ttl_s=3600, ttl_policy=None, metadata=None, now_ms=NOW)
    assert [left(key) for key in (row, transcript, turns, expiry, tenant)] == [60] * 5
    await store.touch(KEY, ttl_s=60, ttl_policy=TtlPolicy.SLIDING, metadata=None, now_ms=NOW)
    assert [left(key) for key in (row, transcript, turns)] == [1, 1, 1]


async def test_a_manager_with_a_wrong_clock_deletes_nothing(store: SessionStore, raw: redis.Redis) -> None:
    """Seen to fail with PEXPIREAT: a clock two days behind, and a row was gone as soon as it was written."""
    await store.reserve(NEW, lease_id="create", lease_ttl_ms=LEASE_MS, now_ms=1)

    assert (await store.commit_turn(first_commit(), now_ms=1)).generation == 1
    assert len(left_ms(raw)) == 5


@pytest.mark.thorough
@pytest.mark.parametrize("server", [False], indirect=True, ids=["single"])
async def test_with_the_managers_gone_for_good_all_of_ten_thousand_sessions_go(
    server: ValkeyServer, raw: redis.Redis
) -> None:
    store = SessionStore(_connection(server), tombstone_s=0, grace_ms=4000)

    async def create(number: int) -> None:
        new = replace(NEW, tenant=f"tenant-{number % 7}", session_id=f"ctx_{number}", ttl_s=1)
        now_ms = round(time.time() * 1000)
        await store.reserve(new, lease_id="create", lease_ttl_ms=1000, now_ms=now_ms)
        if number % 10:
            await store.commit_turn(first_commit(SessionKey(new.tenant, new.session_id)), now_ms=now_ms)

    seen: set[str] = set()
    for start in range(0, 10_000, 500):
        await asyncio.gather(*(create(number) for number in range(start, start + 500)))
        left = left_ms(raw)
        seen |= left.keys()

        assert [key for key, ms in left.items() if ms < 0] == []
    await store.close()

    assert len(seen) > 10_000
    ledgers = {key for key in seen if ":bytes:" in key}
    assert 7 <= len(ledgers) <= 7 * NUM_SHARDS
    await until(raw.dbsize, is_so=lambda num_keys: num_keys == len(ledgers), what="no key is left but ledgers")
    assert all(0 < ms <= HOUR_MS + 5000 for ms in left_ms(raw).values())


async def test_a_set_without_an_end_gets_that_of_its_longest_life(store: SessionStore, raw: redis.Redis) -> None:
    """The first change after an upgrade is that of a short-lived session; the others need the set for longer."""
    names = [f"ctx_{number}" for number in range(2000)]
    long, short = [name for name in names if shard_of("demo", name) == shard_of(*astuple(KEY))][:2]
    for name, ttl_s in ((long, 86_400), (short, 60)):
        await store.reserve(
            replace(NEW, session_id=name, ttl_s=ttl_s), lease_id="create", lease_ttl_ms=LEASE_MS, now_ms=NOW
        )
        await store.commit_turn(first_commit(SessionKey("demo", name)), now_ms=NOW)
    _, _, expiry, tenant = script_keys(KEY)
    raw.persist(expiry)
    raw.persist(tenant)
    await store.touch(SessionKey("demo", short), ttl_s=60, ttl_policy=None, metadata=None, now_ms=NOW)

    assert what_is_wrong(raw, NOW) == []
