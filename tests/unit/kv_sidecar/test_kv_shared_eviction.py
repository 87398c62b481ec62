"""A store with a budget: what leaves it, what stays, and that nothing which lives in a pod is lost for it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_sidecar.crash_points import AFTER_EVICTED_MANIFEST
from kv_sidecar.limits import Limits
from kv_sidecar.store import stored_kv
from kv_sidecar.store.collector import COLLECTOR, LOWER_MARK, UPPER_MARK, Shelf, evictions
from kv_sidecar.store.stored_kv import StoredSession
from tests.kit.kv_blocks import TENANT, SidecarUnderTest, brought, written
from tests.kit.shared_store import Killed, kill_at, sessions

HOUR_S = 3600


def shelf(**sessions: tuple[int, str]) -> Shelf:
    """Return blocks of 10 bytes: of each session when it was used, and the letters of its blocks."""
    files = {name for _, names in sessions.values() for name in names}
    held = {name: StoredSession({name}, set(files), used) for name, (used, files) in sessions.items()}
    return Shelf(dict.fromkeys(files, 10), held)


def limits_of(limit_bytes: int, tenant_limit_bytes: int) -> Limits:
    return Limits(block_tokens=1, store_limit_bytes=limit_bytes, store_tenant_limit_bytes=tenant_limit_bytes)


def left_by(shelves: dict[str, Shelf], *, limit: int = 0, tenant_limit: int = 0) -> list[str]:
    return [session_id for _, session_id, _ in evictions(shelves, limits_of(limit, tenant_limit))]


def test_what_was_used_longest_ago_leaves_whoever_has_it_down_to_the_lower_mark():
    shelves = {"a": shelf(one=(3, "abc"), two=(1, "def")), "b": shelf(three=(2, "ghi"), four=(4, "j"))}

    assert left_by(shelves, limit=100) == ["two"]
    assert [it.size_bytes for it in shelves.values()] == [30, 40]


def test_below_the_upper_mark_and_without_a_limit_nothing_leaves():
    assert left_by({"a": shelf(one=(1, "abcdefghi"))}, limit=100) == []
    assert left_by({"a": shelf(one=(1, "abcdefghi"))}) == []


def test_a_tenant_that_has_too_much_makes_room_itself():
    shelves = {"a": shelf(one=(9, "abc"), two=(8, "def")), "b": shelf(three=(1, "ghi"))}

    assert left_by(shelves, limit=1000, tenant_limit=50) == ["two"]


def test_blocks_that_a_session_shares_with_one_that_stays_free_nothing():
    shelves = {"a": shelf(one=(1, "abc"), two=(2, "abc"), three=(3, "def"))}

    assert left_by(shelves, limit=50) == ["one", "two"]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.text("abcdefgh", max_size=5)), max_size=8),
    st.integers(1, 120),
    st.integers(0, 60),
)
def test_what_is_left_fits_is_counted_right_and_was_used_no_earlier_than_what_left(sessions, limit, tenant_limit):
    named = {f"{number}": it for number, it in enumerate(sessions)}
    shelves = {"a": shelf(**named)}

    gone = evictions(shelves, limits_of(limit, tenant_limit))

    kept = shelves["a"].sessions
    files = {name for it in kept.values() for name in it.files}
    assert shelves["a"].size_bytes == 10 * len(files)
    assert shelves["a"].size_bytes <= UPPER_MARK * min(limit, tenant_limit or limit) or not kept
    if gone and kept:
        assert max(session.used_at_ms for *_, session in gone) <= min(it.used_at_ms for it in kept.values())
        whole = {name for it in [*kept.values(), gone[-1][2]] for name in it.files}
        assert 10 * len(whole) > LOWER_MARK * min(limit, tenant_limit or limit)


@pytest.fixture
def kv_settings() -> dict[str, object]:
    return {"store_interval_s": 1}


def stored_bytes(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in (tmp_path / "store" / TENANT / "blocks").iterdir() if path.is_file())


def age(tmp_path: Path, session: str, by_s: float) -> None:
    """Let a session's objects have been written earlier."""
    for path in (tmp_path / "store" / TENANT / "sessions" / session).iterdir():
        for aged in (path, tmp_path / "store" / TENANT / "manifests" / path.name):
            os.utime(aged, times=(time.time() - by_s,) * 2)


async def three_contexts(kv: SidecarUnderTest, tmp_path: Path) -> list[str]:
    """Save three that share nothing, the first one written first; return their refs."""
    saved = [await kv.save(tuple(range(n, n + 10)), session_id=f"ctx_{n}") for n in (0, 100, 200)]
    await written(kv)
    for number, by_s in ((0, 3000), (100, 2000), (200, 1000)):
        age(tmp_path, f"ctx_{number}", by_s)
    return [new.cache_ref for new in saved]


@pytest.mark.parametrize("limit", ["store_limit_bytes", "store_tenant_limit_bytes"])
async def test_what_was_used_longest_ago_leaves_a_full_store_and_its_pod_still_has_it(pod, tmp_path, limit):
    async with pod("a") as kv:
        await three_contexts(kv, tmp_path)
        size_bytes = stored_bytes(tmp_path)
    async with pod("a", **{limit: size_bytes}) as kv:
        await kv.collect_shared(s=10)
        assert sessions(tmp_path) == {"ctx_100", "ctx_200"}
        assert kv.counted("store_evicted_contexts_total") == 1
        assert kv.counted("store_tenant_bytes", tenant=TENANT) == stored_bytes(tmp_path) < size_bytes
        assert len(kv.manifest_files()) == 3


async def test_every_pod_shows_what_the_one_that_collected_has_counted(pod, tmp_path):
    async with pod("a") as kv:
        await kv.share(tuple(range(10)))
        await kv.sidecar.collect_shared()
    async with pod("b", store_interval_s=10_000) as kv:
        await kv.sidecar.collect_shared()
        assert kv.counted("store_tenant_bytes", tenant=TENANT) == stored_bytes(tmp_path) > 0


@pytest.mark.parametrize("use", ["loaded where it is", "fetched elsewhere"])
async def test_what_is_used_is_noted_and_stays(pod, tmp_path, use):
    async with pod("a") as kv:
        refs = await three_contexts(kv, tmp_path)
        size_bytes = stored_bytes(tmp_path)
        if use == "loaded where it is":
            await kv.sidecar.resolver.manifest(TENANT, refs[0])
            await written(kv)
    async with pod("b", store_limit_bytes=size_bytes) as kv:
        if use == "fetched elsewhere":
            await brought(kv, refs[0])
            await written(kv)
        await kv.collect_shared(s=10)
    assert sessions(tmp_path) == {"ctx_0", "ctx_200"}


async def test_a_context_that_left_is_written_whole_again_with_its_next_turn(pod, tmp_path):
    async with pod("a") as kv:
        await three_contexts(kv, tmp_path)
        async with pod("b", store_limit_bytes=stored_bytes(tmp_path)) as other:
            await other.collect_shared(s=10)
        assert sessions(tmp_path) == {"ctx_100", "ctx_200"}
        new = await kv.share(tuple(range(12)), session_id="ctx_0")
    async with pod("c") as kv:
        assert await kv.fetch(new) == ["object"] * 3


async def test_what_a_crash_left_of_a_context_that_was_leaving_is_collected(pod, clock, tmp_path, monkeypatch):
    kill_at(AFTER_EVICTED_MANIFEST, monkeypatch, stored_kv)
    async with pod("a") as kv:
        await three_contexts(kv, tmp_path)
        size_bytes = stored_bytes(tmp_path)
    async with pod("b", store_limit_bytes=size_bytes) as kv:
        clock.advance(s=10)
        with pytest.raises(Killed):
            await kv.sidecar.collect_shared()
        assert stored_bytes(tmp_path) == size_bytes
    monkeypatch.undo()
    async with pod("c", store_grace_s=60, orphan_after_s=10 * HOUR_S) as kv:
        for _ in range(2):
            await kv.collect_shared(s=120)
    assert sessions(tmp_path) == {"ctx_100", "ctx_200"}
    assert stored_bytes(tmp_path) < size_bytes


async def test_the_collector_forgets_manifests_of_a_tenant_that_has_left_the_store(pod):
    """Seen failing: it remembered them for the life of the process."""
    async with pod("a") as kv:
        new = await kv.share(tuple(range(10)), tenant="gone")
        await kv.collect_shared(s=10)
        collector = kv.sidecar._shared_collector
        assert len(collector._seen) == 1
        await kv.sidecar.delete("gone", new.session_id, [])
        await kv.collect_shared(s=10)
        assert not collector._seen


async def test_a_tenant_may_be_named_like_the_collectors_object(pod):
    """Seen failing: in a mounted directory one of both was in the place of the other, and nothing was collected."""
    async with pod("a") as kv:
        new = await kv.share(tuple(range(10)), tenant=COLLECTOR.lstrip("."))
        await kv.collect_shared(s=10)
        assert kv.sidecar._shared_collector.bytes_by_tenant.keys() == {new.tenant}
