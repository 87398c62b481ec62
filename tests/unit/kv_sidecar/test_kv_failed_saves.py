"""Why there is no KV: told by the rank that gave a save up, remembered, and told to whoever asks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from contextcache.clock import ManualClock
from contextcache.errors import ContextCacheError, ContextDeleted, InvalidRequest
from contextcache.names import new_cache_ref
from kv_sidecar import catalog
from kv_sidecar.intake import REASONS_MAX
from kv_sidecar.saves import FailedSave
from tests.kit.kv_blocks import TENANT, SidecarUnderTest, new_save

PROMPT = tuple(range(10))


async def test_who_waits_for_a_save_learns_at_once_that_it_was_given_up(kv: SidecarUnderTest) -> None:
    ref = new_cache_ref()
    waiting = asyncio.create_task(kv.catalog.wait_sealed(TENANT, ref, timeout_s=30))
    await asyncio.sleep(0)
    await kv.catalog.give_up_save(FailedSave(TENANT, ref, "arena_full", 7))

    async with asyncio.timeout(10):
        assert await waiting is None
        assert await kv.catalog.wait_sealed(TENANT, ref, timeout_s=30) is None
    assert kv.catalog.refs.get(TENANT, ref).failure == "arena_full"
    assert kv.catalog.refs.get("other", ref).failure == ""
    assert kv.counted("refused_saves_total", code="arena_full") == 1


@pytest.mark.parametrize("order", list(permutations(["save 0", "give up 1"])))
async def test_one_rank_that_gives_up_ends_the_save_in_any_order(kv: SidecarUnderTest, order: tuple[str, ...]) -> None:
    new = new_save(PROMPT, now_ms=kv.clock.now_ms(), world_size=2, started_at_ms=7)

    async def step(name: str) -> None:
        if name == "give up 1":
            await kv.catalog.give_up_save(FailedSave(TENANT, new.cache_ref, "arena_full", 7))
            return
        rank = replace(new, rank=int(name[-1]))
        try:
            await kv.send_all(rank)
            await kv.catalog.seal(new.cache_ref, rank.rank)
        except ContextDeleted as exc:
            # As the connector does with whatever ends a save.
            await kv.catalog.give_up_save(FailedSave(TENANT, new.cache_ref, exc.code, 7))

    for name in order:
        await step(name)

    assert await kv.catalog.wait_sealed(TENANT, new.cache_ref, timeout_s=0) is None
    assert kv.catalog.refs.get(TENANT, new.cache_ref).failure == "arena_full"
    assert kv.block_files() == set()


async def test_another_attempt_under_the_same_name_is_welcome(kv: SidecarUnderTest) -> None:
    new = new_save(PROMPT, now_ms=kv.clock.now_ms(), started_at_ms=8)
    await kv.catalog.give_up_save(FailedSave(TENANT, new.cache_ref, "queue_full", 7))
    await kv.send_all(new)
    await kv.catalog.give_up_save(FailedSave(TENANT, new.cache_ref, "queue_full", 7))
    await kv.catalog.seal(new.cache_ref, 0)
    await kv.catalog.give_up_save(FailedSave(TENANT, new.cache_ref, "queue_full", 8))

    assert await kv.load(new) == ["host"] * 3
    assert kv.catalog.refs.get(TENANT, new.cache_ref).failure == ""


@pytest.mark.parametrize(
    "failed",
    [
        FailedSave("", new_cache_ref(), "queue_full"),
        FailedSave(TENANT, "../etc", "queue_full"),
        FailedSave(TENANT, new_cache_ref(), "Something the client said"),
        FailedSave(TENANT, new_cache_ref(), "a" * 41),
        FailedSave(TENANT, new_cache_ref(), ""),
    ],
)
async def test_what_is_no_failure_is_refused(kv: SidecarUnderTest, failed: FailedSave) -> None:
    with pytest.raises(InvalidRequest):
        await kv.catalog.give_up_save(failed)


async def test_reasons_beyond_the_bound_are_one_label(kv: SidecarUnderTest) -> None:
    names = [f"reason_{first}{second}" for first in "abcdefgh" for second in "abcdefgh"]
    assert len(names) == REASONS_MAX
    for name in (*names, "one_more", "another", names[0]):
        await kv.catalog.give_up_save(FailedSave(TENANT, new_cache_ref(), name))

    assert kv.counted("refused_saves_total", code="other") == 2
    assert kv.counted("refused_saves_total", code=names[0]) == 2


async def test_a_failure_outlives_no_seal(kv: SidecarUnderTest) -> None:
    clock = kv.clock
    assert isinstance(clock, ManualClock)
    new = new_save(PROMPT, now_ms=clock.now_ms(), started_at_ms=7)
    await kv.catalog.prepare_save(new)
    clock.advance(ms=kv.settings.limits().save_deadline_ms)
    await kv.catalog.collect()
    late = kv.catalog.refs.get(TENANT, new.cache_ref).failure
    await kv.send_all(replace(new, started_at_ms=9))
    await kv.catalog.seal(new.cache_ref, 0)

    assert late == "save_deadline"
    assert kv.catalog.refs.get(TENANT, new.cache_ref).failure == ""


async def test_a_save_that_could_not_be_held_to_its_end_is_gone_on_with(tmp_path: Path) -> None:
    async with SidecarUnderTest(tmp_path, spare_ms=60_000) as kv:
        first = new_save(PROMPT, now_ms=kv.clock.now_ms(), started_at_ms=7)
        await kv.catalog.prepare_save(first)
        await kv.send(first, 0)
        await kv.catalog.give_up_save(FailedSave(TENANT, first.cache_ref, "hold_deadline", 7))
        await kv.catalog.collect()
        second = new_save((*PROMPT, 11), now_ms=kv.clock.now_ms(), started_at_ms=8)
        prepared = await kv.catalog.prepare_save(second)

    assert prepared.missing_files == (1, 2)


async def test_a_delete_during_a_save_is_its_reason_and_one_without_a_save_has_none(kv: SidecarUnderTest) -> None:
    """Seen failing: the phase's change cleared the reason, and readers waited for a save that could not come."""
    new = new_save(tuple(range(10)), now_ms=kv.clock.now_ms())
    await kv.catalog.prepare_save(new)
    sealed = await kv.save(tuple(range(10)), session_id="ctx_2")

    await kv.catalog.delete(TENANT, "", [new.cache_ref])
    await kv.catalog.delete(TENANT, "", [sealed.cache_ref])

    assert kv.catalog.refs.get(TENANT, new.cache_ref).failure == "context_deleted"
    assert kv.catalog.refs.get(TENANT, sealed.cache_ref).failure == ""


@pytest.mark.parametrize("how", ["cancelled", "refused", "disagrees"])
async def test_a_second_rank_that_goes_leaves_the_first_ranks_save(
    kv: SidecarUnderTest, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing: while the first rank's tokens were hashed, the end of the second rank's call ended the save."""
    monkeypatch.setattr(catalog, "_HASHED_HERE", 0)
    first = new_save(PROMPT, now_ms=kv.clock.now_ms(), world_size=2, started_at_ms=7)
    second = replace(first, rank=1)
    announcing = asyncio.create_task(kv.catalog.prepare_save(first))
    await asyncio.sleep(0)
    if how == "cancelled":
        beside = asyncio.create_task(kv.catalog.prepare_save(second))
        await asyncio.sleep(0)
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
    else:
        wrong = {"expires_at_ms": 1} if how == "refused" else {"fingerprint": "e" * 64}
        with pytest.raises(ContextCacheError):
            await kv.catalog.prepare_save(replace(second, **wrong))
    await announcing
    for rank in (first, second):
        await kv.send_all(rank)
        sealed = await kv.catalog.seal(rank.cache_ref, rank.rank)

    assert sealed
    assert await kv.load(first)


async def test_a_pull_in_the_millisecond_of_a_failed_turn_is_an_attempt_of_its_own(kv: SidecarUnderTest) -> None:
    """And its end leaves an engine's save alone."""
    new = new_save(PROMPT, now_ms=kv.clock.now_ms(), started_at_ms=7)
    await kv.catalog.give_up_save(FailedSave(TENANT, new.cache_ref, "arena_full", 7))
    pulled = replace(new, source="peer")

    assert (await kv.catalog.prepare_save(pulled)).missing_files
    await kv.catalog.abandon_save(new.cache_ref)
    assert kv.catalog.refs.get(TENANT, new.cache_ref).failure == "arena_full"
    await kv.catalog.prepare_save(replace(new, started_at_ms=8))
    await kv.catalog.abandon_save(new.cache_ref)
    await kv.send_all(replace(new, started_at_ms=8))
    assert await kv.catalog.seal(new.cache_ref, 0)


async def test_a_late_rank_opens_no_save_that_another_rank_may_have_ended(tmp_path: Path) -> None:
    """Seen failing: with the failure's record forgotten, the save held its blocks until its deadline."""
    async with SidecarUnderTest(tmp_path, max_tombstones=1) as kv:
        late = new_save(PROMPT, now_ms=kv.clock.now_ms(), world_size=2, rank=1, started_at_ms=7)
        for cache_ref in (late.cache_ref, new_cache_ref()):
            await kv.catalog.give_up_save(FailedSave(TENANT, cache_ref, "arena_full", 7))
        with pytest.raises(ContextDeleted):
            await kv.catalog.prepare_save(late)
        alone = replace(late, cache_ref=new_cache_ref(), rank=0, world_size=1)
        later = replace(late, started_at_ms=8)

        assert (await kv.catalog.prepare_save(alone)).missing_files
        assert (await kv.catalog.prepare_save(later)).missing_files
