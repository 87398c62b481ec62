"""Replicas of both releases at the same time: managers over one store, sidecars that pull from each other."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import pytest

from context_manager.client import ContextManagerClient
from contextcache.errors import ContextBusy, ContextNotFound, SidecarUnavailable
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit
from contextcache.names import new_cache_ref, new_session_id
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import KVSidecarClient
from tests.kit.engine_rank import EngineRank
from tests.kit.kv_blocks import TENANT
from tests.kit.ports import free_port
from tests.kit.valkey import ValkeyServer
from tests.upgrade.release_before import ReleaseBefore
from tests.upgrade.snapshot import newest_snapshot

pytestmark = pytest.mark.skipif(newest_snapshot() is None, reason="no release has been tagged yet")

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60
LEASE_MS = 60_000
PROMPT = tuple(range(10))


@dataclass
class Process:
    """One part of one release on loopback."""

    address: str
    popen: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> ReleaseBefore:
    return ReleaseBefore(tmp_path_factory.mktemp("release-before"))


@pytest.fixture
def start(before: ReleaseBefore) -> Iterator[Callable[..., Process]]:
    """Start `python -m module` of either release with an environment; `{port}` in it is a free one."""
    started: list[Process] = []

    def start_one(module: str, environment: dict[str, str], *, old: bool) -> Process:
        port = free_port()
        env = before.environment | {name: value.replace("{port}", str(port)) for name, value in environment.items()}
        cwd = before.directory
        if not old:
            env["PYTHONPATH"] = str(ROOT)
            cwd = ROOT
        process = Process(f"127.0.0.1:{port}", subprocess.Popen([sys.executable, "-m", module], cwd=cwd, env=env))
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.popen.terminate()
        process.popen.wait(DEADLINE_S)


@pytest.fixture
async def managers(tmp_path: Path, start: Callable[..., Process]) -> AsyncIterator[list[ContextManagerClient]]:
    """The old one first."""
    valkey = ValkeyServer(tmp_path)
    valkey.start()
    environment = {"MANAGER_LISTEN": "127.0.0.1:{port}", "MANAGER_REDIS_URL": valkey.url}
    processes = [start("context_manager", environment, old=old) for old in (True, False)]
    clients = [ContextManagerClient(process.address, timeout_s=DEADLINE_S) for process in processes]
    async with asyncio.timeout(DEADLINE_S):
        for client in clients:
            while not await client.is_serving():
                await asyncio.sleep(0.05)
    yield clients
    for client in clients:
        await client.close()
    for process in processes:
        process.popen.terminate()
        process.popen.wait(DEADLINE_S)
    valkey.stop()


@pytest.mark.parametrize("first", [0, 1])
async def test_every_step_of_a_session_may_meet_another_release(
    managers: list[ContextManagerClient], first: int
) -> None:
    """Calls alternate between the releases: what one wrote, the other reads, refuses, extends and removes."""
    manager = cycle([managers[first], managers[1 - first]])
    session_id, lease = new_session_id(), "lease"
    new = NewSession(TENANT, session_id, "m", ttl_s=600, metadata={"a": "b"})
    await next(manager).reserve(new, lease_id=lease, lease_ttl_ms=LEASE_MS)
    prompt = Segment(SegmentKind.PROMPT, (1, 2, 3), text="Grüße")
    commit = TurnCommit(
        TENANT, session_id, lease, 0, keep_segments=0, segments=(prompt,), cache_ref=new_cache_ref(), holder="pod-a"
    )
    await next(manager).register_session_cache(commit)

    for generation in (1, 2, 3):
        found, transcript = await next(manager).begin_turn(TENANT, session_id, lease_id=lease, lease_ttl_ms=LEASE_MS)
        assert (found.generation, len(transcript), transcript[0]) == (generation, generation, prompt)
        with pytest.raises(ContextBusy):
            await next(manager).begin_turn(TENANT, session_id, lease_id="other", lease_ttl_ms=LEASE_MS)
        await next(manager).renew_lease(TENANT, session_id, lease_id=lease, lease_ttl_ms=LEASE_MS)
        answer = Segment(SegmentKind.ANSWER, (7, generation), text="!")
        turn = TurnCommit(
            TENANT,
            session_id,
            lease,
            generation,
            keep_segments=generation,
            segments=(answer,),
            cache_ref=new_cache_ref(),
            holder="pod-b",
        )
        await next(manager).commit_turn(turn)

    found = await next(manager).locate(TENANT, session_id)
    listed = (await next(manager).list_sessions(TENANT, limit=10)).sessions
    assert (found.generation, found.holder, found.metadata) == (4, "pod-b", {"a": "b"})
    assert [session.session_id for session in listed] == [session_id]
    await next(manager).unregister_session_cache(TENANT, session_id)
    for client in managers:
        with pytest.raises(ContextNotFound):
            await client.locate(TENANT, session_id)


@pytest.mark.parametrize("puller_is_old", [True, False])
async def test_a_context_moves_between_sidecars_of_both_releases(
    tmp_path: Path, start: Callable[..., Process], puller_is_old: bool
) -> None:
    here = start("kv_sidecar", sidecar_environment(tmp_path / "here"), old=puller_is_old)
    there = start("kv_sidecar", sidecar_environment(tmp_path / "there"), old=not puller_is_old)
    for process in (here, there):
        await serving(process)
    holder = await asyncio.to_thread(EngineRank, there.address)
    saved = await asyncio.to_thread(holder.save, PROMPT)
    rank = await asyncio.to_thread(EngineRank, here.address)
    client = KVSidecarClient(here.address, timeout_s=DEADLINE_S)
    assert await client.pull_context(TENANT, [saved.cache_ref], peer=there.address) == "started"
    async with asyncio.timeout(DEADLINE_S):
        while (await client.stats()).num_pulls:
            await asyncio.sleep(0.02)

    assert await asyncio.to_thread(rank.load, saved) == {pb.TIER_PEER}
    await client.close()
    holder.close()
    rank.close()


async def test_a_data_directory_goes_from_release_to_release_and_back(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    """Seen failing: with the checksums in `__metadata__` the release before puts every newer manifest aside."""
    environment = sidecar_environment(tmp_path / "one")
    saved = []
    for turn, old in enumerate((True, False, True, False)):
        process = start("kv_sidecar", environment, old=old)
        await serving(process)
        rank = await asyncio.to_thread(EngineRank, process.address)
        client = KVSidecarClient(process.address, timeout_s=DEADLINE_S)
        for new in saved:
            assert await asyncio.to_thread(rank.load, new), f"{new.session_id} in turn {turn}"
        saved.append(await asyncio.to_thread(rank.save, (*PROMPT, turn), session_id=f"ctx_{turn}"))
        # A touch rewrites the manifests, whoever wrote them before.
        until_ms = saved[0].expires_at_ms + 1000 * (turn + 1)
        assert await client.touch_context(TENANT, saved[0].session_id, until_ms) == 1
        assert (await client.stats()).num_contexts == len(saved)
        await client.close()
        rank.close()
        process.popen.terminate()
        process.popen.wait(DEADLINE_S)


def test_the_archive_is_what_runs(before: ReleaseBefore) -> None:
    """Else all of this would compare the release with itself."""
    code = "import contextcache, deploy.local, vllm_plugin; print(contextcache.__file__, vllm_plugin.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=before.directory,
        env=before.environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert all(path.startswith(str(before.directory)) for path in result.stdout.split())


def test_the_protocols_break_nothing_of_the_release_before(before: ReleaseBefore) -> None:
    """Seen failing: with a field's number changed."""
    buf = Path(sys.executable).with_name("buf")
    against = str(before.directory / "proto")
    result = subprocess.run(
        [buf, "breaking", "proto", "--against", against],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert result.returncode == 0, result.stdout + result.stderr


def sidecar_environment(directory: Path) -> dict[str, str]:
    directory.mkdir()
    return {
        "SIDECAR_LISTEN": "127.0.0.1:{port}",
        "SIDECAR_UNIX_SOCKET": "",
        # Of the release before; this one knows it no more, and passes it over.
        "SIDECAR_SHARED_DIR": "",
        "SIDECAR_MEMORY_LIMIT_BYTES": str(16 << 20),
        "SIDECAR_DATA_DIR": str(directory / "data"),
        "SIDECAR_BLOCK_TOKENS": "4",
        "SIDECAR_PEERS": '["127.0.0.0/8"]',
        "SIDECAR_PULL_TIMEOUT_S": "60",
        "SIDECAR_PULL_MANIFEST_TIMEOUT_S": "30",
        "SIDECAR_LOG_LEVEL": "WARNING",
    }


async def serving(process: Process) -> None:
    """Return when a sidecar answers."""
    client = KVSidecarClient(process.address, timeout_s=1)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            assert process.popen.poll() is None, "the sidecar ended"
            try:
                await client.stats()
            except SidecarUnavailable:
                await asyncio.sleep(0.05)
                continue
            break
    await client.close()
