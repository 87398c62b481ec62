"""Forks share their source's segments in Redis: a random family of contexts is what it is without sharing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import redis
from typing_extensions import override

from context_manager.layout import CONTEXT_BYTES, LENGTHS_MAX, PLACE_BYTES, SEGMENT_BYTES, TRUNKS_MAX, session_key
from context_manager.limits import SessionKey
from context_manager.manager import ContextCacheManager
from context_manager.redis_connection import RedisConnection
from contextcache.errors import ContextCacheError
from contextcache.model import BRANCH_LEASE_ID, Segment, SegmentKind, TtlPolicy, TurnCommit
from contextcache.names import shard_of
from tests.contract.session_changes_contract import beside
from tests.contract.session_store_contract import KEY, LEASE_MS, NEW, NOW, REF_1, TOMBSTONE_S, TTL_MS
from tests.kit.seed import SEED
from tests.kit.session_store import BlockingConnection, SessionStore, transcript_key
from tests.kit.valkey import ValkeyServer


@pytest.fixture
def raw(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port, decode_responses=True) as raw:
        raw.flushall()
        yield raw


@pytest.fixture
async def store(server: ValkeyServer, raw: redis.Redis) -> AsyncIterator[SessionStore]:
    connection = RedisConnection(server.url, timeout_s=30.0, max_connections=8)
    store = SessionStore(connection, tombstone_s=TOMBSTONE_S)
    yield store
    await store.close()


def said(number: int) -> tuple[Segment, ...]:
    """Return one to three segments that are told from all others."""
    text = f"{number} " * (1 + number % 90)
    return tuple(
        Segment(SegmentKind.PROMPT, tuple(range(number, number + 1 + part)), text=text)
        for part in range(1 + number % 3)
    )


async def transcript_of(store: SessionStore, key: SessionKey, now_ms: int = NOW) -> tuple[Segment, ...]:
    begun = await store.begin_turn(
        key, lease_id="reader", lease_ttl_ms=LEASE_MS, read_only=True, expected_generation=None, now_ms=now_ms
    )
    return begun.transcript()


class CopyingManager(ContextCacheManager):
    """A manager whose forks copy their segments."""

    @override
    async def _change(self, script: str, key: SessionKey, *more: Any, **named: Any) -> Sequence[Any]:
        if script != "share":
            return await super()._change(script, key, *more, **named)
        there = self._accepted(await self._run("get", [session_key(key)], {}))
        row, lease = dict(zip(there[1][::2], there[1][1::2], strict=True)), named["lease_id"].encode()
        # A repeat is known, as share.lua knows it.
        if lease == row[b"committed_lease_id"] or (lease == row[b"lease_id"] and b"forked_from" in row):
            return [*there, int(row[b"num_segments"])]
        return [b"copy"]


class CopyingStore(SessionStore):
    manager_class = CopyingManager


def bytes_there(server: ValkeyServer) -> int:
    """Return what a tenant's rows, segments and places come to; a segment that forks share is there once."""
    found = 0
    with redis.Redis(port=server.port) as raw:
        for key in raw.scan_iter(count=1000):
            kind = key.split(b":")[2]
            if kind == b"session":
                found += CONTEXT_BYTES + len(raw.hget(key, "metadata"))
            elif kind in (b"transcript", b"trunk"):
                segments = raw.lrange(key, 1 if kind == b"trunk" else 0, -1)
                found += sum(SEGMENT_BYTES + len(segment) for segment in segments)
            elif kind == b"place":
                found += PLACE_BYTES
    return found


class Family:
    """The same operations on several stores, on contexts of one shard."""

    def __init__(self, *stores: SessionStore, seed: int, num_names: int = 8) -> None:
        self.stores = stores
        self.random = Random(seed)
        self.keys = [KEY, *(SessionKey(KEY.tenant, name) for name in beside(KEY, num_names - 1))]
        self.number = 0

    async def create(self, key: SessionKey) -> None:
        self.number += 1
        for store in self.stores:
            policy = TtlPolicy.SLIDING if self.number % 2 else TtlPolicy.FIXED
            new = replace(NEW, session_id=key.session_id, ttl_policy=policy)
            await store.reserve(new, lease_id=f"l{self.number}", lease_ttl_ms=LEASE_MS, now_ms=NOW)
            await store.commit_turn(self._commit(key, 0, 0), now_ms=NOW)

    def _commit(
        self, key: SessionKey, generation: int, keep: int, segments: tuple[Segment, ...] | None = None
    ) -> TurnCommit:
        given = said(self.number) if segments is None else segments
        return TurnCommit(key.tenant, key.session_id, f"l{self.number}", generation, keep, given, REF_1, "pod")

    async def turn(self, key: SessionKey) -> None:
        self.number += 1
        size = len(await transcript_of(self.stores[0], key))
        keep = self.random.choice((size, size, self.random.randint(0, size)))
        for store in self.stores:
            generation = (await store.get(key, now_ms=NOW)).generation
            await store.begin_turn(
                key,
                lease_id=f"l{self.number}",
                lease_ttl_ms=LEASE_MS,
                read_only=False,
                expected_generation=None,
                now_ms=NOW,
            )
            await store.commit_turn(self._commit(key, generation, keep), now_ms=NOW)

    async def fork(self, source: SessionKey, key: SessionKey, *, generation: int | None = None) -> None:
        self.number += 1
        is_branch = self.random.random() < 0.3
        for store in self.stores:
            lease_id = BRANCH_LEASE_ID if is_branch else f"l{self.number}"
            new = replace(NEW, session_id=key.session_id)
            await store.reserve(new, lease_id=lease_id, lease_ttl_ms=LEASE_MS, now_ms=NOW)
            commit = replace(self._commit(key, 0, 0, ()), lease_id=lease_id)
            try:
                for _ in range(self.random.choice((1, 1, 2))):
                    await store.fork(source, generation=generation, commit=commit, now_ms=NOW)
            except ContextCacheError:
                await store.abort_turn(key, lease_id=lease_id, now_ms=NOW)
                raise

    async def rewind(self, key: SessionKey) -> None:
        now = (await self.stores[0].get(key, now_ms=NOW)).generation
        generation = self.random.randint(1, now)
        for store in self.stores:
            await store.rewind(key, generation=generation, expected_generation=None, now_ms=NOW)

    async def delete(self, key: SessionKey) -> None:
        for store in self.stores:
            await store.unregister(key, now_ms=NOW)

    async def step(self, raw: redis.Redis) -> str:
        pick, key, other = self.random.random(), *self.random.sample(self.keys, 2)
        state = self.random.getstate()
        told = []
        for store in self.stores:  # each in its own turn, with the same choices
            self.random.setstate(state)
            alone, self.stores = self.stores, (store,)
            before = self.number
            try:
                if pick < 0.2:
                    await self.create(key)
                elif pick < 0.5:
                    await self.turn(key)
                elif pick < 0.75:
                    if len(str(raw.hget(session_key(key), "trunks") or "").split()) < TRUNKS_MAX:
                        generation = self.random.choice((None, None, self.random.randint(1, 6)))
                        await self.fork(key, other, generation=generation)
                elif pick < 0.85:
                    await self.rewind(key)
                else:
                    await self.delete(key)
                told.append("ok")
            except ContextCacheError as exc:
                told.append(exc.code)
            finally:
                self.stores, self.number = alone, before
        self.number += 1
        assert len(set(told)) == 1, (told, pick, key, other)
        return f"{pick:.2f} {key.session_id} {other.session_id}: {told[0]}"


@pytest.mark.parametrize("seed", [SEED, *(pytest.param(SEED + more, marks=pytest.mark.thorough) for more in (1, 2, 3))])
async def test_a_random_family_is_what_it_is_without_sharing_and_counts_each_byte_once(
    server: ValkeyServer, store: SessionStore, raw: redis.Redis, seed: int
) -> None:
    copying = CopyingStore(BlockingConnection(), tombstone_s=TOMBSTONE_S)
    family = Family(copying, store, seed=seed)
    ledger = store._bytes.ledger(KEY)
    done: list[str] = []
    for _ in range(150):
        done.append(await family.step(raw))
        for key in family.keys:
            found: list[object] = []
            for one in (copying, store):
                with suppress(ContextCacheError):
                    session = await one.get(key, now_ms=NOW)
                    found.append((replace(session, mark=""), session.num_tokens))
                    found.append(await transcript_of(one, key))
            assert found[: len(found) // 2] == found[len(found) // 2 :], done
        assert int(raw.hget(ledger, "sum") or 0) == bytes_there(server), done

    for key in family.keys:
        with suppress(ContextCacheError):
            await store.unregister(key, now_ms=NOW)
    left = [key for key in raw.scan_iter(count=1000) if ":place:" not in key and ":usage:" not in key]
    assert left == [ledger], done


async def test_a_fork_of_a_deep_family_copies_and_begins_a_new_one(store: SessionStore, raw: redis.Redis) -> None:
    family = Family(store, seed=1, num_names=TRUNKS_MAX + 4)
    family.random.random = lambda: 1.0  # type: ignore[method-assign]
    await family.create(KEY)
    transcripts = []
    for source, key in zip(family.keys, family.keys[1:], strict=False):
        await family.fork(source, key)
        family.number += 1
        for one in family.stores:
            await one.begin_turn(
                key,
                lease_id=f"l{family.number}",
                lease_ttl_ms=LEASE_MS,
                read_only=False,
                expected_generation=None,
                now_ms=NOW,
            )
            keep = len(await transcript_of(one, key))
            await one.commit_turn(family._commit(key, 1, keep), now_ms=NOW)
        transcripts.append(await transcript_of(store, key))
    depths = [len(str(raw.hget(session_key(key), "trunks") or "").split()) for key in family.keys]

    assert max(depths) == TRUNKS_MAX
    assert depths[-1] < TRUNKS_MAX
    assert [len(one) for one in transcripts] == sorted(len(one) for one in transcripts)
    for key, expected in zip(family.keys[1:], transcripts, strict=True):
        assert await transcript_of(store, key) == expected


@pytest.mark.parametrize("server", [False], indirect=True, ids=["single"])
async def test_a_trunk_is_shared_at_so_many_lengths_and_copied_at_others(store: SessionStore, raw: redis.Redis) -> None:
    """Its head is read and written by every fork and delete of the family."""
    num_turns = LENGTHS_MAX + 20
    family = Family(store, seed=1, num_names=num_turns + 2)
    family.random.choice = lambda options: options[0]  # type: ignore[method-assign]
    family.random.random = lambda: 1.0  # type: ignore[method-assign]
    await family.create(KEY)
    for _ in range(num_turns):
        await family.turn(KEY)
        family.number += 2  # as many segments each time, so that every generation is remembered
    whole = await transcript_of(store, KEY)
    for generation, key in enumerate(family.keys[1:], start=1):
        await family.fork(KEY, key, generation=generation)
        if generation % 16 == 0 or generation > num_turns:
            found = await transcript_of(store, key)
            assert found == whole[: len(found)]

    (trunk,) = raw.scan_iter("*:trunk:*")
    assert len(str(raw.lindex(trunk, 0)).split()) == 1 + LENGTHS_MAX
    assert await transcript_of(store, KEY) == whole == found
    for key in family.keys:
        await family.delete(key)
    assert list(raw.scan_iter("*:trunk:*")) == []


async def test_what_is_left_of_a_family_lives_as_long_as_it_and_ends_by_itself(
    store: SessionStore, raw: redis.Redis
) -> None:
    """The source ends long before its fork, by delete or by its time; the fork is touched again and again."""
    family = Family(store, seed=1)
    await family.create(KEY)
    expected = await transcript_of(store, KEY)
    child = family.keys[1]
    family.random.random = lambda: 1.0  # type: ignore[method-assign]
    await family.fork(KEY, child)
    long_ms = 20 * TTL_MS
    await store.touch(child, ttl_s=long_ms // 1000, ttl_policy=None, metadata=None, now_ms=NOW)
    later = NOW + TTL_MS
    assert len(await store.take_expired(shard_of(KEY.tenant, KEY.session_id), now_ms=later, limit=10)) == 1
    (trunk,) = raw.scan_iter("*:trunk:*")
    assert raw.pttl(trunk) >= raw.pttl(session_key(child)) - 400
    assert raw.exists(transcript_key(KEY)) == 0

    assert await transcript_of(store, child, NOW + long_ms - 1) == expected
    assert all(raw.pttl(key) > 0 for key in raw.scan_iter())


async def test_a_trunk_that_is_gone_or_cut_is_damage_and_never_a_shorter_conversation(
    store: SessionStore, raw: redis.Redis
) -> None:
    family = Family(store, seed=1)
    family.random.random = lambda: 1.0  # type: ignore[method-assign]
    await family.create(KEY)
    await family.fork(KEY, family.keys[1])
    (trunk,) = raw.scan_iter("*:trunk:*")
    raw.ltrim(trunk, 0, -2)
    for key in (KEY, family.keys[1]):
        with pytest.raises(ContextCacheError, match="damaged"):
            await transcript_of(store, key)
    raw.delete(trunk)
    for key in (KEY, family.keys[1]):
        with pytest.raises(ContextCacheError, match="damaged"):
            await transcript_of(store, key)
        await store.unregister(key, now_ms=NOW)
