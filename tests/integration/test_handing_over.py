"""A pod that ends without a shared store: real sidecars, a real manager over Valkey; what its peer has afterwards."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from context_manager.client import ContextManagerClient
from contextcache.errors import CacheRefNotFound
from contextcache.model import CacheSessionMetadata, NewSession, Segment, SegmentKind, TurnCommit
from contextcache.process.crash_points import VARIABLE
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import KVSidecarClient
from kv_sidecar.crash_points import AFTER_HANDOVER_NOTE, AFTER_HANDOVER_SEAL
from kv_sidecar.saves import NewSave
from tests.integration.test_sidecar_process import SidecarProcess
from tests.kit.engine_rank import EngineRank
from tests.kit.kv_blocks import TENANT
from tests.kit.manager_process import running_manager_process
from tests.kit.ports import free_port
from tests.kit.until import until

PROMPTS = [tuple(range(start, start + 10)) for start in (0, 100, 200, 300)]


class Pod:
    """A sidecar process that knows its name, its peer and the manager, and one engine rank beside it."""

    def __init__(self, directory: Path, number: int, *, ports: tuple[int, ...], manager: str, **more: str) -> None:
        directory.mkdir()
        self.name = f"engine-{number}"
        self.address = f"127.0.0.1:{ports[number]}"
        self.sidecar = SidecarProcess(directory)
        self.crash_file = directory / "crash"
        self.environment = {
            "SIDECAR_LISTEN": self.address,
            "SIDECAR_ENDPOINT_NAME": self.name,
            "SIDECAR_PEERS": f'["127.0.0.1:{ports[1 - number]}"]',
            "SIDECAR_MANAGER": manager,
            VARIABLE: str(self.crash_file),
            **more,
        }
        self.sidecar.start(**self.environment)
        self.rank = EngineRank(self.sidecar.address)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.rank.close()
        return self.sidecar.end(number)

    def close(self) -> None:
        if self.sidecar.process is not None:
            self.end(signal.SIGKILL)


class World:
    """Two or more pods and a manager."""

    def __init__(self, directory: Path, manager: str, stack: ExitStack, *, num_pods: int = 2) -> None:
        self._directory, self._manager, self._stack = directory, manager, stack
        self._ports = tuple(free_port() for _ in range(num_pods))
        self.sessions = ContextManagerClient(manager)

    async def pod(self, number: int, **more: str) -> Pod:
        settings = {"ports": self._ports, "manager": self._manager}
        pod = await asyncio.to_thread(Pod, self._directory / f"{number}", number, **settings, **more)
        self._stack.callback(pod.close)
        return pod

    async def create(self, pod: Pod, number: int) -> NewSave:
        """Save a context in a pod, and commit it there."""
        new = await asyncio.to_thread(pod.rank.save, PROMPTS[number], session_id=f"ctx_{number}")
        await self.sessions.reserve(NewSession(TENANT, new.session_id, "toy"), lease_id="l", lease_ttl_ms=60_000)
        said = Segment(SegmentKind.PROMPT, PROMPTS[number], text="x")
        commit = TurnCommit(TENANT, new.session_id, "l", 0, 0, (said,), new.cache_ref, pod.name)
        await self.sessions.register_session_cache(commit)
        return new

    async def row(self, new: NewSave) -> CacheSessionMetadata:
        return await self.sessions.locate(TENANT, new.session_id)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
async def world(tmp_path: Path, valkey, stack: ExitStack) -> AsyncIterator[World]:
    async with running_manager_process(tmp_path, valkey.url) as manager:
        world = World(tmp_path, manager.address, stack)
        yield world
        await world.sessions.close()


async def test_a_pod_that_ends_leaves_its_hottest_contexts_to_its_peer_and_the_manager_knows(world: World) -> None:
    there = await world.pod(1)
    # Two of three fit.
    ends = await world.pod(0, SIDECAR_BOUNDS='{"handover_bytes_max": 5000}')
    first, second, third = [await world.create(ends, number) for number in range(3)]
    await asyncio.to_thread(ends.rank.load, first)
    size_bytes = sum(path.stat().st_size for path in (ends.sidecar.root / "data").rglob("*.r0.safetensors")) // 3
    assert 2 * size_bytes <= 5000 < 3 * size_bytes

    assert await asyncio.to_thread(ends.end) == 0

    for new in (first, third):
        assert (await world.row(new)).holder == there.name
        assert (await world.row(new)).holders == (ends.name, there.name)
        assert await asyncio.to_thread(there.rank.load, new) == {pb.TIER_PEER}
    assert (await world.row(second)).holder == ends.name
    with pytest.raises(CacheRefNotFound):
        await asyncio.to_thread(there.rank.load, second)


@pytest.mark.thorough
@pytest.mark.parametrize("point", [AFTER_HANDOVER_NOTE, AFTER_HANDOVER_SEAL])
async def test_a_pod_killed_while_it_hands_over_leaves_a_session_that_goes_on_and_is_deleted_whole(
    world: World, point: str
) -> None:
    there, ends = await world.pod(1), await world.pod(0)
    new = await world.create(ends, 0)
    ends.crash_file.write_text(point)
    assert await asyncio.to_thread(ends.end) == -signal.SIGKILL
    row = await world.row(new)

    # Where it was is where it is; who may have some is known.
    assert (row.holder, row.holders, row.generation) == (ends.name, (ends.name, there.name), 1)
    if point == AFTER_HANDOVER_SEAL:
        assert await asyncio.to_thread(there.rank.load, new) == {pb.TIER_PEER}
    else:
        with pytest.raises(CacheRefNotFound):
            await asyncio.to_thread(there.rank.load, new)
    client = KVSidecarClient(there.address)
    await client.delete_context(TENANT, session_id=new.session_id, cache_refs=[new.cache_ref])
    await client.close()
    assert not list((there.sidecar.root / "data").rglob("*.safetensors"))


@pytest.mark.thorough
async def test_a_peer_killed_while_it_takes_a_context_leaves_the_session_where_it_was(world: World) -> None:
    there, ends = await world.pod(1), await world.pod(0, SIDECAR_HANDOVER_S="10")
    new = await world.create(ends, 0)
    there.crash_file.write_text("sidecar.pull.between-blocks")
    assert await asyncio.to_thread(ends.end) == 0

    assert (await world.row(new)).holder == ends.name
    await asyncio.to_thread(there.sidecar.process.wait, 60)
    there.rank.close()
    await asyncio.to_thread(lambda: there.sidecar.start(**there.environment))
    there.rank = EngineRank(there.sidecar.address)
    with pytest.raises(CacheRefNotFound):
        await asyncio.to_thread(there.rank.load, new)


@pytest.mark.thorough
@pytest.mark.parametrize("missing", ["the peer", "the manager"])
async def test_a_pod_ends_in_time_when_nobody_can_take_anything_over(world: World, valkey, missing: str) -> None:
    ends = await world.pod(0, SIDECAR_HANDOVER_S="2")
    new = await world.create(ends, 0)
    if missing == "the manager":
        await world.pod(1)
        valkey.stop()
    began_s = time.monotonic()
    assert await asyncio.to_thread(ends.end) == 0

    print(f"ended after {time.monotonic() - began_s:.1f} s")
    assert "sidecar draining" in ends.sidecar.events()
    await asyncio.to_thread(lambda: ends.sidecar.start(**ends.environment))
    ends.rank = EngineRank(ends.sidecar.address)
    assert await asyncio.to_thread(ends.rank.load, new) == {pb.TIER_DISK}


@pytest.mark.thorough
async def test_two_pods_that_end_together_give_each_other_nothing_and_end(world: World) -> None:
    pods = [await world.pod(1), await world.pod(0)]
    new = await world.create(pods[1], 0)
    for pod in pods:
        assert pod.sidecar.process is not None
        pod.sidecar.process.send_signal(signal.SIGTERM)

    async def running() -> int:
        return sum(pod.sidecar.process.poll() is None for pod in pods if pod.sidecar.process)

    await until(running, is_so=lambda number: not number, what="both have ended")
    assert (await world.row(new)).holder in {pod.name for pod in pods}
