"""KV that no session names: asked about after a while, freed on a manager's word only, never what changed meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from contextcache.clock import ManualClock
from contextcache.errors import ContextCacheError, ContextDeleted, InvalidRequest, StoreUnavailable
from contextcache.model import CacheRef, HeldCacheRef, TenantId
from contextcache.names import new_cache_ref, prompt_ref
from kv_sidecar import orphans
from kv_sidecar.saves import NewSave
from tests.kit.kv_blocks import SESSION, TENANT, TTL_MS, SidecarUnderTest, new_save

PROMPT = tuple(range(10))
OTHER_END = (*range(8), 90, 91, 92)
"""Shares two whole blocks with PROMPT."""
AFTER_S = 60


class FakeManager:
    """Knows which names are live; notes what it was asked."""

    def __init__(self) -> None:
        self.named: set[tuple[TenantId, CacheRef]] = set()
        self.questions: list[list[CacheRef]] = []
        self.failure: ContextCacheError | None = None
        self.before_answer: Callable[[], object] = lambda: None
        self.answer: Sequence[int] | None = None
        """Said instead of the truth."""

    async def orphans(self, held: Sequence[HeldCacheRef]) -> Sequence[int]:
        self.questions.append([one.cache_ref for one in held])
        result = self.before_answer()
        if asyncio.iscoroutine(result):
            await result
        if self.failure is not None:
            raise self.failure
        if self.answer is not None:
            return self.answer
        return [i for i, one in enumerate(held) if (one.tenant, one.cache_ref) not in self.named]

    def name(self, new: NewSave) -> None:
        self.named.add((new.tenant, new.cache_ref))


@pytest.fixture
def manager() -> FakeManager:
    return FakeManager()


@pytest.fixture
def kv_settings(manager: FakeManager) -> dict[str, object]:
    return {"manager": manager, "orphan_after_s": AFTER_S}


async def pass_after(kv: SidecarUnderTest, s: float) -> None:
    """Make a pass that learns what is there, and one `s` seconds later."""
    await kv.sidecar.collect()
    await kv.collect(s=s)


async def test_kv_that_no_session_names_leaves_no_byte(kv: SidecarUnderTest, manager: FakeManager) -> None:
    await kv.save(PROMPT)
    await pass_after(kv, AFTER_S)

    assert kv.disk_bytes() == 0
    assert kv.manifest_files() == set()
    assert kv.in_memory() == []
    assert kv.counted("orphaned_contexts_total") == 1
    assert kv.counted("failed_manager_questions_total") == 0


async def test_kv_that_a_session_names_stays_with_the_blocks_an_orphan_shared(
    kv: SidecarUnderTest, manager: FakeManager
) -> None:
    kept = await kv.save(PROMPT)
    own_bytes = kv.disk_bytes()
    await kv.save(OTHER_END, session_id="ctx_2")
    manager.name(kept)
    await pass_after(kv, AFTER_S)

    assert kv.manifest_files() == {kept.cache_ref}
    assert kv.disk_bytes() == own_bytes
    assert await kv.load(kept)


async def test_what_was_saved_at_a_prompts_end_lives_and_goes_with_its_context(
    kv: SidecarUnderTest, clock: ManualClock, manager: FakeManager
) -> None:
    """No session names it. Seen failing: freed as nobody's while its context was named."""
    named, nameless = await kv.save(PROMPT), await kv.save(OTHER_END, session_id="ctx_2")
    clock.advance(s=AFTER_S / 2)
    for new in (named, nameless):
        await kv.save(new.token_ids[:5], session_id=new.session_id, cache_ref=prompt_ref(new.cache_ref))
    await kv.save(PROMPT[:6], session_id="ctx_3", cache_ref=prompt_ref(new_cache_ref()))
    manager.name(named)
    await pass_after(kv, 2 * AFTER_S)

    assert kv.manifest_files() == {named.cache_ref, prompt_ref(named.cache_ref)}


async def test_a_deleted_context_takes_what_was_saved_at_its_prompts_end_along(kv: SidecarUnderTest) -> None:
    new = await kv.save(PROMPT)
    await kv.save(PROMPT[:5], cache_ref=prompt_ref(new.cache_ref))
    await kv.catalog.delete(new.tenant, "", [new.cache_ref])

    assert kv.manifest_files() == set()
    assert kv.disk_bytes() == 0
    with pytest.raises(ContextDeleted):
        await kv.save(PROMPT[:5], cache_ref=prompt_ref(new.cache_ref))


async def test_nothing_is_asked_before_its_time_and_nothing_twice_within_it(
    kv: SidecarUnderTest, manager: FakeManager
) -> None:
    """A create's seal comes before its commit. Seen to fail with `due <= now` replaced by True in `find`."""
    new = await kv.save(PROMPT)
    await pass_after(kv, AFTER_S - 1)

    assert manager.questions == []

    manager.name(new)
    await kv.collect(s=1)
    await pass_after(kv, AFTER_S - 1)

    assert manager.questions == [[new.cache_ref]]

    await kv.collect(s=1)

    assert manager.questions == [[new.cache_ref]] * 2


async def test_the_time_since_the_seal_outlives_a_restart(
    tmp_path: Path, clock: ManualClock, manager: FakeManager
) -> None:
    """Seen to fail with the time of the first pass in place of the manifest file's own."""
    async with SidecarUnderTest(tmp_path, clock=clock, manager=manager, orphan_after_s=AFTER_S) as before:
        new = await before.save(PROMPT)
        (manifest,) = (before.settings.data_dir / "manifests").glob("*/*")
        sealed_s = clock.now_ms() / 1000
        os.utime(manifest, (sealed_s, sealed_s))
    clock.advance(s=AFTER_S)
    async with SidecarUnderTest(tmp_path, clock=clock, manager=manager, orphan_after_s=AFTER_S) as after:
        await after.sidecar.collect()

        assert manager.questions == [[new.cache_ref]]
        assert after.disk_bytes() == 0


async def test_a_file_of_the_future_waits_from_now(
    kv: SidecarUnderTest, clock: ManualClock, manager: FakeManager
) -> None:
    """The clock went back an hour. Seen to fail without the `min` in `_learn`: the file waited an hour longer."""
    await kv.save(PROMPT)
    (manifest,) = (kv.settings.data_dir / "manifests").glob("*/*")
    future_s = clock.now_ms() / 1000 + 3600
    os.utime(manifest, (future_s, future_s))
    await pass_after(kv, AFTER_S)

    assert kv.manifest_files() == set()


@pytest.mark.parametrize("failure", [StoreUnavailable("silent"), InvalidRequest("not these")], ids=lambda e: e.code)
async def test_without_a_usable_answer_nothing_is_freed_and_it_is_counted(
    kv: SidecarUnderTest, manager: FakeManager, failure: ContextCacheError
) -> None:
    """Seen to fail with `return list(records)` in place of the silence."""
    new = await kv.save(PROMPT)
    manager.failure = failure
    await pass_after(kv, AFTER_S)

    assert kv.manifest_files() == {new.cache_ref}
    assert kv.counted("failed_manager_questions_total") == 1
    assert await kv.load(new)


@pytest.mark.parametrize("answer", [[0, 1], [-1], [1 << 31]])
async def test_an_answer_about_something_else_frees_nothing(
    kv: SidecarUnderTest, manager: FakeManager, answer: list[int]
) -> None:
    """Seen to fail (position -1 freed the last KV asked about) without the look at the positions."""
    new = await kv.save(PROMPT)
    manager.answer = answer
    await pass_after(kv, AFTER_S)

    assert kv.manifest_files() == {new.cache_ref}
    assert kv.counted("failed_manager_questions_total") == 1


def warned(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.name == "kv_sidecar.orphans" for record in caplog.records)


async def test_an_outage_is_logged_once_and_over_with_the_first_answer(
    kv: SidecarUnderTest, manager: FakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen to fail without `_is_silent`: one line for each pass."""
    await kv.save(PROMPT)
    manager.failure = StoreUnavailable("silent")
    with caplog.at_level(logging.WARNING, logger="kv_sidecar.orphans"):
        await pass_after(kv, AFTER_S)
        await kv.sidecar.collect()
        await kv.sidecar.collect()

        assert warned(caplog) == 1
        assert kv.counted("failed_manager_questions_total") == 3

        manager.failure = None
        await kv.sidecar.collect()
        await kv.save(PROMPT)
        manager.failure = StoreUnavailable("silent again")
        await pass_after(kv, AFTER_S)

        assert warned(caplog) == 2


async def test_questions_of_a_pass_end_in_time_and_the_rest_of_the_pass_is_made(
    kv: SidecarUnderTest, manager: FakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to hang without the time limit of a pass."""
    monkeypatch.setattr(orphans, "PASS_S", 0.01)
    new = await kv.save(PROMPT)
    manager.before_answer = lambda: asyncio.Event().wait()
    await asyncio.wait_for(pass_after(kv, AFTER_S), 30)

    assert kv.manifest_files() == {new.cache_ref}
    assert kv.counted("failed_manager_questions_total") == 1
    assert kv.registry.get_sample_value("contextcache_sidecar_tenant_bytes", {"tenant": TENANT}) == kv.disk_bytes()


async def test_a_pass_asks_about_so_many_beginning_with_what_waited_longest(
    kv: SidecarUnderTest, clock: ManualClock, manager: FakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live KV that was asked about lets others come next. Seen to fail without the sort: two were never asked about."""
    monkeypatch.setattr(orphans, "QUESTION_REFS", 2)
    monkeypatch.setattr(orphans, "PASS_REFS", 3)
    saved = []
    for i in range(5):
        saved.append((await kv.save((*PROMPT, i), session_id=f"ctx_{i}")).cache_ref)
        await kv.sidecar.collect()
        clock.advance(s=1)
        manager.named.add((TENANT, saved[-1]))
    await kv.collect(s=AFTER_S)

    assert manager.questions == [saved[:2], saved[2:3]]

    await kv.collect(s=AFTER_S)

    assert manager.questions[2:] == [saved[3:5], saved[:1]]


async def test_what_one_answer_said_is_freed_although_the_next_question_failed(
    kv: SidecarUnderTest, clock: ManualClock, manager: FakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "QUESTION_REFS", 1)
    await kv.save(PROMPT)
    await kv.sidecar.collect()
    clock.advance(s=1)
    second = await kv.save((*PROMPT, 1), session_id="ctx_2")

    def fail_from_the_second_on() -> None:
        if len(manager.questions) == 2:
            manager.failure = StoreUnavailable("gone in between")

    manager.before_answer = fail_from_the_second_on
    await pass_after(kv, AFTER_S + 1)

    assert kv.manifest_files() == {second.cache_ref}


async def test_a_refused_question_does_not_stand_in_the_way_of_others(
    kv: SidecarUnderTest, clock: ManualClock, manager: FakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name the manager takes offence at must not be the first of every pass. Seen to fail without the new due."""
    monkeypatch.setattr(orphans, "QUESTION_REFS", 1)
    monkeypatch.setattr(orphans, "PASS_REFS", 1)
    first = await kv.save(PROMPT)
    await kv.sidecar.collect()
    clock.advance(s=1)
    await kv.save((*PROMPT, 1), session_id="ctx_2")
    manager.failure = InvalidRequest("not this one")
    await pass_after(kv, AFTER_S)
    manager.failure = None
    await kv.sidecar.collect()

    assert kv.manifest_files() == {first.cache_ref}


async def test_kv_touched_while_the_manager_was_asked_stays(
    kv: SidecarUnderTest, clock: ManualClock, manager: FakeManager
) -> None:
    """Whoever touches has a live session. Seen to fail with the drop by name alone."""
    new = await kv.save(PROMPT)
    manager.before_answer = lambda: kv.catalog.touch(TENANT, SESSION, clock.now_ms() + 2 * TTL_MS)
    await pass_after(kv, AFTER_S)

    assert manager.questions == [[new.cache_ref]]
    assert kv.manifest_files() == {new.cache_ref}


async def test_a_name_whose_kv_was_freed_as_nobodys_can_be_saved_under_again(
    kv: SidecarUnderTest, manager: FakeManager
) -> None:
    """A turn that outlived its lease committed the name all the same: a later turn may bring its KV back."""
    new = await kv.save(PROMPT)
    await pass_after(kv, AFTER_S)
    again = await kv.save(PROMPT, cache_ref=new.cache_ref)

    assert again.cache_ref == new.cache_ref
    assert await kv.load(again)


async def test_a_save_in_flight_keeps_the_blocks_an_orphan_leaves(
    kv: SidecarUnderTest, clock: ManualClock, manager: FakeManager
) -> None:
    """The next turn of a session shares its blocks before it is sealed. Nothing of it is asked about or freed."""
    await kv.save(PROMPT)
    await kv.sidecar.collect()
    clock.advance(s=AFTER_S)
    growing = new_save((*PROMPT, *range(20, 31)), now_ms=clock.now_ms())
    prepared = await kv.catalog.prepare_save(growing)
    assert 0 not in prepared.missing_files

    await kv.sidecar.collect()
    for block_index in prepared.missing_files:
        await kv.send(growing, block_index)
    assert await kv.catalog.seal(growing.cache_ref, 0)

    assert kv.manifest_files() == {growing.cache_ref}
    assert await kv.load(growing)


async def test_without_a_manager_everything_stays_until_its_time_is_over(tmp_path: Path, clock: ManualClock) -> None:
    async with SidecarUnderTest(tmp_path, clock=clock, orphan_after_s=AFTER_S) as kv:
        new = await kv.save(PROMPT)
        await pass_after(kv, 10 * AFTER_S)

        assert kv.manifest_files() == {new.cache_ref}
