"""Sessions over a real Valkey for tests: one server a process, a database of its own for each manager.

`SessionStore` calls a manager's operations by SessionKey and at a given time, as the contract suites do.
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import redis
from prometheus_client import CollectorRegistry
from typing_extensions import override

from context_manager.layout import CONTEXT_BYTES, KEY_GRACE_MS, TENANT_BYTES_MAX, Script, session_keys
from context_manager.limits import SessionKey, TtlBounds
from context_manager.manager import BegunTurn, ContextCacheManager, Swept, _session
from context_manager.metrics import ManagerMetrics
from context_manager.redis_connection import RedisConnection
from context_manager.row import new_mark, stored_fields
from context_manager.segments import pack_segment
from contextcache.clock import ManualClock
from contextcache.model import (
    CacheSessionMetadata,
    HeldCacheRef,
    KeptAnswer,
    NewSession,
    Repeatable,
    SessionPage,
    TenantId,
    TtlPolicy,
    TurnCommit,
    TurnReceipt,
    Usage,
    UsageReport,
)
from contextcache.terms import Terms
from tests.kit.until import wait_until
from tests.kit.valkey import valkey_binary

NUM_DATABASES = 16
_NUMBERS = count()


@cache
def process_valkey() -> Path:
    """Return the Unix socket of this test process's Valkey, which ends with the process. It has no network port."""
    folder = Path(tempfile.mkdtemp(prefix="valkey-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "valkey.sock"
    options = ("--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder))
    log = folder / "valkey.log"
    server = subprocess.Popen([str(valkey_binary()), *options, "--logfile", str(log)], cwd=folder)
    atexit.register(server.wait, 60)
    atexit.register(server.terminate)
    client = redis.Redis(unix_socket_path=str(path))
    wait_until(client.ping, is_so=bool, what="valkey-server answers", deadline_s=60, despite=(redis.ConnectionError,))
    client.close()
    return path


class BlockingConnection(RedisConnection):
    """A connection that blocks: a real Valkey for tests whose time is virtual, in any event loop and without an end.

    It takes the next database of the process's Valkey, and empties it.
    """

    def __init__(self) -> None:
        self.is_cluster = False
        self.client = redis.Redis(unix_socket_path=str(process_valkey()), db=next(_NUMBERS) % NUM_DATABASES)
        self.client.flushdb()
        self.before: Callable[[], None] = lambda: None
        """Called before each command; may raise."""

    @override
    async def call(self, *command: Any) -> Any:
        self.before()
        return self.client.execute_command(*command)

    @override
    async def script(
        self, script: Script, keys: Sequence[str], arguments: Sequence[Any], *, repeatable: bool, durable: bool = False
    ) -> Any:
        self.before()
        try:
            return self.client.evalsha(script.sha, len(keys), *keys, *arguments)
        except redis.exceptions.NoScriptError:
            return self.client.eval(script.text, len(keys), *keys, *arguments)

    @override
    async def batch(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.before()
        pipeline = self.client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers = pipeline.execute(raise_on_error=False)
        return [None if isinstance(answer, redis.ResponseError) else answer for answer in answers]

    def age(self, *, ms: int) -> None:
        """Let every key end `ms` earlier: Redis expires keys by its own clock, not by a test's."""
        for key in self.client.scan_iter():
            if (left_ms := self.client.pttl(key)) >= 0:
                self.client.pexpire(key, max(left_ms - ms, 0))

    @override
    async def info(self) -> list[Mapping[str, Any]]:
        return [self.client.info()]

    @override
    async def close(self) -> None:
        self.client.close()


def in_valkey(**options: Any) -> dict[str, Any]:
    """Return arguments of a ContextCacheManager over an empty database."""
    return {"redis": BlockingConnection(), "metrics": ManagerMetrics(CollectorRegistry()), **options}


def script_keys(key: SessionKey) -> list[str]:
    """Return row, transcript, expiry set and tenant set of a session."""
    return session_keys(key, ledger="")[:4]


def transcript_key(key: SessionKey) -> str:
    """Return the name of a session's list of segments."""
    return script_keys(key)[1]


class SessionStore:
    """A manager's operations by SessionKey, at `now_ms`."""

    manager_class = ContextCacheManager

    def __init__(
        self,
        connection: RedisConnection,
        *,
        tombstone_s: int,
        tenant_contexts_max: int = 0,
        tenant_bytes_max: int = TENANT_BYTES_MAX,
        grace_ms: int = KEY_GRACE_MS,
    ) -> None:
        self._redis = connection
        self.clock = ManualClock()
        self.manager = self.manager_class(
            connection,
            metrics=ManagerMetrics(CollectorRegistry()),
            ttl_bounds=TtlBounds(1, 10**9),
            tombstone_s=tombstone_s,
            tenant_contexts_max=tenant_contexts_max,
            tenant_bytes_max=tenant_bytes_max,
            grace_ms=grace_ms,
            clock=self.clock,
        )
        self._bytes = self.manager._bytes

    def _at(self, now_ms: int) -> ContextCacheManager:
        self.clock.advance(ms=now_ms - self.clock.now_ms())
        return self.manager

    async def reserve(
        self, new: NewSession, *, lease_id: str, lease_ttl_ms: int, repeatable: Repeatable | None = None, now_ms: int
    ) -> CacheSessionMetadata:
        return await self._at(now_ms).reserve(new, lease_id=lease_id, lease_ttl_ms=lease_ttl_ms, repeatable=repeatable)

    async def get(self, key: SessionKey, *, now_ms: int) -> CacheSessionMetadata:
        return await self._at(now_ms).locate(key.tenant, key.session_id)

    async def read_turns(self, key: SessionKey) -> tuple[TurnReceipt, ...]:
        return await self.manager._read_turns(key)

    async def begin_turn(self, key: SessionKey, *, now_ms: int, **turn: Any) -> BegunTurn:
        return await self._at(now_ms).begin_turn(key.tenant, key.session_id, **turn)

    async def renew_lease(self, key: SessionKey, *, lease_id: str, lease_ttl_ms: int, now_ms: int) -> None:
        await self._at(now_ms).renew_lease(key.tenant, key.session_id, lease_id=lease_id, lease_ttl_ms=lease_ttl_ms)

    async def note_holder(self, key: SessionKey, *, holder: str, instead_of: str = "", now_ms: int) -> None:
        await self._at(now_ms).note_holder(key.tenant, key.session_id, holder=holder, instead_of=instead_of)

    async def commit_turn(self, commit: TurnCommit, *, now_ms: int) -> CacheSessionMetadata:
        # The store's own answer, also to more segments than a client may send at once.
        key = SessionKey(commit.tenant, commit.session_id)
        return await self._at(now_ms)._commit(key, commit, [pack_segment(segment) for segment in commit.segments])

    async def find_answer(self, key: SessionKey, *, repeat_key: str, now_ms: int) -> KeptAnswer | None:
        return await self._at(now_ms).find_answer(key.tenant, key.session_id, repeat_key=repeat_key)

    async def rewind(
        self, key: SessionKey, *, generation: int, expected_generation: int | None, now_ms: int
    ) -> CacheSessionMetadata:
        # The store's own answer, also to generations that the manager refuses before.
        checked = {"generation": generation, "expected_generation": expected_generation, "mark": new_mark()}
        return _session(key, await self._at(now_ms)._change("rewind", key, durable=True, **checked))

    async def fork(
        self, source: SessionKey, *, generation: int | None, commit: TurnCommit, now_ms: int
    ) -> CacheSessionMetadata:
        return await self._at(now_ms).fork(source.session_id, generation=generation, commit=commit)

    async def abort_turn(self, key: SessionKey, *, lease_id: str, now_ms: int) -> None:
        await self._at(now_ms).abort_turn(key.tenant, key.session_id, lease_id=lease_id)

    async def touch(
        self,
        key: SessionKey,
        *,
        ttl_s: int | None,
        ttl_policy: TtlPolicy | None,
        metadata: Mapping[str, str] | None,
        now_ms: int,
    ) -> CacheSessionMetadata:
        # The store's own answer, also to longer metadata than a client may send.
        room = await self._bytes.room(key, CONTEXT_BYTES)
        changed = stored_fields(Terms(ttl_s, ttl_policy, metadata))
        return _session(key, await self._at(now_ms)._change("touch", key, durable=True, room=room, **changed))

    async def unregister(self, key: SessionKey, *, now_ms: int) -> CacheSessionMetadata:
        return await self._at(now_ms).unregister_session_cache(key.tenant, key.session_id)

    async def list_sessions(self, tenant: TenantId, *, now_ms: int, **page: Any) -> SessionPage:
        return await self._at(now_ms).list_sessions(tenant, **page)

    async def take_expired(self, shard: int, *, now_ms: int, limit: int) -> tuple[Swept, ...]:
        return await self._at(now_ms)._take_expired(shard, limit=limit)

    async def claim_sweep(self, *, for_ms: int) -> bool:
        return await self.manager.claim_sweep(for_ms=for_ms)

    async def check_refs(self, held: Sequence[HeldCacheRef], *, now_ms: int) -> tuple[int, ...]:
        return await self._at(now_ms).check_cache_refs(held)

    async def add_usage(
        self, tenant: TenantId, sender: str, usage: Sequence[Usage], *, number: int | None = None, now_ms: int
    ) -> bool:
        return await self._at(now_ms)._count_usage(tenant, sender, usage, number)

    async def read_usage(self, tenant: TenantId, days: Sequence[int], *, now_ms: int) -> UsageReport:
        return await self._at(now_ms).read_usage(tenant, first_day=min(days), last_day=max(days))

    async def count_sessions(self) -> int:
        return await self.manager.count_sessions()

    async def read_info(self) -> Sequence[Mapping[str, Any]]:
        return await self._redis.info()

    async def close(self) -> None:
        await self._redis.close()
