"""A WAIT for replicas that Redis breaks off: what the script wrote is there all the same, so nobody knows.

Seen to fail when the error of the WAIT was told as the script's: `internal_error`, "the session store refused a
command", for a write that was made; the pod then told its client that the turn was not committed, and did not repeat.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from context_manager.layout import Script
from context_manager.limits import SessionKey
from context_manager.redis_connection import RedisConnection, ReplicaWait
from contextcache.errors import AlreadyAnswered, StoreUnavailable
from contextcache.model import NewSession, Repeatable, Segment, SegmentKind, TurnCommit, Usage
from tests.kit.session_store import SessionStore
from tests.kit.until import until
from tests.kit.valkey import ValkeyServer
from tests.kit.valkey_failover import FailoverPair

_TEXT = "if ARGV[1] == 'no' then return {'refused', 7} end redis.call('SET', KEYS[1], 'x') return {'ok'}"
SCRIPT = Script(text=_TEXT, sha=hashlib.sha1(_TEXT.encode()).hexdigest())
KEY = SessionKey("demo", "ctx_1")
NEW = NewSession("demo", "ctx_1", "smol")
LEASE: dict[str, Any] = {"lease_id": "lease", "lease_ttl_ms": 30_000}
COMMIT = TurnCommit("demo", "ctx_1", "lease", 0, 0, (Segment(SegmentKind.PROMPT, (1, 2), text="hi"),), "", "pod-1")


async def create(store: SessionStore, said: Repeatable | None = None) -> None:
    await store.reserve(NEW, **LEASE, repeatable=said, now_ms=0)
    await store.commit_turn(replace(COMMIT, repeatable=said), now_ms=0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path) as server:
        server.command("SCRIPT", "LOAD", _TEXT)
        yield server


@pytest.fixture
async def errors() -> list[str]:
    return []


@pytest.fixture
async def connection(server: ValkeyServer, errors: list[str]) -> AsyncIterator[RedisConnection]:
    wait = ReplicaWait(num_replicas=1, timeout_ms=50_000)
    connection = RedisConnection(server.url, timeout_s=60, max_connections=2, wait=wait, on_error=errors.append)
    yield connection
    await connection.close()


async def test_a_master_that_becomes_a_replica_in_the_wait_may_have_the_write(
    server: ValkeyServer, connection: RedisConnection, errors: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    writing = asyncio.create_task(connection.script(SCRIPT, ["k"], [""], repeatable=True, durable=True))
    await until(lambda: b"blocked_clients:1" in server.command("INFO", "clients"), what="the server lets it wait")
    assert server.command("REPLICAOF", "127.0.0.1", "1") == b"+OK\r\n"

    with pytest.raises(StoreUnavailable):
        await writing
    assert server.command("GET", "k").endswith(b"x\r\n")
    assert errors == ["TooFewReplicas"]
    assert next(getattr(record, "redis_code", "") for record in caplog.records) == "UNBLOCKED"


async def test_a_user_who_may_not_wait_is_told_in_the_log_and_nothing_counts_as_refused_that_was_written(
    server: ValkeyServer, connection: RedisConnection, caplog: pytest.LogCaptureFixture
) -> None:
    assert server.command("ACL", "SETUSER", "default", "-wait") == b"+OK\r\n"

    with pytest.raises(StoreUnavailable):
        await connection.script(SCRIPT, ["k"], [""], repeatable=True, durable=True)
    assert server.command("GET", "k").endswith(b"x\r\n")
    assert next(record.levelname for record in caplog.records) == "ERROR"
    # A refusal of the script's own stands: it has nothing to wait for.
    assert await connection.script(SCRIPT, ["k"], ["no"], repeatable=True, durable=True) == [b"refused", 7]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[FailoverPair]:
    pair = FailoverPair(tmp_path)
    pair.start(sentinel=False)
    yield pair
    pair.stop()


@pytest.fixture
async def stores(pair: FailoverPair) -> AsyncIterator[list[SessionStore]]:
    """Three managers' stores: WAIT is about what its own connection wrote."""
    wait = ReplicaWait(num_replicas=1, timeout_ms=500)
    connections = [RedisConnection(pair.primary.url, timeout_s=20, max_connections=1, wait=wait) for _ in range(3)]
    stores = [SessionStore(connection, tombstone_s=60) for connection in connections]
    yield stores
    for store in stores:
        await store.close()


async def test_usage_is_waited_for_by_whoever_tells_it_also_again(
    pair: FailoverPair, stores: list[SessionStore]
) -> None:
    """Seen failing: `'int' object is not subscriptable`, always; and a repeat that wrote nothing waited for nothing."""
    first, second, _ = stores
    batch = [Usage("app", {"turns": 1})]
    pair.replica.pause()
    for store in (first, second):
        with pytest.raises(StoreUnavailable):
            await store.add_usage("demo", "batch", batch, now_ms=0)
    pair.replica.resume()

    assert not await second.add_usage("demo", "batch", batch, now_ms=0)
    assert await first.add_usage("demo", "next", batch, now_ms=0)
    assert (await first.read_usage("demo", [0], now_ms=0)).days == {0: [Usage("app", {"turns": 2})]}


async def test_a_rewind_is_waited_for_by_whoever_asks_for_it_also_again(
    pair: FailoverPair, stores: list[SessionStore]
) -> None:
    """Seen failing: the repeat wrote nothing, waited for nothing and was acknowledged."""
    first, second, _ = stores
    await create(first)
    await first.begin_turn(KEY, **LEASE, read_only=False, expected_generation=1, now_ms=0)
    await first.commit_turn(replace(COMMIT, expected_generation=1, keep_segments=1), now_ms=0)
    pair.replica.pause()
    for store in (first, second):
        with pytest.raises(StoreUnavailable):
            await store.rewind(KEY, generation=1, expected_generation=None, now_ms=0)
    pair.replica.resume()

    assert (await second.rewind(KEY, generation=1, expected_generation=None, now_ms=0)).generation == 3


@pytest.mark.thorough
async def test_a_kept_answer_is_told_again_once_the_replicas_have_it(
    pair: FailoverPair, stores: list[SessionStore]
) -> None:
    """Seen failing: a client got the answer of a turn that nobody but the master had."""
    said = Repeatable("a" * 32, "b" * 32)
    first, second, third = stores
    pair.replica.pause()
    with pytest.raises(StoreUnavailable):
        await create(first, said)
    for store in (second, third):
        with pytest.raises(StoreUnavailable):
            await store.begin_turn(KEY, **LEASE, read_only=False, expected_generation=None, repeatable=said, now_ms=0)
        with pytest.raises(StoreUnavailable):
            await store.reserve(NEW, **LEASE, repeatable=said, now_ms=0)
    pair.replica.resume()

    with pytest.raises(AlreadyAnswered):
        await third.reserve(NEW, **LEASE, repeatable=said, now_ms=0)
