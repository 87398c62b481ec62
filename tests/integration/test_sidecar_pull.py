"""Two sidecars over real gRPC: one pulls from the other, which hangs, lies, is killed, or does as it should."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from typing_extensions import override

from contextcache.clock import SystemClock
from contextcache.errors import CacheRefNotFound, CacheRefPending
from contextcache.model import Manifest
from contextcache.names import new_cache_ref
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.v1 import kv_sidecar_pb2_grpc as pb_grpc
from contextcache.wire.messages import message_of
from kv_sidecar.client import KVSidecarClient
from kv_sidecar.format.manifest import block_meta
from kv_sidecar.server import serve
from tests.integration.test_sidecar_process import SidecarProcess
from tests.kit.engine_rank import EngineRank
from tests.kit.kv_blocks import (
    FINGERPRINT,
    TENANT,
    SidecarUnderTest,
    block_file_bytes,
    new_save,
)
from tests.kit.ports import free_port
from tests.kit.until import until

PROMPT = tuple(range(10))
LARGE_PAGE_BYTES = 1 << 20
"""Block files of 4 MiB: more than lies in gRPC's buffers while nobody reads."""


class Node:
    """A sidecar of this process that listens on TCP."""

    def __init__(self, kv: SidecarUnderTest, port: int) -> None:
        self.kv = kv
        self.address = f"127.0.0.1:{port}"
        self.client = KVSidecarClient(self.address, timeout_s=60)

    async def pull(self, *cache_refs: str, peer: str) -> pb.PullContextResponse:
        answer: pb.PullContextResponse = await self.client._call(
            "PullContext", tenant=TENANT, cache_refs=cache_refs, peer=peer
        )
        return answer

    async def settled(self) -> None:
        """Return when no pull is going on, as the sidecar itself tells it."""
        await until(self.client.stats, is_so=lambda stats: not stats.num_pulls, what="no pull is going on")

    def pulls(self, outcome: str) -> float:
        return self.kv.counted("pulls_total", outcome=outcome)


@pytest.fixture
async def start_node(tmp_path: Path) -> AsyncIterator[Callable[..., object]]:
    started = []

    async def start(name: str, *, world_size: int = 1, **settings: object) -> Node:
        # The peer is this process too, which may stand still for longer than a turn would wait.
        defaults = {"peers": ("127.0.0.0/8",), "manifest_timeout_s": 20, "pull_timeout_s": 30}
        kv = SidecarUnderTest(tmp_path / name, clock=SystemClock(), **{**defaults, **settings})
        await kv.sidecar.open()
        server = serve(kv.sidecar, ["127.0.0.1:0"])
        await server.start()
        node = Node(kv, server.ports[0])
        for rank in range(world_size):
            kv.sidecar.engine.introduce(rank, world_size, FINGERPRINT, "")
        started.append((node, server))
        return node

    yield start
    for node, server in started:
        await node.client.close()
        await node.kv.sidecar.pulls.close()
        await server.stop(1)
        await node.kv.sidecar.close()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[SidecarProcess]:
    (tmp_path / "peer").mkdir()
    process = SidecarProcess(tmp_path / "peer")
    yield process
    if process.process is not None:
        process.process.send_signal(signal.SIGCONT)
        process.end(signal.SIGKILL)


async def test_a_pulled_context_is_equal_and_names_the_peer_once(start_node) -> None:
    there, here = await start_node("there"), await start_node("here")
    new = await there.kv.save(PROMPT)
    rank = await asyncio.to_thread(EngineRank, here.address)
    answer = await here.pull(new.cache_ref, peer=there.address)
    await here.settled()

    assert answer.outcome == pb.PULL_OUTCOME_STARTED
    assert (await here.client.get_manifest(TENANT, new.cache_ref))[1] == "peer"
    assert await asyncio.to_thread(rank.load, new) == {pb.TIER_PEER}
    assert await asyncio.to_thread(rank.load, new) == {pb.TIER_HOST}
    assert {key: here.kv.path_of(key).read_bytes() for key in here.kv.block_files()} == {
        key: there.kv.path_of(key).read_bytes() for key in there.kv.block_files()
    }
    assert (await here.client.stats()).fingerprints == [FINGERPRINT]
    rank.close()


async def test_more_ranks_than_files_have_room_in_memory_come_side_by_side(start_node, monkeypatch) -> None:
    monkeypatch.setattr("kv_sidecar.sidecar.STREAMS_MAX", 1)
    there = await start_node("there", world_size=4, slots=False)
    here = await start_node("here", world_size=4)
    first = new_save(PROMPT, now_ms=SystemClock().now_ms(), world_size=4)
    ranks = [replace(first, rank=rank) for rank in range(4)]
    for new in ranks:
        await there.kv.catalog.prepare_save(new)
        for index in range(3):
            data = block_file_bytes(block_meta(there.kv.plan(new), index, new.rank), page_bytes=LARGE_PAGE_BYTES)
            await there.kv.catalog.take_block(new.cache_ref, new.rank, index, data)
        await there.kv.catalog.seal(new.cache_ref, new.rank)
    await here.pull(first.cache_ref, peer=there.address)
    await here.settled()

    assert here.pulls("pulled") == 1
    for new in ranks:
        assert await here.kv.load(new, in_slots=False) == ["peer"] * 3


async def test_a_peer_that_hangs_ends_the_pull_and_lookups_go_on(start_node, process: SidecarProcess) -> None:
    here = await start_node("here", manifest_timeout_s=1)
    address = await stopped_peer(process)
    own, ref = await here.kv.save(PROMPT), new_cache_ref()
    await here.pull(ref, peer=address)

    assert (await here.client.get_manifest(TENANT, own.cache_ref))[0].token_ids == PROMPT
    await here.settled()
    with pytest.raises(CacheRefNotFound) as missing:
        await here.client.get_manifest(TENANT, ref)
    assert not isinstance(missing.value, CacheRefPending)
    assert here.pulls("sidecar_unavailable") == 1


@pytest.mark.parametrize(
    ("ending", "timeout_s"),
    [
        pytest.param(signal.SIGKILL, 60, id="killed"),
        # Takes until a ping of its connection is given up, or the deadline.
        pytest.param(signal.SIGSTOP, 20, id="stopped", marks=pytest.mark.thorough),
    ],
)
async def test_a_peer_lost_in_the_middle_of_a_pull_leaves_nothing(
    start_node, process: SidecarProcess, ending: signal.Signals, timeout_s: int
) -> None:
    gate, arrived = threading.Event(), threading.Event()

    def step(name: str) -> None:
        if name.startswith("write ") and not gate.is_set():
            arrived.set()
            assert gate.wait(60)

    here = await start_node("here", step=step, slots=False, pull_timeout_s=timeout_s)
    address, new = await large_peer(process, num_blocks=25)
    await here.pull(new.cache_ref, peer=address)
    assert await asyncio.to_thread(arrived.wait, 60)
    process.process.send_signal(ending)
    gate.set()
    await here.settled()

    assert here.pulls("sidecar_unavailable") + here.pulls("deadline") == 1
    assert here.kv.block_files() == set()
    assert here.kv.manifest_files() == set()
    with pytest.raises(CacheRefNotFound) as missing:
        await here.client.get_manifest(TENANT, new.cache_ref)
    assert not isinstance(missing.value, CacheRefPending)


async def test_a_peer_that_is_not_there_ends_the_pull_at_once(start_node) -> None:
    here = await start_node("here")
    await here.pull(new_cache_ref(), peer=f"127.0.0.1:{free_port()}")
    await here.settled()

    assert here.pulls("sidecar_unavailable") == 1


async def test_a_block_that_is_wrong_at_the_peer_is_quarantined_there_and_refused_here(start_node) -> None:
    there, here = await start_node("there", memory_limit_bytes=0), await start_node("here")
    new = await there.kv.save(PROMPT)
    path = there.kv.path_of(max(there.kv.block_files(), key=lambda key: key.kind))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    await here.pull(new.cache_ref, peer=there.address)
    await here.settled()

    assert here.pulls("corrupt_block") == 1
    assert here.kv.block_files() == set()
    assert there.kv.sidecar.directory.num_quarantined == 1


async def test_each_refusal_says_why(start_node) -> None:
    ref, elsewhere = new_cache_ref(), "10.255.255.1:50061"
    answers = {
        "peer_not_allowed": await (await start_node("a", peers=())).pull(ref, peer=elsewhere),
        "no_engine": await (await start_node("b", peers=("*",), world_size=0)).pull(ref, peer=elsewhere),
    }
    full = await start_node("c", peers=("*",), max_pulls=1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        await full.pull(ref, peer=f"127.0.0.1:{silent.getsockname()[1]}")
        answers["too_many_pulls"] = await full.pull(new_cache_ref(), peer=elsewhere)
    draining = await start_node("d")
    await draining.kv.sidecar.pulls.close()
    answers["draining"] = await draining.pull(ref, peer=elsewhere)

    for reason, answer in answers.items():
        assert (answer.outcome, answer.reason) == (pb.PULL_OUTCOME_REFUSED, reason)


async def test_a_pull_of_what_is_here_is_answered_as_present(start_node) -> None:
    here = await start_node("here")
    new = await here.kv.save(PROMPT)

    assert await here.client.pull_context(TENANT, [new.cache_ref, new_cache_ref()], peer="127.0.0.1:1") == "present"


@pytest.mark.parametrize(
    "lie",
    [
        "another_position",
        "too_much",
        "too_little",
        "unasked",
        "in_between",
        "unknown_kind",
        "runs_behind_the_end",
        "blocks_of_no_token",
    ],
)
async def test_a_peer_that_does_not_keep_to_the_protocol_is_not_believed(start_node, monkeypatch, lie: str) -> None:
    there = await start_node("there")
    monkeypatch.setattr("kv_sidecar.moving.peer.BLOCK_BYTES_MAX", 4096)
    here = await start_node("here")
    new = await there.kv.save(PROMPT)
    manifest = await there.kv.catalog.open(TENANT, new.cache_ref)
    server = grpc.aio.server()
    pb_grpc.add_KVSidecarServiceServicer_to_server(Liar(manifest, lie), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await here.pull(new.cache_ref, peer=f"127.0.0.1:{port}")
    await here.settled()
    await server.stop(0)

    assert here.pulls("corrupt_block") == 1
    assert here.kv.block_files() == set()


@pytest.mark.thorough
async def test_a_hundred_megabytes_are_pulled_in_bounded_memory(tmp_path: Path, process: SidecarProcess) -> None:
    address, new = await large_peer(process, num_blocks=25)
    (tmp_path / "here").mkdir()
    here = SidecarProcess(tmp_path / "here")
    listen = f"127.0.0.1:{free_port()}"
    try:
        here.start(
            SIDECAR_LISTEN=listen,
            SIDECAR_PEERS='["127.0.0.1"]',
            SIDECAR_SHARED_DIR="",
            SIDECAR_MEMORY_LIMIT_BYTES="0",
            SIDECAR_BOUNDS='{"pull_timeout_s": 60, "manifest_timeout_s": 20}',
        )
        client = KVSidecarClient(listen, timeout_s=30)
        rank = await asyncio.to_thread(EngineRank, listen)
        before_kb = peak_kb(here)
        assert await client.pull_context(TENANT, [new.cache_ref], peer=address) == "started"
        stats = await until(
            client.stats, is_so=lambda stats: not stats.num_pulls, what="no pull is going on", deadline_s=90
        )
        rank.close()
        await client.close()
        grown_kb = peak_kb(here) - before_kb
    finally:
        here.end(signal.SIGKILL)

    assert sum(tier.size_bytes for tier in stats.tiers) > 100e6
    assert grown_kb < 60_000


class Liar(pb_grpc.KVSidecarServiceServicer):
    """A peer that sends what it should not."""

    def __init__(self, manifest: Manifest, lie: str) -> None:
        self._manifest = manifest
        self._lie = lie

    @override
    async def GetManifest(self, request, context):
        manifest = message_of(pb.Manifest, self._manifest)
        if self._lie == "unknown_kind":
            manifest.groups[0].kind = "unheard_of"
        elif self._lie == "runs_behind_the_end":
            manifest.groups[0].runs[0].end_token += 1
        elif self._lie == "blocks_of_no_token":
            manifest.groups[0].block_tokens = 0
        return pb.GetManifestResponse(manifest=manifest)

    @override
    async def LoadBlocks(self, request, context):
        files = {i: block_file_bytes(block_meta(self._manifest, i, 0)) for i in request.block_indices}
        whole = {i: pb.LoadBlocksResponse(block_index=i, frame=data, last_frame=True) for i, data in files.items()}
        part = pb.LoadBlocksResponse(block_index=0, frame=files[0][:100])
        answers = {
            "another_position": [whole[1]],
            "too_much": [part] * 50,
            "too_little": [whole[0], whole[1]],
            "unasked": [whole[0], whole[1], whole[2], whole[2]],
            "in_between": [part, whole[1]],
        }
        for answer in answers[self._lie]:
            yield answer


async def stopped_peer(process: SidecarProcess) -> str:
    """Start a sidecar that accepts connections and then says nothing."""
    address = f"127.0.0.1:{free_port()}"
    await asyncio.to_thread(process.start, SIDECAR_LISTEN=address)
    process.process.send_signal(signal.SIGSTOP)
    return address


async def large_peer(process: SidecarProcess, *, num_blocks: int):
    """Start a sidecar with one context of `num_blocks` files of 4 MiB; return its address and the context."""
    address = f"127.0.0.1:{free_port()}"
    await asyncio.to_thread(process.start, SIDECAR_LISTEN=address)

    def save():
        rank = EngineRank(process.address, page_bytes=LARGE_PAGE_BYTES)
        new = rank.save(tuple(range(4 * num_blocks)))
        rank.close()
        return new

    return address, await asyncio.to_thread(save)


def peak_kb(process: SidecarProcess) -> int:
    """The most memory a process has had so far."""
    assert process.process is not None
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
