"""Redis' sorted sets, read with bounds: a tenant's sessions, newest first over all shards; the due ones of a shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from context_manager import refusals
from context_manager.layout import place_key, session_key, tenant_key
from context_manager.limits import SessionKey
from context_manager.redis_connection import RedisConnection
from contextcache.model import CacheSessionMetadata, SessionId, SessionPage, TenantId
from contextcache.names import NUM_SHARDS, shard_of

LIST_ROWS_MAX = 400
"""Maximum number of rows that one call reads. With a filter that matches few, a page is short and more may follow. 400
rows take some 30 ms of a manager's time."""
Position = tuple[int, str]
"""(created_at_ms, session id): the list runs downwards through these."""
Shown = Callable[[SessionKey, Mapping[bytes, bytes]], CacheSessionMetadata | None]
"""Function that returns the session of a row in this list, or None for a row that the list leaves out."""
_NAMES_AT_ONCE = 16
"""Names that the first read of a shard asks for: a page of 100 rarely needs more of any."""
_SCORE_MAX = 10**15


@dataclass(slots=True)
class _ShardCursor:
    """Position of the merge in one shard's tenant set. No delete moves a position."""

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
        """Queue the names of a reply that are behind the position."""
        pairs = _pairs(reply or [])
        self.is_done = len(pairs) < self.count
        behind = [pair for pair in pairs if self.below is None or pair < self.below]
        self.ahead.extend(behind)
        if behind:
            self.below = behind[-1]
        else:
            self.count *= 2  # all names of one ms


async def read_page(
    redis: RedisConnection, tenant: TenantId, *, limit: int, after: SessionId, shown: Shown
) -> SessionPage:
    """Return up to `limit` sessions behind `after`; fewer, with more to follow, after LIST_ROWS_MAX rows.

    `after`: empty, or a session that is there, or was until lately. Raises InvalidRequest.
    """
    position = (await _created_at_ms(redis, SessionKey(tenant, after)), after) if after else None
    cursors = [_ShardCursor(tenant_key(shard, tenant), position) for shard in range(NUM_SHARDS)]
    found: list[CacheSessionMetadata] = []
    last_id: SessionId = ""
    num_left = LIST_ROWS_MAX
    while num_left > 0:
        keys = await _next_keys(redis, tenant, cursors, count=min(limit + 1, num_left))
        if not keys:
            return SessionPage(tuple(found), has_more=False, last_id=found[-1].session_id if found else "")
        num_left -= len(keys)
        rows = await redis.batch([("HGETALL", session_key(key)) for key in keys])
        for key, fields in zip(keys, rows, strict=True):
            session = shown(key, fields) if fields else None
            if session is not None and len(found) == limit:
                return SessionPage(tuple(found), has_more=True, last_id=last_id)
            found += [] if session is None else [session]
            # The next page skips also rows that this one has left out, or that are gone.
            last_id = key.session_id
    return SessionPage(tuple(found), has_more=True, last_id=last_id)


async def _next_keys(
    redis: RedisConnection, tenant: TenantId, cursors: Sequence[_ShardCursor], *, count: int
) -> list[SessionKey]:
    keys: list[SessionKey] = []
    while len(keys) < count:
        while empty := [cursor for cursor in cursors if not cursor.ahead and not cursor.is_done]:
            replies = await redis.batch([cursor.next_read() for cursor in empty])
            for cursor, reply in zip(empty, replies, strict=True):
                cursor.take(reply)
        heads = [cursor for cursor in cursors if cursor.ahead]
        if not heads:
            break
        newest = max(heads, key=lambda cursor: cursor.ahead[0])
        keys.append(SessionKey(tenant, newest.ahead.popleft()[1]))
    return keys


async def _created_at_ms(redis: RedisConnection, key: SessionKey) -> int:
    """Return the position of a session in the lists, or the one it had when it was removed. Raises InvalidRequest."""
    commands = [("HGET", name, "created_at_ms") for name in (session_key(key), place_key(key))]
    in_list = ("ZSCORE", tenant_key(shard_of(key.tenant, key.session_id), key.tenant), key.session_id)
    *told, score = await redis.batch([*commands, in_list])
    for text in told:
        if text is not None and text.isdigit():
            return int(text)
    if score is None:
        raise refusals.unknown_after()
    return _created_at_of(score)  # the row is gone, or damaged, and its name is still in the set


def _pairs(reply: list[Any]) -> list[Position]:
    """Return (score, name) of a WITHSCORES reply, whether the client paired it up or left it flat."""
    if reply and isinstance(reply[0], bytes):
        reply = list(zip(reply[::2], reply[1::2], strict=True))
    return [(_created_at_of(score), name.decode(errors="replace")) for name, score in reply]


def _created_at_of(score: Any) -> int:
    return int(min(float(score), _SCORE_MAX))
