"""What a context looks like from outside, and what a delete leaves."""

import pytest

from contextcache.errors import CacheRefNotFound, ContextNotFound, StoreUnavailable
from contextcache.model import Segment, SegmentKind, TurnCommit
from tests.helpers.gateway_parts import PREVIOUS_REF, REF, manifest_of


async def test_a_context_is_described_with_its_kv(parts):
    await parts.directory.add("ctx_1", holder="pod-a")
    parts.sidecars["pod-a"].keep(manifest_of("ctx_1", size_bytes=4096), tier="disk")
    created = parts.clock.now_ms() // 1000

    assert await parts.gateway.read("demo", "ctx_1") == {
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
        "bytes": 4096,
        "tiers": ["disk"],
        "holder": {"endpoint": "pod-a", "state": "sealed"},
    }


async def kv_of(parts, session_id="ctx_1"):
    found = await parts.gateway.read("demo", session_id)
    return found["holder"]["state"], found["bytes"], found["tiers"]


async def test_kv_that_is_not_sealed_is_pending_at_first_and_absent_later(parts):
    await parts.directory.add("ctx_1")

    assert await kv_of(parts) == ("pending", 0, [])
    parts.clock.advance(s=30)
    assert await kv_of(parts) == ("absent", 0, [])


async def test_while_the_newest_kv_is_sealing_the_one_before_counts(parts):
    await parts.directory.add("ctx_1", cache_ref=PREVIOUS_REF)
    await parts.directory.begin_turn("demo", "ctx_1", lease_id="t", lease_ttl_ms=1000)
    await parts.directory.commit_turn(_commit("ctx_1"))
    parts.sidecars["pod-a"].keep(manifest_of("ctx_1", cache_ref=PREVIOUS_REF, size_bytes=100))

    assert await kv_of(parts) == ("pending", 100, ["host"])


async def test_a_context_that_saved_nothing_has_none(parts):
    await parts.directory.add("ctx_1", cache_ref="")

    assert await kv_of(parts) == ("absent", 0, [])


@pytest.mark.parametrize("holder", ["pod-a", "pod-of-yesterday"])
async def test_an_unreachable_holder_never_fails_the_call(parts, holder):
    await parts.directory.add("ctx_1", holder=holder)
    parts.sidecars["pod-a"].down = True

    assert await kv_of(parts) == ("unreachable", None, [])


async def test_a_list_has_the_tenants_own_contexts_newest_first_in_pages(parts):
    for number in range(3):
        await parts.directory.add(f"ctx_{number}")
        parts.clock.advance(s=1)
    await parts.directory.add("ctx_foreign", tenant="other")
    first = await parts.gateway.list_contexts("demo", limit=2)
    second = await parts.gateway.list_contexts("demo", limit=2, after=first["last_id"])

    assert [found["session_id"] for found in first["data"]] == ["ctx_2", "ctx_1"]
    assert (first["object"], first["has_more"], first["last_id"]) == ("list", True, "ctx_1")
    assert [found["session_id"] for found in second["data"]] == ["ctx_0"]
    assert second["has_more"] is False


async def test_a_list_can_be_of_one_model(parts):
    await parts.directory.add("ctx_1", model="a")
    await parts.directory.add("ctx_2", model="b")
    found = await parts.gateway.list_contexts("demo", limit=10, model="b")

    assert [entry["session_id"] for entry in found["data"]] == ["ctx_2"]
    assert await parts.gateway.list_contexts("demo", limit=10, model="c") == {
        "object": "list",
        "data": [],
        "has_more": False,
        "last_id": None,
    }


async def test_a_delete_removes_the_row_and_the_kv_at_every_sidecar(parts):
    await parts.directory.add("ctx_1", holder="pod-a")
    parts.sidecars["pod-a"].keep(manifest_of("ctx_1", size_bytes=100))
    parts.sidecars["pod-b"].keep(manifest_of("ctx_1", cache_ref=PREVIOUS_REF, size_bytes=10))

    assert await parts.gateway.delete("demo", "ctx_1") == {"session_id": "ctx_1", "status": "success"}
    assert parts.metrics.registry.get_sample_value("contextcache_gateway_freed_bytes_total") == 110
    for name, ref in (("pod-a", REF), ("pod-b", PREVIOUS_REF)):
        with pytest.raises(CacheRefNotFound):
            await parts.sidecars[name].get_manifest("demo", ref)
    with pytest.raises(ContextNotFound):
        await parts.gateway.delete("demo", "ctx_1")
    with pytest.raises(ContextNotFound):
        await parts.gateway.read("demo", "ctx_1")


async def test_a_delete_succeeds_without_the_sidecars(parts):
    await parts.directory.add("ctx_1")
    parts.sidecars["pod-b"].down = True
    await parts.gateway.delete("demo", "ctx_1")

    missed = parts.metrics.registry.get_sample_value(
        "contextcache_gateway_unreachable_deletes_total", {"endpoint": "pod-b"}
    )
    assert missed == 1


async def test_a_delete_without_the_store_touches_no_kv(parts):
    await parts.directory.add("ctx_1")
    parts.sidecars["pod-a"].keep(manifest_of("ctx_1"))
    parts.directory.down = True
    with pytest.raises(StoreUnavailable):
        await parts.gateway.delete("demo", "ctx_1")

    assert await parts.sidecars["pod-a"].get_manifest("demo", REF)


@pytest.mark.parametrize("session_id", ["ctx_1", "ctx_none", "not an id", "x" * 200])
async def test_foreign_unknown_and_impossible_ids_get_one_answer(parts, session_id):
    await parts.directory.add("ctx_1")
    for call in (parts.gateway.read, parts.gateway.delete):
        with pytest.raises(ContextNotFound) as caught:
            await call("other", session_id)

        assert caught.value.message == "no context has this session_id"
    assert (await parts.gateway.read("demo", "ctx_1"))["session_id"] == "ctx_1"


def _commit(session_id):
    return TurnCommit("demo", session_id, "t", 1, 1, (Segment(SegmentKind.PROMPT, (4,), text="x"),), REF, "pod-a")
