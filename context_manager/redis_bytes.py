"""`TenantBytes`: how many more bytes a tenant may have in Redis, as scripts/bytes.lua wants to know it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from context_manager.layout import HOUR_MS, ledger_key
from context_manager.limits import SessionKey
from context_manager.redis_connection import RedisConnection
from contextcache.model import TenantId
from contextcache.names import NUM_SHARDS, shard_of

_SUMS_KNOWN_S = 1.0
"""Seconds for which a Cluster's sums are cached: one round trip a second for each tenant that writes."""
_EXACT_FROM = 0.5
"""Share of its limit from which a tenant's sums are read at each write: only then can a second's writes matter."""
_TENANTS_MAX = 10_000
"""Maximum number of tenants in the cache of sums: about 10 MB."""


@dataclass(slots=True)
class _Sums:
    """A tenant's bytes in each shard of a Cluster, as they were read."""

    read_at_s: float
    by_shard: list[int]
    granted: int = 0
    """Bytes that this manager let the tenant write since."""


class TenantBytes:
    """A tenant's limit of bytes, and the ledgers that count against it.

    Outside a Cluster one ledger counts all bytes of a tenant, and no race exceeds the limit. In a Cluster each shard
    has a ledger. A script reads its own shard's ledger; the manager read the others just before. Calls that race may
    exceed the limit by the bytes that they write.
    """

    def __init__(self, connection: RedisConnection, *, bytes_max: int, now_ms: Callable[[], Awaitable[int]]) -> None:
        """`bytes_max`: 0 for no limit. `now_ms`: returns the time of Redis."""
        self._now_ms = now_ms
        self._redis = connection
        self.bytes_max = bytes_max
        """The limit; 0: none."""
        self._sums: dict[TenantId, _Sums] = {}

    def ledger(self, key: SessionKey) -> str:
        """Return the name of the ledger that counts a session's bytes."""
        return ledger_key(key.tenant, shard_of(key.tenant, key.session_id) if self._redis.is_cluster else None)

    async def room(self, key: SessionKey, more: int) -> int | None:
        """Return the bytes that the session's ledger may come to; None: any number. Raises StoreUnavailable.

        `more`: bytes that the caller is about to write.
        """
        if not self.bytes_max:
            return None
        if not self._redis.is_cluster:
            return self.bytes_max
        sums = await self._sums_of(key.tenant)
        sums.granted += more
        return self.bytes_max - sum(sums.by_shard) + sums.by_shard[shard_of(key.tenant, key.session_id)]

    async def _sums_of(self, tenant: TenantId) -> _Sums:
        known, now_s = self._sums.get(tenant), asyncio.get_running_loop().time()
        if (
            known is not None
            and now_s - known.read_at_s < _SUMS_KNOWN_S
            and sum(known.by_shard) + known.granted < self.bytes_max * _EXACT_FROM
        ):
            return known
        by_shard = await self._read_sums(tenant, await self._now_ms())
        if len(self._sums) >= _TENANTS_MAX:
            self._sums.clear()
        self._sums[tenant] = _Sums(now_s, by_shard)
        return self._sums[tenant]

    async def _read_sums(self, tenant: TenantId, now_ms: int) -> list[int]:
        ledgers = [ledger_key(tenant, shard) for shard in range(NUM_SHARDS)]
        heads = await self._redis.batch([("HMGET", ledger, "first", "sum") for ledger in ledgers])
        sums = [_number(head[1]) if head is not None else 0 for head in heads]
        # A sum that was written in an earlier hour may hold bytes that ended since.
        hour = now_ms // HOUR_MS
        stale = [shard for shard, head in enumerate(heads) if sums[shard] and _number(head[0]) < hour]
        if stale:
            found = await self._redis.batch([("HGETALL", ledgers[shard]) for shard in stale])
            for shard, by_hour in zip(stale, found, strict=True):
                hours = {_number(name): _number(text) for name, text in (by_hour or {}).items()}
                sums[shard] = sum(number for name, number in hours.items() if name >= hour)
        return sums


def _number(text: bytes | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
