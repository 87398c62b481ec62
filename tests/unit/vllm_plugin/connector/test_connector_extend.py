"""A long context's early saves: token ids travel once, are hashed once, and cost the worker little time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from contextcache.clock import ManualClock
from contextcache.identity import KVTransfer
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.tracing import NO_TRACER
from kv_sidecar.client import parse_block_file
from kv_sidecar.format import ids
from tests.unit.vllm_plugin.connector.conftest import EXPIRES_AT_MS, cache_ref
from tests.unit.vllm_plugin.connector.fake_sidecar import FakeSidecar
from vllm_plugin.connector.copies.pages import LayerShape, PagedLayers
from vllm_plugin.connector.metadata import EngineGroup, RankFacts, SavePlan
from vllm_plugin.connector.saves.running import RunningSaves
from vllm_plugin.connector.saves.saving import PHASES, SavePhase, Saver
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import RankLink
from vllm_plugin.connector.telemetry import Counters
from vllm_plugin.connector.transfer import Reporter, ResultBox, TransferPool

NUM_TOKENS, STEP_TOKENS, BLOCK_TOKENS, FILE_TOKENS = 131_072, 2_048, 16, 256
NUM_PARTS = 23
"""Seen failing: each of the 64 steps sent a part, and the calls took more CPU time than all else."""
A = cache_ref(1)
GROUP = EngineGroup("full_attention", BLOCK_TOKENS)
FACTS = RankFacts("f" * 64, "{}", 0, 1, (GROUP,))


class NoPages(PagedLayers):
    """Layers of one byte a block: what is left is the work of a save beside its copies."""

    shapes = ((LayerShape("l", 1, 1, 1, 1),),)
    planes = ((1,),)

    def gather(self, copies: Any) -> Any:
        return [() for _ in copies]


class CountingSidecar(FakeSidecar):
    """The fake, without the cost of its own hashes and checks."""

    def __init__(self) -> None:
        super().__init__(block_tokens=FILE_TOKENS)
        self.num_tokens = 0
        self.num_files = 0
        self.is_sealed = False

    def prepare_save(self, request: pb.PrepareSaveRequest, timeout_s: float) -> pb.PrepareSaveResponse:
        assert self.num_tokens == 0, "opened once"
        return pb.PrepareSaveResponse(**self._added(0, request.token_ids))

    def extend_save(self, request: pb.ExtendSaveRequest, timeout_s: float) -> pb.ExtendSaveResponse:
        return pb.ExtendSaveResponse(**self._added(request.first_token, request.token_ids))

    def _added(self, first_token: int, token_ids: bytes) -> dict[str, Any]:
        assert first_token == self.num_tokens
        self.sent_token_bytes += len(token_ids)
        self.num_tokens += len(token_ids) // ids.TOKEN_BYTES
        known, self.num_files = self.num_files, -(-self.num_tokens // FILE_TOKENS)
        return {"num_files": self.num_files, "missing_files": range(known, self.num_files)}

    def save_blocks(self, requests: Iterator[pb.SaveBlocksRequest], timeout_s: float) -> pb.SaveBlocksResponse:
        slot_ids = [slot.slot_id for request in requests for slot in request.slots]
        self.memory.give_back("engine", slot_ids)
        return pb.SaveBlocksResponse(num_blocks=len(slot_ids))

    def seal(self, cache_ref: str, rank: int, timeout_s: float) -> bool:
        self.is_sealed = True
        return True


class AtOnce(TransferPool):
    """Runs work where it is queued, so that a thread's clock measures it."""

    def __init__(self) -> None:
        super().__init__("none", threads=1, queue_limit=1)

    def try_submit(self, work: Callable[[], None], tenant: str = "") -> Any:
        work()
        return True


@pytest.fixture
def sidecar() -> CountingSidecar:
    return CountingSidecar()


@pytest.fixture
def saver(sidecar: CountingSidecar) -> Iterator[Saver]:
    clock, counters = ManualClock(), Counters()
    link = RankLink(sidecar, lambda _gone: sidecar.arena, clock, counters)
    link.introduce(FACTS)
    saver = Saver(
        settings=ConnectorSettings("s", "f"),
        link=link,
        layers=NoPages(),
        results=ResultBox(),
        reporter=Reporter(sidecar, counters, queue_limit=4),
        counters=counters,
        clock=clock,
        tracer=NO_TRACER,
        copying=AtOnce(),
        uploads=AtOnce(),
    )
    yield saver
    saver.close()


def plans_of(num_tokens: int) -> list[SavePlan]:
    """Return the plans of a prompt that is computed in steps, and of its end, as the scheduler makes them."""
    tokens = np.random.default_rng(1).integers(0, 150_000, num_tokens + 1).tolist()
    request = SimpleNamespace(
        request_id="r",
        num_computed_tokens=0,
        num_prompt_tokens=num_tokens,
        num_tokens=len(tokens),
        arrival_time=1.0,
        all_token_ids=tokens,
    )
    tables = [list(range(1, num_tokens // BLOCK_TOKENS + 1))]
    step = SimpleNamespace(
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: tables), preempted_req_ids=None
    )
    running, plans = RunningSaves(sends_ahead=True), list[SavePlan]()
    running.watch(request, KVTransfer("demo", "ctx_1", "r", (), A, EXPIRES_AT_MS), FACTS)
    while request.num_computed_tokens < num_tokens:
        request.num_computed_tokens += STEP_TOKENS
        plans += running.observe(step, FACTS, lambda _: True)
        running.ended(plans[-1].name)
    last = dict.fromkeys(["engine_request_id", "tenant", "session_id"], "demo") | {"cache_ref": A, "groups": (GROUP,)}
    plans.append(
        SavePlan(
            **last,
            expires_at_ms=EXPIRES_AT_MS,
            started_at_ms=1000,
            first_token=running.planned_tokens("r"),
            token_ids=b"",
            block_ids=(tuple(tables[0]),),
            fingerprint=plans[0].fingerprint,
        )
    )
    return plans


def carry_out(saver: Saver, plans: Sequence[SavePlan]) -> None:
    for plan in plans:
        saver.start(plan, None)


def test_token_ids_of_a_long_context_travel_once_and_are_hashed_once(
    saver: Saver, sidecar: CountingSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing with plans of all tokens so far: 31 times the ids."""
    hashed_bytes, sha256 = 0, hashlib.sha256

    class Counted:
        def __init__(self, data: bytes = b"") -> None:
            self._digest = sha256(data)

        def update(self, data: bytes) -> None:
            nonlocal hashed_bytes
            hashed_bytes += len(data)
            self._digest.update(data)

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    monkeypatch.setattr(ids.hashlib, "sha256", Counted)
    plans, all_bytes = plans_of(NUM_TOKENS), NUM_TOKENS * ids.TOKEN_BYTES
    carry_out(saver, plans)

    assert len(plans) == NUM_PARTS + 1
    assert sum(len(plan.token_ids) for plan in plans) == all_bytes
    assert sidecar.sent_token_bytes <= 1.05 * all_bytes
    assert hashed_bytes <= 1.3 * all_bytes, "ids, and each block's parent and tenant"
    assert sidecar.is_sealed
    assert saver.counters.get("early_saves") == NUM_PARTS


def test_a_save_that_the_sidecar_has_lost_is_opened_again_with_all_tokens(
    saver: Saver, sidecar: CountingSidecar
) -> None:
    plans = plans_of(4 * STEP_TOKENS)
    carry_out(saver, plans[:2])
    fresh = FakeSidecar(block_tokens=FILE_TOKENS)
    saver.link.sidecar = fresh
    fresh.memory.borrowers.add("engine")
    saver.link._terms = None
    saver.link._arena = fresh.arena
    carry_out(saver, plans[2:])

    assert len(fresh.manifests[A].token_ids) == 4 * STEP_TOKENS
    assert saver.counters.get("saves") == 1


def test_a_part_is_copied_behind_its_own_fence_alone(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing: a thread that was late copied the next part's blocks too, before the engine had computed them."""
    fences: dict[int, object] = {}

    class Watched(NoPages):
        def gather(self, copies: Any) -> Any:
            fences.update({block: copy.after for copy in copies for block in copy.block_ids})
            return super().gather(copies)

    saver.layers = Watched()
    first, second = plans_of(2 * STEP_TOKENS)[:2]
    terms, is_late = saver.link.terms, [True]

    def late() -> Any:
        if is_late.pop() if is_late else False:
            saver.start(second, "second")
        return terms()

    monkeypatch.setattr(saver.link, "terms", late)
    saver.start(first, "first")

    assert {fences[block] for block in first.block_ids[0]} == {"first"}
    assert {fences[block] for block in second.block_ids[0]} == {"second"}


def test_early_files_have_the_longer_deadline_while_the_last_part_waits(
    saver: Saver, sidecar: CountingSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine holds no blocks for them. Seen failing: they had the two seconds of the part that waited."""
    small, timeouts_s = FakeSidecar(arena_bytes=24_000), list[float]()
    first, last = plans_of(STEP_TOKENS)
    lend, save_blocks = small.lend_slots, sidecar.save_blocks
    sidecar.memory, saver.link._arena = small.memory, small.arena
    saver.link.open_arena = lambda _gone: small.arena

    def lend_slots(request: pb.LendSlotsRequest, timeout_s: float) -> Any:
        if saver._saves[A].plan is first:
            saver.start(last, None)
        return lend(request, timeout_s)

    def timed(requests: Iterator[pb.SaveBlocksRequest], timeout_s: float) -> pb.SaveBlocksResponse:
        timeouts_s.append(timeout_s)
        return save_blocks(requests, timeout_s)

    monkeypatch.setattr(sidecar, "lend_slots", lend_slots)
    monkeypatch.setattr(sidecar, "save_blocks", timed)
    saver.start(first, None)

    assert sidecar.is_sealed
    assert set(timeouts_s) == {30.0}


@pytest.mark.parametrize(("holds_blocks", "num_digests"), [(True, [16, 1]), (False, [16, 0])])
def test_a_page_that_a_running_request_fills_has_no_digest(
    saver: Saver, monkeypatch: pytest.MonkeyPatch, *, holds_blocks: bool, num_digests: list[int]
) -> None:
    """The request goes on to write into it, so that no load could compare."""

    class Digested(NoPages):
        makes_digests = True

        def gather(self, copies: Any) -> Any:
            return [(7,) * copy.num_pages for copy in copies]

    monkeypatch.setattr(saver, "layers", Digested())
    sidecar = FakeSidecar(block_tokens=FILE_TOKENS)
    saver.link.sidecar, saver.link.open_arena = sidecar, lambda _gone: sidecar.arena
    num_tokens = FILE_TOKENS + 5
    block_ids = (tuple(range(1, num_tokens // BLOCK_TOKENS + 2)),)
    plan = replace(plans_of(STEP_TOKENS)[0], token_ids=bytes(4 * num_tokens), block_ids=block_ids, early=False)
    saver.start(replace(plan, holds_blocks=holds_blocks), None)

    files = map(parse_block_file, sidecar.files.values())
    assert [len(file.digests) for file in sorted(files, key=lambda file: -len(file.meta.token_ids))] == num_digests


def test_a_rank_without_an_arena_asks_for_one_again(saver: Saver, sidecar: CountingSidecar) -> None:
    """Seen failing: one refused connection, and the rank saved and loaded nothing until the engine's restart."""
    tries: list[object] = []

    def open_arena(_gone: object) -> Any:
        tries.append(_gone)
        if len(tries) == 1:
            raise OSError("refused")
        return sidecar.arena

    saver.link.open_arena = open_arena

    assert saver.link.terms().arena is None
    assert saver.link.terms().arena is None
    saver.clock.advance(ms=10_000)
    assert saver.link.terms().arena is sidecar.arena


def test_a_save_ends_once_from_every_phase() -> None:
    ends = {move.start for move in PHASES if move.event == "end"}

    assert ends == set(SavePhase) - {SavePhase.ENDED}
    assert {move.end for move in PHASES if move.start is SavePhase.ENDED} == set()
    assert {move.event for move in PHASES if move.end is SavePhase.ENDED} == {"end"}
