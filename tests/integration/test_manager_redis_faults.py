"""What the manager does when Redis dies, hangs, refuses or comes back; and when many sweep at once."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from context_manager.layout import Script
from context_manager.limits import SessionKey
from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from context_manager.redis_connection import RedisConnection
from context_manager.sweeper import SessionSweeper
from contextcache.clock import ManualClock
from contextcache.errors import ContextCacheError, ContextNotFound, StoreUnavailable
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit, TurnReceipt, Usage
from tests.contract.session_changes_contract import beside
from tests.kit.ports import free_port
from tests.kit.session_store import SessionStore
from tests.kit.until import until
from tests.kit.valkey import ValkeyServer, valkey_binary

NOW = 1_700_000_000_000
KEY = SessionKey("demo", "ctx_1")
NEW = NewSession("demo", "ctx_1", "smol", ttl_s=600)
FIRST = TurnCommit("demo", "ctx_1", "create", 0, 0, (Segment(SegmentKind.PROMPT, (1, 2), text="hi"),), "", "pod-1")


def store_at(url: str, *, timeout_s: float = 20.0, max_connections: int = 4) -> SessionStore:
    connection = RedisConnection(url, timeout_s=timeout_s, max_connections=max_connections)
    return SessionStore(connection, tombstone_s=3600)


async def create(store: SessionStore, session_id: str = "ctx_1") -> None:
    new = replace(NEW, session_id=session_id, model_id=f"model of {session_id}")
    await store.reserve(new, lease_id="create", lease_ttl_ms=30_000, now_ms=NOW)
    await store.commit_turn(replace(FIRST, session_id=session_id), now_ms=NOW)


@pytest.mark.parametrize("cluster", [False, pytest.param(True, marks=pytest.mark.thorough)])
async def test_a_killed_redis_is_unavailable_and_found_again(tmp_path: Path, cluster: bool) -> None:
    valkey = ValkeyServer(tmp_path, cluster=cluster)
    valkey.start()
    store = store_at(valkey.url)
    try:
        await create(store)
        valkey.kill()

        async with asyncio.timeout(60):
            for _ in range(3):
                with pytest.raises(StoreUnavailable) as refused:
                    await store.get(KEY, now_ms=NOW)
                assert refused.value.retry_after_s == 1
            with pytest.raises(StoreUnavailable):
                await store.list_sessions("demo", limit=10, after="", model_id="", now_ms=NOW)
        valkey.start()
        with pytest.raises(ContextNotFound):
            await store.get(KEY, now_ms=NOW)
        await create(store)
        assert (await store.get(KEY, now_ms=NOW)).generation == 1
    finally:
        await store.close()
        valkey.stop()


@pytest.mark.parametrize("cluster", [False, pytest.param(True, marks=pytest.mark.thorough)])
async def test_a_restart_between_two_calls_is_not_noticed(tmp_path: Path, cluster: bool) -> None:
    valkey = ValkeyServer(tmp_path, cluster=cluster)
    valkey.start()
    store = store_at(valkey.url)
    try:
        await create(store)
        valkey.kill()
        valkey.start()

        await create(store)
        assert (await store.unregister(KEY, now_ms=NOW)).generation == 1
    finally:
        await store.close()
        valkey.stop()


async def test_a_hanging_redis_is_given_up_at_the_deadline(valkey: ValkeyServer) -> None:
    patient, store = store_at(valkey.url), store_at(valkey.url, timeout_s=1.0, max_connections=2)
    await create(patient)
    valkey.pause()

    async with asyncio.timeout(60):  # without a deadline of its own the first call would never end
        outcomes = await asyncio.gather(*(store.get(KEY, now_ms=NOW) for _ in range(10)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {StoreUnavailable}
    valkey.resume()
    found = await until(lambda: store.get(KEY, now_ms=NOW), what="the store answers again", despite=(StoreUnavailable,))
    assert found.generation == 1
    await store.close()
    await patient.close()


async def test_more_calls_than_connections_all_succeed(valkey: ValkeyServer) -> None:
    store = store_at(valkey.url, max_connections=2)
    await create(store)
    rows = await asyncio.gather(*(store.get(KEY, now_ms=NOW) for _ in range(100)))
    clients = valkey.command("CLIENT", "LIST").count(b" laddr=")

    assert len(rows) == 100
    assert clients <= 2 + 1
    await store.close()


@pytest.mark.parametrize("cluster", [False, pytest.param(True, marks=pytest.mark.thorough)])
async def test_a_cancelled_call_ends_and_mixes_up_no_replies(tmp_path: Path, cluster: bool) -> None:
    """A swallowed cancellation hangs a shutdown; a connection left with an unread reply answers the next caller."""
    valkey = ValkeyServer(tmp_path, cluster=cluster)
    valkey.start()
    store = store_at(valkey.url, max_connections=1)
    swallowed = []
    try:
        for number in range(20):
            await create(store, f"ctx_{number}")
        for number in range(300):
            key = SessionKey("demo", f"ctx_{number % 20}")
            call = asyncio.create_task(store.get(key, now_ms=NOW))
            for _ in range(number % 15):  # cancel it after each of its first steps
                await asyncio.sleep(0)
            if not call.done():
                call.cancel()
                await asyncio.wait([call])
                swallowed += [number] if not call.cancelled() else []
            other = SessionKey("demo", f"ctx_{(number + 7) % 20}")

            assert (await store.get(other, now_ms=NOW)).model_id == f"model of {other.session_id}"
    finally:
        await store.close()
        valkey.stop()
    assert swallowed == []


async def test_a_full_redis_is_unavailable_and_loses_nothing(valkey: ValkeyServer) -> None:
    store = store_at(valkey.url)
    await create(store)
    valkey.command("CONFIG", "SET", "maxmemory", "1")

    with pytest.raises(StoreUnavailable):
        await create(store, "ctx_2")
    assert (await store.get(KEY, now_ms=NOW)).generation == 1
    valkey.command("CONFIG", "SET", "maxmemory", "0")
    await create(store, "ctx_2")
    await store.close()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", "OutOfMemoryError"),
        ("MISCONF Redis is configured to save RDB snapshots, but it is currently not able to persist", "ResponseError"),
        ("READONLY You can't write against a read only replica.", "ReadOnlyError"),
    ],
)
async def test_what_redis_6_says_about_a_script_s_write_is_as_unavailable_as_without_its_frame(
    valkey: ValkeyServer, words: str, error: str
) -> None:
    """Literal replies of Redis 6.2.5. Seen failing: `internal_error`, and a former master's connections were kept."""
    frame = "ERR Error running script (call to f_e6a86ad1a924540477c9472c2190eee2a2a70445): @user_script:1: "
    text = f'return redis.error_reply("{frame}@user_script: 1: -{words}")'
    script = Script(text, hashlib.sha1(text.encode()).hexdigest())
    errors: list[str] = []
    connection = RedisConnection(valkey.url, timeout_s=20.0, max_connections=1, on_error=errors.append)
    before = await connection.call("CLIENT", "ID")
    with pytest.raises(StoreUnavailable):
        await connection.script(script, [], [], repeatable=False)

    assert errors == [error]
    assert (await connection.call("CLIENT", "ID") != before) == (error == "ReadOnlyError")
    await connection.close()


async def test_a_script_that_is_wrong_is_a_fault_of_ours_whatever_it_quotes(valkey: ValkeyServer) -> None:
    text = "return redis.error_reply('ERR Error compiling script: -OOM command')"
    script = Script(text, hashlib.sha1(text.encode()).hexdigest())
    connection = RedisConnection(valkey.url, timeout_s=20.0, max_connections=1)

    with pytest.raises(ContextCacheError) as refused:
        await connection.script(script, [], [], repeatable=False)
    assert refused.value.code == "internal_error"
    await connection.close()


async def test_an_acl_user_needs_only_our_keys_and_commands(valkey: ValkeyServer) -> None:
    """Seen failing in `add_usage`, which took GET and SET."""
    commands = "+@hash +@list +@sortedset +@keyspace +eval +evalsha +ping +client|setinfo +time -@dangerous"
    assert valkey.command("ACL", "SETUSER", "manager", "on", ">pa:ss", "~cc:*", *commands.split()) == b"+OK\r\n"
    assert valkey.command("ACL", "SETUSER", "default", "off") == b"+OK\r\n"
    store = store_at(f"redis://manager:pa%3Ass@127.0.0.1:{valkey.port}")
    await store.reserve(NEW, lease_id="create", lease_ttl_ms=30_000, now_ms=NOW)
    receipt = TurnReceipt(1, NOW, 2, 0, 0, 1, "none", took_ms=77)
    usage = Usage("app", {"turns": 1})
    await store.commit_turn(replace(FIRST, receipt=receipt, usage=usage), now_ms=NOW)
    lease = {"lease_id": "turn", "lease_ttl_ms": 30_000}
    await store.begin_turn(KEY, **lease, read_only=False, expected_generation=1, now_ms=NOW)
    await store.commit_turn(replace(FIRST, lease_id="turn", expected_generation=1, keep_segments=1), now_ms=NOW)
    assert await store.read_turns(KEY) == (receipt,)
    assert (await store.rewind(KEY, generation=1, expected_generation=2, now_ms=NOW)).generation == 3
    (beside_it,) = beside(KEY, 1)
    await store.reserve(replace(NEW, session_id=beside_it), lease_id="fork", lease_ttl_ms=30_000, now_ms=NOW)
    fork = replace(FIRST, session_id=beside_it, lease_id="fork", segments=())
    assert (await store.fork(KEY, generation=None, commit=fork, now_ms=NOW)).generation == 1
    await store.unregister(SessionKey(KEY.tenant, beside_it), now_ms=NOW)
    assert [await store.add_usage("demo", "batch", [usage], now_ms=NOW) for _ in range(2)] == [True, False]
    taken = [taken for shard in range(64) for taken in await store.take_expired(shard, now_ms=NOW * 2, limit=1)]

    assert len(taken) == 1
    await store.close()


async def test_a_wrong_password_is_unavailable(valkey: ValkeyServer) -> None:
    store = store_at(f"redis://nobody:wrong@127.0.0.1:{valkey.port}")

    with pytest.raises(StoreUnavailable):
        await store.get(KEY, now_ms=NOW)
    await store.close()


async def test_a_command_that_redis_refuses_for_good_is_no_outage(valkey: ValkeyServer) -> None:
    valkey.command("ACL", "SETUSER", "reader", "on", ">secret", "~cc:*", "+get")
    store = store_at(f"redis://reader:secret@127.0.0.1:{valkey.port}")

    with pytest.raises(ContextCacheError) as refused:
        await store.get(KEY, now_ms=NOW)
    assert refused.value.code == "internal_error"
    await store.close()


async def test_the_master_is_found_through_sentinel(valkey: ValkeyServer, tmp_path: Path) -> None:
    port = free_port()
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nlogfile {tmp_path}/sentinel.log\n"
        f"sentinel monitor main 127.0.0.1 {valkey.port} 1\n"
    )
    sentinel = subprocess.Popen([str(valkey_binary()), str(configuration), "--sentinel"], stdout=subprocess.DEVNULL)
    store = store_at(f"redis+sentinel://127.0.0.1:{port}/main")
    try:
        # A Sentinel that has just started knows no master yet.
        await until(
            lambda: create(store), is_so=lambda _: True, what="the master is found", despite=(StoreUnavailable,)
        )

        assert (await store.get(KEY, now_ms=NOW)).generation == 1
    finally:
        await store.close()
        os.kill(sentinel.pid, signal.SIGTERM)
        sentinel.wait(timeout=60)


@pytest.mark.thorough
async def test_two_sweepers_bury_ten_thousand_sessions_once_each_in_bounded_memory(valkey: ValkeyServer) -> None:
    num_sessions = 10_000
    store = store_at(valkey.url, timeout_s=30.0, max_connections=16)
    gate = asyncio.Semaphore(64)

    async def create_one(number: int) -> None:
        async with gate:
            await create(store, f"ctx_{number}")

    await asyncio.gather(*(create_one(number) for number in range(num_sessions)))
    clock = ManualClock(NOW + 600_000)
    registries = [CollectorRegistry(), CollectorRegistry()]
    sweepers = []
    for registry in registries:
        metrics = ManagerMetrics(registry)
        manager = ContextCacheManager(store._redis, clock=clock, metrics=metrics)
        sweepers.append(SessionSweeper(manager, metrics=metrics, interval_s=5.0))
    peak_before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    passes = await asyncio.gather(*(sweeper.sweep_pass() for sweeper in sweepers))
    last = await sweepers[0].sweep_pass()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before_kib

    counted = [registry.get_sample_value("contextcache_manager_sessions_expired_total") for registry in registries]
    assert sum(passes) + last == num_sessions
    assert min(passes) > 0
    assert sum(count or 0 for count in counted) == num_sessions
    assert grown_kib < 32 * 1024
    assert valkey.command("DBSIZE") == f":{num_sessions + 1}\r\n".encode()  # tombstones and the ledger
    await store.close()
