"""A tenant's sessions, newest first, merged over all shards with bounded reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from context_manager.redis_connection import RedisConnection
from context_manager.redis_keys import session_key, tenant_key
from context_manager.store import NUM_SHARDS, SessionKey
from contextcache.model import CacheSessionMetadata, TenantId

Position = tuple[int, str]
"""(created_at_ms, session id): the list runs downwards through these."""
Shown = Callable[[SessionKey, Mapping[bytes, bytes]], CacheSessionMetadata | None]
"""Returns what a row shows in this list, or None when it is not in it."""


@dataclass(slots=True)
class _ShardCursor:
    """Where the merge stands in one shard's tenant set."""

    key: str
    max_score: str
    offset: int = 0
    ahead: deque[Position] = field(default_factory=deque)
    is_done: bool = False

    def next_read(self, count: int) -> tuple[Any, ...]:
        """Return the command that reads the next `count` names."""
        return ("ZREVRANGEBYSCORE", self.key, self.max_score, "-inf", "WITHSCORES", "LIMIT", self.offset, count)

    def take(self, reply: list[Any], *, count: int, below: Position | None) -> None:
        """Queue the names of a reply that lie behind `below`."""
        pairs = _pairs(reply)
        self.offset += len(pairs)
        self.is_done = len(pairs) < count
        self.ahead.extend(pair for pair in pairs if below is None or pair < below)


class SessionLister:
    """Reads pages; holds at most `limit + 1` names a shard."""

    def __init__(self, connection: RedisConnection) -> None:
        self._redis = connection

    async def page(
        self, tenant: TenantId, *, limit: int, position: Position | None, shown: Shown
    ) -> tuple[tuple[CacheSessionMetadata, ...], bool]:
        """Return up to `limit` sessions behind `position` and whether more follow."""
        start = "+inf" if position is None else str(position[0])
        cursors = [_ShardCursor(tenant_key(shard, tenant), start) for shard in range(NUM_SHARDS)]
        found: list[CacheSessionMetadata] = []
        while len(found) <= limit:
            keys = await self._next_keys(tenant, cursors, count=limit + 1, below=position)
            if not keys:
                return tuple(found), False
            rows = await self._redis.batch([("HGETALL", session_key(key)) for key in keys])
            sessions = (shown(key, fields) for key, fields in zip(keys, rows, strict=True) if fields)
            found += [session for session in sessions if session is not None]
        return tuple(found[:limit]), True

    async def _next_keys(
        self, tenant: TenantId, cursors: list[_ShardCursor], *, count: int, below: Position | None
    ) -> list[SessionKey]:
        keys: list[SessionKey] = []
        while len(keys) < count:
            while empty := [cursor for cursor in cursors if not cursor.ahead and not cursor.is_done]:
                replies = await self._redis.batch([cursor.next_read(count) for cursor in empty])
                for cursor, reply in zip(empty, replies, strict=True):
                    cursor.take(reply, count=count, below=below)
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
    return [(int(float(score)), name.decode()) for name, score in reply]
