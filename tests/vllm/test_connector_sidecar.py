"""The worker's half against the kv-sidecar, real and fake: one suite, so that the fake may stand for the real one.

No engine here: tests/kit/connector_rank.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contextcache.errors import CacheRefNotFound, StorageFull
from contextcache.names import new_cache_ref
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import EngineSidecarClient, pack_token_ids
from tests.kit.connector_rank import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    ENGINE_BLOCK_TOKENS,
    HEAD_BYTES,
    NUM_BLOCKS,
    Door,
    Rank,
    door_of,
    load_plan,
    save_plan,
)
from tests.kit.sidecar_process import SidecarProcess, fault
from tests.kit.until import wait_until
from tests.unit.vllm_plugin.connector.fake_sidecar import FakeSidecar
from vllm_plugin.connector.engine_check import LayerGroup

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=["fake", "real"])
def door(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """One sidecar for all tests: each test's ranks run a model of their own, which shares no block with another's."""
    arena_bytes = 64 << 20
    if request.param == "fake":
        fake = FakeSidecar(block_tokens=BLOCK_TOKENS, arena_bytes=arena_bytes)
        yield Door(lambda timeout_s: fake, lambda on_gone: fake.arena)
    else:
        process = SidecarProcess(
            tmp_path_factory.mktemp("sidecar"), block_tokens=BLOCK_TOKENS, memory_limit_bytes=arena_bytes
        )
        process.start()
        yield door_of(process)
        process.kill()


@pytest.fixture
def start_rank(door: Door, request: pytest.FixtureRequest) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def start(*args: int, **more: Any) -> Rank:
        ranks.append(Rank(door, *args, model=request.node.name, **more))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.side.shutdown()


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
def test_pages_of_every_group_come_back_and_only_those_that_are_needed(
    start_rank: Callable[..., Rank], num_tokens: int
) -> None:
    """Layers of two groups over each other in one memory, as vLLM lays them: told apart by block ids alone."""
    window = LayerGroup("sliding_window", ENGINE_BLOCK_TOKENS, 40, ("l1", "l2"))
    full = LayerGroup("full_attention", ENGINE_BLOCK_TOKENS, 0, ("l0", "l1"))
    rank, cache_ref = start_rank(groups=[full, window]), new_cache_ref()
    num_blocks = -(-num_tokens // ENGINE_BLOCK_TOKENS)
    first = max(0, num_tokens - 39) // ENGINE_BLOCK_TOKENS
    old = [list(range(num_blocks, 0, -1)), list(range(60 + first, 60 + num_blocks))]
    new = [list(range(30, 30 + num_blocks)), list(range(90, 90 + num_blocks))]
    plan = save_plan(rank, cache_ref, num_tokens, old[0])
    rank.run(save=replace(plan, block_ids=tuple(tuple(ids) for ids in old)))
    manifest = rank.manifest(cache_ref)
    before = {name: tensor.clone() for name, tensor in rank.kv.items()}
    loaded = rank.run(load=load_plan(rank, manifest, *new))

    assert loaded.failed == set()
    expected = {name: tensor.clone() for name, tensor in before.items()}
    for names, source, target in ((("l0", "l1"), old[0], new[0]), (("l1", "l2"), old[1], new[1][first:])):
        for name in names:
            expected[name][target] = before[name][source]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in rank.kv.items())


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
def test_pages_come_back_bit_by_bit_into_other_blocks(start_rank: Callable[..., Rank], num_tokens: int) -> None:
    rank, cache_ref = start_rank(), new_cache_ref()
    num_blocks = -(-num_tokens // ENGINE_BLOCK_TOKENS)
    old, new = list(range(num_blocks, 0, -1)), list(range(30, 30 + num_blocks))
    saved = rank.run(save=save_plan(rank, cache_ref, num_tokens, old))
    manifest = rank.manifest(cache_ref)
    before = {name: tensor.clone() for name, tensor in rank.kv.items()}
    loaded = rank.run(load=load_plan(rank, manifest, new))

    assert saved.sent == {f"engine-{cache_ref}"}
    assert loaded.received == {"engine-load"}
    assert loaded.failed == set()
    assert manifest.token_ids == tuple(range(num_tokens))
    for name, tensor in rank.kv.items():
        assert torch.equal(tensor[new], before[name][old])
        untouched = [block for block in range(NUM_BLOCKS) if block not in new]
        assert torch.equal(tensor[untouched], before[name][untouched])


def test_parts_of_a_save_arrive_as_one_context(start_rank: Callable[..., Rank]) -> None:
    """Each part brings new tokens alone; the first and the second end inside a file."""
    rank, cache_ref = start_rank(), new_cache_ref()
    old, new = list(range(13)), list(range(30, 43))
    rest = save_plan(rank, cache_ref, 200, old)
    for number, (first, end) in enumerate(((0, 80), (80, 176)), start=1):
        blocks = tuple(old[first // ENGINE_BLOCK_TOKENS : end // ENGINE_BLOCK_TOKENS])
        part = replace(rest, first_token=first, token_ids=rest.token_ids[4 * first : 4 * end], block_ids=(blocks,))
        rank.side.start([], [replace(part, early=True, holds_blocks=False)])
        wait_until(lambda count=number: rank.side.counters.get("early_saves") == count, what="the part is copied")
    rank.run(save=replace(rest, first_token=176, token_ids=rest.token_ids[4 * 176 :]))
    manifest = rank.manifest(cache_ref)
    before = {name: tensor.clone() for name, tensor in rank.kv.items()}
    loaded = rank.run(load=load_plan(rank, manifest, new))

    assert loaded.failed == set()
    assert manifest.token_ids == tuple(range(200))
    assert all(torch.equal(tensor[new], before[name][old]) for name, tensor in rank.kv.items())


def test_a_load_starts_in_the_middle_of_a_block(start_rank: Callable[..., Rank]) -> None:
    rank, cache_ref = start_rank(), new_cache_ref()
    rank.run(save=save_plan(rank, cache_ref, 200, list(range(13))))
    new = list(range(30, 43))
    before = {name: tensor.clone() for name, tensor in rank.kv.items()}
    rank.run(load=load_plan(rank, rank.manifest(cache_ref), new, device_tokens=96))

    for name, tensor in rank.kv.items():
        assert torch.equal(tensor[30:36], before[name][30:36])
        assert torch.equal(tensor[36:43], before[name][6:13])


def test_a_context_is_there_only_when_every_rank_has_sealed_it(start_rank: Callable[..., Rank], door: Door) -> None:
    if isinstance(door.connect(1), FakeSidecar):
        return  # the fake has one rank
    ranks, cache_ref = [start_rank(0, 2), start_rank(1, 2)], new_cache_ref()
    client = ranks[0].side._sidecar
    ranks[0].run(save=save_plan(ranks[0], cache_ref, 100, list(range(7))))
    wait_until(lambda: ranks[0].side.counters.get("saves") == 1, what="the first rank has saved", deadline_s=90)
    first = fault(lambda: client.get_manifest("demo", cache_ref, 1))
    ranks[1].run(save=save_plan(ranks[1], cache_ref, 100, list(range(7))))
    manifest = ranks[1].manifest(cache_ref)
    for rank in ranks:
        before = {name: tensor.clone() for name, tensor in rank.kv.items()}
        rank.run(load=load_plan(rank, manifest, list(range(20, 27))))

        assert all(torch.equal(tensor[20:27], before[name][:7]) for name, tensor in rank.kv.items())
    assert isinstance(first, CacheRefNotFound)


def test_parallel_loads_that_memory_cannot_hold_use_disk_and_none_is_computed(tmp_path: Path) -> None:
    """Memory for three blocks, four loads of nine each, none of which opens a file before all names are there.

    Seen failing without leases: slots were another's before they were copied.
    """
    process = SidecarProcess(tmp_path, block_tokens=BLOCK_TOKENS, memory_limit_bytes=3 * (BLOCK_BYTES + HEAD_BYTES))
    process.start()
    ranks = [Rank(door_of(process)) for _ in range(4)]
    try:
        plans = []
        for number, rank in enumerate(ranks):
            tokens = pack_token_ids(range(number, 520 + number))
            save = replace(save_plan(rank, new_cache_ref(), 520, list(range(33))), token_ids=tokens)
            rank.run(save=save)
            plans.append(load_plan(rank, rank.manifest(save.cache_ref), list(range(50, 83))))
        together = threading.Barrier(4)
        for rank in ranks:
            _open_late(rank, together)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda rank, plan: rank.run(load=plan), ranks, plans))

        assert [found.failed for found in results] == [set()] * 4
        for rank in ranks:
            assert rank.side.counters.get("loads") == 1
            assert all(torch.equal(tensor[50:83], tensor[:33]) for tensor in rank.kv.values())
    finally:
        for rank in ranks:
            rank.side.shutdown()
        process.kill()


def _open_late(rank: Rank, together: threading.Barrier) -> None:
    """Have a rank's first load take all answers before it opens a file, and all ranks open at the same time."""
    link = rank.side._link.sidecar
    load_blocks, is_first = link.load_blocks, [True]

    def buffered(request: pb.LoadBlocksRequest, timeout_s: float) -> Iterator[pb.LoadBlocksResponse]:
        if not is_first.pop():
            is_first.append(False)
            yield from list(load_blocks(request, timeout_s))
            return
        is_first.append(False)
        room_wait_ms, request.room_wait_ms = request.room_wait_ms, 0
        answers: list[pb.LoadBlocksResponse] = []
        # The others hold the room until all have asked.
        with suppress(StorageFull):
            answers += load_blocks(request, timeout_s)
        together.wait(60)
        request.room_wait_ms = room_wait_ms
        yield from answers
        if len([file for answer in answers for file in (answer, *answer.more)]) < len(request.block_indices):
            if answers:
                raise StorageFull("as the sidecar said")
            yield from list(load_blocks(request, timeout_s))

    link.load_blocks = buffered


def test_one_answer_names_all_slots_of_a_load_from_memory(start_rank: Callable[..., Rank]) -> None:
    """Seen failing with 31 files an answer and 33 files."""
    rank, cache_ref, num_answers = start_rank(), new_cache_ref(), list[int]()
    num_tokens = 33 * BLOCK_TOKENS
    blocks = [*range(1, 1 + num_tokens // ENGINE_BLOCK_TOKENS)]
    rank.run(save=save_plan(rank, cache_ref, num_tokens, blocks))
    plan, client = load_plan(rank, rank.manifest(cache_ref), blocks), rank.side._link.sidecar
    load_blocks = client.load_blocks

    def counted(request: pb.LoadBlocksRequest, timeout_s: float) -> Iterator[pb.LoadBlocksResponse]:
        for answer in load_blocks(request, timeout_s):
            num_answers.append(1 + len(answer.more))
            yield answer

    client.load_blocks = counted
    loaded = rank.run(load=plan)
    client.load_blocks = load_blocks

    assert loaded.failed == set()
    assert num_answers == [33]


def test_a_refused_load_is_reported_as_failed_with_its_reason(start_rank: Callable[..., Rank]) -> None:
    rank, cache_ref = start_rank(), new_cache_ref()
    rank.run(save=save_plan(rank, cache_ref, 100, list(range(7))))
    manifest = rank.manifest(cache_ref)
    unknown = load_plan(rank, replace(manifest, cache_ref=new_cache_ref()), list(range(20, 27)))
    results = rank.run(load=unknown)

    assert results.failed == {"engine-load"}
    assert rank.side.counters.get("failed_loads", "cache_ref_not_found") == 1


def test_another_tenants_context_is_not_found(start_rank: Callable[..., Rank]) -> None:
    rank, cache_ref = start_rank(), new_cache_ref()
    rank.run(save=save_plan(rank, cache_ref, 100, list(range(7))))
    rank.manifest(cache_ref)
    client = rank.side._sidecar

    assert isinstance(fault(lambda: client.get_manifest("other", cache_ref, 1)), CacheRefNotFound)


def test_blocks_two_contexts_share_are_sent_once(start_rank: Callable[..., Rank]) -> None:
    rank, one, two = start_rank(), new_cache_ref(), new_cache_ref()
    rank.run(save=save_plan(rank, one, 150, list(range(10))))
    rank.manifest(one)
    assert rank.side.facts is not None
    request = pb.PrepareSaveRequest(
        tenant="demo",
        session_id="ctx_1",
        cache_ref=two,
        fingerprint=rank.side.facts.fingerprint,
        world_size=1,
        token_ids=pack_token_ids(range(200)),
        expires_at_ms=2_000_000_000_000,
        started_at_ms=1_000,
    )
    answer = rank.side._sidecar.prepare_save(request, 60)

    assert (answer.num_files, list(answer.missing_files)) == (4, [2, 3])


def test_a_report_reaches_the_sidecar(start_rank: Callable[..., Rank], door: Door) -> None:
    rank, cache_ref = start_rank(), new_cache_ref()
    rank.run(save=save_plan(rank, cache_ref, 100, list(range(7))))
    rank.run(load=load_plan(rank, rank.manifest(cache_ref), list(range(20, 27))))
    client, request_id = rank.side._sidecar, f"request-{cache_ref}"
    if isinstance(client, FakeSidecar):
        wait_until(lambda: request_id in client.reports, what="the report is there", deadline_s=90)
        report = client.reports[request_id]
    else:
        assert isinstance(client, EngineSidecarClient)
        report = client._line.stub.GetLoadReport(
            pb.GetLoadReportRequest(request_id=request_id, timeout_ms=30_000), timeout=60
        ).report

    assert (report.outcome, report.loaded_tokens, report.device_tokens) == (pb.LOAD_OUTCOME_LOADED, 100, 0)
    assert report.size_bytes == 3 * 7 * 2 * ENGINE_BLOCK_TOKENS * 8 * 4
