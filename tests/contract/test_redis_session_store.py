"""SessionStore keeps the contract on a real valkey-server, alone and in cluster mode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from typing_extensions import override

from context_manager.layout import (
    ANSWER_KEPT_MS,
    CONTEXT_BYTES,
    SWEEPER_KEY,
    answer_key,
    counted_key,
    place_key,
    session_key,
    tenant_key,
    turns_key,
)
from context_manager.limits import SessionKey
from context_manager.preconditions import NAMES, judged
from context_manager.redis_connection import RedisConnection
from context_manager.row import receipt_text
from context_manager.segments import pack_segment
from contextcache.errors import (
    AlreadyAnswered,
    ContextCacheError,
    ContextExpired,
    ContextQuotaExceeded,
    GenerationMismatch,
    LeaseLost,
)
from contextcache.model import TtlPolicy, Usage
from contextcache.names import NUM_SHARDS, shard_of
from tests.contract.session_changes_contract import SessionChangesContract
from tests.contract.session_store_contract import (
    ANSWER,
    KEY,
    LEASE_MS,
    NEW,
    NOW,
    PROMPT,
    TOMBSTONE_S,
    TTL_MS,
    first_commit,
    receipt,
    turn_commit,
)
from tests.contract.usage_contract import UsageContract
from tests.kit.session_store import SessionStore, script_keys
from tests.kit.until import until
from tests.kit.valkey import ValkeyServer


def connection_to(server: ValkeyServer, **options: float) -> RedisConnection:
    return RedisConnection(server.url, timeout_s=options.get("timeout_s", 10.0), max_connections=8)


class DeafConnection(RedisConnection):
    """Loses the reply to each script once, and repeats it as after a broken connection."""

    @override
    async def script(self, *script: Any, **options: Any) -> Any:
        await super().script(*script, **options)
        return await super().script(*script, **options)


class RedisContract(SessionChangesContract, UsageContract):
    """The suite, and what only Redis can show."""

    @pytest.fixture
    async def store(self, server: ValkeyServer) -> AsyncIterator[SessionStore]:
        server.command("FLUSHALL")
        store = SessionStore(connection_to(server), tombstone_s=TOMBSTONE_S)
        yield store
        await store.close()

    @pytest.fixture
    async def frugal(self, server: ValkeyServer) -> AsyncIterator[SessionStore]:
        server.command("FLUSHALL")
        store = SessionStore(connection_to(server), tombstone_s=TOMBSTONE_S, tenant_bytes_max=self.TENANT_BYTES_MAX)
        yield store
        await store.close()

    async def lose_last_segment(self, store: SessionStore) -> None:
        await store._redis.call("RPOP", script_keys(KEY)[1])

    async def known_ms(self, store: SessionStore, sender: str) -> int:
        known_ms: int = await store._redis.call("PTTL", counted_key(shard_of(KEY.tenant, sender), KEY.tenant, sender))
        return known_ms

    async def test_a_context_can_be_deleted_from_a_redis_that_is_full(
        self, store: SessionStore, server: ValkeyServer
    ) -> None:
        """Deleting is what frees memory."""
        await self.create(store)
        server.command("CONFIG", "SET", "maxmemory", "1")

        try:
            await store.unregister(KEY, now_ms=NOW)
        finally:
            server.command("CONFIG", "SET", "maxmemory", "0")

        assert server.command("EXISTS", *script_keys(KEY)) == b":0\r\n"

    async def test_a_damaged_sum_costs_its_figure_and_no_turn(self, store: SessionStore, server: ValkeyServer) -> None:
        """Seen failing: read as the row's other numbers, a damaged sum made the context unreadable."""
        await self.create(store)
        name = session_key(KEY)
        server.command("HSET", name, "computed_tokens", "many", "cached_tokens", "9" * 18, "saved_ms", "-1")
        await self.begin(store)
        usage = Usage("app", {"computed_tokens": 1, "cached_tokens": 2, "saved_ms": 3})
        session = await store.commit_turn(replace(turn_commit("turn"), usage=usage), now_ms=NOW)

        assert (session.generation, session.computed_tokens, session.cached_tokens, session.saved_ms) == (2, 0, 0, 2)

    async def test_turns_that_an_older_manager_left_behind_are_nobody_s_and_what_is_none_is_left_out(
        self, store: SessionStore, server: ValkeyServer
    ) -> None:
        """It knows of no turns when it removes a session."""
        server.command("RPUSH", turns_key(KEY), receipt_text(receipt(7)))
        await self.reserve(store)
        await store.commit_turn(replace(first_commit(), receipt=receipt(1)), now_ms=NOW)
        whole = receipt_text(receipt(2))
        for spoilt in ("", "{", "[1]", "17", '"text"', whole.replace("77", "-1"), whole.replace('"disk"', "7")):
            server.command("RPUSH", turns_key(KEY), spoilt)

        assert await store.read_turns(KEY) == (receipt(1),)
        server.command("DEL", turns_key(KEY))
        server.command("HSET", turns_key(KEY), "no", "list")
        assert await store.read_turns(KEY) == ()
        await self.begin(store)
        assert (await store.commit_turn(replace(turn_commit("turn"), receipt=receipt(2)), now_ms=NOW)).generation == 2
        assert await store.read_turns(KEY) == (receipt(2),)

    @pytest.mark.parametrize("change", [("HDEL", "holders"), ("HSET", "holder", "pod-of-an-older-manager")])
    async def test_a_row_that_an_older_release_wrote_does_not_know_its_holders(
        self, store: SessionStore, server: ValkeyServer, change: tuple[str, ...]
    ) -> None:
        """Managers of two releases write one row during an upgrade."""
        await self.create(store)
        command, *rest = change
        server.command(command, script_keys(KEY)[0], *rest)

        assert (await store.get(KEY, now_ms=NOW)).holders is None
        await store.note_holder(KEY, holder="pod-9", now_ms=NOW)
        await self.begin(store)
        assert (await store.commit_turn(turn_commit("turn"), now_ms=NOW)).holders is None

    @pytest.fixture
    async def limited(self, server: ValkeyServer) -> AsyncIterator[SessionStore]:
        server.command("FLUSHALL")
        connection = RedisConnection(server.url, timeout_s=30.0, max_connections=8)
        store = SessionStore(connection, tombstone_s=TOMBSTONE_S, tenant_contexts_max=self.CONTEXTS_MAX)
        yield store
        await store.close()

    async def test_a_context_over_the_limit_leaves_no_key(self, limited: SessionStore, server: ValkeyServer) -> None:
        await self.fill(limited)
        before = server.command("DBSIZE")
        for number in range(20):
            with pytest.raises(ContextQuotaExceeded):
                await self.reserve(limited, replace(NEW, session_id=f"more_{number}"), lease_id="other")

        assert server.command("DBSIZE") == before

    @pytest.fixture
    async def raw(self, server: ValkeyServer) -> AsyncIterator[RedisConnection]:
        connection = connection_to(server)
        yield connection
        await connection.close()

    async def test_scripts_survive_a_script_flush(self, store: SessionStore, server: ValkeyServer) -> None:
        await self.create(store)
        server.command("SCRIPT", "FLUSH")

        assert (await self.begin(store))[1] == (PROMPT, ANSWER)
        assert (await self.begin(store))[1] == (PROMPT, ANSWER)

    async def test_a_deleted_session_leaves_its_place_in_lists_for_a_while(
        self, store: SessionStore, server: ValkeyServer, raw: RedisConnection
    ) -> None:
        await self.begun(store)
        await store.commit_turn(turn_commit("turn"), now_ms=NOW)
        await store.unregister(KEY, now_ms=NOW)

        assert server.command("DBSIZE") == b":2\r\n"  # and the ledger
        assert await raw.call("HGETALL", place_key(KEY)) == {b"created_at_ms": str(NOW).encode()}
        assert 0 < await raw.call("PTTL", place_key(KEY)) <= TOMBSTONE_S * 1000

    async def test_names_deleted_while_a_page_is_read_hide_no_other(
        self, store: SessionStore, raw: RedisConnection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Seen to fail before: each name that left a set moved the rest under an offset, and as many were skipped."""
        names = [name for number in range(20_000) if shard_of("demo", name := f"ctx_{number}") == 0][:100]
        for number, name in enumerate(names):
            model_id = "rare" if 84 <= number < 89 else "smol"
            await self.reserve(store, replace(NEW, session_id=name, model_id=model_id), now_ms=NOW + number)
        doomed, batch = names[90:], RedisConnection.batch

        async def deleting(connection: RedisConnection, commands: Sequence[Any]) -> list[Any]:
            answers = await batch(connection, commands)
            await raw.call("ZREM", tenant_key(0, "demo"), *doomed)
            return answers

        monkeypatch.setattr(RedisConnection, "batch", deleting)

        assert await self.ids(store, limit=5, model_id="rare") == (names[84:89][::-1], False)

    async def test_a_rewind_whose_reply_was_lost_is_repeated_on_the_connection_and_is_no_mismatch(
        self, store: SessionStore, server: ValkeyServer
    ) -> None:
        """Seen failing: the repeat met its own new generation, and the client was told to look again."""
        at = await self.converse(store, 2)
        deaf = SessionStore(DeafConnection(server.url, timeout_s=10.0, max_connections=2), tombstone_s=TOMBSTONE_S)

        try:
            assert (await self.rewind(deaf, 1, expected=3)).generation == 4
            with pytest.raises(GenerationMismatch):
                await self.rewind(deaf, 1, expected=3)
        finally:
            await deaf.close()
        assert await self.transcript(store) == at[1]

    async def test_a_full_redis_still_tells_that_a_request_was_answered(
        self, store: SessionStore, server: ValkeyServer
    ) -> None:
        await self.commit_kept(store)
        server.command("CONFIG", "SET", "maxmemory", "1")

        try:
            with pytest.raises(AlreadyAnswered):
                await self.begin_again(store, self.SAID)
        finally:
            server.command("CONFIG", "SET", "maxmemory", "0")
        record = answer_key(KEY, self.SAID.key)
        assert ANSWER_KEPT_MS - 60_000 < await store._redis.call("PTTL", record) <= ANSWER_KEPT_MS

    async def test_one_of_all_managers_sweeps_until_the_key_has_ended(
        self, store: SessionStore, raw: RedisConnection
    ) -> None:
        claims = await asyncio.gather(*(store.claim_sweep(for_ms=60_000) for _ in range(8)))

        assert sum(claims) == 1
        assert 0 < await raw.call("PTTL", SWEEPER_KEY) <= 60_000
        await raw.call("PEXPIRE", SWEEPER_KEY, 1)
        await until(lambda: store.claim_sweep(for_ms=60_000), what="the claim ends")

    async def test_a_tombstone_is_one_key_that_redis_lets_go_by_itself(
        self, store: SessionStore, server: ValkeyServer, raw: RedisConnection
    ) -> None:
        await self.create(store)
        await self.sweep(store, now_ms=NOW + TTL_MS + 1000)
        hash_key = script_keys(KEY)[0]

        assert server.command("DBSIZE") == b":2\r\n"  # and the ledger
        ttl_ms = await raw.call("PTTL", hash_key)
        assert 0 < ttl_ms <= (TOMBSTONE_S - 1) * 1000
        await self.reserve(store, lease_id="again", now_ms=NOW + TTL_MS + 1000)
        assert await raw.call("PTTL", hash_key) > TOMBSTONE_S * 1000

    async def test_a_session_found_late_leaves_no_tombstone(self, store: SessionStore, server: ValkeyServer) -> None:
        await self.create(store)
        swept = await self.sweep(store, now_ms=NOW + TTL_MS + TOMBSTONE_S * 1000)

        assert len(swept) == 1
        assert server.command("DBSIZE") == b":0\r\n"

    async def test_a_wrong_expiry_score_is_put_right_instead_of_believed(
        self, store: SessionStore, raw: RedisConnection
    ) -> None:
        await self.create(store)
        _, _, expiry, _ = script_keys(KEY)
        await raw.call("ZADD", expiry, NOW, "demo:ctx_1")

        assert await self.sweep(store, now_ms=NOW + 1) == []
        assert await raw.call("ZSCORE", expiry, "demo:ctx_1") in (NOW + TTL_MS, str(NOW + TTL_MS).encode())

    async def test_the_expiry_score_follows_the_row(self, store: SessionStore, raw: RedisConnection) -> None:
        """A sweep puts a wrong score right, so only the score itself shows that each script sets it."""

        async def score() -> int:
            return int(float(await raw.call("ZSCORE", script_keys(KEY)[2], "demo:ctx_1"))) - NOW

        await self.reserve(store, replace(NEW, ttl_policy=TtlPolicy.SLIDING))
        assert await score() == LEASE_MS
        await store.renew_lease(KEY, lease_id="create", lease_ttl_ms=LEASE_MS, now_ms=NOW + 1)
        assert await score() == LEASE_MS + 1
        await store.commit_turn(first_commit(), now_ms=NOW + 2)
        assert await score() == TTL_MS + 2
        await self.begin(store, now_ms=NOW + 3)
        assert await score() == TTL_MS + 3
        await store.renew_lease(KEY, lease_id="turn", lease_ttl_ms=LEASE_MS, now_ms=NOW + 4)
        assert await score() == TTL_MS + 4
        await store.commit_turn(turn_commit("turn"), now_ms=NOW + 5)
        assert await score() == TTL_MS + 5

    async def test_a_transcript_of_other_bytes_is_never_continued(
        self, store: SessionStore, raw: RedisConnection
    ) -> None:
        """Seen to fail without the ValueError caught: the caller got gRPC's UNKNOWN."""
        await self.create(store)
        await raw.call("LSET", script_keys(KEY)[1], 0, b"\x00garbage")

        with pytest.raises(ContextCacheError) as refused:
            await self.begin(store)
        assert refused.value.code == "internal_error"

    async def test_a_row_of_the_release_before_is_sent_whole(self, store: SessionStore, raw: RedisConnection) -> None:
        """Seen to fail with marks believed at any generation: a commit of the release before was not sent."""
        mark = (await self.create(store)).mark
        row, transcript, *_ = script_keys(KEY)
        # A commit of its script: everything as ours but the marks.
        await raw.call("RPUSH", transcript, pack_segment(ANSWER))
        await raw.call("HSET", row, "generation", "2", "num_segments", "3", "num_tokens", "5")

        assert await self.known(store, mark) == (0, (PROMPT, ANSWER, ANSWER))
        assert (await store.get(KEY, now_ms=NOW)).mark == ""
        later = await self.turn(store, 2, keep=3)
        assert await self.known(store, mark) == (0, (PROMPT, ANSWER, ANSWER, PROMPT))
        assert await self.known(store, later) == (4, ())
        await raw.call("HDEL", row, "marks")
        assert await self.known(store, later) == (0, (PROMPT, ANSWER, ANSWER, PROMPT))

    async def test_what_is_kept_of_a_request_ends_by_itself(self, store: SessionStore, raw: RedisConnection) -> None:
        await self.commit_kept(store)

        assert ANSWER_KEPT_MS - 60_000 < await raw.call("PTTL", answer_key(KEY, self.SAID.key)) <= ANSWER_KEPT_MS

    async def test_hours_that_are_over_leave_the_ledger_with_the_next_change(
        self, store: SessionStore, raw: RedisConnection
    ) -> None:
        ledger = store._bytes.ledger(KEY)
        await self.commit_kept(store)
        await store.unregister(KEY, now_ms=NOW)
        assert len(await raw.call("HGETALL", ledger)) == 4
        await self.create(store, now_ms=NOW + ANSWER_KEPT_MS + 3_600_000)

        found = {name.decode(): int(text) for name, text in (await raw.call("HGETALL", ledger)).items()}
        first, total = found.pop("first"), found.pop("sum")
        assert len(found) == 1
        assert total == sum(found.values()) > CONTEXT_BYTES
        assert min(map(int, found)) >= first

    @pytest.mark.parametrize("spoilt", ["another type", "no number"])
    async def test_a_spoilt_ledger_stops_no_turn(self, store: SessionStore, server: ValkeyServer, spoilt: str) -> None:
        await self.create(store)
        ledger = store._bytes.ledger(KEY)
        if spoilt == "no number":
            server.command("HSET", ledger, "first", "soon", "sum", "many")
        else:
            server.command("DEL", ledger)
            server.command("SET", ledger, "nothing of ours")
        await self.begin(store)

        assert (await store.commit_turn(turn_commit("turn"), now_ms=NOW)).generation == 2
        await store.unregister(KEY, now_ms=NOW)

    async def test_redis_tells_how_it_is_set(self, store: SessionStore, server: ValkeyServer) -> None:
        server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        try:
            (info,) = await store.read_info()
        finally:
            server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        found = {one.name: one.is_met for one in judged(info, tenant_bytes_max=1, wait_replicas=1)}

        assert set(found) == set(NAMES)
        assert (found["eviction_policy"], found["version"], found["replicas"]) == (False, True, False)
        assert info["evicted_keys"] == 0
        (info,) = await store.read_info()
        assert info["maxmemory_policy"] == "noeviction"

    async def test_an_acl_that_forbids_info_is_a_refusal_and_no_outage(
        self, store: SessionStore, server: ValkeyServer
    ) -> None:
        server.command("ACL", "SETUSER", "default", "-info")
        try:
            with pytest.raises(ContextCacheError) as refused:
                await store.read_info()
        finally:
            server.command("ACL", "SETUSER", "default", "+info")

        assert refused.value.code == "internal_error"

    async def test_a_row_stays_in_one_compact_piece(self, store: SessionStore, raw: RedisConnection) -> None:
        """Seen to fail with marks of more than 64 characters: the encoding became hashtable, twice the memory."""
        await self.create(store)
        for generation in range(1, 6):
            await self.turn(store, generation, keep=1)

        assert await raw.call("OBJECT", "ENCODING", script_keys(KEY)[0]) in (b"listpack", b"ziplist")

    async def test_what_is_known_and_damaged_is_not_read(self, store: SessionStore, raw: RedisConnection) -> None:
        """Whoever has it whole goes on; whoever needs it is told, and so is everybody once segments are missing."""
        mark = (await self.create(store)).mark
        await raw.call("LSET", script_keys(KEY)[1], 0, b"\x00garbage")

        assert await self.known(store, mark) == (2, ())
        with pytest.raises(ContextCacheError):
            await self.known(store, "")
        await raw.call("RPOP", script_keys(KEY)[1])
        with pytest.raises(ContextCacheError):
            await self.known(store, mark)

    async def test_a_transcript_of_a_hundred_thousand_tokens_comes_back_whole(self, store: SessionStore) -> None:
        await self.reserve(store)
        long = replace(PROMPT, token_ids=tuple(range(100_000)), text="word " * 100_000)
        session = await store.commit_turn(replace(first_commit(), segments=(long, ANSWER)), now_ms=NOW)

        assert session.num_tokens == 100_001
        assert await self.transcript(store) == (long, ANSWER)
        await self.begin(store)
        session = await store.commit_turn(turn_commit("turn", keep=0), now_ms=NOW)
        assert session.num_tokens == 3

    async def test_commits_racing_for_one_generation_leave_one_of_them(self, store: SessionStore) -> None:
        await self.begun(store, "a")
        await self.begin(store, "b", now_ms=NOW + LEASE_MS)
        outcomes = await asyncio.gather(
            *(store.commit_turn(turn_commit(lease), now_ms=NOW + LEASE_MS) for lease in ("a", "b", "a", "b")),
            return_exceptions=True,
        )

        assert [isinstance(outcome, LeaseLost) for outcome in outcomes] == [True, False, True, False]
        assert len(await self.transcript(store)) == 3

    async def test_a_tombstone_holds_nothing_of_the_client(self, store: SessionStore, raw: RedisConnection) -> None:
        await self.create(store)
        await self.sweep(store, now_ms=NOW + TTL_MS)
        fields = await raw.call("HGETALL", script_keys(KEY)[0])

        assert {name.decode() for name in fields} == {"state", "created_at_ms", "expires_at_ms"}
        with pytest.raises(ContextExpired):
            await store.get(KEY, now_ms=NOW + TTL_MS)


class TestRedisSessionStore(RedisContract):
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
        with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
            yield server


class TestRedisClusterSessionStore(RedisContract):
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
        with ValkeyServer(tmp_path_factory.mktemp("valkey"), cluster=True) as server:
            yield server

    def test_the_keys_of_a_session_lie_in_one_slot(self, server: ValkeyServer) -> None:
        for number in range(50):
            keys = script_keys(SessionKey(f"tenant-{number}", f"ctx_{number}"))

            assert len({server.command("CLUSTER", "KEYSLOT", key) for key in keys}) == 1

    def test_shards_spread_over_the_cluster(self, server: ValkeyServer) -> None:
        slots = {server.command("CLUSTER", "KEYSLOT", f"{{s{shard}}}") for shard in range(NUM_SHARDS)}

        assert len(slots) == NUM_SHARDS
