"""KV of turns that ended without a commit, and of engines that went away: kept for a retry, and evicted first."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from contextcache.clock import ManualClock
from contextcache.errors import CacheRefNotFound, ContextDeleted, ContextExists, InvalidRequest, StorageFull
from contextcache.model import KVGroup
from contextcache.names import new_cache_ref, prompt_ref
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.catalog import ForkTerms
from kv_sidecar.format.ids import pack_token_ids
from kv_sidecar.format.manifest import decode_manifest, encode_manifest
from kv_sidecar.saves import FailedSave, NewSave
from tests.kit.kv_blocks import BORROWER, FINGERPRINT, SESSION, TENANT, TTL_MS, SidecarUnderTest, new_save, written
from tests.unit.kv_sidecar.test_kv_orphans import AFTER_S, FakeManager, pass_after

TOKENS = tuple(range(1, 19))
"""Four whole files of four tokens, and a tail of two."""
WHOLE = 16
LIFE_S = 600


@pytest.fixture
def kv_settings() -> dict[str, object]:
    return {"manager": FakeManager(), "orphan_after_s": AFTER_S}


def announced(kv: SidecarUnderTest, num_tokens: int = len(TOKENS), **fields: object) -> NewSave:
    """Return a save of the first tokens; of fewer than all, the first of several parts."""
    new = new_save(TOKENS[:num_tokens], now_ms=kv.clock.now_ms(), **fields)  # type: ignore[arg-type]  # its fields
    return replace(new, early=num_tokens < len(TOKENS))


async def interrupted(kv: SidecarUnderTest, when: str, *, life_ms: int = TTL_MS, touches: bool = False) -> NewSave:
    """Save a context whose turn is interrupted before its save, during it or after it.

    `touches`: a turn of its session moves the expiry of all its KV before the seal.
    """
    new = replace(announced(kv), expires_at_ms=kv.clock.now_ms() + life_ms)
    if when == "before":
        await kv.catalog.interrupt(TENANT, new.cache_ref)
    await kv.send_all(new)
    if when == "during":
        await kv.catalog.interrupt(TENANT, new.cache_ref)
    if touches:
        await kv.catalog.touch(TENANT, SESSION, kv.clock.now_ms() + TTL_MS)
    await kv.catalog.seal(new.cache_ref, 0)
    if when == "after":
        await kv.catalog.interrupt(TENANT, new.cache_ref)
    return new


async def end_engine(kv: SidecarUnderTest) -> None:
    """Do as the sidecar does when an engine's process has ended."""
    kv.memory.end_borrower(BORROWER)
    await kv.catalog.seal_rest(BORROWER)


async def tokens_of(kv: SidecarUnderTest, new: NewSave) -> tuple[int, ...]:
    return (await kv.catalog.open(TENANT, new.cache_ref)).token_ids


# Turns without a commit.


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_it_is_loaded_for_ten_minutes_and_leaves_no_byte(kv: SidecarUnderTest, when: str) -> None:
    """No session names it, and the manager says so: it stays all the same, and no longer."""
    new = await interrupted(kv, when)
    await pass_after(kv, LIFE_S - 1)
    assert await kv.load(new)

    await kv.collect(s=1)

    assert (kv.disk_bytes(), kv.manifest_files(), kv.in_memory()) == (0, set(), [])
    assert kv.counted("orphaned_contexts_total") == 0


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_it_lives_no_longer_than_its_session(kv: SidecarUnderTest, clock: ManualClock, when: str) -> None:
    new = await interrupted(kv, when, life_ms=60_000)

    assert kv.catalog.manifests.get(new.cache_ref).expires_at_ms == clock.now_ms() + 60_000


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_a_later_turn_of_its_session_prolongs_it_by_nothing(
    kv: SidecarUnderTest, clock: ManualClock, when: str
) -> None:
    new = await interrupted(kv, when, touches=True)
    await kv.catalog.touch(TENANT, SESSION, clock.now_ms() + 10 * TTL_MS)

    assert kv.catalog.manifests.get(new.cache_ref).expires_at_ms == clock.now_ms() + LIFE_S * 1000


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_its_session_takes_it_along(kv: SidecarUnderTest, when: str) -> None:
    await interrupted(kv, when)
    await kv.save(TOKENS[:9])
    await kv.catalog.delete(TENANT, SESSION, [])

    assert (kv.disk_bytes(), kv.manifest_files(), kv.in_memory()) == (0, set(), [])


async def test_a_save_that_comes_after_the_delete_of_its_session_is_refused(kv: SidecarUnderTest) -> None:
    new = announced(kv)
    await kv.catalog.interrupt(TENANT, new.cache_ref)
    await kv.catalog.delete(TENANT, SESSION, [])

    with pytest.raises(ContextDeleted):
        await kv.send_all(new)


async def test_it_outlives_a_restart_as_what_it_is(tmp_path: Path, clock: ManualClock) -> None:
    async with SidecarUnderTest(tmp_path, clock=clock) as before:
        new = await interrupted(before, "after")
    async with SidecarUnderTest(tmp_path, clock=clock) as after:
        await after.catalog.touch(TENANT, SESSION, clock.now_ms() + 10 * TTL_MS)

        assert after.catalog.manifests.get(new.cache_ref).is_expendable
        assert after.catalog.manifests.get(new.cache_ref).expires_at_ms == clock.now_ms() + LIFE_S * 1000
        assert after.blocks.kept_bytes(TENANT) == after.disk_bytes()


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_it_makes_room_for_contexts_although_it_was_used_last(tmp_path: Path, when: str) -> None:
    async with SidecarUnderTest(tmp_path, spare_ms=0) as kv:
        context = await kv.save(tuple(range(100, 118)), session_id="ctx_2")
        one_bytes = kv.disk_bytes()
    async with SidecarUnderTest(tmp_path, spare_ms=0, disk_limit_bytes=round(2.2 * one_bytes)) as kv:
        new = await interrupted(kv, when)
        third = await kv.save(tuple(range(200, 218)), session_id="ctx_3")

        assert kv.manifest_files() == {context.cache_ref, third.cache_ref}
        assert new.cache_ref not in kv.manifest_files()


async def test_its_save_evicts_no_context(tmp_path: Path) -> None:
    async with SidecarUnderTest(tmp_path, spare_ms=0) as kv:
        context = await kv.save(tuple(range(100, 118)), session_id="ctx_2")
        one_bytes = kv.disk_bytes()
    async with SidecarUnderTest(tmp_path, spare_ms=0, disk_limit_bytes=round(1.5 * one_bytes)) as kv:
        with pytest.raises(StorageFull):
            await interrupted(kv, "before")

        assert kv.manifest_files() == {context.cache_ref}


@pytest.mark.parametrize(("when", "is_written"), [("before", False), ("during", False), ("after", True)])
async def test_the_shared_store_gets_what_was_sealed_before_and_hears_of_its_end(
    tmp_path: Path, clock: ManualClock, when: str, is_written: bool
) -> None:
    store = {"store_url": f"file://{tmp_path}/store", "orphan_after_s": 100 * LIFE_S}
    async with SidecarUnderTest(tmp_path / "a", clock=clock, **store) as kv:
        new = await interrupted(kv, when)
        await written(kv)
        found = await kv.sidecar.shared.stored.manifest(TENANT, new.cache_ref)

    assert (found is not None) == is_written
    assert found is None or (found.expires_at_ms, found.interrupted) == (clock.now_ms() + LIFE_S * 1000, True)


async def test_its_blocks_count_for_the_tenant_and_give_way_to_its_contexts(tmp_path: Path) -> None:
    async with SidecarUnderTest(tmp_path) as kv:
        await kv.save(TOKENS)
        one_bytes = kv.disk_bytes()
        await kv.catalog.delete(TENANT, SESSION, [])
    async with SidecarUnderTest(tmp_path / "limited", tenant_limit_bytes=round(1.5 * one_bytes)) as kv:
        await interrupted(kv, "after")
        assert kv.blocks.tenant_bytes(TENANT)[0] == one_bytes

        context = await kv.save(tuple(range(200, 218)), session_id="ctx_2")

        assert kv.manifest_files() == {context.cache_ref}


async def test_what_was_saved_at_its_prompts_end_has_the_same_life(kv: SidecarUnderTest, clock: ManualClock) -> None:
    new = await kv.save(TOKENS)
    await kv.save(TOKENS[:5], cache_ref=prompt_ref(new.cache_ref))
    await kv.catalog.interrupt(TENANT, new.cache_ref)

    assert {it.expires_at_ms for it in kv.catalog.manifests} == {clock.now_ms() + LIFE_S * 1000}


async def test_a_save_that_is_still_to_come_has_not_failed(kv: SidecarUnderTest) -> None:
    """The ref of a deleted context answers alike: nothing tells which names were ever used."""
    new = announced(kv)
    await kv.catalog.interrupt(TENANT, new.cache_ref)

    assert kv.catalog.refs.get(TENANT, new.cache_ref).failure == ""


async def test_another_tenants_word_changes_nothing(kv: SidecarUnderTest) -> None:
    new = await kv.save(TOKENS)
    await kv.catalog.interrupt("other", new.cache_ref)

    assert not kv.catalog.manifests.get(new.cache_ref).is_expendable


async def test_a_name_that_is_none_is_refused(kv: SidecarUnderTest) -> None:
    with pytest.raises(InvalidRequest):
        await kv.catalog.interrupt(TENANT, "ref_1")


@pytest.mark.parametrize("reason", ["deleted", "failed"])
async def test_a_save_that_has_ended_stays_ended(kv: SidecarUnderTest, reason: str) -> None:
    new = announced(kv, started_at_ms=7)
    if reason == "deleted":
        await kv.catalog.delete(TENANT, "", [new.cache_ref])
    else:
        await kv.catalog.give_up_save(FailedSave(TENANT, new.cache_ref, "arena_full", 7))
    await kv.catalog.interrupt(TENANT, new.cache_ref)

    with pytest.raises(ContextDeleted):
        await kv.send_all(new)


async def test_a_fork_of_it_is_a_context(kv: SidecarUnderTest, clock: ManualClock) -> None:
    new, ref = await interrupted(kv, "after"), new_cache_ref()
    await kv.catalog.fork(ForkTerms(TENANT, "ctx_2", ref, (new.cache_ref,), clock.now_ms() + TTL_MS))

    assert not kv.catalog.manifests.get(ref).is_expendable
    assert kv.catalog.manifests.get(ref).expires_at_ms == clock.now_ms() + TTL_MS


async def test_a_manifest_says_that_its_turn_was_interrupted_in_its_file(kv: SidecarUnderTest) -> None:
    new = await interrupted(kv, "after")
    manifest = await kv.catalog.open(TENANT, new.cache_ref)

    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert manifest.interrupted
    assert not decode_manifest(encode_manifest(replace(manifest, interrupted=False))).interrupted


async def test_a_retry_finds_it_although_its_context_is_nearly_all_of_the_prompt(kv: SidecarUnderTest) -> None:
    """Seen failing without `_interrupted`: what follows a long context is not searched for."""
    context = await kv.save(TOKENS[:WHOLE])
    new = await interrupted(kv, "after")
    question = pb.ResolveRequest(
        tenant=TENANT,
        fingerprint=FINGERPRINT,
        world_size=1,
        cache_refs=[context.cache_ref],
        token_ids=pack_token_ids((*TOKENS, 50, 51)),
    )

    assert (await kv.sidecar.resolver.answer(question)).manifest.cache_ref == new.cache_ref

    question.tenant = "other"
    assert (await kv.sidecar.resolver.answer(question)).manifest is None


# Engines that went away.


@pytest.mark.parametrize(("sent", "sealed"), [((0, 1, 2, 3, 4), 18), ((0, 1, 2, 3), 16), ((0, 1, 3, 4), 8)])
async def test_a_save_is_sealed_as_far_as_its_files_came(
    kv: SidecarUnderTest, sent: tuple[int, ...], sealed: int
) -> None:
    new = announced(kv)
    await kv.catalog.prepare_save(new)
    for index in sent:
        await kv.send(new, index)
    await end_engine(kv)
    rest = replace(new, token_ids=TOKENS[:sealed])

    assert await kv.load(rest)
    assert len(kv.block_files()) == -(-sealed // 4)
    assert not any(block.refs.save for block in kv.blocks)


async def test_parts_ahead_of_a_save_are_sealed_too(kv: SidecarUnderTest) -> None:
    new = announced(kv, 8)
    await kv.send_all(new)
    await kv.catalog.prepare_save(announced(kv, 12, cache_ref=new.cache_ref))
    await end_engine(kv)

    assert await tokens_of(kv, new) == TOKENS[:8]
    with pytest.raises(ContextExists):
        await kv.catalog.prepare_save(announced(kv, cache_ref=new.cache_ref))


async def test_a_save_whose_session_is_committed_keeps_its_life(kv: SidecarUnderTest, clock: ManualClock) -> None:
    """A turn commits before its seal: only the word of its turn makes KV short-lived."""
    new = announced(kv, 8)
    await kv.send_all(new)
    await end_engine(kv)

    assert kv.catalog.manifests.get(new.cache_ref).expires_at_ms == clock.now_ms() + TTL_MS
    await kv.catalog.interrupt(TENANT, new.cache_ref)
    assert kv.catalog.manifests.get(new.cache_ref).expires_at_ms == clock.now_ms() + LIFE_S * 1000


@pytest.mark.parametrize(("second", "sealed"), [((0, 1, 2), 12), ((1, 2, 3), 0), ((), 0)])
async def test_ranks_seal_what_all_of_them_have_sent(
    kv: SidecarUnderTest, second: tuple[int, ...], sealed: int
) -> None:
    first = announced(kv, WHOLE, world_size=2)
    other = replace(first, rank=1)
    await kv.send_all(first)
    await kv.catalog.prepare_save(other)
    for index in second:
        await kv.send(other, index)
    await end_engine(kv)

    if sealed:
        assert await tokens_of(kv, first) == TOKENS[:sealed]
    assert len(kv.block_files()) == 2 * sealed // 4
    assert not any(block.refs.save for block in kv.blocks)


async def test_a_rank_that_was_not_heard_of_leaves_nothing(kv: SidecarUnderTest) -> None:
    new = announced(kv, WHOLE, world_size=2)
    await kv.send_all(new)
    await end_engine(kv)

    assert (kv.block_files(), kv.manifest_files(), kv.in_memory()) == (set(), set(), [])


def groups(num_tokens: int) -> tuple[KVGroup, ...]:
    return (
        KVGroup("full_attention", 4, ((0, num_tokens),), 0, "a" * 16),
        KVGroup("state", 4, ((num_tokens - 1, num_tokens),), 0, "b" * 16),
    )


@pytest.mark.parametrize("is_all", [True, False])
async def test_a_state_is_sealed_with_all_its_files_or_not_at_all(kv: SidecarUnderTest, is_all: bool) -> None:
    new = replace(announced(kv), groups=groups(len(TOKENS)))
    prepared = await kv.catalog.prepare_save(new)
    for index in prepared.missing_files if is_all else prepared.missing_files[:-1]:
        await kv.send(new, index)
    await end_engine(kv)

    assert kv.manifest_files() == ({new.cache_ref} if is_all else set())
    assert len(kv.block_files()) == (prepared.num_files if is_all else 0)


async def test_readers_of_a_save_that_came_to_nothing_wait_no_longer(kv: SidecarUnderTest) -> None:
    new = announced(kv)
    await kv.catalog.prepare_save(new)
    waiting = asyncio.create_task(kv.catalog.wait_sealed(TENANT, new.cache_ref, timeout_s=60))
    await asyncio.sleep(0)
    await end_engine(kv)

    assert await waiting is None
    assert kv.catalog.refs.get(TENANT, new.cache_ref).failure == "engine_gone"
    with pytest.raises(CacheRefNotFound):
        await kv.catalog.open(TENANT, new.cache_ref)


async def test_saves_of_another_engine_and_pulls_go_on(kv: SidecarUnderTest) -> None:
    kv.memory.borrowers.add("another engine")
    new, pulled = announced(kv, 8), replace(announced(kv, session_id="ctx_2"), source="peer")
    await kv.send_all(new)
    await kv.catalog.prepare_save(pulled)
    kv.memory.end_borrower("another engine")
    await kv.catalog.seal_rest("another engine")
    assert kv.manifest_files() == set()

    await end_engine(kv)
    kv.memory.borrowers.add(BORROWER)
    await kv.send_all(pulled)
    assert await kv.catalog.seal(pulled.cache_ref, 0)


async def test_a_file_on_its_way_to_the_disk_counts(kv: SidecarUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    new = announced(kv)
    await kv.catalog.prepare_save(new)
    write, gate = kv.sidecar.threads.write, asyncio.Event()

    async def slow(work: object, *args: object) -> object:
        await gate.wait()
        return await write(work, *args)  # type: ignore[arg-type]  # as it came

    monkeypatch.setattr(kv.sidecar.threads, "write", slow)
    sending = asyncio.create_task(kv.send(new, 0))
    while not any(block.over for block in kv.blocks):
        await asyncio.sleep(0)
    ending = asyncio.create_task(end_engine(kv))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(sending, ending)

    assert await tokens_of(kv, new) == TOKENS[:4]
