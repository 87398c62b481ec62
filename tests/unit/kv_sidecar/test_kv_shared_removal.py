"""What leaves the shared store and what must not: deletes that are cut short, tried again, or meet the writer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextcache.errors import InvalidRequest, SidecarUnavailable
from contextcache.names import KEPT_PREFIX, new_cache_ref, prompt_ref
from kv_sidecar.saves import NewSave
from kv_sidecar.store import writer
from kv_sidecar.store.collector import COLLECTOR
from kv_sidecar.store.objects import ListedObject, ObjectStore, each
from kv_sidecar.store.stored_kv import KnownBlocks, StoredSession
from tests.kit.kv_blocks import TENANT, SidecarUnderTest, brought, written
from tests.kit.shared_store import Held, NamedRefs, manifests, objects, refuse
from tests.kit.until import until

TEN = tuple(range(10))
"""Two whole blocks and a tail."""
HOUR_S = 3600
GROUP = f"{KEPT_PREFIX}{'1' * 32}"


@pytest.fixture
def kv_settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setattr(writer, "BACKOFF_S", 0.0)
    return {"orphan_after_s": 100 * HOUR_S, "store_grace_s": 60, "store_interval_s": 10}


async def with_its_prompt(kv: SidecarUnderTest) -> NewSave:
    """Save a context of a model with windows: the end of its prompt is KV of its own."""
    new = await kv.save(TEN, session_id="ctx_1")
    await kv.share(TEN[:7], session_id="ctx_1", cache_ref=prompt_ref(new.cache_ref))
    return new


@pytest.mark.parametrize(
    ("tenant", "session_id"), [(TENANT, "x" * 70_000), (TENANT, "../../other"), ("..", "ctx_1"), ("x" * 70_000, "")]
)
async def test_a_delete_under_an_illegal_name_is_refused_and_leaves_the_writer_no_work(
    pod: Callable[..., Any], tenant: str, session_id: str
) -> None:
    """Seen failing: the store refused the name for ever, and the writer paused after each attempt."""
    async with pod("a") as kv:
        with pytest.raises(InvalidRequest):
            await kv.sidecar.delete(tenant, session_id, [new_cache_ref()])

        assert not kv.sidecar.shared._chores
        assert len(kv.catalog.refs) == 0


async def given_up(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_removal_that_the_store_refuses_does_not_slow_the_writes(
    pod: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing: without the right to delete, the writer paused after each context, up to 30 s."""
    async with pod("a") as kv:
        monkeypatch.setattr(writer, "BACKOFF_S", 3600.0)
        shared = kv.sidecar.shared
        await shared.close()
        refuse(shared.stored.objects, "delete", monkeypatch)
        await kv.sidecar.delete(TENANT, "ctx_9", [new_cache_ref()])
        saved = {(await kv.save((number, *TEN), session_id=f"ctx_{number}")).cache_ref for number in range(4)}
        shared.start()
        await until(lambda: manifests(tmp_path) == saved, what="all contexts are written")
        await until(lambda: len(shared._chores) == 1, what="the removal waits")


@pytest.mark.parametrize("is_named", [True, False])
async def test_the_end_of_a_prompt_goes_from_the_store_with_its_context_and_never_takes_it_along(
    pod, tmp_path, is_named
):
    async with pod("a") as kv:
        new = await with_its_prompt(kv)
    there = objects(tmp_path)

    async with pod("b", manager=NamedRefs(*[new.cache_ref] * is_named)) as kv:
        await kv.collect_shared(s=120)
        assert objects(tmp_path) == (there if is_named else set())


async def test_the_end_of_a_prompt_whose_context_has_left_the_store_goes_alone(pod, tmp_path):
    async with pod("a") as kv:
        new = await with_its_prompt(kv)
        shared = kv.sidecar.shared
        await shared.end_delete(shared.begin_delete(TENANT, "ctx_1", [new.cache_ref], is_whole=False))
    assert manifests(tmp_path) == {prompt_ref(new.cache_ref)}

    async with pod("b", manager=NamedRefs(new.cache_ref)) as kv:
        await kv.collect_shared(s=120)
    assert objects(tmp_path) == set()


async def test_a_copy_under_a_name_that_is_none_keeps_nothing_else_in_the_store(pod, tmp_path):
    async with pod("a") as kv:
        new = await kv.share(TEN)
    stored = tmp_path / "store" / TENANT / "manifests"
    (stored / "copy").write_bytes((stored / new.cache_ref).read_bytes())

    async with pod("b", manager=NamedRefs()) as kv:
        await kv.collect_shared(s=120)
        assert manifests(tmp_path) == {"copy"}
        await kv.collect_shared(s=2 * HOUR_S)
    assert objects(tmp_path) == set()


async def test_the_end_of_a_prompt_that_lacks_a_block_takes_no_context_out_of_the_store(pod, tmp_path):
    async with pod("a") as kv:
        new = await with_its_prompt(kv)
    (tail,) = (tmp_path / "store").rglob(f"blocks/{prompt_ref(new.cache_ref)}*")
    tail.unlink()

    async with pod("b") as kv:
        await brought(kv, prompt_ref(new.cache_ref))
        await kv.sidecar.shared.flush(60)
        assert manifests(tmp_path) == {new.cache_ref}
        assert await kv.fetch(new) == ["object"] * 3


async def test_the_end_of_a_prompt_that_alone_is_on_a_pod_takes_no_context_out_of_the_store(pod, tmp_path):
    async with pod("a") as kv:
        new = await with_its_prompt(kv)
    there = objects(tmp_path)

    async with pod("b", manager=NamedRefs(new.cache_ref), orphan_after_s=60) as kv:
        await brought(kv, prompt_ref(new.cache_ref))
        await kv.sidecar.collect()
        await kv.collect(s=60)
        assert kv.manifest_files() == set()
        await kv.sidecar.collect_shared()
        await kv.sidecar.shared.flush(60)
    assert objects(tmp_path) == there


@pytest.mark.parametrize("session", ["", "ctx_1"], ids=["a turn", "a context"])
async def test_a_delete_takes_the_end_of_the_prompt_along(pod, tmp_path, session):
    async with pod("a") as kv:
        new = await with_its_prompt(kv)
    async with pod("b") as kv:
        await kv.sidecar.delete(TENANT, session, [new.cache_ref])
    assert objects(tmp_path) == set()


@pytest.mark.parametrize("how", ["cancelled", "refused"])
async def test_a_removal_cut_short_after_its_manifest_leaves_nothing_when_it_is_tried_again(
    pod, tmp_path, monkeypatch, how
):
    async with pod("a") as kv:
        new = await kv.share(tuple(range(30)), session_id="ctx_1")
    async with pod("b") as kv:
        store = kv.sidecar.shared.stored.objects
        if how == "refused":
            refuse(store, "delete", monkeypatch, "/holders/")
            await kv.sidecar.delete(TENANT, "ctx_1", [new.cache_ref])
            assert manifests(tmp_path) == set() != objects(tmp_path, "blocks/")
            monkeypatch.undo()
        else:
            held = Held(store, "delete", "/holders/")
            delete = asyncio.create_task(kv.sidecar.delete(TENANT, "ctx_1", [new.cache_ref]))
            await held.has_come.wait()
            await given_up(delete)
            held.may_go_on.set()
        await kv.sidecar.shared.flush(60)
    assert objects(tmp_path) == set()


@pytest.mark.parametrize("refused", ["delete", "listed"])
@pytest.mark.parametrize("where", ["a", "b"], ids=["where it was", "on another pod"])
async def test_a_delete_that_is_tried_again_leaves_what_was_made_anew_under_the_same_name(
    pod, tmp_path, clock, monkeypatch, refused, where
):
    async with pod("a") as kv, pod("b") as other:
        old = await kv.share(TEN, session_id="my-chat")
        clock.advance(ms=round(time.time() * 1000) - clock.now_ms())
        refuse(kv.sidecar.shared.stored.objects, refused, monkeypatch)
        await kv.sidecar.delete(TENANT, "my-chat", [old.cache_ref])
        # The store's clock is the real one, and goes on.
        await until(lambda: time.time() * 1000 > clock.now_ms() + 1, what="it is later")
        maker = kv if where == "a" else other
        new = await maker.save(tuple(range(100, 110)), session_id="my-chat", started_at_ms=clock.now_ms() + 1)

        async def there() -> set[str]:
            return manifests(tmp_path)

        await until(there, is_so=lambda refs: new.cache_ref in refs, what="the new one is written")
        monkeypatch.undo()
        await kv.sidecar.shared.flush(60)
        assert manifests(tmp_path) == {new.cache_ref}
    async with pod("c") as kv:
        assert await kv.fetch(new) == ["object"] * 3


async def test_a_delete_that_waits_for_the_writer_leaves_what_is_made_anew_meanwhile(pod, tmp_path, clock, monkeypatch):
    async with pod("a") as kv:
        shared = kv.sidecar.shared
        held, find = Held(shared.stored.objects, "put", "/blocks/"), shared.stored._find
        old = await kv.save(TEN, session_id="my-chat")
        await held.has_come.wait()
        delete = asyncio.create_task(kv.sidecar.delete(TENANT, "my-chat", [old.cache_ref]))
        await until(lambda: old.cache_ref in shared._deleted, what="the store hears of it")
        clock.advance(ms=5)
        new = await kv.save(tuple(range(100, 110)), session_id="my-chat", started_at_ms=clock.now_ms())

        async def late(removal: Any) -> None:
            await until(lambda: new.cache_ref in manifests(tmp_path), what="the new one is written")
            await find(removal)

        monkeypatch.setattr(shared.stored, "_find", late)
        held.may_go_on.set()
        await delete
        assert manifests(tmp_path) == {new.cache_ref}
        assert len(objects(tmp_path)) == 2 + 2 * 3


async def test_a_tidying_cut_short_after_a_manifest_leaves_nothing_when_it_is_tried_again(pod, tmp_path, monkeypatch):
    async with pod("a") as kv:
        await kv.share(TEN, session_id=GROUP)
        refuse(kv.sidecar.shared.stored.objects, "delete", monkeypatch, "/holders/")
        new = await kv.save((*TEN, *range(20, 30)), session_id=GROUP)
        await until(lambda: manifests(tmp_path) == {new.cache_ref}, what="the shorter one's manifest has gone")
        monkeypatch.undo()
        await written(kv)
        assert len(objects(tmp_path)) == 2 + 2 * len(kv.block_files())


@pytest.mark.parametrize("session", ["ctx_1", GROUP])
async def test_a_delete_that_is_given_up_while_the_disk_is_at_it_reaches_the_store(pod, tmp_path, session):
    async with pod("a") as kv:
        await kv.share(TEN, session_id=session)
        held = Held(kv.catalog, "_delete")
        asked = asyncio.create_task(kv.sidecar.delete(TENANT, session, []))
        await held.has_come.wait()
        await given_up(asked)
        assert not await kv.sidecar.shared.of_group(TENANT, session)
        held.may_go_on.set()
        await kv.sidecar.threads.idle()
        await kv.sidecar.flush()
        assert kv.manifest_files() == set()
    assert objects(tmp_path) == set()


async def test_the_end_of_a_pod_removes_what_the_store_did_not_take(pod, tmp_path, monkeypatch):
    async with pod("a") as kv:
        new = await kv.share(TEN, session_id="ctx_1")
        await kv.sidecar.shared.close()
        refuse(kv.sidecar.shared.stored.objects, "delete", monkeypatch)
        await kv.sidecar.delete(TENANT, "ctx_1", [new.cache_ref])
        monkeypatch.undo()
        kv.sidecar.shared.start()
        await kv.sidecar.flush()
    assert objects(tmp_path) == set()


@pytest.mark.parametrize("session", ["", "ctx_1"])
async def test_a_turn_dropped_while_it_is_written_leaves_what_its_context_had_before(pod, tmp_path, session):
    async with pod("a") as kv:
        await kv.share(TEN[:5], session_id="ctx_1")
        before = objects(tmp_path)
        held = Held(kv.sidecar.shared.stored.objects, "put", "/blocks/")
        new = await kv.save((*TEN[:5], *range(50, 70)), session_id="ctx_1")
        await held.has_come.wait()
        delete = asyncio.create_task(kv.sidecar.delete(TENANT, "", [new.cache_ref]))
        await until(lambda: new.cache_ref in kv.sidecar.shared._deleted, what="the store hears of it")
        held.may_go_on.set()
        await delete
        assert objects(tmp_path) == before
        await written(kv)
    assert objects(tmp_path) == before


async def test_a_turn_that_goes_here_while_it_is_written_leaves_what_its_context_had_before(pod, tmp_path):
    async with pod("a") as kv:
        await kv.share(TEN[:5], session_id="ctx_1")
        before = objects(tmp_path)
        held = Held(kv.sidecar.shared.stored.objects, "put", "/blocks/")
        new = await kv.save((*TEN[:5], *range(50, 90)), session_id="ctx_1")
        await held.has_come.wait()
        await kv.catalog.drop([kv.catalog.manifests.get(new.cache_ref)])
        held.may_go_on.set()
        await written(kv)
        assert kv.counted("store_writes_total", outcome="gone") == 1
    assert objects(tmp_path) == before


async def test_kv_dropped_when_it_is_half_written_and_waits_again_leaves_nothing(pod, tmp_path):
    async with pod("a") as kv:
        shared = kv.sidecar.shared
        held = Held(shared.stored.objects, "put", "/holders/")
        new = await kv.save(tuple(range(40)), session_id=GROUP)
        await held.has_come.wait()
        last = Held(shared.stored.objects, "put", "ctx_1")
        await kv.save(tuple(range(100, 105)), session_id="ctx_1")
        held.may_go_on.set()
        await last.has_come.wait()
        assert [name for name in objects(tmp_path) if name.endswith(GROUP)]
        await kv.sidecar.delete(TENANT, "", [new.cache_ref])
        last.may_go_on.set()
        await written(kv)
    assert not [name for name in objects(tmp_path) if name.endswith(GROUP)]


async def test_a_dropped_turn_does_not_wait_for_another_of_its_context_that_is_written(pod, tmp_path):
    async with pod("a") as kv:
        old = await kv.share(TEN[:5], session_id="ctx_1")
        held = Held(kv.sidecar.shared.stored.objects, "put", "/blocks/")
        new = await kv.save(TEN, session_id="ctx_1")
        await held.has_come.wait()
        shared = kv.sidecar.shared
        await shared.end_delete(shared.begin_delete(TENANT, "ctx_1", [old.cache_ref], is_whole=False))
        assert manifests(tmp_path) == set()
        held.may_go_on.set()
        await written(kv)
        assert kv.counted("store_writes_total", outcome="written") == 2
    async with pod("b") as kv:
        assert await kv.fetch(new) == ["object"] * 3


async def test_a_use_that_is_noted_beside_a_delete_leaves_nothing(pod, tmp_path):
    async with pod("a") as kv:
        new = await kv.share(TEN, session_id="ctx_1")
        held = Held(kv.sidecar.shared.stored.objects, "put", "/sessions/")
        kv.sidecar.shared.note_use(TENANT, "ctx_1", new.cache_ref)
        await held.has_come.wait()
        delete = asyncio.create_task(kv.sidecar.delete(TENANT, "ctx_1", [new.cache_ref]))
        assert not (await asyncio.wait([delete], timeout=0.2))[0]
        held.may_go_on.set()
        await delete
        assert objects(tmp_path) == set()
        await kv.sidecar.shared.flush(60)
    assert objects(tmp_path) == set()


async def test_a_context_used_since_the_listing_that_it_should_leave_by_stays_whole(pod):
    async with pod("a") as kv, pod("b", store_limit_bytes=1) as other:
        await kv.share(TEN, session_id="ctx_1")
        held = Held(other.sidecar.shared, "evict")
        collect = asyncio.create_task(other.sidecar.collect_shared())
        await held.has_come.wait()
        new = await kv.share((*TEN, *range(20, 30)), session_id="ctx_1")
        held.may_go_on.set()
        await collect
        assert other.counted("store_evicted_contexts_total") == 0
    async with pod("c") as kv:
        assert await kv.fetch(new) == ["object"] * 5


async def test_a_context_that_is_being_written_does_not_leave_the_store(pod, tmp_path):
    async with pod("a") as kv:
        await kv.share(TEN, session_id="ctx_1")
        refs = manifests(tmp_path)
        held = Held(kv.sidecar.shared.stored.objects, "put", "/blocks/")
        await kv.save((*TEN, *range(20, 30)), session_id="ctx_1")
        await held.has_come.wait()
        listing = StoredSession(refs, set(), round(time.time() * 1000) + 1000)
        assert not await kv.sidecar.shared.evict(TENANT, "ctx_1", listing)
        assert manifests(tmp_path) == refs
        held.may_go_on.set()
        await written(kv)


async def listing_of(kv: SidecarUnderTest, tmp_path: Path) -> StoredSession:
    """Save a context, and return what a listing tells of it before anything else comes."""
    await kv.share(TEN, session_id="ctx_1")
    files = {name.split("/")[2] for name in objects(tmp_path, "blocks/")}
    listing = StoredSession(manifests(tmp_path), files, round(time.time() * 1000))
    await until(lambda: time.time() * 1000 > listing.used_at_ms + 1, what="it is later")
    return listing


@pytest.mark.parametrize("where", ["a", "b"], ids=["by its own pod", "by another pod"])
@pytest.mark.parametrize("part", ["/blocks/", "/sessions/", "/manifests/"])
async def test_a_turn_written_while_its_context_leaves_the_store_is_whole_there_in_the_end(pod, tmp_path, where, part):
    async with pod("a") as kv, pod("b") as other, pod("c") as third:
        listing = await listing_of(kv, tmp_path)
        shared = (kv if where == "a" else other).sidecar.shared
        leaves, comes = (
            Held(shared.stored.objects, "delete", "/manifests/"),
            Held(kv.sidecar.shared.stored.objects, "put", part),
        )
        evict = asyncio.create_task(shared.evict(TENANT, "ctx_1", listing))
        await leaves.has_come.wait()
        new = await kv.save((*TEN, *range(20, 30)), session_id="ctx_1")
        await comes.has_come.wait()
        leaves.may_go_on.set()
        await evict
        comes.may_go_on.set()
        await written(kv)
        known = kv.sidecar.shared.stored.known
        assert len(known) == len(known.of((TENANT, "ctx_1")).blocks)
        assert await third.fetch(new) == ["object"] * 5


@pytest.mark.parametrize("where", ["a", "b"], ids=["by its own pod", "by another pod"])
async def test_a_context_written_between_the_blocks_that_leave_is_whole_with_its_next_turn(pod, tmp_path, where):
    async with pod("a") as kv, pod("b") as other, pod("c") as third:
        listing = await listing_of(kv, tmp_path)
        shared = (kv if where == "a" else other).sidecar.shared
        leaves = Held(shared.stored.objects, "delete", "/holders/")
        evict = asyncio.create_task(shared.evict(TENANT, "ctx_1", listing))
        await leaves.has_come.wait()
        new = await kv.share((*TEN, *range(20, 30)), session_id="ctx_1")
        leaves.may_go_on.set()
        await evict
        await written(kv)
        if where == "b":
            new = await kv.share((*TEN, *range(20, 30)), session_id="ctx_1")
        assert await third.fetch(new) == ["object"] * 5


async def test_a_pass_removes_the_lists_of_release_0_1_0(pod, tmp_path):
    async with pod("a") as kv:
        await kv.sidecar.shared.stored.objects.put(".hot/pod", b"{}")
        await kv.sidecar.collect_shared()

    assert not (tmp_path / "store" / ".hot").exists()


async def test_nothing_is_remembered_of_contexts_that_are_gone(pod):
    async with pod("a") as kv:
        for number in range(3):
            new = await kv.share(TEN, session_id=f"ctx_{number}")
            await kv.sidecar.delete(TENANT, new.session_id, [new.cache_ref])
        assert (len(kv.sidecar.shared.stored.known._sessions), len(kv.sidecar.shared.stored.known)) == (0, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "trust", "discard", "doubt", "forget"]), st.sampled_from("ab"), st.integers(0, 3)
        )
    )
)
def test_what_is_known_is_counted_right_whatever_comes_between(steps):
    known = KnownBlocks(max_blocks=5)
    for step, session, name in steps:
        if step == "trust":
            known.of((TENANT, session)).trust(f"{name}")
        elif step == "doubt":
            known.of((TENANT, session)).doubt()
        else:
            getattr(known, step)((TENANT, session), *[f"{name}"] * (step != "forget"))

    names = {session: known.of((TENANT, session)).blocks for session in "ab"}
    assert len(known) == sum(map(len, names.values())) <= 5
    assert len(known._sessions) == sum(map(bool, names.values()))


def test_a_block_that_was_let_go_of_while_it_was_written_is_not_trusted():
    known, session = KnownBlocks(max_blocks=5), (TENANT, "ctx_1")
    for name in "ab":
        known.begin(session, name)
    known.discard(session, "a")
    for name in "ab":
        known.of(session).trust(name)

    assert known.of(session).is_trusted("b")
    assert not known.of(session).is_trusted("ab")


async def test_a_directory_has_no_empty_directories_of_contexts_that_are_gone(pod, tmp_path):
    async with pod("a") as kv:
        await kv.share(TEN, session_id="ctx_1")
        await kv.sidecar.delete(TENANT, "ctx_1", [])

    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize(("pods", "rounds"), [(16, 20), pytest.param(2, 400, marks=pytest.mark.thorough)])
async def test_objects_come_and_go_in_one_directory_side_by_side(tmp_path, pods, rounds):
    stores = [ObjectStore(f"file://{tmp_path}/store", timeout_s=60) for _ in range(4)]

    async def come_and_go(number: int) -> None:
        store, name = stores[number % len(stores)], f"{TENANT}/holders/one/{number}"
        for _ in range(rounds):
            await store.put(name, b"")
            assert (await store.head(name)).size_bytes == 0
            assert name in [it.name async for it in store.listed(f"{TENANT}/holders/one/")]
            await store.delete(name)
            await store.put(name, b"1")
            await store.delete(name)

    await asyncio.gather(*map(come_and_go, range(pods)))

    assert list((tmp_path / "store").iterdir()) == []


class Compared(ListedObject):
    """Counts how often objects of a listing are compared."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return self is other

    __hash__ = None


async def test_a_pass_compares_no_object_of_a_listing_with_all_others(pod, clock, monkeypatch):
    async with pod("a") as kv:
        for number in range(5):
            await kv.save(TEN, session_id=f"ctx_{number}")
        await written(kv)
        store = kv.sidecar.shared.stored.objects
        for number in range(5, 10):
            await store.put(f"{TENANT}/sessions/ctx_{number}/ref_{number:032x}", b"")
            await store.put(f"{TENANT}/holders/nothing/ctx_{number}", b"")
        listed = store.listed

        async def compared(prefix: str) -> AsyncIterator[ListedObject]:
            async for it in listed(prefix):
                yield Compared(it.name, it.size_bytes, it.modified_at_ms)

        monkeypatch.setattr(store, "listed", compared)
        clock.advance(s=120)
        Compared.count = 0
        await kv.sidecar.collect_shared()
        monkeypatch.undo()
        assert Compared.count == 0
        assert len([it async for it in store.listed(f"{TENANT}/holders/")]) == 15


async def test_what_is_here_is_collected_while_the_store_takes_its_time(pod, tmp_path):
    async with pod("a") as kv:
        await kv.share(TEN, session_id="ctx_1")
        held = Held(kv.sidecar.shared.stored.objects, "head", COLLECTOR)
        kv.sidecar.start_collecting()
        await held.has_come.wait()
        await kv.collect(s=2 * HOUR_S)
        assert kv.manifest_files() == set() != manifests(tmp_path)
    # It has ended with its sidecar, whose store would have been asked again.
    assert not held.may_go_on.is_set()


async def test_after_the_first_refusal_nothing_more_is_begun():
    begun = []

    async def refuse(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(0)
        raise SidecarUnavailable("down")

    with pytest.raises(SidecarUnavailable):
        await each(range(100), refuse, at_once=4)
    assert begun == [0, 1, 2, 3]
