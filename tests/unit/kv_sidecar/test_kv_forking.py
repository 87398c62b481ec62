"""Forks at one sidecar: the same files, to the byte, for as long as anybody has them."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from contextcache.errors import (
    CacheRefNotFound,
    ContextDeleted,
    ContextExists,
    ContextExpired,
    CorruptBlock,
    InvalidRequest,
    SidecarUnavailable,
    StorageFull,
)
from contextcache.model import KVGroup
from contextcache.names import new_cache_ref, prompt_ref
from kv_sidecar.catalog import ForkTerms
from kv_sidecar.format.manifest import FORMAT_FORK, block_key, decode_manifest, encode_manifest
from kv_sidecar.saves import NewSave
from tests.kit.kv_blocks import SESSION, TENANT, TTL_MS, SidecarUnderTest, new_save

TOKENS = tuple(range(11))
"""Two whole blocks and a tail of three."""


def fork_of(kv: SidecarUnderTest, *sources: str, session_id: str = "ctx_fork", **fields: object) -> ForkTerms:
    new = ForkTerms(TENANT, session_id, new_cache_ref(), sources, kv.clock.now_ms() + TTL_MS)
    return replace(new, **fields)  # type: ignore[arg-type]  # fields of ForkTerms


def as_saved(save: NewSave, fork: ForkTerms) -> NewSave:
    """Return what loads a fork: `SidecarUnderTest.load` compares its tokens and every byte."""
    return replace(save, cache_ref=fork.cache_ref, session_id=fork.session_id)


async def test_a_fork_adds_no_byte_of_kv_and_loads_token_for_token(kv: SidecarUnderTest) -> None:
    save = await kv.save(TOKENS)
    before, files = kv.disk_bytes(), kv.block_files()
    for number in range(20):
        fork = fork_of(kv, save.cache_ref, session_id=f"ctx_{number}")
        record = await kv.catalog.fork(fork)
        assert record is not None
        assert record.num_tokens == 11
        await kv.load(as_saved(save, fork))

    assert (kv.disk_bytes(), kv.block_files()) == (before, files)
    assert len(kv.catalog.manifests) == 21


async def test_the_last_of_a_family_frees_everything_whatever_the_order(tmp_path: Path) -> None:
    rng = Random(7)
    async with SidecarUnderTest(tmp_path) as kv:
        for _ in range(6):
            save = await kv.save(TOKENS, session_id=f"ctx_{rng.random()}")
            family = [(save.session_id, save.cache_ref)]
            for number in range(6):
                _, source = rng.choice(family)
                fork = fork_of(kv, source, session_id=f"{save.session_id}.{number}")
                assert await kv.catalog.fork(fork)
                family.append((fork.session_id, fork.cache_ref))
            rng.shuffle(family)
            while family:
                session_id, _ = family.pop()
                removed = await kv.catalog.delete(TENANT, session_id, ())
                assert (removed.freed_bytes > 0) == (not family)
                for other_id, ref in family:
                    await kv.load(replace(save, cache_ref=ref, session_id=other_id))

            assert (kv.disk_bytes(), kv.block_files(), kv.missing_bytes()) == (0, set(), 0)


async def test_a_fork_outlives_a_restart_and_its_source(tmp_path: Path) -> None:
    async with SidecarUnderTest(tmp_path) as kv:
        save = await kv.save(TOKENS)
        fork = fork_of(kv, save.cache_ref)
        await kv.catalog.fork(fork)
        await kv.catalog.delete(TENANT, SESSION, ())
    async with SidecarUnderTest(tmp_path, clock=kv.clock) as kv:
        assert kv.manifest_files() == {fork.cache_ref}
        assert set(await kv.load(as_saved(save, fork))) == {"disk"}
        await kv.catalog.collect()
        await kv.load(as_saved(save, fork))
        await kv.catalog.delete(TENANT, fork.session_id, ())

        assert kv.block_files() == set()


async def test_each_ends_at_its_own_time(kv: SidecarUnderTest) -> None:
    save = await kv.save(TOKENS)
    late = fork_of(kv, save.cache_ref, expires_at_ms=kv.clock.now_ms() + 3 * TTL_MS)
    await kv.catalog.fork(late)
    kv.clock.advance(s=TTL_MS // 1000 + 1)
    await kv.catalog.collect()
    with pytest.raises(CacheRefNotFound):
        await kv.catalog.open(TENANT, save.cache_ref)
    await kv.load(as_saved(save, late))
    assert await kv.catalog.touch(TENANT, late.session_id, kv.clock.now_ms() + 1000) == 1
    await kv.load(as_saved(save, late))
    kv.clock.advance(s=2)
    await kv.catalog.collect()

    assert kv.block_files() == set()


async def test_a_fork_that_grows_shares_what_it_had_and_saves_its_own_tail(kv: SidecarUnderTest) -> None:
    save = await kv.save(TOKENS)
    fork = fork_of(kv, save.cache_ref)
    await kv.catalog.fork(fork)
    grown = await kv.save((*TOKENS, 90, 91), session_id=fork.session_id)
    await kv.catalog.delete(TENANT, "", (fork.cache_ref,))
    await kv.load(save)
    await kv.load(grown)
    tails = {key.name for key in kv.block_files() if key.kind == "tail"}

    assert tails == {save.cache_ref, grown.cache_ref}
    assert len([key for key in kv.block_files() if key.kind == "block"]) == 3


async def test_the_better_source_is_taken_and_without_any_nothing_is_written(kv: SidecarUnderTest) -> None:
    old, new = await kv.save(TOKENS[:6]), await kv.save(TOKENS)
    record = await kv.catalog.fork(fork_of(kv, new_cache_ref(), new.cache_ref, old.cache_ref))
    none = await kv.catalog.fork(fork_of(kv, new_cache_ref(), session_id="ctx_none"))
    foreign = await kv.catalog.fork(fork_of(kv, new.cache_ref, tenant="other"))

    assert record is not None
    assert record.num_tokens == 11
    assert (none, foreign) == (None, None)
    assert len(kv.manifest_files()) == 3


async def test_kv_that_is_being_saved_is_waited_for(kv: SidecarUnderTest) -> None:
    new = await kv.sent(TOKENS)
    forking = asyncio.create_task(kv.catalog.fork(fork_of(kv, new.cache_ref)))
    await asyncio.sleep(0)
    await kv.catalog.seal(new.cache_ref, 0)
    record = await forking

    assert record is not None
    assert record.num_tokens == 11


async def test_forks_and_a_delete_of_their_source_at_once_leave_whole_forks_or_none(kv: SidecarUnderTest) -> None:
    for round_ in range(10):
        save = await kv.save(TOKENS, session_id=f"source_{round_}")
        forks = [fork_of(kv, save.cache_ref, session_id=f"fork_{round_}_{number}") for number in range(4)]
        deleting = kv.catalog.delete(TENANT, save.session_id, (save.cache_ref,))
        *records, _ = await asyncio.gather(*map(kv.catalog.fork, forks), deleting)
        for fork, record in zip(forks, records, strict=True):
            if record is not None:
                await kv.load(as_saved(save, fork))
            await kv.catalog.delete(TENANT, fork.session_id, ())

        assert (kv.block_files(), kv.manifest_files()) == (set(), set())


async def test_a_fork_whose_source_is_deleted_after_it_was_read_is_none(kv: SidecarUnderTest, monkeypatch) -> None:
    """Seen failing without the second look at the source: the fork named files that were gone."""
    save = await kv.save(TOKENS)
    manifests = kv.catalog.manifests
    read = manifests.read

    async def read_and_deleted(*arguments, **more):
        monkeypatch.setattr(manifests, "read", read)
        manifest = await read(*arguments, **more)
        await kv.catalog.delete(TENANT, save.session_id, (save.cache_ref,))
        return manifest

    monkeypatch.setattr(manifests, "read", read_and_deleted)

    assert await kv.catalog.fork(fork_of(kv, save.cache_ref)) is None
    assert (kv.block_files(), kv.manifest_files()) == (set(), set())


async def test_a_fork_that_was_deleted_does_not_come_back(kv: SidecarUnderTest) -> None:
    save = await kv.save(TOKENS)
    fork = fork_of(kv, save.cache_ref)
    await kv.catalog.delete(TENANT, "", (fork.cache_ref,))
    with pytest.raises(ContextDeleted):
        await kv.catalog.fork(fork)
    again = fork_of(kv, save.cache_ref, session_id="ctx_again")
    kv.clock.advance(s=1)
    await kv.catalog.delete(TENANT, "ctx_again", ())
    kv.clock.advance(s=1)

    assert await kv.catalog.fork(again)  # a session of the same name that came later


async def test_a_name_that_is_taken_is_not_taken_over_and_a_repeat_answers_the_same(kv: SidecarUnderTest) -> None:
    save, other = await kv.save(TOKENS), await kv.save(TOKENS[:4], session_id="ctx_other")
    fork = fork_of(kv, save.cache_ref)

    assert await kv.catalog.fork(fork) == await kv.catalog.fork(fork)
    with pytest.raises(ContextExists):
        await kv.catalog.fork(replace(fork, cache_ref=other.cache_ref))
    await kv.load(other)


@pytest.mark.parametrize("tenant", [TENANT, "other"])
async def test_a_name_that_is_announced_while_its_fork_is_written_is_the_forks(tmp_path: Path, tenant: str) -> None:
    """Seen failing: the announcement opened a save, and the fork ended with AssertionError and a file of its own."""
    reached, may_go = threading.Event(), threading.Event()
    names = list[str]()

    def step(name: str) -> None:
        if names and names[0] in name and not reached.is_set():
            reached.set()
            assert may_go.wait(60)

    async with SidecarUnderTest(tmp_path, step=step) as kv:
        save = await kv.save(TOKENS)
        fork = fork_of(kv, save.cache_ref)
        names.append(fork.cache_ref)
        forking = asyncio.create_task(kv.catalog.fork(fork))
        assert await asyncio.to_thread(reached.wait, 60)
        with pytest.raises(ContextExists):
            await kv.catalog.prepare_save(
                new_save(TOKENS, now_ms=kv.clock.now_ms(), cache_ref=fork.cache_ref, tenant=tenant)
            )
        may_go.set()

        assert await forking
        await kv.load(as_saved(save, fork))


async def test_a_fork_that_the_disk_refuses_leaves_its_name_free(tmp_path: Path) -> None:
    refuses = list[str]()

    def step(name: str) -> None:
        if refuses and refuses[0] in name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with SidecarUnderTest(tmp_path, step=step) as kv:
        save = await kv.save(TOKENS)
        fork = fork_of(kv, save.cache_ref)
        refuses.append(fork.cache_ref)
        with pytest.raises((StorageFull, SidecarUnavailable)):
            await kv.catalog.fork(fork)
        refuses.clear()

        assert await kv.catalog.fork(fork)
        await kv.load(as_saved(save, fork))


async def test_what_cannot_be_is_refused(kv: SidecarUnderTest) -> None:
    save = await kv.save(TOKENS)
    good = fork_of(kv, save.cache_ref)
    for bad in (
        replace(good, tenant="a/b"),
        replace(good, session_id=""),
        replace(good, cache_ref="../etc"),
        replace(good, sources=("ref_x",)),
        replace(good, sources=()),
        replace(good, sources=(save.cache_ref,) * 5),
    ):
        with pytest.raises(InvalidRequest):
            await kv.catalog.fork(bad)
    with pytest.raises(ContextExpired):
        await kv.catalog.fork(replace(good, expires_at_ms=kv.clock.now_ms()))

    assert kv.manifest_files() == {save.cache_ref}


GROUPS = (
    KVGroup("full_attention", 4, ((0, 11),), 0, "a0" * 8),
    KVGroup("sliding_window", 4, ((0, 2), (5, 11)), 6, "b0" * 8),
    KVGroup("state", 4, ((10, 11),), 0, "c0" * 8),
)


async def test_groups_windows_and_what_was_saved_at_the_prompts_end_go_along(kv: SidecarUnderTest) -> None:
    save = await kv.save(TOKENS, groups=GROUPS)
    at_prompt = await kv.save(TOKENS[:8], cache_ref=prompt_ref(save.cache_ref))
    fork, files = fork_of(kv, save.cache_ref), kv.block_files()
    await kv.catalog.fork(fork)
    await kv.catalog.delete(TENANT, SESSION, (save.cache_ref,))
    await kv.load(as_saved(save, fork))
    await kv.load(replace(as_saved(at_prompt, fork), cache_ref=prompt_ref(fork.cache_ref)))

    assert kv.block_files() == files
    await kv.catalog.delete(TENANT, "", (fork.cache_ref,))
    assert kv.block_files() == set()


async def test_a_corrupt_block_takes_the_whole_family_that_holds_it(tmp_path: Path) -> None:
    async with SidecarUnderTest(tmp_path, memory_limit_bytes=0) as kv:
        save = await kv.save(TOKENS)
        fork = fork_of(kv, save.cache_ref)
        await kv.catalog.fork(fork)
        path = kv.path_of(block_key(kv.plan(save), 2, 0))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptBlock):
            await kv.load(as_saved(save, fork))
        for ref in (save.cache_ref, fork.cache_ref):
            with pytest.raises(CacheRefNotFound):
                await kv.catalog.open(TENANT, ref)


async def test_a_forks_file_says_whose_tails_it_has_and_older_readers_know_the_format_for_another(
    tmp_path: Path,
) -> None:
    async with SidecarUnderTest(tmp_path) as kv:
        save = await kv.save(TOKENS)
        manifest = await kv.catalog.open(TENANT, save.cache_ref)
    forked = replace(manifest, cache_ref=new_cache_ref(), tail_ref=save.cache_ref)
    file = encode_manifest(forked)

    assert FORMAT_FORK.encode() in file
    assert FORMAT_FORK.encode() not in encode_manifest(manifest)
    assert decode_manifest(file) == forked
    with pytest.raises(CorruptBlock):
        decode_manifest(encode_manifest(replace(forked, tail_ref="ref_x")))
