"""Redis' sorted sets, read with bounds: a tenant's sessions, newest first over all shards; what is due in a shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from context_manager.redis_connection import RedisConnection
from context_manager.redis_layout import (
    Script,
    expiry_key,
    key_of_member,
    member,
    place_key,
    session_key,
    tenant_key,
    transcript_key,
    turns_key,
)
from context_manager.store import LIST_ROWS_MAX, SWEEP_BATCH, Fate, SessionKey, Swept, last_page
from contextcache.model import CacheSessionMetadata, SessionId, SessionPage, TenantId
from contextcache.names import NUM_SHARDS
from contextcache.process.crash_points import crash_point

Position = tuple[int, str]
"""(created_at_ms, session id): the list runs downwards through these."""
Shown = Callable[[SessionKey, Mapping[bytes, bytes]], CacheSessionMetadata | None]
"""Returns what a row shows in this list, or None when it is not in it."""
_NAMES_AT_ONCE = 16
"""Of one shard: a page of 100 rarely needs more of any."""
_SCORE_MAX = 10**15


@dataclass(slots=True)
class _ShardCursor:
    """Where the merge stands in one shard's tenant set: at a position, which no delete moves."""

    key: str
    below: Position | None
    count: int = _NAMES_AT_ONCE
    ahead: deque[Position] = field(default_factory=deque)
    is_done: bool = False

    def next_read(self) -> tuple[Any, ...]:
        """Return the command that reads the next `count` names."""
        start = "+inf" if self.below is None else str(self.below[0])
        return ("ZREVRANGEBYSCORE", self.key, start, "-inf", "WITHSCORES", "LIMIT", 0, self.count)

    def take(self, reply: list[Any] | None) -> None:
        """Queue the names of a reply that lie behind the position."""
        pairs = _pairs(reply or [])
        self.is_done = len(pairs) < self.count
        behind = [pair for pair in pairs if self.below is None or pair < self.below]
        self.ahead.extend(behind)
        if behind:
            self.below = behind[-1]
        else:
            self.count *= 2  # all of one ms


class SessionLister:
    """Reads pages; one call reads at most LIST_ROWS_MAX rows, whatever it looks for."""

    def __init__(self, connection: RedisConnection) -> None:
        self._redis = connection

    async def page(self, tenant: TenantId, *, limit: int, position: Position | None, shown: Shown) -> SessionPage:
        """Return up to `limit` sessions behind `position`; fewer, with more to follow, when the rows are used up."""
        cursors = [_ShardCursor(tenant_key(shard, tenant), position) for shard in range(NUM_SHARDS)]
        found: list[CacheSessionMetadata] = []
        last_id: SessionId = ""
        num_left = LIST_ROWS_MAX
        while num_left > 0:
            keys = await self._next_keys(tenant, cursors, count=min(limit + 1, num_left))
            if not keys:
                return last_page(found)
            num_left -= len(keys)
            rows = await self._redis.batch([("HGETALL", session_key(key)) for key in keys])
            for key, fields in zip(keys, rows, strict=True):
                session = shown(key, fields) if fields else None
                if session is not None and len(found) == limit:
                    return SessionPage(tuple(found), has_more=True, last_id=last_id)
                found += [] if session is None else [session]
                # The next page need not read again what this one has left out, rows that are gone included.
                last_id = key.session_id
        return SessionPage(tuple(found), has_more=True, last_id=last_id)

    async def _next_keys(self, tenant: TenantId, cursors: list[_ShardCursor], *, count: int) -> list[SessionKey]:
        keys: list[SessionKey] = []
        while len(keys) < count:
            while empty := [cursor for cursor in cursors if not cursor.ahead and not cursor.is_done]:
                replies = await self._redis.batch([cursor.next_read() for cursor in empty])
                for cursor, reply in zip(empty, replies, strict=True):
                    cursor.take(reply)
            heads = [cursor for cursor in cursors if cursor.ahead]
            if not heads:
                break
            newest = max(heads, key=lambda cursor: cursor.ahead[0])
            keys.append(SessionKey(tenant, newest.ahead.popleft()[1]))
        return keys


def _pairs(reply: list[Any]) -> list[Position]:
    """Return (score, name) of a WITHSCORES reply, whether the client paired it up or left it flat."""
    if reply and isinstance(reply[0], bytes):
        reply = list(zip(reply[::2], reply[1::2], strict=True))
    return [(created_at_of(score), name.decode(errors="replace")) for name, score in reply]


def created_at_of(score: Any) -> int:
    """Return the ms that a score of a tenant's set stands for."""
    return int(min(float(score), _SCORE_MAX))


class ShardSweeper:
    """Takes what is due, a shard at a time, and makes a slow round over all sessions, due or not.

    Bounded: one call looks at SWEEP_BATCH sessions at most.
    """

    def __init__(
        self, connection: RedisConnection, script: Script, *, tombstone_ms: int, ledger: Callable[[SessionKey], str]
    ) -> None:
        """`ledger`: the name of the ledger that counts a session's bytes."""
        self._redis = connection
        self._script = script
        self._tombstone_ms = tombstone_ms
        self._ledger = ledger
        self._next_shard, self._next_rank = 0, 0
        """Where the round goes on."""

    async def take_expired(self, shard: int, *, now_ms: int, limit: int) -> tuple[Swept, ...]:
        """Take up to `limit` due sessions of a shard."""
        count = min(limit, SWEEP_BATCH)
        members = await self._redis.call("ZRANGEBYSCORE", expiry_key(shard), "-inf", now_ms, "LIMIT", 0, count)
        return await self._take(shard, members, now_ms=now_ms)

    async def review(self, *, now_ms: int) -> tuple[Swept, ...]:
        """Look at the next sessions of the round, in the order in which they end."""
        shard, rank = self._next_shard, self._next_rank
        # A shard that fails is not waited for: its turn comes again.
        self._next_shard, self._next_rank = (shard + 1) % NUM_SHARDS, 0
        members = await self._redis.call("ZRANGE", expiry_key(shard), rank, rank + SWEEP_BATCH - 1)
        if len(members) == SWEEP_BATCH:
            self._next_shard, self._next_rank = shard, rank + SWEEP_BATCH
        return await self._take(shard, members, now_ms=now_ms)

    async def _take(self, shard: int, members: Sequence[bytes], *, now_ms: int) -> tuple[Swept, ...]:
        keys = {name: key for name in members if (key := key_of_member(name, shard=shard)) is not None}
        nameless = [name for name in members if name not in keys]
        # Of managers at the same time one removes it, and counts it.
        num_removed = await self._redis.call("ZREM", expiry_key(shard), *nameless) if nameless else 0
        taken = await self._take_named(shard, list(keys.values()), now_ms=now_ms) if keys else []
        swept = [Swept(keys[name], Fate(fate.decode())) for name, fate in zip(taken[::2], taken[1::2], strict=True)]
        return (*swept, *(Swept(None, Fate.DAMAGED) for _ in range(num_removed)))

    async def _take_named(self, shard: int, candidates: Sequence[SessionKey], *, now_ms: int) -> Sequence[bytes]:
        names = [expiry_key(shard)]
        arguments: list[Any] = [now_ms, self._tombstone_ms]
        for key in candidates:
            names += [session_key(key), transcript_key(key), tenant_key(shard, key.tenant)]
            names += [self._ledger(key), turns_key(key), place_key(key)]
            arguments += [member(key), key.session_id]
        crash_point("manager.sweep.before")
        taken: Sequence[bytes] = await self._redis.script(self._script, names, arguments, repeatable=False)
        crash_point("manager.sweep.after")
        return taken
