"""What a context looks like from outside, and what a delete leaves."""

import asyncio

import pytest

from contextcache.errors import (
    CacheRefNotFound,
    ContextNotFound,
    ContextQuotaExceeded,
    InvalidRequest,
    StoreUnavailable,
    TooManyInFlight,
)
from contextcache.model import (
    NewSession,
    Segment,
    SegmentKind,
    SessionPage,
    TurnCommit,
    TurnReceipt,
    Usage,
    UsageReport,
)
from contextcache.terms import Terms
from gateway import conversations
from gateway.http.answers import context_list, context_read, usage_of_tenant
from gateway.tenants.keys import SingleTenant
from tests.kit.gateway_parts import PREVIOUS_REF, REF, GatewayParts, manifest_of
from tests.kit.session_store import in_valkey
from tests.kit.turn_bench import DirectoryInProcess


async def test_a_context_is_described_with_its_kv(parts):
    await parts.directory.add("ctx_1", holder="pod-a")
    parts.sidecars["pod-a"].keep(manifest_of("ctx_1", size_bytes=4096), tier="disk")
    created = parts.clock.now_ms() // 1000

    assert context_read(*await parts.gateway.contexts.read("demo", "ctx_1")) == {
        "object": "context",
        "session_id": "ctx_1",
        "model": "stub-model",
        "mode": "session",
        "state": "ready",
        "created": created,
        "expires_at": created + 600,
        "ttl": 600,
        "ttl_policy": "fixed",
        "turns": 1,
        "tokens": 3,
        "generation": 1,
        "metadata": {},
        "forked_from": None,
        "parent": None,
        "computed_tokens": 0,
        "cached_tokens": 0,
        "saved_share": None,
        "saved_seconds": 0.0,
        "bytes": 4096,
        "tiers": ["disk"],
        "holder": {"endpoint": "pod-a", "state": "sealed"},
        "recent_turns": [],
    }


async def test_a_context_that_is_read_tells_what_its_last_turns_took(parts):
    row = await parts.directory.add("ctx_1", holder="pod-a")
    told = TurnReceipt(
        *(2, row.created_at_ms, 4, 90, 91, 8, "disk", "append"), restore_ms=12, first_token_ms=40, took_ms=77
    )
    await parts.directory.begin_turn("demo", "ctx_1", lease_id="turn", lease_ttl_ms=1000)
    await parts.directory.commit_turn(
        TurnCommit("demo", "ctx_1", "turn", 1, 1, (), REF, "pod-a", receipt=told),
    )

    (shown,) = context_read(*await parts.gateway.contexts.read("demo", "ctx_1"))["recent_turns"]
    assert shown == {
        "generation": 2,
        "at": row.created_at_ms // 1000,
        "computed_tokens": 4,
        "cached_tokens": 90,
        "context_tokens": 91,
        "completion_tokens": 8,
        "source": "disk",
        "match": "append",
        "reason": None,
        "restore_ms": 12,
        "first_token_ms": 40,
        "took_ms": 77,
        "saved_share": 0.9574,
    }


async def kv_of(parts, session_id="ctx_1"):
    _, kv, _ = await parts.gateway.contexts.read("demo", session_id)
    return kv.state, kv.size_bytes, kv.tier


async def test_kv_that_is_not_sealed_is_pending_at_first_and_absent_later(parts):
    await parts.directory.add("ctx_1")

    assert await kv_of(parts) == ("pending", 0, "")
    parts.clock.advance(s=30)
    assert await kv_of(parts) == ("absent", 0, "")


async def test_kv_that_is_being_saved_is_pending_however_long_it_takes(parts):
    """Seen failing: a save of more than half a minute was told as absent."""
    await parts.directory.add("ctx_1", holder="pod-a")
    parts.sidecars["pod-a"].saving.add(("demo", REF))
    parts.clock.advance(s=90)

    assert await kv_of(parts) == ("pending", 0, "")


async def test_kv_that_was_given_up_is_absent_at_once_and_says_why(parts):
    await parts.directory.add("ctx_1", holder="pod-a")
    parts.sidecars["pod-a"].fail("demo", REF, "arena_full")
    found = context_read(*await parts.gateway.contexts.read("demo", "ctx_1"))

    assert found["holder"] == {"endpoint": "pod-a", "state": "absent", "reason": "arena_full"}


async def test_while_the_newest_kv_is_sealing_the_one_before_counts(parts):
    await parts.directory.add("ctx_1", cache_ref=PREVIOUS_REF)
    await parts.directory.begin_turn("demo", "ctx_1", lease_id="t", lease_ttl_ms=1000)
    await parts.directory.commit_turn(_commit("ctx_1"))
    parts.sidecars["pod-a"].keep(manifest_of("ctx_1", cache_ref=PREVIOUS_REF, size_bytes=100))

    assert await kv_of(parts) == ("pending", 100, "host")


async def test_a_context_that_saved_nothing_has_none(parts):
    await parts.directory.add("ctx_1", cache_ref="")

    assert await kv_of(parts) == ("absent", 0, "")


@pytest.mark.parametrize("holder", ["pod-a", "pod-of-yesterday"])
async def test_an_unreachable_holder_never_fails_the_call(parts, holder):
    await parts.directory.add("ctx_1", holder=holder)
    parts.sidecars["pod-a"].down = True

    assert await kv_of(parts) == ("unreachable", None, "")


async def test_a_list_has_the_tenants_own_contexts_newest_first_in_pages(parts):
    for number in range(3):
        await parts.directory.add(f"ctx_{number}")
        parts.clock.advance(s=1)
    await parts.directory.add("ctx_foreign", tenant="other")
    first = context_list(await parts.gateway.contexts.page("demo", limit=2))
    second = context_list(await parts.gateway.contexts.page("demo", limit=2, after=first["last_id"]))

    assert [found["session_id"] for found in first["data"]] == ["ctx_2", "ctx_1"]
    assert (first["object"], first["has_more"], first["last_id"]) == ("list", True, "ctx_1")
    assert [found["session_id"] for found in second["data"]] == ["ctx_0"]
    assert second["has_more"] is False


async def test_a_list_tells_what_each_context_saved(parts):
    await parts.directory.add("ctx_1")
    await parts.directory.begin_turn("demo", "ctx_1", lease_id="turn", lease_ttl_ms=1000)
    used = Usage("app", {"computed_tokens": 100, "cached_tokens": 900, "saved_ms": 1250}, "stub-model")
    await parts.directory.commit_turn(TurnCommit("demo", "ctx_1", "turn", 1, 1, (), REF, "pod-a", usage=used))
    (found,) = context_list(await parts.gateway.contexts.page("demo", limit=2))["data"]

    assert {name: found[name] for name in ("computed_tokens", "cached_tokens", "saved_share", "saved_seconds")} == {
        "computed_tokens": 100,
        "cached_tokens": 900,
        "saved_share": 0.9,
        "saved_seconds": 1.25,
    }


def test_usage_is_told_by_key_by_model_by_day_and_in_all():
    """Seen failing: grouped without sorting by model, one model had two entries."""
    first = [
        Usage("app", {"turns": 1, "computed_tokens": 30, "cached_tokens": 10, "saved_ms": 100}, "large"),
        Usage("app", {"turns": 2, "computed_tokens": 10, "cached_tokens": 90}, "small"),
        Usage("batch", {"turns": 3, "computed_tokens": 20}, "large"),
        Usage("", {"disk_kib_s": 3600}),
    ]
    answer = usage_of_tenant("demo", UsageReport({1: first, 2: first[1:2]}, 4, 2), operator=False)
    day, later = answer["days"]

    assert [(one["key"], one["turns"], one["saved_share"]) for one in day["keys"]] == [
        ("", 0, None),
        ("app", 3, 0.7143),
        ("batch", 3, 0.0),
    ]
    assert [(one["model"], one["turns"], one["saved_share"]) for one in day["models"]] == [
        ("large", 4, 0.1667),
        ("small", 2, 0.9),
    ]
    assert (day["total"]["saved_share"], day["total"]["byte_hours"]["disk"]) == (0.625, 1024)
    assert (later["total"]["cached_tokens"], answer["total"]["cached_tokens"]) == (90, 190)
    assert [(one["model"], one["cached_tokens"]) for one in answer["models"]] == [("large", 10), ("small", 180)]
    assert answer["total"]["saved_seconds"] == 0.1


def unreachable(parts):
    """Sidecars that a delete asked in vain."""
    found = parts.metrics.unreachable_deletes.collect()[0].samples
    return {sample.labels["endpoint"] for sample in found if sample.name.endswith("_total")}


@pytest.fixture
async def fleet():
    """Two hundred pods whose sidecars are all away."""
    fleet = GatewayParts(SingleTenant(), pods=tuple(f"pod-{number}" for number in range(200)))
    await fleet.endpoints.probe_all()
    for sidecar in fleet.sidecars.values():
        sidecar.down = True
    return fleet


async def test_a_delete_asks_only_where_kv_may_be(fleet):
    """Seen failing before: all two hundred were asked."""
    await fleet.directory.add("ctx_1", tenant="default", holder="pod-7")
    await fleet.directory.note_holder("default", "ctx_1", holder="pod-100")
    await fleet.directory.note_holder("default", "ctx_1", holder="pod-of-yesterday")
    await fleet.gateway.contexts.delete("default", "ctx_1")

    assert unreachable(fleet) == {"pod-7", "pod-100"}


async def test_a_delete_asks_all_where_nobody_knows(fleet):
    """A create under way, a session that was at too many pods, and pods that go by other names in their settings."""
    new = NewSession("default", "ctx_new", "stub-model")
    await fleet.directory.reserve(new, lease_id="l", lease_ttl_ms=1000)
    await fleet.directory.add("ctx_many", tenant="default", holder="pod-7")
    for number in range(20):
        await fleet.directory.note_holder("default", "ctx_many", holder=f"pod-{number}")
    await fleet.directory.add("ctx_odd", tenant="default", holder="engine-0")
    for name in ("ctx_new", "ctx_many", "ctx_odd"):
        fleet.metrics.unreachable_deletes.clear()
        await fleet.gateway.contexts.delete("default", name)

        assert len(unreachable(fleet)) == 200


async def test_a_delete_removes_the_row_and_the_kv_at_every_sidecar_it_was_at(parts):
    await parts.directory.add("ctx_1", holder="pod-a")
    await parts.directory.note_holder("demo", "ctx_1", holder="pod-b")
    parts.sidecars["pod-a"].keep(manifest_of("ctx_1", size_bytes=100))
    parts.sidecars["pod-b"].keep(manifest_of("ctx_1", cache_ref=PREVIOUS_REF, size_bytes=10))

    await parts.gateway.contexts.delete("demo", "ctx_1")

    assert parts.metrics.registry.get_sample_value("contextcache_gateway_freed_bytes_total") == 110
    for name, ref in (("pod-a", REF), ("pod-b", PREVIOUS_REF)):
        with pytest.raises(CacheRefNotFound):
            await parts.sidecars[name].get_manifest("demo", ref)
    with pytest.raises(ContextNotFound):
        await parts.gateway.contexts.delete("demo", "ctx_1")
    with pytest.raises(ContextNotFound):
        await parts.gateway.contexts.read("demo", "ctx_1")


async def test_a_delete_succeeds_without_the_sidecars(parts):
    await parts.directory.add("ctx_1")
    parts.sidecars["pod-a"].down = True
    await parts.gateway.contexts.delete("demo", "ctx_1")

    missed = parts.metrics.registry.get_sample_value(
        "contextcache_gateway_unreachable_deletes_total", {"endpoint": "pod-a"}
    )
    assert missed == 1


async def test_a_delete_without_the_store_touches_no_kv(parts):
    await parts.directory.add("ctx_1")
    parts.sidecars["pod-a"].keep(manifest_of("ctx_1"))
    parts.directory.down = True
    with pytest.raises(StoreUnavailable):
        await parts.gateway.contexts.delete("demo", "ctx_1")

    assert await parts.sidecars["pod-a"].get_manifest("demo", REF)


def _commit(session_id):
    return TurnCommit("demo", session_id, "t", 1, 1, (Segment(SegmentKind.PROMPT, (4,), text="x"),), REF, "pod-a")


async def test_an_empty_page_says_where_to_go_on(parts, monkeypatch):
    page = SessionPage((), has_more=True, last_id="ctx_7")
    monkeypatch.setattr(parts.directory, "list_sessions", lambda *_, **__: asyncio.sleep(0, page))

    assert context_list(await parts.gateway.contexts.page("demo", limit=10, model="rare")) == {
        "object": "list",
        "data": [],
        "has_more": True,
        "last_id": "ctx_7",
    }


async def test_of_one_tenant_s_usage_only_so_much_is_read_at_a_time(parts, monkeypatch):
    """Seen failing without the bound: three hundred such reads made another tenant's creates twenty times slower."""
    gate = asyncio.Event()

    async def read_usage(tenant, **_days):
        await gate.wait()
        return tenant

    monkeypatch.setattr(parts.directory, "read_usage", read_usage, raising=False)

    def read(tenant):
        return asyncio.create_task(parts.gateway.contexts.usage(tenant, first_day=None, last_day=None))

    reads = [read("demo") for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyInFlight):
        await read("demo")
    others = read("other")
    gate.set()

    assert await asyncio.gather(*reads, others) == ["demo"] * 4 + ["other"]
    assert await read("demo") == "demo"


async def test_a_change_of_items_whose_lease_got_no_reply_leaves_the_context_free(parts, monkeypatch):
    """Seen failing: the context was busy until the lease ended."""
    await parts.directory.add("ctx_1")
    begin = parts.directory.begin_turn

    async def without_reply(*named, **how):
        await begin(*named, **how)
        raise StoreUnavailable("no reply")

    monkeypatch.setattr(parts.directory, "begin_turn", without_reply)
    with pytest.raises(StoreUnavailable):
        await parts.gateway.conversations.add("demo", "ctx_1", [{"role": "user", "content": "Hi"}])

    await begin("demo", "ctx_1", lease_id="turn", lease_ttl_ms=1000)


async def test_items_that_no_turn_has_read_have_a_bound(parts, monkeypatch):
    """Seen failing: items were added without end, and lists of them took gigabytes of the gateway's memory."""
    monkeypatch.setattr(conversations, "_UNREAD_CHARS_MAX", 10_000)
    calls = parts.with_parts(manager=DirectoryInProcess(**in_valkey(clock=parts.clock))).conversations
    item = {"role": "user", "content": "x" * 4_000}
    made = await calls.create("demo", [item], Terms(), key="")
    await calls.add("demo", made.session_id, [item])
    with pytest.raises(InvalidRequest, match="create one first"):
        await calls.add("demo", made.session_id, [item])

    assert len(await calls.items("demo", made.session_id)) == 2


async def test_a_conversation_whose_items_find_no_room_is_not_there(parts):
    """Seen failing: it counted as a context of the tenant until its lease ended."""
    manager = DirectoryInProcess(**in_valkey(clock=parts.clock))
    manager.fault = ("commit_turn", ContextQuotaExceeded("no room"))
    with pytest.raises(ContextQuotaExceeded):
        await parts.with_parts(manager=manager).conversations.create("demo", [], Terms(), key="")

    assert (await manager.list_sessions("demo", limit=9)).sessions == ()
