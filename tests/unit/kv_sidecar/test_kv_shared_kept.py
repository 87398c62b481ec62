"""Kept conversations in the shared store: written behind contexts, found there by another pod, and what is left."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from contextcache.errors import CacheRefNotFound, CacheRefPending
from contextcache.model import KVGroup
from contextcache.names import KEPT_PREFIX, OBJECT_PREFIX
from kv_sidecar.format.ids import pack_token_ids
from kv_sidecar.moving import borrowing
from kv_sidecar.moving.pulling import ABSENT_MS
from kv_sidecar.retention import GROUP_MAX
from kv_sidecar.sealed.manifests import STAYS_MS
from kv_sidecar.sealed.prefixes import Found, PrefixQuestion
from kv_sidecar.store import writer
from kv_sidecar.store.objects import ObjectStore
from tests.kit.catalog_peer import CatalogPeer
from tests.kit.kv_blocks import BLOCK_TOKENS, FINGERPRINT, TENANT, TTL_MS, SidecarUnderTest, written
from tests.kit.shared_store import Held, NamedRefs, flip_last_bytes, kinds, never, objects, refuse, sessions
from tests.kit.until import until

GROUP = f"{KEPT_PREFIX}{'1' * 32}"
OTHER = f"{KEPT_PREFIX}{'2' * 32}"
SAID = tuple(range(1, 23))
"""Five whole blocks and two tokens."""
PEER = "10.0.0.7:50061"


@pytest.fixture(params=[None, {"*": ["1"]}], ids=["plain", "encrypted"])
def kv_settings(request: pytest.FixtureRequest) -> dict[str, object]:
    return {"store_interval_s": 1, "keys": request.param}


async def find(kv: SidecarUnderTest, prompt: tuple[int, ...], **more: Any) -> list[Found]:
    kv.sidecar.prefixes.ask_s = more.pop("ask_s", 10.0)
    peer, more = more.pop("peer", ""), {"group": GROUP} | more
    question = PrefixQuestion(more.pop("tenant", TENANT), FINGERPRINT, pack_token_ids(prompt), BLOCK_TOKENS, **more)
    return list(await kv.sidecar.prefixes.find(question, peer=peer))


async def ended(kv: SidecarUnderTest) -> None:
    await until(lambda: not kv.sidecar.pulls.num_pulls, what="the pulls have ended")


def told(kv: SidecarUnderTest) -> dict[str, float]:
    counts = {
        found: kv.counted("peer_matches_total", source="object", found=found) for found in ("some", "none", "silent")
    }
    return {found: count for found, count in counts.items() if count}


async def test_a_conversation_whose_pod_is_gone_is_found_and_loaded_on_another(pod):
    async with pod("a") as kv:
        kept = await kv.share(SAID, session_id=GROUP)

    async with pod("b") as kv:
        assert await find(kv, (*SAID, 30, 31, 32, 33, 34)) == [Found(kept.cache_ref, len(SAID))]
        with pytest.raises(CacheRefPending):
            await kv.catalog.open(TENANT, kept.cache_ref)
        assert len(await find(kv, (*SAID, 30, 31, 32, 33, 34))) == 1  # who asks next hears the same
        await ended(kv)
        assert await kv.load(kept) == ["object"] * 6
        assert [one.group for one in kv.catalog.retention.groups(TENANT)] == [GROUP]
        assert kv.sidecar.shared.num_waiting == 0
        (found,) = await find(kv, (*SAID, 30, 31, 32, 33, 34))
        assert (found.cache_ref, told(kv)) == (kept.cache_ref, {"some": 2})


async def test_of_a_conversation_that_was_edited_what_both_begin_with_comes_in_whole_blocks(pod, tmp_path):
    async with pod("a") as kv:
        await kv.save((9, 9, 9, 9, 9, 9), session_id=GROUP)
        kept = await kv.share(SAID, session_id=GROUP)
    there = objects(tmp_path)

    async with pod("b") as kv:
        (found,) = await find(kv, (*SAID[:14], 70, 71, 72, 73, 74, 75))
        await ended(kv)
        assert found.cache_ref != kept.cache_ref
        assert (await kv.catalog.open(TENANT, found.cache_ref)).token_ids == SAID[:12]
        await kv.sidecar.shared.flush(60)
    assert objects(tmp_path) == there


async def test_kv_that_cannot_be_cut_is_taken_whole_or_not_at_all(pod):
    groups = (
        KVGroup("full_attention", 4, ((0, 22),), 0, "a0" * 8),
        KVGroup("sliding_window", 4, ((0, 2), (18, 22)), 4, "b0" * 8),
    )
    async with pod("a") as kv:
        kept = await kv.share(SAID, session_id=GROUP, groups=groups)

    async with pod("b") as kv:
        assert await find(kv, (*SAID[:14], 70, 71, 72)) == []
    async with pod("c") as kv:
        assert [one.cache_ref for one in await find(kv, (*SAID, 70, 71))] == [kept.cache_ref]
        await ended(kv)
        assert await kv.load(kept)


async def test_of_many_turns_about_one_manifest_is_left_and_each_block_once(pod, tmp_path):
    said = SAID
    async with pod("a") as kv:
        for turn in range(20):
            await find(kv, said)  # what is named is replaced when the time to load it is over
            await kv.share(said, session_id=GROUP)
            said = (*said, *range(100 * turn, 100 * turn + 7))
        assert kinds(tmp_path)["manifests"] > 1
        await kv.collect(ms=STAYS_MS)
        await written(kv)
        await until(lambda: kinds(tmp_path)["manifests"] == 1, what="one is left")
        files = len(kv.block_files())
    assert kinds(tmp_path) == {"blocks": files, "holders": files, "sessions": 1, "manifests": 1}


async def test_what_is_replaced_before_its_turn_comes_is_never_written(pod, monkeypatch):
    put, listed = [], []
    async with pod("a") as kv:
        shared = kv.sidecar.shared
        await shared.close()
        for end in (10, 14, 22):
            last = await kv.save(SAID[:end], session_id=GROUP)
        assert shared.num_waiting == 1
        objects_put = shared.stored.objects.put

        async def noted(name, data):
            put.append(name)
            await objects_put(name, data)

        def noted_listing(prefix):
            listed.append(prefix)
            return objects_listed(prefix)

        objects_listed = shared.stored.objects.listed
        monkeypatch.setattr(shared.stored.objects, "put", noted)
        monkeypatch.setattr(shared.stored.objects, "listed", noted_listing)
        shared.start()
        await written(kv)
    assert {name for name in put if "/manifests/" in name} == {f"{TENANT}/manifests/{last.cache_ref}"}
    assert len(listed) == 1  # after it was written


@pytest.mark.parametrize("goes", [False, True], ids=["stays here", "leaves this pod"])
async def test_what_stands_for_nothing_in_the_store_takes_nothing_away_there(pod, goes):
    async with pod("a", store_queue_max=1) as kv:
        await kv.share((9, 9, 9, 9, 9), session_id=GROUP)
        first = await kv.share(SAID, session_id=GROUP)
        await kv.sidecar.shared.close()
        await kv.save((*SAID, 30, 31, 32), session_id=GROUP)
        await kv.save((7, 7, 7, 7, 7), session_id="ctx_1")  # for which the other gives way
        if goes:
            await kv.catalog.drop([it for it in kv.catalog.manifests if it.is_kept])
        kv.sidecar.shared.start()
        await written(kv)
        assert kv.counted("store_writes_total", outcome="queue_full") == 1
    async with pod("b") as kv:
        assert [one.cache_ref for one in await find(kv, (*SAID, 30, 31, 32, 33, 34))] == [first.cache_ref]


async def test_several_pods_together_keep_no_more_of_a_conversation_than_one_may(pod, tmp_path):
    for name in ("a", "b"):
        async with pod(name) as kv:
            for number in range(GROUP_MAX // 2 + 3):
                start = 1000 * number + (500 if name == "b" else 0)
                await kv.save(tuple(range(start, start + 5)), session_id=GROUP)
            await written(kv)
    assert kinds(tmp_path)["manifests"] == GROUP_MAX


async def test_contexts_are_written_before_what_is_kept_and_while_it_is(pod, monkeypatch):
    async with pod("a") as kv:
        shared = kv.sidecar.shared
        await shared.close()
        wrote, put = [], shared.stored.objects.put

        async def noted(name, data):
            if "/manifests/" in name:
                wrote.append(name.rpartition("/")[2])
            await put(name, data)

        monkeypatch.setattr(shared.stored.objects, "put", noted)
        held = Held(shared.stored.objects, "put", f"/{OTHER}")
        kept = [await kv.save(SAID, session_id=OTHER), await kv.save((*SAID[:4], 50), session_id=GROUP)]
        contexts = [await kv.save((7, 7, 7, 7, 7), session_id="ctx_1")]
        shared.start()
        await held.has_come.wait()
        contexts.append(await kv.save((8, 8, 8, 8, 8), session_id="ctx_2"))
        held.may_go_on.set()
        await written(kv)
    assert wrote == [new.cache_ref for new in (*contexts, *kept)]


async def test_objects_of_lmcache_stay_in_their_pod(pod, tmp_path):
    async with pod("a") as kv:
        kept = await kv.save(SAID, session_id=f"{OBJECT_PREFIX}1")
        await kv.sidecar.resolver.manifest(TENANT, kept.cache_ref)
        assert kv.sidecar.shared.num_waiting == len(kv.sidecar.shared._chores) == 0
    assert objects(tmp_path) == set()


async def test_kept_kv_gives_way_first_when_too_much_waits(pod, tmp_path):
    async with pod("a", store_queue_max=2) as kv:
        await kv.sidecar.shared.close()
        await kv.save((7, 7, 7, 7, 7), session_id="ctx_1")
        await kv.save(SAID, session_id=GROUP)
        await kv.save((8, 8, 8, 8, 8), session_id="ctx_2")
        assert kv.counted("store_writes_total", outcome="queue_full") == 1
        kv.sidecar.shared.start()
        await written(kv)
    assert sessions(tmp_path) == {"ctx_1", "ctx_2"}


async def test_what_was_not_written_before_a_kill_is_after_the_restart(pod, tmp_path, monkeypatch):
    monkeypatch.setattr(ObjectStore, "put", never)
    async with pod("a") as kv:
        await kv.save(SAID, session_id=GROUP)
    monkeypatch.undo()
    async with pod("a") as kv:
        await written(kv)
    assert kinds(tmp_path)["manifests"] == 1


@pytest.mark.parametrize("where", ["a", "b"], ids=["where it is", "on another pod"])
async def test_a_delete_leaves_nothing_in_the_store(pod, tmp_path, where):
    async with pod("a") as kv:
        await kv.save(SAID, session_id=GROUP)
        await kv.share((*SAID[:6], 50, 51), session_id=GROUP)
        if where == "a":
            await kv.sidecar.delete(TENANT, GROUP, [])
    if where == "b":
        async with pod("b") as kv:
            await kv.sidecar.delete(TENANT, GROUP, [])
            assert await find(kv, (*SAID, 30, 31, 32, 33, 34)) == []
    assert objects(tmp_path) == set()


@pytest.mark.parametrize("writer", ["writes it", "removes what it stands for"])
async def test_a_delete_returns_when_the_writer_has_ended_and_leaves_nothing(pod, tmp_path, writer):
    async with pod("a") as kv:
        if writer != "writes it":
            await kv.share(SAID[:10], session_id=GROUP)
        call = "put" if writer == "writes it" else "delete"
        held = Held(kv.sidecar.shared.stored.objects, call, "/blocks/")
        await kv.save(SAID, session_id=GROUP)
        await held.has_come.wait()
        delete = asyncio.create_task(kv.sidecar.delete(TENANT, GROUP, []))
        assert not (await asyncio.wait([delete], timeout=0.2))[0]
        held.may_go_on.set()
        await delete
        assert objects(tmp_path) == set()
        await written(kv)
    assert objects(tmp_path) == set()


async def test_a_delete_that_its_caller_does_not_wait_for_is_carried_out(pod, tmp_path):
    async with pod("a") as kv:
        await kv.share(SAID, session_id=GROUP)
        held = Held(kv.sidecar.shared.stored.objects, "delete", "/manifests/")
        delete = asyncio.create_task(kv.sidecar.delete(TENANT, GROUP, []))
        await held.has_come.wait()
        delete.cancel()
        await asyncio.gather(delete, return_exceptions=True)
        held.may_go_on.set()
        await written(kv)
    assert objects(tmp_path) == set()


@asynccontextmanager
async def half_written(kv: SidecarUnderTest) -> AsyncIterator[None]:
    """Save a conversation, and hold on where a part of it is in the store and a context is written instead."""
    store = kv.sidecar.shared.stored.objects
    first, context = Held(store, "put", f"/{GROUP}"), Held(store, "put", "ctx_1")
    await kv.save(SAID, session_id=GROUP)
    await first.has_come.wait()
    await kv.save((7, 7, 7, 7, 7), session_id="ctx_1")
    first.may_go_on.set()
    await context.has_come.wait()
    yield
    context.may_go_on.set()
    await written(kv)


async def test_a_delete_of_what_is_half_written_leaves_nothing_of_it(pod, tmp_path):
    async with pod("a") as kv:
        async with half_written(kv):
            assert [name for name in objects(tmp_path) if name.endswith(GROUP)]
            await kv.sidecar.delete(TENANT, GROUP, [])
        assert kinds(tmp_path) == {"blocks": 2, "holders": 2, "sessions": 1, "manifests": 1}  # the context's
        assert len(kv.sidecar.shared.stored.known) == 2


async def test_what_was_half_written_when_a_context_came_is_whole_though_it_was_collected(pod, tmp_path):
    async with pod("a") as kv:
        async with half_written(kv):
            gone = list((tmp_path / "store").rglob("blocks/*")) + list((tmp_path / "store").rglob(f"holders/*/{GROUP}"))
            assert gone
            for path in gone:
                path.unlink()
        assert len(kv.sidecar.shared.stored.known) == 8
    assert kinds(tmp_path) == {"blocks": 8, "holders": 8, "sessions": 2, "manifests": 2}


async def test_what_was_deleted_while_the_store_was_away_is_not_found_again_and_what_came_later_is(
    pod, tmp_path, clock, monkeypatch
):
    async with pod("a") as kv:
        kept = await kv.share(SAID, session_id=GROUP)
    async with pod("b") as kv:
        clock.advance(s=60)
        monkeypatch.setattr(writer, "BACKOFF_S", 60.0)
        refuse(kv.sidecar.shared.stored.objects, "delete", monkeypatch)
        await kv.sidecar.delete(TENANT, GROUP, [])
        assert await find(kv, (*SAID, 30, 31, 32, 33, 34)) == []
        assert kinds(tmp_path)["manifests"] == 1
        clock.advance(s=60)
        for path in (tmp_path / "store").rglob(f"sessions/{GROUP}/*"):
            os.utime(path, (time.time() + 90, time.time() + 90))
        assert [one.cache_ref for one in await find(kv, (*SAID, 30, 31, 32, 33, 34))] == [kept.cache_ref]
        await ended(kv)


async def test_surplus_that_the_store_does_not_let_go_of_is_one_piece_of_work(pod, tmp_path, monkeypatch):
    """Seen failing: each attempt left one more removal, and these displaced the deletes of clients."""
    async with pod("a") as kv:
        shared = kv.sidecar.shared
        monkeypatch.setattr(writer, "BACKOFF_S", 0.0)
        await kv.share(SAID, session_id=GROUP)
        refuse(shared.stored.objects, "delete", monkeypatch)
        await kv.save((*SAID, 30, 31, 32, 33, 34), session_id=GROUP)

        async def num_refused() -> float:
            return kv.counted("store_writes_total", outcome="unavailable")

        await until(num_refused, is_so=lambda number: number > 10, what="the store refused some attempts")
        assert len(shared._chores) + len(shared._untidy) <= 1
        monkeypatch.undo()
        await shared.flush(60)
    assert kinds(tmp_path)["manifests"] == 1
    assert kinds(tmp_path)["blocks"] == kinds(tmp_path)["holders"]


async def test_a_delete_that_waits_for_the_store_is_not_lost_for_turns_that_come_meanwhile(pod, tmp_path, monkeypatch):
    async with pod("a", store_queue_max=2) as kv:
        await kv.share((7, 7, 7, 7, 7), session_id="ctx_1")
        shared = kv.sidecar.shared
        await shared.close()
        refuse(shared.stored.objects, "delete", monkeypatch)
        await kv.sidecar.delete(TENANT, "ctx_1", [])
        for number, group in enumerate((GROUP, OTHER, f"{KEPT_PREFIX}3")):
            for end in (5, 10, 14, 18):
                await kv.save((100 + number, *SAID[:end]), session_id=group)
        assert len(shared._untidy) == 2
        assert [name for name in objects(tmp_path) if "ctx_1" in name]
        monkeypatch.undo()
        shared.start()
        await written(kv)
    assert not [name for name in objects(tmp_path) if "ctx_1" in name]


async def test_it_ends_with_its_life_and_no_manager_is_asked(pod, clock, tmp_path):
    async with pod("a") as kv:
        await kv.share(SAID, session_id=GROUP)
    settings = {"store_grace_s": 60, "orphan_after_s": 60, "manager": NamedRefs()}
    async with pod("b", **settings) as kv:
        await kv.collect_shared(ms=TTL_MS - 1000)
        assert kinds(tmp_path)["manifests"] == 1
        clock.advance(s=60)
        assert await find(kv, (*SAID, 30, 31, 32, 33, 34)) == []
        await kv.sidecar.collect_shared()
    assert objects(tmp_path) == set()


async def test_what_is_used_lives_on_in_the_store_too(pod, clock):
    async with pod("a") as kv:
        kept = await kv.share(SAID, session_id=GROUP)
        clock.advance(ms=TTL_MS // 2)
        await find(kv, SAID, expires_at_ms=clock.now_ms() + TTL_MS)
        await kv.sidecar.collect()
        await written(kv)
        clock.advance(ms=TTL_MS * 3 // 4)
        assert (await kv.sidecar.shared.manifest(TENANT, kept.cache_ref)).expires_at_ms > clock.now_ms()


async def test_a_full_store_loses_what_is_kept_before_a_context(pod, tmp_path):
    async with pod("a") as kv:
        await kv.share(tuple(range(200, 222)), session_id="ctx_1")
        await kv.share(SAID, session_id=GROUP)
        size_bytes = sum(path.stat().st_size for path in (tmp_path / "store").rglob("blocks/*"))
    async with pod("b", store_limit_bytes=round(size_bytes / 1.5)) as kv:
        await kv.collect_shared(s=60)
    assert sessions(tmp_path) == {"ctx_1"}


def counting(kv: SidecarUnderTest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the groups that the store is asked for from now on."""
    asked: list[str] = []
    of_group = kv.sidecar.shared.of_group

    async def noted(tenant: str, group: str) -> Any:
        asked.append(group)
        return await of_group(tenant, group)

    monkeypatch.setattr(kv.sidecar.shared, "of_group", noted)
    return asked


async def test_a_new_conversation_is_looked_for_once_and_its_turns_never(pod, clock, monkeypatch):
    async with pod("a") as kv:
        asked = counting(kv, monkeypatch)
        assert await find(kv, SAID) == await find(kv, SAID) == []
        assert (asked, told(kv)) == ([GROUP], {"none": 1})
        await kv.save(SAID, session_id=GROUP)
        clock.advance(ms=ABSENT_MS)
        for more in (5, 20):
            assert await find(kv, (*SAID, *range(50, 50 + more)))
        assert asked == [GROUP]
        await find(kv, (*SAID, *range(50, 50 + 23)))  # here is less than half of it
        await find(kv, SAID, group=OTHER)  # all of it is here
        assert asked == [GROUP] * 2
        await find(kv, (*SAID, *range(50, 60)), group=OTHER)  # another conversation that begins alike
        assert asked == [GROUP, GROUP, OTHER]


@pytest.mark.parametrize("group", ["", "ctx_1", f"{KEPT_PREFIX}/../../{'1' * 8}", f"{KEPT_PREFIX}x/ctx_1"])
async def test_only_a_conversation_s_name_is_looked_for(pod, monkeypatch, group):
    async with pod("a") as kv:
        asked = counting(kv, monkeypatch)
        assert await find(kv, SAID, group=group) == []
        assert asked == []


async def test_another_tenant_of_the_same_conversation_s_name_finds_nothing(pod):
    async with pod("a") as kv:
        await kv.share(SAID, session_id=GROUP)
    async with pod("b") as kv:
        assert await find(kv, (*SAID, 30, 31), tenant="other") == []


async def test_where_a_peer_was_named_the_store_is_not_asked(pod, tmp_path, clock, monkeypatch):
    async with SidecarUnderTest(tmp_path / "there", clock=clock) as there:
        peer = CatalogPeer(there)
        async with pod("a", connect_peer=peer.connect, peers=("10.0.0.0/24",)) as kv:
            asked = counting(kv, monkeypatch)
            await find(kv, SAID, peer=PEER)
            assert asked == []
            await find(kv, SAID, peer="192.0.2.1:1")  # may not be asked
            assert asked == [GROUP]


async def test_a_silent_store_costs_a_moment_and_is_left_alone_for_a_while(pod, clock):
    async with pod("a") as kv:
        ours = await kv.share(SAID[:8], session_id="ctx_1")
        arrived = Held(kv.sidecar.shared, "of_group").has_come
        assert [one.cache_ref for one in await find(kv, SAID, ask_s=0.001)] == [ours.cache_ref]
        for number in range(5):
            await find(kv, SAID, group=f"{KEPT_PREFIX}{number}")  # would never end
        assert told(kv) == {"silent": 1}
        clock.advance(ms=ABSENT_MS)
        await find(kv, SAID, ask_s=0.001)
        assert told(kv) == {"silent": 2}

        clock.advance(ms=ABSENT_MS)
        arrived.clear()
        given_up = asyncio.create_task(find(kv, SAID))
        await arrived.wait()
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        arrived.clear()
        await find(kv, SAID)
        assert not arrived.is_set()


async def test_only_so_many_questions_wait_for_the_store_at_once(pod):
    """Seen failing: one tenant's questions kept another tenant from asking the store."""
    async with pod("a") as kv:
        held = Held(kv.sidecar.shared, "of_group")
        many = borrowing._STORE_QUESTIONS_MAX + 5
        asking = [asyncio.create_task(find(kv, SAID, group=f"{KEPT_PREFIX}{number}")) for number in range(many)]
        await until(lambda: sum(task.done() for task in asking) == 5, what="five were not let wait")
        other = asyncio.create_task(find(kv, SAID, tenant="other"))
        await until(lambda: other.done() or held.num_come > borrowing._STORE_QUESTIONS_MAX, what="another tenant asks")
        held.may_go_on.set()
        await asyncio.gather(*asking, other)
        assert told(kv) == {"none": borrowing._STORE_QUESTIONS_MAX + 1}


async def test_wrong_bytes_in_the_store_are_a_miss_and_not_named_again_at_once(pod, tmp_path):
    async with pod("a") as kv:
        kept = await kv.share(SAID, session_id=GROUP)
    flip_last_bytes(tmp_path)

    async with pod("b") as kv:
        assert await find(kv, (*SAID, 30, 31))
        await ended(kv)
        with pytest.raises(CacheRefNotFound):
            await kv.catalog.open(TENANT, kept.cache_ref)
        assert await find(kv, (*SAID, 30, 31)) == []
        assert (kv.block_files(), kv.manifest_files()) == (set(), set())
