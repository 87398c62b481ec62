"""A pod that starts beside a shared store: real sidecars, a real manager over Valkey; what it took over unasked."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.store.hot_lists import DIRECTORY
from tests.integration.test_handing_over import World
from tests.kit.kv_blocks import TENANT
from tests.kit.manager_process import running_manager_process
from tests.kit.until import until


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
async def world(tmp_path: Path, valkey, stack: ExitStack) -> AsyncIterator[World]:
    async with running_manager_process(tmp_path, valkey.url) as manager:
        world = World(tmp_path, manager.address, stack, num_pods=3)
        yield world
        await world.sessions.close()


@pytest.mark.thorough
@pytest.mark.parametrize("end", [pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), signal.SIGKILL])
async def test_a_pod_that_starts_takes_over_the_hottest_contexts_of_one_that_is_gone(
    world: World, tmp_path: Path, end: signal.Signals
) -> None:
    """Seen to fail with no pod taken for gone, and with every other pod taken for it."""
    store = tmp_path / "store"
    settings = {"SIDECAR_STORE_URL": f"file://{store}", "SIDECAR_COLLECT_INTERVAL_S": "2"}
    # Its disk is more than half full with what it has: it takes nothing over itself.
    stays = await world.pod(2, SIDECAR_DISK_LIMIT_BYTES="3000", **settings)
    untouched = await world.create(stays, 3)
    ends = await world.pod(0, **settings)
    first, second, third = [await world.create(ends, number) for number in range(3)]
    await asyncio.to_thread(ends.rank.load, first)

    async def is_written() -> bool:
        lists = [json.loads(path.read_text()) for path in (store / DIRECTORY).rglob("*.living")]
        hottest = [[TENANT, new.session_id] for new in (first, third, second)]
        is_listed = {"endpoint": ends.name, "contexts": hottest} in lists
        return is_listed and len(list((store / TENANT / "manifests").iterdir())) == 4

    await until(is_written, what="the store has all, and the list")
    assert await asyncio.to_thread(ends.end, end) == (0 if end is signal.SIGTERM else -signal.SIGKILL)
    if end is signal.SIGKILL:
        for path in (store / DIRECTORY).rglob("*.living"):
            if ends.name in path.read_text():
                # As it will be in a while.
                os.utime(path, (time.time() - 60,) * 2)

    starts = await world.pod(1, SIDECAR_WARM_CONTEXTS_MAX="2", **settings)

    async def holders() -> list[str]:
        return [(await world.row(new)).holder for new in (first, second, third, untouched)]

    taken_over = [starts.name, ends.name, starts.name, stays.name]
    await until(holders, is_so=lambda found: found == taken_over, what="the two hottest are the new pod's")
    assert (await world.row(first)).holders == (ends.name, starts.name)
    assert (await world.row(second)).holders == (ends.name,)
    assert len(list((starts.sidecar.root / "data" / "manifests").rglob("*.safetensors"))) == 2
    for new in (first, third):
        assert await asyncio.to_thread(starts.rank.load, new) == {pb.TIER_OBJECT}
    assert await asyncio.to_thread(stays.rank.load, untouched) == {pb.TIER_HOST}
