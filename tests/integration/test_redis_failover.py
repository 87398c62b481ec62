"""Turns through real manager processes while Valkey is killed, stopped, filled, emptied and failed over under them.

Seen to fail: `unavailable` in place of a deadline (RedisConnection without its asyncio.timeout: a stopped Valkey held
every call for the client's 10 s); a commit that counts its answer before the replicas' (the `num_replicas` check taken
out of RedisConnection); former masters that are not left (`_replace_clients` taken out of `_once`).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from context_manager.client import ContextManagerClient
from context_manager.limits import SessionKey
from context_manager.redis_connection import RedisConnection, ReplicaWait
from contextcache.errors import ContextNotFound, LeaseLost, StoreUnavailable
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit
from tests.kit.faults.proxy import Proxy
from tests.kit.manager_process import ManagerProcess, running_manager_process
from tests.kit.session_store import SessionStore
from tests.kit.turn_load import TENANT, TurnLoad
from tests.kit.until import until
from tests.kit.valkey import ValkeyServer
from tests.kit.valkey_failover import FailoverPair

pytestmark = pytest.mark.thorough

NUM_SESSIONS = 8
NOW = 1_700_000_000_000


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ValkeyServer | FailoverPair]]:
    """What a test starts, ended at its end."""
    started: list[ValkeyServer | FailoverPair] = []
    yield started
    for server in started:
        server.stop()


@asynccontextmanager
async def loaded(managers: list[ManagerProcess]) -> AsyncIterator[TurnLoad]:
    load = TurnLoad([manager.address for manager in managers], num_sessions=NUM_SESSIONS)
    try:
        load.start()
        await load.until_acknowledged(2 * NUM_SESSIONS)
        yield load
    finally:
        await load.close()


async def num_lost(load: TurnLoad, manager: ManagerProcess) -> int:
    """Stop the load and return how many acknowledged turns are lost; anything worse fails at once."""
    await load.stop()
    client = ContextManagerClient(manager.address, timeout_s=30)
    try:
        lost = await until(
            lambda: load.check(client),
            is_so=lambda _: True,
            what="the store answers for every session",
            despite=(StoreUnavailable,),
        )
    finally:
        await client.close()
    assert load.faults == []
    print(f"acknowledged {load.num_acknowledged}, lost {lost}, {waits(load)}")
    return lost


def waits(load: TurnLoad) -> str:
    waited_s = sorted(load.refused_s) or [0.0]
    return f"unavailable {len(load.refused_s)}: median {statistics.median(waited_s):.2f} s, most {waited_s[-1]:.2f} s"


def check_waits(load: TurnLoad) -> None:
    """Within a second, says the issue; a busy machine is late by seconds now and then, never by the client's ten."""
    assert load.refused_s
    assert statistics.median(load.refused_s) < 3, waits(load)
    assert max(load.refused_s) < 9.5, waits(load)


@pytest.mark.parametrize("fault", ["killed", "stopped"])
async def test_a_valkey_that_is_gone_is_told_in_time_and_found_again_and_nothing_acknowledged_is_lost(
    tmp_path: Path, servers: list[ValkeyServer], fault: str
) -> None:
    valkey = ValkeyServer(tmp_path, appendfsync="always")
    servers.append(valkey)
    valkey.start()
    async with running_manager_process(tmp_path, valkey.url) as manager, loaded([manager]) as load:
        for _ in range(2):
            valkey.kill() if fault == "killed" else valkey.pause()
            await load.until_refused(2 * NUM_SESSIONS)
            await until(
                lambda: manager.metric("contextcache_manager_sweep_failures_total"), what="a sweep meets the outage too"
            )
            valkey.start() if fault == "killed" else valkey.resume()
            await load.until_acknowledged(2 * NUM_SESSIONS)
        check_waits(load)

        assert await num_lost(load, manager) == 0
        log = manager.log.read_text()
        assert "Traceback" not in log
        assert log.count('"sweep failed"') <= 4, "one line an outage, and one each time that it begins anew"


async def test_a_full_valkey_and_one_that_refuses_writes_cost_time_only(
    tmp_path: Path, servers: list[ValkeyServer]
) -> None:
    valkey = ValkeyServer(tmp_path)
    servers.append(valkey)
    valkey.start()
    async with running_manager_process(tmp_path, valkey.url) as manager, loaded([manager]) as load:
        for setting, bad, good in (("maxmemory", "1", "0"), ("min-replicas-to-write", "1", "0")):
            valkey.command("CONFIG", "SET", setting, bad)
            await load.until_refused(2 * NUM_SESSIONS)
            valkey.command("CONFIG", "SET", setting, good)
            await load.until_acknowledged(2 * NUM_SESSIONS)

        assert await num_lost(load, manager) == 0


async def test_an_emptied_valkey_has_no_sessions_and_takes_new_ones(
    tmp_path: Path, servers: list[ValkeyServer]
) -> None:
    valkey = ValkeyServer(tmp_path)
    servers.append(valkey)
    valkey.start()
    async with running_manager_process(tmp_path, valkey.url) as manager, loaded([manager]) as load:
        valkey.command("FLUSHALL")
        await load.until_gone()
        await load.stop()
        assert load.faults == []
        async with loaded([manager]) as anew:
            assert await num_lost(anew, manager) == 0
        assert valkey.command("SCRIPT", "FLUSH") == b"+OK\r\n"
        async with loaded([manager]) as anew:
            assert await num_lost(anew, manager) == 0


@pytest.mark.parametrize("fault", ["killed", "stopped"])
async def test_a_failover_by_sentinel_loses_nothing_that_replicas_were_waited_for(
    tmp_path: Path, servers: list[FailoverPair], fault: str
) -> None:
    pair = FailoverPair(tmp_path)
    servers.append(pair)
    pair.start()
    environment = {"MANAGER_REDIS_WAIT_REPLICAS": "1"}
    async with (
        running_manager_process(tmp_path, pair.url, **environment) as one,
        running_manager_process(tmp_path, pair.url, **environment) as other,
        loaded([one, other]) as load,
    ):
        pair.primary.kill() if fault == "killed" else pair.primary.pause()
        await load.until_refused(2 * NUM_SESSIONS)
        pair.until_promoted()
        # Nobody follows the new primary yet: nothing is acknowledged until the old one is its replica.
        acknowledged = load.num_acknowledged
        await load.until_refused(2 * NUM_SESSIONS)
        assert load.num_acknowledged - acknowledged <= NUM_SESSIONS
        pair.primary.start() if fault == "killed" else pair.primary.resume()
        await load.until_acknowledged(2 * NUM_SESSIONS)
        check_waits(load)

        assert await num_lost(load, one) == 0
        assert "too few replicas acknowledged a write in time" in one.log.read_text() + other.log.read_text()
        assert one.metric("contextcache_manager_redis_errors_total") > 0


async def test_a_commit_that_too_few_replicas_have_is_not_acknowledged_and_may_be_repeated(
    tmp_path: Path, servers: list[FailoverPair]
) -> None:
    pair = FailoverPair(tmp_path)
    servers.append(pair)
    pair.start(sentinel=False)
    async with (
        running_manager_process(tmp_path, pair.primary.url, MANAGER_REDIS_WAIT_REPLICAS="1") as manager,
        loaded([manager]) as load,
    ):
        pair.replica.pause()
        await load.until_refused(2 * NUM_SESSIONS)
        acknowledged = load.num_acknowledged
        await load.until_refused(2 * NUM_SESSIONS)
        assert load.num_acknowledged == acknowledged
        assert all(len(record.in_doubt) == 1 for record in load.records)
        pair.replica.resume()
        await load.until_acknowledged(2 * NUM_SESSIONS)

        assert await num_lost(load, manager) == 0
        client = ContextManagerClient(manager.address, timeout_s=30)
        pair.replica.kill()
        with pytest.raises(StoreUnavailable):
            await client.unregister_session_cache(TENANT, load.records[0].session_id)
        with pytest.raises(ContextNotFound):
            await until(
                lambda: client.unregister_session_cache(TENANT, load.records[0].session_id),
                what="it is gone",
                despite=(StoreUnavailable,),
            )
        await client.close()


async def test_a_repeated_commit_is_waited_for_by_whoever_repeats_it(
    tmp_path: Path, servers: list[FailoverPair]
) -> None:
    """WAIT is about its own connection's writes: seen to fail with a repeat in commit.lua that writes nothing."""
    pair = FailoverPair(tmp_path)
    servers.append(pair)
    pair.start(sentinel=False)
    stores = [
        SessionStore(
            RedisConnection(
                pair.primary.url, timeout_s=20, max_connections=1, wait=ReplicaWait(num_replicas=1, timeout_ms=500)
            ),
            tombstone_s=3600,
        )
        for _ in range(2)
    ]
    await stores[0].reserve(NewSession(TENANT, "ctx_1", "toy"), lease_id="l", lease_ttl_ms=30_000, now_ms=NOW)
    said = Segment(SegmentKind.PROMPT, (1,), text="hi")
    commit = TurnCommit(TENANT, "ctx_1", "l", 0, 0, (said,), "", "pod")
    pair.replica.pause()
    for store in stores:
        with pytest.raises(StoreUnavailable):
            await store.commit_turn(commit, now_ms=NOW)
    # A refusal has nothing to wait for, and a look-up neither.
    with pytest.raises(LeaseLost):
        await stores[0].commit_turn(replace(commit, lease_id="other"), now_ms=NOW)
    assert (await stores[0].get(SessionKey(TENANT, "ctx_1"), now_ms=NOW)).generation == 1
    pair.replica.resume()

    assert (await stores[1].commit_turn(commit, now_ms=NOW)).generation == 1
    for store in stores:
        await store.close()


async def test_a_promotion_behind_a_plain_url_is_followed_without_a_restart(
    tmp_path: Path, servers: list[FailoverPair]
) -> None:
    """As with a Service whose endpoint changes: open connections stay with the former primary, now a replica."""
    pair = FailoverPair(tmp_path)
    servers.append(pair)
    pair.start(sentinel=False)
    name = Proxy(f"127.0.0.1:{pair.primary.port}")
    url = f"redis://{name.start()}"
    try:
        async with running_manager_process(tmp_path, url) as manager, loaded([manager]) as load:
            pair.promote()
            demoted = pair.primary.command("REPLICAOF", "127.0.0.1", str(pair.replica.port))
            assert demoted == b"+OK\r\n"
            name.target = f"127.0.0.1:{pair.replica.port}"
            await load.until_acknowledged(4 * NUM_SESSIONS)

            await num_lost(load, manager)
    finally:
        name.close()


async def test_a_manager_that_starts_while_valkey_is_away_serves_when_it_comes(
    tmp_path: Path, servers: list[ValkeyServer]
) -> None:
    valkey = ValkeyServer(tmp_path)
    servers.append(valkey)
    async with running_manager_process(tmp_path, valkey.url) as manager:
        client = ContextManagerClient(manager.address, timeout_s=30)
        with pytest.raises(StoreUnavailable) as refused:
            await client.locate(TENANT, "ctx_1")
        assert refused.value.retry_after_s
        valkey.start()
        async with asyncio.timeout(120), loaded([manager]) as load:
            assert await num_lost(load, manager) == 0
        await client.close()
