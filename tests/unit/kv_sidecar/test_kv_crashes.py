"""The process dies between any two steps on disk; a new one starts over the same directory.

Whatever the moment: no manifest points to a block that is not there, a context that was durable before is served, and
one collector pass leaves exactly the bytes that live manifests reach.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from contextcache.clock import ManualClock
from contextcache.errors import CacheRefNotFound
from contextcache.names import new_cache_ref
from kv_sidecar.format.manifest import all_keys
from kv_sidecar.saves import NewSave
from tests.kit.kv_blocks import TENANT, TTL_MS, SidecarUnderTest, new_save

KEPT = tuple(range(10))
OTHER = (*range(8), 90, 91, 92, 93, 94)
"""Shares two whole blocks with KEPT; has one whole block and a tail of its own."""
OTHER_REF = new_cache_ref()


class Died(BaseException):
    """The process is gone: nothing in it runs any more, no cleaning up either."""


class DyingDisk:
    """Lets `num_steps` steps happen; every later one kills."""

    def __init__(self) -> None:
        self.num_steps = 1 << 30
        self.taken: list[str] = []

    def __call__(self, name: str) -> None:
        if len(self.taken) >= self.num_steps:
            raise Died(name)
        self.taken.append(name)


Scenario = Callable[[SidecarUnderTest, ManualClock], Awaitable[None]]


async def save_other(kv: SidecarUnderTest, clock: ManualClock) -> None:
    await kv.save(OTHER, cache_ref=OTHER_REF, session_id="ctx_other")


async def delete_other(kv: SidecarUnderTest, clock: ManualClock) -> None:
    await kv.catalog.delete(TENANT, "ctx_other", [])


async def expire_other(kv: SidecarUnderTest, clock: ManualClock) -> None:
    clock.advance(ms=TTL_MS // 2 + 1)
    await kv.catalog.collect()


async def touch_other(kv: SidecarUnderTest, clock: ManualClock) -> None:
    await kv.catalog.touch(TENANT, "ctx_other", clock.now_ms() + 2 * TTL_MS)


async def save_other_from_two_ranks(kv: SidecarUnderTest, clock: ManualClock) -> None:
    for rank in range(2):
        await kv.sent(OTHER, cache_ref=OTHER_REF, rank=rank, world_size=2)
        await kv.catalog.seal(OTHER_REF, rank)


SCENARIOS: list[tuple[Scenario, bool, int]] = [
    # what runs, whether OTHER is there before, the fewest steps it must have to mean anything
    (save_other, False, 9),
    (delete_other, True, 4),
    (expire_other, True, 4),
    (touch_other, True, 3),
    (save_other_from_two_ranks, False, 15),
]


async def prepare(kv: SidecarUnderTest, clock: ManualClock, *, with_other: bool) -> NewSave:
    """Save OTHER half a life before KEPT, so that it can expire first."""
    if with_other:
        await save_other(kv, clock)
    clock.advance(ms=TTL_MS // 2)
    return await kv.save(KEPT, session_id="ctx_kept")


async def die_after(
    root: Path, num_steps: int, scenario: Scenario, *, with_other: bool
) -> tuple[NewSave, ManualClock, list[str], bool]:
    """Run the scenario until it dies; return the kept context, the clock, the steps taken, whether it came through."""
    clock, disk = ManualClock(), DyingDisk()
    kv = SidecarUnderTest(root, clock=clock, step=disk)
    await kv.sidecar.open()
    kept = await prepare(kv, clock, with_other=with_other)
    disk.taken.clear()
    disk.num_steps = num_steps
    try:
        await scenario(kv, clock)
    except Died:
        survived = False
    else:
        survived = True
    disk.num_steps = 0
    await kv.sidecar.close()
    return kept, clock, disk.taken, survived


async def check_what_is_left(root: Path, kept: NewSave, clock: ManualClock) -> bool:
    """Start anew over the directory; return whether OTHER is served."""
    async with SidecarUnderTest(root, clock=clock) as kv:
        live = {kept.cache_ref: kv.plan(kept)}
        try:
            live[OTHER_REF] = await kv.catalog.open(TENANT, OTHER_REF)
        except CacheRefNotFound:
            pass
        else:
            for rank in range(live[OTHER_REF].world_size):
                other = new_save(OTHER, now_ms=0, cache_ref=OTHER_REF, rank=rank, world_size=live[OTHER_REF].world_size)
                await kv.load(other)
        await kv.load(kept)
        await kv.sidecar.collect()

        assert kv.block_files() == {key for manifest in live.values() for key in all_keys(manifest)}
        assert kv.manifest_files() == set(live)
        assert list(kv.sidecar.directory.tmp.iterdir()) == []
        assert await kv.load(kept)
        return OTHER_REF in live


@pytest.mark.parametrize(("scenario", "with_other", "fewest_steps"), SCENARIOS)
async def test_death_between_any_two_steps_leaves_nothing_that_points_to_nothing(
    tmp_path: Path, scenario: Scenario, with_other: bool, fewest_steps: int
) -> None:
    served = []
    for num_steps in range(60):
        root = tmp_path / str(num_steps)
        kept, clock, taken, survived = await die_after(root, num_steps, scenario, with_other=with_other)
        served.append(await check_what_is_left(root, kept, clock))
        if survived:
            break
        assert len(taken) == num_steps

    assert survived
    assert len(taken) >= fewest_steps
    if scenario in {save_other, save_other_from_two_ranks}:
        assert (served[0], served[-1]) == (False, True)
    if scenario in {delete_other, expire_other}:
        assert served[-1] is False
    if scenario is touch_other:
        assert all(served)


async def test_blocks_are_durable_before_the_manifest_and_it_goes_before_them(tmp_path: Path) -> None:
    _, _, saved, _ = await die_after(tmp_path / "save", 1 << 30, save_other, with_other=False)
    _, _, deleted, _ = await die_after(tmp_path / "delete", 1 << 30, delete_other, with_other=True)
    manifest = f"{OTHER_REF}.safetensors"

    assert [step for step in saved if manifest in step] == saved[-4:]
    assert saved[-5].startswith("published")
    assert deleted[:3] == [f"unlink {manifest}", f"sync-unlink {manifest}", f"unlinked {manifest}"]
    assert not any(manifest in step for step in deleted[3:])


async def test_a_new_context_can_be_saved_after_any_death(tmp_path: Path) -> None:
    _, clock, _, _ = await die_after(tmp_path, 5, save_other, with_other=False)
    async with SidecarUnderTest(tmp_path, clock=clock) as kv:
        await save_other(kv, clock)

        assert await asyncio.wait_for(check(kv), 10)


async def check(kv: SidecarUnderTest) -> bool:
    await kv.load(new_save(OTHER, now_ms=0, cache_ref=OTHER_REF))
    return True
