"""A WAIT for replicas that Redis breaks off: what the script wrote is there all the same, so nobody knows.

Seen to fail when the error of the WAIT was told as the script's: `internal_error`, "the session store refused a
command", for a write that was made; the pod then told its client that the turn was not committed, and did not repeat.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from context_manager.redis_connection import RedisConnection, ReplicaWait
from context_manager.redis_layout import Script
from contextcache.errors import StoreUnavailable
from tests.kit.until import until
from tests.kit.valkey import ValkeyServer

_TEXT = "if ARGV[1] == 'no' then return {'refused', 7} end redis.call('SET', KEYS[1], 'x') return {'ok'}"
SCRIPT = Script(text=_TEXT, sha=hashlib.sha1(_TEXT.encode()).hexdigest())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path)
    server.start()
    server.command("SCRIPT", "LOAD", _TEXT)
    yield server
    server.stop()


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
