"""The sidecar over real gRPC: engine ranks in threads, gateway and turn middleware in asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contextcache.clock import SystemClock
from contextcache.errors import (
    CacheRefNotFound,
    ContextDeleted,
    CorruptBlock,
    InvalidRequest,
    SaveIncomplete,
    SidecarUnavailable,
)
from contextcache.model import KVGroup, LoadedKV, SaveOutcome, plain_group
from contextcache.names import new_cache_ref
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import EngineSidecarClient, KVSidecarClient
from kv_sidecar.format.ids import pack_token_ids
from kv_sidecar.server import serve
from tests.kit.engine_rank import EngineRank
from tests.kit.kv_blocks import FINGERPRINT, TENANT, SidecarUnderTest, new_save
from tests.kit.until import until

PROMPT = tuple(range(10))
DEADLINE_S = 60


class Running:
    """A sidecar that listens on a Unix socket and on TCP."""

    def __init__(self, kv: SidecarUnderTest, unix: str, tcp: str) -> None:
        self.kv = kv
        self.unix = unix
        self.tcp = tcp
        self.client = KVSidecarClient(tcp, timeout_s=DEADLINE_S)

    async def rank(self, *, over: str = "unix", frames: bool = False) -> EngineRank:
        return await asyncio.to_thread(EngineRank, self.unix if over == "unix" else self.tcp, frames=frames)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    unix = f"unix://{tmp_path}/s.sock"
    async with SidecarUnderTest(tmp_path, clock=SystemClock(), unix_socket=tmp_path / "s.sock") as kv:
        server = serve(kv.sidecar, ["127.0.0.1:0", unix])
        await server.start()
        running = Running(kv, unix, f"127.0.0.1:{server.ports[0]}")
        yield running
        await running.client.close()
        await server.stop(1)


@pytest.mark.parametrize(("over", "frames"), [("unix", False), ("unix", True), ("tcp", True)])
async def test_what_an_engine_saves_it_loads(running: Running, over: str, frames: bool) -> None:
    rank = await running.rank(over=over, frames=frames)
    new = await asyncio.to_thread(rank.save, PROMPT)

    assert (await running.client.wait_sealed(TENANT, new.cache_ref, timeout_ms=0)).is_sealed
    manifest, tier = await running.client.get_manifest(TENANT, new.cache_ref)
    assert (manifest.token_ids, tier) == (PROMPT, "host")
    assert manifest.size_bytes == running.kv.disk_bytes()
    assert await asyncio.to_thread(rank.load, new) == {pb.TIER_HOST}
    rank.close()


@pytest.mark.parametrize("frames", [False, True], ids=["slots", "frames"])
async def test_what_an_engine_with_several_groups_saves_it_loads(running: Running, frames: bool) -> None:
    rank = await running.rank(frames=frames)
    groups = (
        KVGroup("full_attention", 4, ((0, 10),), 0, "a0" * 8),
        KVGroup("sliding_window", 4, ((0, 4), (6, 10)), 4, "b0" * 8),
        KVGroup("state", 4, ((9, 10),), 0, "c0" * 8),
    )
    new = new_save(PROMPT, now_ms=SystemClock().now_ms(), groups=groups)
    await asyncio.to_thread(rank.send, new)
    manifest, _ = await asyncio.to_thread(rank.client.get_manifest, TENANT, new.cache_ref, DEADLINE_S)

    assert manifest == await running.kv.catalog.open(TENANT, new.cache_ref)
    assert len(manifest.files) == 7
    assert await asyncio.to_thread(rank.load, new) == {pb.TIER_HOST}
    rank.close()


@pytest.mark.parametrize("frames", [False, True], ids=["slots", "frames"])
async def test_what_is_not_in_memory_comes_from_disk(running: Running, frames: bool) -> None:
    rank = await running.rank(frames=frames)
    new = await asyncio.to_thread(rank.save, PROMPT)
    for key in running.kv.in_memory():  # no mapping
        running.kv.drop_copy(key)

    assert (await running.client.get_manifest(TENANT, new.cache_ref))[1] == "disk"
    assert await asyncio.to_thread(rank.load, new) == {pb.TIER_DISK}
    assert await asyncio.to_thread(rank.load, new) == {pb.TIER_HOST}
    rank.close()


async def test_a_waiter_learns_of_the_seal_as_it_comes(running: Running) -> None:
    rank = await running.rank()
    new = new_save(PROMPT, now_ms=SystemClock().now_ms())
    waiting = asyncio.create_task(running.client.wait_sealed(TENANT, new.cache_ref, timeout_ms=30_000))
    await asyncio.to_thread(rank.prepare, new)
    await asyncio.to_thread(rank.client.save_blocks, rank.requests(new, [0, 1, 2]), DEADLINE_S)
    await asyncio.to_thread(rank.client.seal, new.cache_ref, 0, DEADLINE_S)

    assert (await waiting).is_sealed
    assert not (await running.client.wait_sealed(TENANT, new_cache_ref(), timeout_ms=1)).is_sealed
    rank.close()


async def test_a_waiter_learns_at_once_that_nothing_was_saved_and_why(running: Running) -> None:
    rank, ref = await running.rank(), new_cache_ref()
    waiting = asyncio.create_task(running.client.wait_sealed(TENANT, ref, timeout_ms=30_000))
    await asyncio.to_thread(rank.client.abandon_save, TENANT, ref, "arena_full", started_at_ms=7)

    async with asyncio.timeout(25):  # less than it would wait
        assert await waiting == SaveOutcome(is_sealed=False, reason="arena_full")
    assert (await running.client.wait_sealed("other", ref, timeout_ms=0)).reason == ""
    with pytest.raises(InvalidRequest):
        await asyncio.to_thread(rank.client.abandon_save, TENANT, ref, "A sentence.", started_at_ms=7)
    rank.close()


async def test_delete_frees_every_byte_and_says_how_many(running: Running) -> None:
    rank = await running.rank()
    new = await asyncio.to_thread(rank.save, PROMPT)
    held_bytes = running.kv.disk_bytes()

    assert await running.client.delete_context("other", session_id=new.session_id) == 0
    assert await running.client.delete_context(TENANT, session_id=new.session_id) == held_bytes > 0
    assert running.kv.disk_bytes() == 0
    with pytest.raises(CacheRefNotFound):
        await asyncio.to_thread(rank.load, new)
    with pytest.raises(ContextDeleted):
        await asyncio.to_thread(rank.prepare, new)
    rank.close()


async def test_errors_arrive_as_the_class_they_left_as(running: Running) -> None:
    rank = await running.rank()
    new = new_save(PROMPT, now_ms=SystemClock().now_ms())
    manifest_of = asyncio.to_thread(rank.client.get_manifest, TENANT, new.cache_ref, DEADLINE_S)

    with pytest.raises(CacheRefNotFound, match="no KV under this cache_ref"):
        await manifest_of
    with pytest.raises(SaveIncomplete):
        await asyncio.to_thread(rank.client.seal, new.cache_ref, 0, DEADLINE_S)
    with pytest.raises(InvalidRequest, match="rank must be below world_size"):
        await asyncio.to_thread(rank.client.handshake, FINGERPRINT, "", 1, 1)
    with pytest.raises(InvalidRequest, match="blocks are too small"):
        await asyncio.to_thread(rank.prepare, replace(new, groups=(plain_group(len(PROMPT), 3),)))
    with pytest.raises(InvalidRequest):
        await asyncio.to_thread(rank.client.handshake, FINGERPRINT, "{}", 0, 1)
    with pytest.raises(CacheRefNotFound):
        await running.client.get_manifest(TENANT, new.cache_ref)
    rank.close()


@pytest.mark.parametrize(
    "payload",
    [{"slots": [pb.SavedSlot(slot_id=1)]}, {"slots": [pb.SavedSlot(slot_id=1)] * 65}, {}],
    ids=["never lent", "too many", "no payload"],
)
async def test_a_file_that_lies_nowhere_is_refused(running: Running, payload: dict[str, Any]) -> None:
    rank = await running.rank()
    new = new_save(PROMPT, now_ms=SystemClock().now_ms())
    await asyncio.to_thread(rank.prepare, new)
    request = pb.SaveBlocksRequest(cache_ref=new.cache_ref, last_frame=True, **payload)

    with pytest.raises((InvalidRequest, CorruptBlock)):
        await asyncio.to_thread(rank.client.save_blocks, iter([request]), DEADLINE_S)
    assert running.kv.block_files() == set()
    rank.close()


@pytest.mark.parametrize(("fault", "error"), [("ends inside a file", InvalidRequest), ("is flipped", CorruptBlock)])
async def test_a_stream_that_ends_inside_a_file_or_is_flipped_is_refused(
    running: Running, fault: str, error: type[Exception]
) -> None:
    rank = await running.rank(frames=True)
    new = new_save(PROMPT, now_ms=SystemClock().now_ms())
    await asyncio.to_thread(rank.prepare, new)
    frames = list(rank.requests(new, [0]))
    if fault == "is flipped":
        frames[-1].frame = bytes(len(frames[-1].frame))
    else:
        frames.pop()

    with pytest.raises(error):
        await asyncio.to_thread(rank.client.save_blocks, iter(frames), DEADLINE_S)
    assert running.kv.block_files() == set()
    rank.close()


async def test_a_reader_that_leaves_early_unpins(running: Running) -> None:
    rank = await running.rank()
    assert rank.arena is not None
    new = await asyncio.to_thread(rank.save, PROMPT)
    request = pb.LoadBlocksRequest(
        tenant=TENANT,
        cache_ref=new.cache_ref,
        fingerprint=FINGERPRINT,
        block_indices=[0, 1, 2],
        borrower=rank.arena.borrower,
    )
    reading = rank.client.load_blocks(request, DEADLINE_S)
    await asyncio.to_thread(next, reading)
    await asyncio.to_thread(reading.close)  # type: ignore[attr-defined]  # a generator

    await until(lambda: not running.kv.has_leases, what="no block is pinned")
    rank.close()


async def test_a_load_report_reaches_who_waits_for_it(running: Running) -> None:
    rank = await running.rank()

    async def reported() -> LoadedKV:
        async with asyncio.timeout(DEADLINE_S):
            while (found := await running.client.load_report("r1", timeout_ms=1000)) is None:
                pass
        return found

    waiting = asyncio.create_task(reported())
    report = pb.LoadReport(request_id="r1", outcome=pb.LOAD_OUTCOME_LOADED, loaded_tokens=9, restore_ms=1.5)
    await asyncio.to_thread(rank.client.report_load, report)

    assert await waiting == LoadedKV(False, 0, 9, "", restore_ms=1.5)
    assert await running.client.load_report("r2", timeout_ms=1) is None
    rank.close()


@pytest.mark.parametrize("is_taken", [True, False], ids=["report taken", "report refused"])
async def test_what_is_told_of_a_load_ends_its_lease(running: Running, *, is_taken: bool) -> None:
    rank = await running.rank()
    assert rank.arena is not None
    new = await asyncio.to_thread(rank.save, PROMPT)
    request = pb.LoadBlocksRequest(
        tenant=TENANT,
        cache_ref=new.cache_ref,
        fingerprint=FINGERPRINT,
        block_indices=[0, 1, 2],
        borrower=rank.arena.borrower,
        lease_id="a" * 32,
        lease_ms=60_000,
    )
    await asyncio.to_thread(lambda: list(rank.client.load_blocks(request, DEADLINE_S)))
    assert running.kv.has_leases
    report = pb.LoadReport(request_id="r1" if is_taken else "", outcome=pb.LOAD_OUTCOME_LOADED)
    with nullcontext() if is_taken else pytest.raises(InvalidRequest):
        await asyncio.to_thread(lambda: rank.client.report_load(report, lease_id="a" * 32))

    assert not running.kv.has_leases
    rank.close()


async def test_a_question_waits_in_the_sidecar_for_a_seal_and_its_cancel_leaves_nothing(running: Running) -> None:
    rank, now_ms = await running.rank(), SystemClock().now_ms()
    new = new_save(PROMPT, now_ms=now_ms)
    request = pb.ResolveRequest(
        tenant=TENANT,
        fingerprint=FINGERPRINT,
        world_size=1,
        token_ids=pack_token_ids((*PROMPT, 7)),
        cache_refs=[new.cache_ref],
        saving=[new.cache_ref],
        wait_ms=30_000,
        pull_wait_ms=30_000,
        compute_us_per_token=1.5,
    )
    given_up = rank.client._line.stub.Resolve.future(request)
    asked = asyncio.create_task(asyncio.to_thread(rank.client.resolve, request, 60))
    await running.kv.send_all(new)
    given_up.cancel()
    assert await running.kv.catalog.seal(new.cache_ref, 0)
    manifest, answer = await asked
    rank.close()

    assert manifest is not None
    assert (manifest.cache_ref, answer.num_tokens, answer.tier) == (new.cache_ref, len(PROMPT), pb.TIER_HOST)


async def test_touch_and_stats(running: Running) -> None:
    rank = await running.rank()
    new = await asyncio.to_thread(rank.save, PROMPT)
    until_ms = new.expires_at_ms + 60_000
    stats = await running.client.stats()

    assert await running.client.touch_context(TENANT, new.session_id, until_ms) == 1
    assert (await running.client.get_manifest(TENANT, new.cache_ref))[0].expires_at_ms == until_ms
    assert stats.num_contexts == 1
    disk_bytes = running.kv.disk_bytes()
    assert {tier.tier: (tier.num_blocks, tier.size_bytes) for tier in stats.tiers} == {
        pb.TIER_HOST: (3, disk_bytes),
        pb.TIER_DISK: (3, disk_bytes),
    }
    rank.close()


async def test_a_call_whose_client_is_closed_is_unavailable_and_cancels_nobody(running: Running) -> None:
    async def wait() -> bool:
        try:
            return (await running.client.wait_sealed(TENANT, new_cache_ref(), timeout_ms=20_000)).is_sealed
        except SidecarUnavailable:
            return False

    calls = [asyncio.create_task(wait()) for _ in range(3)]
    await asyncio.sleep(0)
    calls[0].cancel()
    await running.client.close()
    found = await asyncio.gather(*calls, return_exceptions=True)

    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == [False, False]


async def test_a_closed_client_connects_again_and_an_absent_sidecar_is_unavailable(running: Running) -> None:
    assert await running.client.stats()
    await running.client.close()
    assert await running.client.stats()
    absent = KVSidecarClient("127.0.0.1:1", timeout_s=0.5)

    with pytest.raises(SidecarUnavailable):
        await absent.stats()
    await absent.close()
    engine = EngineSidecarClient("127.0.0.1:1", timeout_s=0.5)
    with pytest.raises(SidecarUnavailable):
        await asyncio.to_thread(engine.seal, new_cache_ref(), 0, 0.5)
    engine.close()
    with pytest.raises(SidecarUnavailable):
        engine.seal(new_cache_ref(), 0, 0.5)
    with pytest.raises(SidecarUnavailable):
        next(engine.load_blocks(pb.LoadBlocksRequest(), 1))


async def test_what_a_tenant_has_is_told_with_its_limit(running: Running) -> None:
    rank = await running.rank()
    before = await running.client.tenant_usage(TENANT)
    await asyncio.to_thread(rank.save, PROMPT)
    after = await running.client.tenant_usage(TENANT)
    with pytest.raises(InvalidRequest):
        await running.client.tenant_usage("../x")

    assert (before.size_bytes, before.limit_bytes) == (0, 0)
    assert after.size_bytes == running.kv.disk_bytes() > 0
    assert (await running.client.tenant_usage("other")).size_bytes == 0
    rank.close()
