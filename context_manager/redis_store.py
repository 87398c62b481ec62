"""`RedisSessionStore`: sessions in Redis >= 6.2 or Valkey, single, under Sentinel or in a Cluster.

Every state change is one Lua script (scripts/), so it is atomic; every script is about one shard, so it runs in a
Cluster. Connections are opened in redis_connection.py. What the rules are: store.py, session_row.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import override

from context_manager import refusals
from context_manager.redis_bytes import TenantBytes
from context_manager.redis_connection import RedisConnection
from context_manager.redis_layout import (
    NAMING_FIELDS,
    SWEEPER_KEY,
    answer_key,
    counted_key,
    expiry_key,
    load_scripts,
    member,
    place_key,
    receipt_text,
    receipts_of_reply,
    row_of_reply,
    row_of_values,
    script_keys,
    session_key,
    tenant_key,
    transcript_key,
    turns_key,
    usage_key,
    usage_of_replies,
    usage_text,
)
from context_manager.redis_listing import SessionLister, ShardSweeper, created_at_of
from context_manager.segments import num_tokens_of, pack_segment
from context_manager.session_row import (
    MARKS_CHARS_MAX,
    existing_row,
    forked_from_field,
    metadata_to_field,
    new_mark,
    new_row,
    row_to_fields,
)
from context_manager.store import (
    BATCH_KNOWN_MS,
    CONTEXT_BYTES,
    DAY_MS,
    KEY_GRACE_MS,
    TENANT_BYTES_MAX,
    BegunTurn,
    SessionKey,
    SessionStore,
    Swept,
    day_of,
)
from contextcache.errors import ContextCacheError
from contextcache.model import (
    BRANCH_LEASE_ID,
    CacheSessionMetadata,
    HeldCacheRef,
    KeptAnswer,
    NewSession,
    Repeatable,
    SessionId,
    SessionPage,
    TenantId,
    TtlPolicy,
    TurnCommit,
    TurnReceipt,
    Usage,
    UsageReport,
)
from contextcache.names import NUM_SHARDS, shard_of
from contextcache.process.crash_points import crash_point

TRUNKS_MAX = 16
"""Trunks that one row names at most. A fork of a deeper one copies its transcript, and begins with none."""

LENGTHS_MAX = 256
"""Lengths that one trunk is shared at: each is 20 bytes that every fork and delete of the family reads and writes."""


class RedisSessionStore(SessionStore):
    """The store of a deployment. Owns its connection; `close` gives it back."""

    def __init__(
        self,
        connection: RedisConnection,
        *,
        tombstone_s: int,
        tenant_contexts_max: int = 0,
        tenant_bytes_max: int = TENANT_BYTES_MAX,
        grace_ms: int = KEY_GRACE_MS,
    ) -> None:
        """`tombstone_s`: how long an expired session answers ContextExpired rather than ContextNotFound.

        `tenant_contexts_max`, `tenant_bytes_max`: 0 for no limit. `grace_ms`: see KEY_GRACE_MS.
        """
        self._tenant_contexts_max = tenant_contexts_max
        self._redis = connection
        self._bytes = TenantBytes(connection, bytes_max=tenant_bytes_max)
        self._tombstone_ms = tombstone_s * 1000
        self._scripts = load_scripts(grace_ms=grace_ms)
        self._lister = SessionLister(connection)
        self._sweeper = ShardSweeper(
            connection, self._scripts["sweep"], tombstone_ms=self._tombstone_ms, ledger=self._bytes.ledger
        )

    @override
    async def reserve(
        self,
        new: NewSession,
        *,
        lease_id: str,
        lease_ttl_ms: int,
        repeatable: Repeatable | None = None,
        now_ms: int,
    ) -> CacheSessionMetadata:
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
        keys, arguments = await self._repeat(key, repeatable, now_ms)
        answer = await self._change(
            "reserve", key, now_ms, lease_id, limit, *arguments, *pairs, more_keys=[*keys, *elsewhere, turns_key(key)]
        )
        if b"pending" in answer[1][::2]:
            answer = await self._admit(key, lease_id, now_ms)
        return row_of_reply(key, answer[1]).metadata_at(now_ms)

    async def _admit(self, key: SessionKey, lease_id: str, now_ms: int) -> Sequence[Any]:
        """Keep a reservation or take it back. Of all that are kept the last to count saw every other one."""
        sets = [tenant_key(shard, key.tenant) for shard in range(NUM_SHARDS)]
        num_contexts = sum(number or 0 for number in await self._redis.batch([("ZCARD", name) for name in sets]))
        return await self._change("admit", key, now_ms, lease_id, self._tenant_contexts_max, num_contexts)

    @override
    async def get(self, key: SessionKey, *, now_ms: int) -> CacheSessionMetadata:
        fields = await self._redis.call("HGETALL", session_key(key))
        row = row_of_reply(key, fields) if fields else None
        return existing_row(row, now_ms=now_ms, tombstone_ms=self._tombstone_ms).metadata_at(now_ms)

    @override
    async def read_turns(self, key: SessionKey) -> tuple[TurnReceipt, ...]:
        (reply,) = await self._redis.batch([("LRANGE", turns_key(key), 0, -1)])
        return receipts_of_reply(reply)

    @override
    async def begin_turn(
        self,
        key: SessionKey,
        *,
        lease_id: str,
        lease_ttl_ms: int,
        read_only: bool,
        expected_generation: int | None,
        known_mark: str = "",
        repeatable: Repeatable | None = None,
        now_ms: int,
    ) -> BegunTurn:
        keys, arguments = await self._repeat(key, repeatable, now_ms)
        answer = await self._change(
            "begin",
            key,
            now_ms,
            lease_id,
            now_ms + lease_ttl_ms,
            int(read_only),
            "" if expected_generation is None else expected_generation,
            known_mark,
            *arguments,
            more_keys=[*keys, turns_key(key)],
        )
        row, known_segments, packed = answer[1:]
        return BegunTurn(row_of_reply(key, row).metadata_at(now_ms), known_segments, tuple(packed))

    @override
    async def renew_lease(self, key: SessionKey, *, lease_id: str, lease_ttl_ms: int, now_ms: int) -> None:
        await self._change("renew", key, now_ms, lease_id, now_ms + lease_ttl_ms, more_keys=[turns_key(key)])

    @override
    async def note_holder(self, key: SessionKey, *, holder: str, instead_of: str = "", now_ms: int) -> None:
        await self._change("note_holder", key, now_ms, holder, instead_of)

    @override
    async def commit_turn(self, commit: TurnCommit, *, now_ms: int) -> CacheSessionMetadata:
        packed = [pack_segment(segment) for segment in commit.segments]
        return await self._commit(commit, packed, now_ms=now_ms)

    @override
    async def fork(
        self, source: SessionKey, *, generation: int | None, commit: TurnCommit, now_ms: int
    ) -> CacheSessionMetadata:
        child = SessionKey(commit.tenant, commit.session_id)
        if shard_of(source.tenant, source.session_id) == shard_of(child.tenant, child.session_id):
            answer = await self._change(
                "share",
                child,
                now_ms,
                commit.lease_id,
                "" if generation is None else generation,
                member(source),
                source.session_id,
                new_mark(),
                TRUNKS_MAX,
                LENGTHS_MAX,
                more_keys=[session_key(source), transcript_key(source), turns_key(source)],
            )
            if answer[0] == b"ok":
                return await self._commit(replace(commit, keep_segments=int(answer[2])), [], now_ms=now_ms)
        _, flat, _, packed = await self._change(
            "begin", source, now_ms, commit.lease_id, 0, 1, "", "", "", "", more_keys=[turns_key(source)]
        )
        row = row_of_reply(source, flat)
        begins_as = packed[: row.segments_at(generation)]
        forked_from = source.session_id, row.session.generation if generation is None else generation
        return await self._commit(commit, begins_as, forked_from=forked_from_field(forked_from), now_ms=now_ms)

    async def _commit(
        self, commit: TurnCommit, packed: Sequence[bytes], *, forked_from: str = "", now_ms: int
    ) -> CacheSessionMetadata:
        key = SessionKey(commit.tenant, commit.session_id)
        room = await self._bytes.room(key, sum(map(len, packed)) + len(commit.answer), now_ms=now_ms)
        answer = await self._change(
            "commit",
            key,
            now_ms,
            commit.lease_id,
            commit.expected_generation,
            commit.keep_segments,
            commit.cache_ref,
            commit.holder,
            sum(map(num_tokens_of, packed)),
            new_mark(),
            MARKS_CHARS_MAX,
            "" if commit.repeatable is None else commit.repeatable.request,
            commit.answer,
            "" if commit.usage is None else usage_text([commit.usage]),
            receipt_text(commit.receipt),
            forked_from,
            room,
            *packed,
            more_keys=[
                *([] if commit.repeatable is None else [answer_key(key, commit.repeatable.key)]),
                turns_key(key),
                usage_key(shard_of(key.tenant, key.session_id), key.tenant, day_of(now_ms)),
            ],
            durable=True,
        )
        return row_of_reply(key, answer[1]).metadata_at(now_ms)

    @override
    async def find_answer(self, key: SessionKey, *, repeat_key: str, now_ms: int) -> KeptAnswer | None:
        record = answer_key(key, repeat_key)
        (values,) = await self._redis.batch([("HMGET", record, "answer", "generation", "expires_at_ms", "request")])
        told: Sequence[Any] = values or (None,) * 4
        answer, generation, expires_at_ms, request = told
        if answer is None:
            return None
        try:
            return KeptAnswer(bytes(answer), int(generation), int(expires_at_ms), request.decode())
        except (AttributeError, TypeError, ValueError) as exc:
            raise refusals.damaged() from exc

    async def _repeat(
        self, key: SessionKey, repeatable: Repeatable | None, now_ms: int
    ) -> tuple[list[str], tuple[str, int | str]]:
        """Return the keys and arguments by which a script knows whether a request is to be run."""
        room = await self._bytes.room(key, CONTEXT_BYTES, now_ms=now_ms)
        if repeatable is None:
            return [], ("", room)
        return [answer_key(key, repeatable.key)], (repeatable.request, room)

    @override
    async def rewind(
        self, key: SessionKey, *, generation: int, expected_generation: int | None, now_ms: int
    ) -> CacheSessionMetadata:
        expected = "" if expected_generation is None else expected_generation
        answer = await self._change(
            "rewind",
            key,
            now_ms,
            generation,
            expected,
            new_mark(),
            MARKS_CHARS_MAX,
            more_keys=[turns_key(key)],
            durable=True,
        )
        return row_of_reply(key, answer[1]).metadata_at(now_ms)

    @override
    async def abort_turn(self, key: SessionKey, *, lease_id: str, now_ms: int) -> None:
        await self._change("abort", key, now_ms, lease_id, more_keys=[place_key(key)])

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
        field = "" if metadata is None else metadata_to_field(metadata)
        room = await self._bytes.room(key, len(field), now_ms=now_ms)
        answer = await self._change(
            "touch",
            key,
            now_ms,
            "" if ttl_s is None else ttl_s,
            "" if ttl_policy is None else ttl_policy.value,
            field,
            room,
            more_keys=[turns_key(key)],
            durable=True,
        )
        return row_of_reply(key, answer[1]).metadata_at(now_ms)

    @override
    async def unregister(self, key: SessionKey, *, now_ms: int) -> CacheSessionMetadata:
        # Not repeated after a lost reply: the second answer would say "not found" for a session that was removed.
        answer = await self._change(
            "unregister", key, now_ms, more_keys=[place_key(key), turns_key(key)], repeatable=False, durable=True
        )
        return row_of_reply(key, answer[1]).metadata_at(now_ms)

    @override
    async def list_sessions(
        self, tenant: TenantId, *, limit: int, after: SessionId, model_id: str, now_ms: int
    ) -> SessionPage:
        position = (await self._created_at_ms(SessionKey(tenant, after)), after) if after else None

        def shown(key: SessionKey, fields: Mapping[bytes, bytes]) -> CacheSessionMetadata | None:
            try:
                row = row_of_reply(key, fields)
                existing_row(row, now_ms=now_ms, tombstone_ms=self._tombstone_ms)
            except ContextCacheError:
                return None  # due, and the sweep has not passed yet; or damaged
            if row.lease_id == BRANCH_LEASE_ID:
                return None
            return row.metadata_at(now_ms) if model_id in ("", row.session.model_id) else None

        return await self._lister.page(tenant, limit=limit, position=position, shown=shown)

    @override
    async def take_expired(self, shard: int, *, now_ms: int, limit: int) -> tuple[Swept, ...]:
        return await self._sweeper.take_expired(shard, now_ms=now_ms, limit=limit)

    @override
    async def claim_sweep(self, *, for_ms: int) -> bool:
        crash_point("manager.claim.before")
        claimed = await self._redis.script(self._scripts["claim"], [SWEEPER_KEY], [for_ms], repeatable=False)
        crash_point("manager.claim.after")
        return bool(claimed)

    @override
    async def review(self, *, now_ms: int) -> tuple[Swept, ...]:
        return await self._sweeper.review(now_ms=now_ms)

    @override
    async def check_refs(self, held: Sequence[HeldCacheRef], *, now_ms: int) -> tuple[int, ...]:
        keys = list(dict.fromkeys(SessionKey(one.tenant, one.session_id) for one in held))
        replies = await self._redis.batch([("HMGET", session_key(key), *NAMING_FIELDS) for key in keys])
        answers = dict(zip(keys, replies, strict=True))

        def is_named(one: HeldCacheRef) -> bool:
            key = SessionKey(one.tenant, one.session_id)
            try:
                row = row_of_values(key, answers[key])
            except ContextCacheError:
                return True  # damaged: nobody knows what it named
            return row is not None and row.names(one.cache_ref, now_ms=now_ms, tombstone_ms=self._tombstone_ms)

        return tuple(position for position, one in enumerate(held) if not is_named(one))

    @override
    async def add_usage(
        self, tenant: TenantId, sender: str, usage: Sequence[Usage], *, number: int | None = None, now_ms: int
    ) -> bool:
        shard = shard_of(tenant, sender)
        keys = [counted_key(shard, tenant, sender), usage_key(shard, tenant, day_of(now_ms))]
        arguments = [BATCH_KNOWN_MS if number is None else DAY_MS, number or 0, usage_text(usage)]
        crash_point("manager.count.before")
        answer = await self._redis.script(self._scripts["count"], keys, arguments, repeatable=True, durable=True)
        crash_point("manager.count.after")
        return bool(answer[1])

    @override
    async def read_usage(self, tenant: TenantId, days: Sequence[int], *, now_ms: int) -> UsageReport:
        found: dict[int, Sequence[Usage]] = {}
        for day in sorted(days):
            replies = await self._redis.batch(
                [("HGETALL", usage_key(shard, tenant, day)) for shard in range(NUM_SHARDS)]
            )
            if usage := usage_of_replies(replies):
                found[day] = usage
        counts = await self._redis.batch([("ZCARD", tenant_key(shard, tenant)) for shard in range(NUM_SHARDS)])
        return UsageReport(found, sum(number or 0 for number in counts), day_of(now_ms))

    @override
    async def count_sessions(self) -> int:
        counts = await self._redis.batch([("ZCARD", expiry_key(shard)) for shard in range(NUM_SHARDS)])
        return sum(number or 0 for number in counts)

    @override
    async def read_clock(self) -> int:
        told = await self._redis.call("TIME")
        # A Cluster's primaries answer one by one; one of them with a wrong clock does not count.
        times = sorted(told.values()) if isinstance(told, dict) else [told]
        seconds, microseconds = times[len(times) // 2]
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def read_info(self) -> Sequence[Mapping[str, Any]]:
        """Return the INFO fields of each primary.

        Raises StoreUnavailable, and ContextCacheError where an ACL forbids it.
        """
        return await self._redis.info()

    @override
    async def close(self) -> None:
        await self._redis.close()

    async def _created_at_ms(self, key: SessionKey) -> int:
        """Return where in the lists a session is, or was when it was removed. Raises InvalidRequest."""
        commands = [("HGET", name, "created_at_ms") for name in (session_key(key), place_key(key))]
        in_list = ("ZSCORE", tenant_key(shard_of(key.tenant, key.session_id), key.tenant), key.session_id)
        *told, score = await self._redis.batch([*commands, in_list])
        for text in told:
            if text is not None and text.isdigit():
                return int(text)
        if score is None:
            raise refusals.unknown_after()
        return created_at_of(score)  # its row is gone, or damaged, and its name still there

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
        keys = [*script_keys(key), self._bytes.ledger(key), *more_keys]
        common = [member(key), key.session_id, now_ms, self._tombstone_ms]
        run = partial(self._redis.script, self._scripts[script], keys, [*common, *arguments], repeatable=repeatable)
        crash_point(f"manager.{script}.before")
        answer: Sequence[Any] = await run(durable=durable)
        if answer[0] == b"answered":
            # A commit is acknowledged by its answer: whoever gets it again waits as the first one did.
            answer = await run(durable=True)
        crash_point(f"manager.{script}.after")
        if answer[0] == b"bytes":
            raise refusals.too_many_bytes(self._bytes.bytes_max)
        if answer[0] not in (b"ok", b"copy"):
            raise _refusal(answer[0].decode(), int(answer[1]) if len(answer) > 1 else 0)
        return answer


def _refusal(code: str, number: int) -> ContextCacheError:
    if code in _COUNTED:
        return _COUNTED[code](number)
    plain = {
        "absent": refusals.not_found,
        "expired": refusals.expired,
        "exists": refusals.exists,
        "lease_lost": refusals.lease_lost,
        "damaged": refusals.damaged,
        "answered": refusals.already_answered,
        "key_reused": refusals.key_reused,
    }
    return plain[code]()


_COUNTED: dict[str, Callable[[int], ContextCacheError]] = {
    "busy": refusals.busy,
    "generation": refusals.generation_mismatch,
    "gone": refusals.generation_gone,
    "keep": refusals.keeps_too_much,
    "quota": refusals.too_many_contexts,
}
"""Scripts' refusals that come with a number."""
