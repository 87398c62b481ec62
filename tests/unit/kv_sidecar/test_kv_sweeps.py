"""Manifests that go together: removed for good, a directory at a time, and in parts that others come in between."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from contextcache.clock import ManualClock
from contextcache.errors import SidecarUnavailable
from kv_sidecar.retention import Removed
from kv_sidecar.sealed import manifests
from tests.kit.kv_blocks import TENANT, TTL_MS, SidecarUnderTest

TEN = tuple(range(10))
REFS = [f"ref_{'ab' if number % 2 else 'cd'}{number:030x}" for number in range(6)]
"""In two directories, in turn."""


class Disk:
    """A `step` that notes all, fails at `fails`, and stands still at the first step of `stands_at` until it may go."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.fails = self.stands_at = ""
        self.go_on = threading.Event()
        self._standing = threading.Event()

    def __call__(self, step: str) -> None:
        verb = step.partition(" ")[0]
        self.taken.append(step)
        if verb == self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if verb == self.stands_at and not self._standing.is_set():
            self._standing.set()
            assert self.go_on.wait(60)

    async def stands_in(self, steps: Coroutine[Any, Any, Removed]) -> asyncio.Task[Removed]:
        """Begin something, and return when it stands still at its first removal."""
        self.taken.clear()
        self.stands_at = "unlink"
        task = asyncio.create_task(steps)
        assert await asyncio.to_thread(self._standing.wait, 60)
        return task


async def comes_in(steps: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Begin something, and return when it waits."""
    task = asyncio.create_task(steps)
    for _ in range(10):
        await asyncio.sleep(0)
    return task


async def save_each(kv: SidecarUnderTest) -> None:
    for number, ref in enumerate(REFS):
        await kv.save((number, *TEN), cache_ref=ref, session_id=f"ctx_{number}")


async def test_manifests_that_go_together_are_synced_once_a_directory(tmp_path: Path) -> None:
    disk, clock = Disk(), ManualClock()
    async with SidecarUnderTest(tmp_path, step=disk, clock=clock) as kv:
        await save_each(kv)
        clock.advance(ms=TTL_MS)

        assert (await kv.catalog.collect()).num_manifests == len(REFS)
        assert sum(step.startswith("sync-unlink") for step in disk.taken) == 2
        assert kv.manifest_files() == set()
        assert kv.block_files() == set()


async def test_a_removal_that_may_not_be_durable_is_made_again(tmp_path: Path) -> None:
    disk, clock = Disk(), ManualClock()
    async with SidecarUnderTest(tmp_path, step=disk, clock=clock) as kv:
        new = await kv.save(TEN)
        disk.fails = "sync-unlink"
        clock.advance(ms=TTL_MS)
        assert (await kv.catalog.collect()).num_manifests == 0
        with pytest.raises(SidecarUnavailable):
            await kv.catalog.delete(TENANT, new.session_id, [])
        assert len(kv.block_files()) == 3
        disk.fails = ""

        assert (await kv.catalog.collect()).num_manifests == 1
        assert kv.block_files() == set()


async def test_a_seal_waits_for_a_part_of_a_sweep_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing: one seal waited until all were removed."""
    monkeypatch.setattr(manifests, "SWEPT_AT_ONCE", 2)
    disk, clock = Disk(), ManualClock()
    async with SidecarUnderTest(tmp_path, step=disk, clock=clock) as kv:
        await save_each(kv)
        clock.advance(ms=TTL_MS)
        new = await kv.sent(TEN)
        collecting = await disk.stands_in(kv.catalog.collect())
        sealing = await comes_in(kv.catalog.seal(new.cache_ref, 0))
        disk.go_on.set()
        await asyncio.gather(collecting, sealing)

        removed = [disk.taken.index(f"unlink {ref}.safetensors") for ref in REFS]
        sealed = disk.taken.index(f"published {new.cache_ref}.safetensors")
        assert sum(number < sealed for number in removed) == 2


async def test_what_is_touched_in_the_middle_of_a_sweep_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "SWEPT_AT_ONCE", 1)
    disk = Disk()
    async with SidecarUnderTest(tmp_path, step=disk) as kv:
        gone, stays = [await kv.save(TEN, cache_ref=ref, session_id=f"ctx_{ref}") for ref in sorted(REFS)[:2]]
        dropping = await disk.stands_in(kv.catalog.drop([it for it in kv.catalog.manifests if not it.is_kept]))
        touching = await comes_in(kv.catalog.touch(TENANT, stays.session_id, stays.expires_at_ms + 1))
        disk.go_on.set()

        assert (await dropping).num_manifests == await touching == 1
        assert kv.catalog.manifests.get(gone.cache_ref) is None
        assert await kv.load(stays)
