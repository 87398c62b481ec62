"""`RedisSessionStore`: sessions in Redis >= 6.2 or Valkey, single, under Sentinel or in a Cluster.

Every state change is one Lua script (scripts/), so it is atomic; every script is about one shard, so it runs in a
Cluster. Connections are opened in redis_connection.py. What the rules are: store.py, session_row.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from context_manager import refusals
from context_manager.redis_connection import RedisConnection
from context_manager.redis_keys import (
    NAMING_FIELDS,
    expiry_key,
    key_of_member,
    member,
    row_of_reply,
    row_of_values,
    script_keys,
    session_key,
    tenant_key,
    transcript_key,
)
from context_manager.redis_listing import SessionLister
from context_manager.redis_scripts import load_scripts
from context_manager.segment_codec import pack_segment, unpack_segment
from context_manager.session_row import existing_row, metadata_to_field, new_row, row_to_fields
from context_manager.store import NUM_SHARDS, SWEEP_BATCH, SessionKey, SessionStore, Swept, shard_of
from contextcache.crash_points import crash_point
from contextcache.errors import ContextCacheError
from contextcache.model import (
    CacheSessionMetadata,
    HeldCacheRef,
    NewSession,
    Segment,
    SessionId,
    TenantId,
    TtlPolicy,
    TurnCommit,
)


class RedisSessionStore(SessionStore):
    """The store of a deployment. Owns its connection; `close` gives it back."""

    def __init__(self, connection: RedisConnection, *, tombstone_s: int, tenant_contexts_max: int = 0) -> None:
        """`tombstone_s`: how long an expired session answers ContextExpired rather than ContextNotFound.

        `tenant_contexts_max`: 0 for no limit, which costs nothing.
        """
        self._tenant_contexts_max = tenant_contexts_max
        self._redis = connection
        self._tombstone_ms = tombstone_s * 1000
        self._scripts = load_scripts()
        self._lister = SessionLister(connection)

    @override
    async def reserve(self, new: NewSession, *, lease_id: str, lease_ttl_ms: int, now_ms: int) -> CacheSessionMetadata:
        key = SessionKey(new.tenant, new.session_id)
        row = new_row(new, lease_id=lease_id, lease_ttl_ms=lease_ttl_ms, now_ms=now_ms)
        fields = row_to_fields(row)
        limit, elsewhere = self._tenant_contexts_max, list[str]()
        if limit and self._redis.is_cluster:
            # No script sees all shards there: the row waits for a count that saw it.
            limit, fields = 0, fields | {"pending": "1"}
        elif limit:
            own = shard_of(new.tenant, new.session_id)
            elsewhere = [tenant_key(shard, new.tenant) for shard in range(NUM_SHARDS) if shard != own]
        pairs = [part for pair in fields.items() for part in pair]
        arguments = (lease_id, row.lease_until_ms, now_ms, limit, *pairs)
        answer = await self._change("reserve", key, now_ms, *arguments, more_keys=elsewhere)
        if b"pending" in answer[1][::2]:
            answer = await self._admit(key, lease_id, now_ms)
        return row_of_reply(key, answer[1]).metadata_at(now_ms)

    async def _admit(self, key: SessionKey, lease_id: str, now_ms: int) -> Sequence[Any]:
        """Keep a reservation or take it back. Of all that are kept the last to count saw every other one."""
        sets = [tenant_key(shard, key.tenant) for shard in range(NUM_SHARDS)]
        num_contexts = sum(await self._redis.batch([("ZCARD", name) for name in sets]))
        return await self._change("admit", key, now_ms, lease_id, self._tenant_contexts_max, num_contexts)

    @override
    async def get(self, key: SessionKey, *, now_ms: int) -> CacheSessionMetadata:
        fields = await self._redis.call("HGETALL", session_key(key))
        row = row_of_reply(key, fields) if fields else None
        return existing_row(row, now_ms=now_ms, tombstone_ms=self._tombstone_ms).metadata_at(now_ms)

    @override
    async def begin_turn(
        self,
        key: SessionKey,
        *,
        lease_id: str,
        lease_ttl_ms: int,
        read_only: bool,
        expected_generation: int | None,
        now_ms: int,
    ) -> tuple[CacheSessionMetadata, tuple[Segment, ...]]:
        answer = await self._change(
            "begin",
            key,
            now_ms,
            lease_id,
            now_ms + lease_ttl_ms,
            int(read_only),
            "" if expected_generation is None else expected_generation,
        )
        try:
            transcript = tuple(unpack_segment(packed) for packed in answer[2])
        except ValueError as exc:
            raise refusals.damaged() from exc
        return row_of_reply(key, answer[1]).metadata_at(now_ms), transcript

    @override
    async def renew_lease(self, key: SessionKey, *, lease_id: str, lease_ttl_ms: int, now_ms: int) -> None:
        await self._change("renew", key, now_ms, lease_id, now_ms + lease_ttl_ms)

    @override
    async def commit_turn(self, commit: TurnCommit, *, now_ms: int) -> CacheSessionMetadata:
        key = SessionKey(commit.tenant, commit.session_id)
        answer = await self._change(
            "commit",
            key,
            now_ms,
            commit.lease_id,
            commit.expected_generation,
            commit.keep_segments,
            commit.cache_ref,
            commit.holder,
            sum(len(segment.token_ids) for segment in commit.segments),
            *(pack_segment(segment) for segment in commit.segments),
            durable=True,
        )
        return row_of_reply(key, answer[1]).metadata_at(now_ms)

    @override
    async def abort_turn(self, key: SessionKey, *, lease_id: str, now_ms: int) -> None:
        await self._change("abort", key, now_ms, lease_id)

    @override
    async def touch(
        self,
        key: SessionKey,
        *,
        ttl_s: int | None,
        ttl_policy: TtlPolicy | None,
        metadata: Mapping[str, str] | None,
        now_ms: int,
    ) -> CacheSessionMetadata:
        answer = await self._change(
            "touch",
            key,
            now_ms,
            "" if ttl_s is None else ttl_s,
            "" if ttl_policy is None else ttl_policy.value,
            "" if metadata is None else metadata_to_field(metadata),
            durable=True,
        )
        return row_of_reply(key, answer[1]).metadata_at(now_ms)

    @override
    async def unregister(self, key: SessionKey, *, now_ms: int) -> CacheSessionMetadata:
        # Not repeated after a lost reply: the second answer would say "not found" for a session that was removed.
        answer = await self._change("unregister", key, now_ms, repeatable=False, durable=True)
        return row_of_reply(key, answer[1]).metadata_at(now_ms)

    @override
    async def list_sessions(
        self, tenant: TenantId, *, limit: int, after: SessionId, model_id: str, now_ms: int
    ) -> tuple[tuple[CacheSessionMetadata, ...], bool]:
        position: tuple[int, str] | None = None
        if after:
            key = SessionKey(tenant, after)
            fields = await self._redis.call("HGETALL", session_key(key))
            if not fields:
                raise refusals.unknown_after()
            position = (row_of_reply(key, fields).session.created_at_ms, after)

        def shown(key: SessionKey, fields: Mapping[bytes, bytes]) -> CacheSessionMetadata | None:
            row = row_of_reply(key, fields)
            try:
                existing_row(row, now_ms=now_ms, tombstone_ms=self._tombstone_ms)
            except ContextCacheError:
                return None  # due, and the sweep has not passed yet
            return row.metadata_at(now_ms) if model_id in ("", row.session.model_id) else None

        return await self._lister.page(tenant, limit=limit, position=position, shown=shown)

    @override
    async def take_expired(self, shard: int, *, now_ms: int, limit: int) -> tuple[Swept, ...]:
        expiry = expiry_key(shard)
        count = min(limit, SWEEP_BATCH)
        members = await self._redis.call("ZRANGEBYSCORE", expiry, "-inf", now_ms, "LIMIT", 0, count)
        if not members:
            return ()
        candidates = [key_of_member(name) for name in members]
        keys = [expiry]
        arguments: list[Any] = [now_ms, self._tombstone_ms]
        for key in candidates:
            keys += [session_key(key), transcript_key(key), tenant_key(shard, key.tenant)]
            arguments += [member(key), key.session_id]
        crash_point("manager.sweep.before")
        taken = await self._redis.script(self._scripts["sweep"], keys, arguments, repeatable=False)
        crash_point("manager.sweep.after")
        return tuple(
            Swept(key_of_member(name), is_abandoned=kind == b"abandoned")
            for name, kind in zip(taken[::2], taken[1::2], strict=True)
        )

    @override
    async def check_refs(self, held: Sequence[HeldCacheRef], *, now_ms: int) -> tuple[int, ...]:
        keys = list(dict.fromkeys(SessionKey(one.tenant, one.session_id) for one in held))
        replies = await self._redis.batch([("HMGET", session_key(key), *NAMING_FIELDS) for key in keys])
        rows = {key: row_of_values(key, values) for key, values in zip(keys, replies, strict=True)}
        orphans: list[int] = []
        for position, one in enumerate(held):
            row = rows[SessionKey(one.tenant, one.session_id)]
            if row is None or not row.names(one.cache_ref, now_ms=now_ms, tombstone_ms=self._tombstone_ms):
                orphans.append(position)
        return tuple(orphans)

    @override
    async def count_sessions(self) -> int:
        return sum(await self._redis.batch([("ZCARD", expiry_key(shard)) for shard in range(NUM_SHARDS)]))

    @override
    async def read_clock(self) -> int:
        told = await self._redis.call("TIME")
        # A Cluster's primaries answer one by one; one of them with a wrong clock does not count.
        times = sorted(told.values()) if isinstance(told, dict) else [told]
        seconds, microseconds = times[len(times) // 2]
        return int(seconds) * 1000 + int(microseconds) // 1000

    @override
    async def close(self) -> None:
        await self._redis.close()

    async def _change(
        self,
        script: str,
        key: SessionKey,
        now_ms: int,
        *arguments: Any,
        more_keys: Sequence[str] = (),
        repeatable: bool = True,
        durable: bool = False,
    ) -> Sequence[Any]:
        """Run a script about one session. `durable`: for what is acknowledged to a client; leases are not."""
        keys = [*script_keys(key), *more_keys]
        common = [member(key), key.session_id, now_ms, self._tombstone_ms]
        crash_point(f"manager.{script}.before")
        answer: Sequence[Any] = await self._redis.script(
            self._scripts[script], keys, [*common, *arguments], repeatable=repeatable, durable=durable
        )
        crash_point(f"manager.{script}.after")
        if answer[0] != b"ok":
            raise _refusal(answer[0].decode(), int(answer[1]) if len(answer) > 1 else 0)
        return answer


def _refusal(code: str, number: int) -> ContextCacheError:
    if code == "busy":
        return refusals.busy(number)
    if code == "generation":
        return refusals.generation_mismatch(number)
    if code == "keep":
        return refusals.keeps_too_much(number)
    if code == "quota":
        return refusals.too_many_contexts(number)
    plain = {
        "absent": refusals.not_found,
        "expired": refusals.expired,
        "exists": refusals.exists,
        "lease_lost": refusals.lease_lost,
        "damaged": refusals.damaged,
    }
    return plain[code]()
