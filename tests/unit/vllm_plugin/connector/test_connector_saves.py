"""Saves, driven by vLLM's own scheduler: what is saved, what never is, and that blocks are always given back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from contextcache.errors import SidecarUnavailable
from kv_sidecar.tiers.memory import Place
from tests.unit.vllm_plugin.connector.conftest import Engine, cache_ref, transfer
from tests.unit.vllm_plugin.connector.fake_sidecar import FakeSidecar
from tests.unit.vllm_plugin.connector.loop_connector import LoopConnector
from vllm_plugin.connector.copies.pages import page_bytes
from vllm_plugin.connector.metadata import SavePlan
from vllm_plugin.connector.sidecar_link import Arena

A, B = cache_ref(1), cache_ref(2)
PROMPT = list(range(1, 151))
NO_ARENA = "the sidecar shares no memory with this engine: no KV is saved or loaded"


def test_a_finished_request_is_saved_up_to_the_last_token_that_has_kv(engine: Engine) -> None:
    answer = engine.save(PROMPT, A)

    manifest = engine.sidecar.manifests[A]
    assert manifest.token_ids == (*PROMPT, *answer[:-1])
    assert [(file.kind, file.first_token, file.end_token) for file in manifest.files] == [
        ("block", 0, 64),
        ("block", 64, 128),
        ("tail", 128, 153),
    ]
    assert engine.sidecar.token_ids_of(A) == (*PROMPT[128:], *answer[:-1])


def test_a_context_that_ends_at_a_block_edge_has_no_tail(engine: Engine) -> None:
    engine.save(PROMPT[:125], A)

    manifest = engine.sidecar.manifests[A]
    assert [file.kind for file in manifest.files] == ["block", "block"]
    assert len(manifest.token_ids) == 128
    assert A not in engine.sidecar.files


def test_blocks_the_sidecar_has_are_not_copied_again(engine: Engine) -> None:
    engine.save(PROMPT, A)
    before = set(engine.sidecar.files)
    engine.save([*PROMPT, 7, 7, 7], B, name="more")

    assert set(engine.sidecar.files) - before == {B}


def test_the_engines_blocks_are_held_until_they_are_copied_and_no_longer(engine: Engine) -> None:
    free = engine.loop.free_blocks
    hang = engine.sidecar.hang["prepare_save"] = threading.Event()
    engine.loop.add("save", PROMPT, params=transfer(save=A))
    engine.loop.steps(6)

    assert "save" in engine.loop.finished
    assert engine.loop.scheduler.has_requests()
    assert engine.loop.free_blocks < free
    assert not engine.loop.scheduler.reset_prefix_cache()
    hang.set()
    engine.loop.run_to_end("save")
    assert engine.loop.free_blocks == free
    assert A in engine.sidecar.manifests


def test_a_slow_upload_does_not_hold_the_engines_blocks(engine: Engine) -> None:
    free = engine.loop.free_blocks
    hang = engine.sidecar.hang["save_blocks"] = threading.Event()
    engine.loop.add("save", PROMPT, params=transfer(save=A))
    engine.loop.steps(6)
    _settle_copies(engine)
    engine.loop.step()

    assert not engine.loop.scheduler.has_requests()
    assert engine.loop.free_blocks == free
    hang.set()
    engine.loop.settle()
    assert A in engine.sidecar.manifests


def test_a_save_waiting_too_long_for_a_thread_is_skipped(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(extra={"match_prefix": False}, bounds={"save_threads": 1})
    free = engine.loop.free_blocks
    hang = engine.sidecar.hang["prepare_save"] = threading.Event()
    engine.loop.add("first", PROMPT, params=transfer(save=A))
    engine.loop.add("second", PROMPT[:99], params=transfer(save=B))
    engine.loop.steps(6)
    engine.sidecar.wait_for("prepare_save")
    engine.clock.advance(ms=2_000)
    engine.loop.step()

    assert engine.counted("skipped_saves", "prepare_deadline") == 1
    hang.set()
    engine.loop.run(lambda: not engine.loop.scheduler.has_requests())
    # The first got its answer too late as well: the deadline counts from the finish.
    assert engine.counted("skipped_saves") == 2
    assert engine.loop.free_blocks == free
    assert engine.sidecar.manifests == {}


def test_the_sidecar_is_asked_no_longer_than_the_blocks_may_still_be_held(engine: Engine) -> None:
    """Seen failing with the call's own two seconds: a save that had waited for a thread was held up to four."""
    worker = engine.loop.worker.worker_side
    terms = worker._link.terms

    def slow_terms() -> object:
        engine.clock.advance(ms=1_500)
        return terms()

    worker._link.terms = slow_terms
    engine.save(PROMPT, A)

    assert engine.sidecar.prepare_timeouts_s == [0.5]
    assert A in engine.sidecar.manifests


def test_without_a_sidecar_requests_finish_and_nothing_is_held(start_engine: Callable[..., Engine]) -> None:
    sidecar = FakeSidecar()
    sidecar.down = True
    engine = start_engine(sidecar=sidecar)
    free = engine.loop.free_blocks
    engine.save(PROMPT, A)

    assert engine.loop.free_blocks == free
    assert engine.counted("skipped_saves", "sidecar_unavailable") == 1


def test_a_sidecar_that_comes_late_is_found(start_engine: Callable[..., Engine]) -> None:
    sidecar = FakeSidecar()
    sidecar.down = True
    engine = start_engine(sidecar=sidecar)
    engine.save(PROMPT, A)
    sidecar.down = False
    engine.clock.advance(s=30)
    engine.save(PROMPT, B, name="later")

    assert set(sidecar.manifests) == {B}


def test_while_the_sidecar_is_away_it_is_asked_ever_more_rarely(start_engine: Callable[..., Engine]) -> None:
    sidecar = FakeSidecar()
    sidecar.down = True
    engine = start_engine(sidecar=sidecar)
    for _ in range(20):
        engine.clock.advance(ms=250)
        engine.loop.step()
        engine.loop.settle()

    # At 0, 250, 750, 1 750 and 3 750 ms.
    assert engine.counted("failed_handshakes") == 5


def test_files_hold_whole_engine_blocks_whatever_the_sidecar_would_like(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(sidecar=FakeSidecar(block_tokens=40, arena_bytes=16 << 20))
    answer = engine.save(PROMPT, A)
    engine.loop.settle()
    engine.loop.forget_prefixes()

    assert {group.block_tokens for group in engine.sidecar.manifests[A].groups} == {48}
    assert engine.loop.play("again", PROMPT, params=transfer(load=(A,))) == answer
    assert engine.counted("loads") == 1


def test_a_file_that_the_arena_cannot_hold_skips_the_save(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(sidecar=FakeSidecar(arena_bytes=4_096))
    free = engine.loop.free_blocks
    engine.save(PROMPT, A)
    engine.loop.settle()

    assert engine.counted("skipped_saves", "arena_full") == 1
    assert engine.loop.free_blocks == free
    assert engine.sidecar.abandoned == {A: "arena_full"}


def test_without_an_arena_nothing_is_saved_and_the_reason_is_counted(
    start_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_engine(sidecar=FakeSidecar(arena_bytes=0))
    free = engine.loop.free_blocks
    engine.save(PROMPT, A)
    engine.save([7, *PROMPT], B, name="next")
    engine.loop.settle()

    assert engine.counted("skipped_saves", "no_arena") == 2
    assert engine.sidecar.abandoned == {A: "no_arena", B: "no_arena"}
    assert engine.loop.free_blocks == free
    assert [record.message for record in caplog.records if "shares no memory" in record.message] == [NO_ARENA]


def test_an_arena_that_is_refused_saves_nothing(
    start_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine, another user, a sandbox that passes no descriptors."""

    def refused(self: LoopConnector, on_gone: Callable[[], None]) -> Arena:
        raise PermissionError

    monkeypatch.setattr(LoopConnector, "open_arena", refused)
    engine = start_engine()
    engine.save(PROMPT, A)

    assert engine.counted("skipped_saves", "no_arena") == 1
    assert engine.counted("refused_arenas") == 1


def small_arena() -> FakeSidecar:
    """Return a sidecar with room for one block file."""
    return FakeSidecar(arena_bytes=12_000)


def test_a_context_twenty_times_the_arena_is_saved_whole(start_engine: Callable[..., Engine]) -> None:
    """Seen failing when a save took all its bytes at once: skipped, and so was every later turn's."""
    engine = start_engine(num_blocks=256, sidecar=small_arena())
    free = engine.loop.free_blocks
    prompt = [1 + i % 900 for i in range(20 * 64 + 5)]
    answer = engine.save(prompt, A)
    engine.loop.settle()

    assert engine.sidecar.manifests[A].token_ids == (*prompt, *answer[:-1])
    assert engine.counted("skipped_saves") == 0
    assert engine.loop.free_blocks == free
    assert engine.sidecar.memory.lent_bytes == 0


def test_two_saves_larger_than_the_arena_share_it(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(num_blocks=256, sidecar=small_arena())
    engine.loop.add("one", [1 + i % 900 for i in range(9 * 64)], params=transfer(save=A))
    engine.loop.add("two", [2 + i % 900 for i in range(9 * 64)], params=transfer(save=B))
    engine.loop.run(lambda: not engine.loop.scheduler.has_requests())
    engine.loop.settle()

    assert set(engine.sidecar.manifests) == {A, B}
    assert engine.counted("saves") == 2


def test_blocks_are_not_held_for_a_sidecar_that_takes_nothing(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(sidecar=small_arena())
    free = engine.loop.free_blocks
    hang = engine.sidecar.hang["save_blocks"] = threading.Event()
    engine.loop.add("save", PROMPT, params=transfer(save=A))
    engine.loop.steps(6)
    engine.sidecar.wait_for("save_blocks")
    held = engine.loop.free_blocks
    engine.clock.advance(ms=2_000)
    engine.loop.step()

    assert held < free
    assert engine.loop.free_blocks == free
    assert engine.counted("skipped_saves", "hold_deadline") == 1
    hang.set()
    engine.loop.settle()
    assert engine.sidecar.manifests == {}
    assert engine.sidecar.abandoned == {A: "hold_deadline"}
    assert engine.sidecar.memory.lent_bytes == 0


def test_a_hand_over_that_fails_frees_the_blocks_at_once(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(sidecar=small_arena())
    free = engine.loop.free_blocks
    engine.sidecar.hang["save_blocks"] = threading.Event()
    engine.sidecar.timeout_s = 0.01
    engine.save(PROMPT, A)
    engine.loop.settle()

    assert engine.counted("skipped_saves", "sidecar_unavailable") == 1
    assert engine.counted("skipped_saves") == 1
    assert engine.loop.free_blocks == free
    assert engine.sidecar.memory.lent_bytes == 0


def test_a_larger_context_may_be_held_for_longer(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(bounds={"save_bytes_per_ms_min": 1})
    saver = engine.loop.worker.worker_side._saver
    layers = engine.loop.worker.worker_side._layers
    now_ms, ref = engine.clock.now_ms(), A
    groups = engine.loop.worker.worker_side.facts.groups
    plan = SavePlan("engine", "demo", "ctx_1", ref, 0, 1, 0, bytes(4 * 32), groups, ((1, 2),), fingerprint="f")
    saver.start(plan, None)

    assert saver._saves[A].deadline_ms == now_ms + 2_000 + 2 * page_bytes(layers.shapes[0])


def test_an_abort_is_told_to_the_sidecar_too(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(max_num_batched_tokens=32)
    engine.loop.add("save", PROMPT, params=transfer(save=A))
    engine.loop.step()
    engine.loop.abort("save")
    engine.loop.run(lambda: not engine.loop.scheduler.has_requests())
    engine.sidecar.wait_for("abandon_save")
    engine.loop.settle()

    assert engine.sidecar.abandoned == {A: "not_computed"}


def test_a_save_waits_for_room_in_the_arena_no_longer_than_blocks_may_be_held(
    start_engine: Callable[..., Engine],
) -> None:
    """As when an engine that was stopped keeps all that it was lent, or loads have pinned it all."""
    engine = start_engine(sidecar=FakeSidecar(arena_bytes=40_000))
    free, memory = engine.loop.free_blocks, engine.sidecar.memory
    memory.borrowers.add("stopped")
    assert memory.lend("stopped", Place(B, 0, 0), 39_000)
    engine.loop.add("save", PROMPT, params=transfer(save=A))
    engine.loop.steps(6)
    engine.sidecar.wait_for("lend_slots")
    held = engine.loop.free_blocks
    engine.clock.advance(ms=2_000)
    engine.loop.step()
    engine.loop.settle()
    engine.loop.step()

    assert held < free
    assert engine.loop.free_blocks == free
    assert engine.sidecar.abandoned == {A: "hold_deadline"}
    assert memory.lent_bytes == 39_000


def test_a_word_that_was_lost_is_told_again_when_there_is_no_room(start_engine: Callable[..., Engine]) -> None:
    """Seen failing: half of the arena stayed lent for as long as the engine lived."""
    engine = start_engine(sidecar=FakeSidecar(arena_bytes=12_000))
    sidecar = engine.sidecar
    return_slots, save_blocks = sidecar.return_slots, sidecar.save_blocks

    def unheard(*_: Any) -> Any:
        raise SidecarUnavailable("for now")

    sidecar.return_slots = sidecar.save_blocks = unheard
    engine.save(PROMPT, A)
    engine.loop.settle()
    assert sidecar.memory.lent_bytes > 0
    sidecar.return_slots, sidecar.save_blocks = return_slots, save_blocks
    engine.clock.advance(s=60)
    engine.save(PROMPT, B, name="next")
    engine.loop.settle()

    assert B in sidecar.manifests
    assert sidecar.memory.lent_bytes == 0


def test_a_word_on_one_arenas_slots_that_is_lost_keeps_no_other_arena_waiting(engine: Engine) -> None:
    """After a hiccup there are two. Seen failing: what was owed for the second was forgotten with the first's error."""

    class OneOfTwo:
        def __init__(self, borrower: str) -> None:
            self.borrower = borrower

    def return_slots(borrower: str, slot_ids: Sequence[int]) -> None:
        if borrower == "old":
            raise SidecarUnavailable("for now")
        told.append((borrower, slot_ids))

    reporter, told = engine.loop.worker.worker_side._reporter, list[object]()
    engine.sidecar.return_slots = return_slots
    arenas = [OneOfTwo("old"), OneOfTwo("new")]
    reporter._owed.update({arena: {7} for arena in arenas})  # type: ignore[misc]
    with pytest.raises(SidecarUnavailable):
        reporter._return_slots(engine.sidecar)

    assert told == [("new", [7])]
    assert {arena.borrower: slots for arena, slots in reporter._owed.items()} == {"old": {7}}


def test_the_next_report_of_any_kind_returns_slots_that_a_lost_call_did_not(engine: Engine) -> None:
    """Seen failing: until the next save failed, the slots stayed lent, and no file of the region's size had room."""

    class Mapped:
        borrower = "one"

    def return_slots(borrower: str, slot_ids: Sequence[int]) -> None:
        told.append((borrower, slot_ids))
        if len(told) == 1:
            raise SidecarUnavailable("for now")

    reporter, arena, told = engine.loop.worker.worker_side._reporter, Mapped(), list[object]()
    engine.sidecar.return_slots = return_slots
    reporter.return_slots(arena, [7])  # type: ignore[arg-type]
    reporter.end_load("0" * 16)
    reporter._pool.drain(10)

    assert told == [("one", [7])] * 2
    assert not reporter._owed


@pytest.mark.parametrize(("call", "num_opened"), [("lend_slots", 1), ("save_blocks", 0)])
def test_an_arena_is_let_go_after_a_late_answer_only_where_that_may_have_lent_slots(
    start_engine: Callable[..., Engine], call: str, num_opened: int
) -> None:
    """Its end is what frees them. Seen failing: every call that ran out of its time had the arena mapped anew."""
    engine = start_engine(sidecar=FakeSidecar(arena_bytes=40_000))
    link = engine.loop.worker.worker_side._link
    opened, open_arena = [], link.open_arena
    link.open_arena = lambda on_gone: opened.append(1) or open_arena(on_gone)
    hang = engine.sidecar.hang[call] = threading.Event()
    engine.sidecar.timeout_s = 0.01
    engine.save(PROMPT, A)
    engine.loop.settle()
    hang.set()
    engine.save(PROMPT, B, name="next")
    engine.loop.settle()

    assert A not in engine.sidecar.manifests
    assert B in engine.sidecar.manifests
    assert len(opened) == num_opened


def test_a_save_larger_than_the_arena_goes_by_pieces(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(sidecar=FakeSidecar(arena_bytes=12_000))
    engine.save(PROMPT, A)

    assert sum(map(len, engine.sidecar.files.values())) > 20_000
    assert engine.counted("saves") == 1
    assert engine.sidecar.memory.lent_bytes == 0


def test_a_save_that_is_lost_leaves_no_slot_and_no_bytes_behind(engine: Engine) -> None:
    engine.save(PROMPT, A)
    engine.sidecar.hang["save_blocks"] = threading.Event()
    engine.sidecar.timeout_s = 0.01
    engine.save([9, *PROMPT], B, name="lost")
    engine.loop.settle()

    assert engine.counted("skipped_saves", "sidecar_unavailable") == 1
    assert engine.sidecar.memory.lent_bytes == 0
    engine.sidecar.wait_for("return_slots")
    engine.loop.settle()
    assert engine.sidecar.memory.lent_bytes == 0


def test_a_session_that_was_deleted_meanwhile_is_not_saved(engine: Engine) -> None:
    engine.sidecar.deleted.add(A)
    engine.save(PROMPT, A)

    assert engine.counted("skipped_saves", "context_deleted") == 1
    assert engine.sidecar.manifests == {}


def test_an_abort_before_a_block_is_computed_saves_nothing(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(max_num_batched_tokens=32)
    free = engine.loop.free_blocks
    engine.loop.add("save", PROMPT, params=transfer(save=A))
    engine.loop.step()
    engine.loop.abort("save")
    engine.loop.run(lambda: not engine.loop.scheduler.has_requests())

    assert engine.sidecar.prepared == {}
    assert engine.sidecar.manifests == {}
    assert engine.counted("skipped_saves", "not_computed") == 1
    assert engine.loop.free_blocks == free


def test_an_abort_after_the_prompt_saves_it_as_a_stop_string_ends_so(engine: Engine) -> None:
    engine.loop.add("save", PROMPT, max_tokens=20, params=transfer(save=A))
    engine.loop.steps(4)
    engine.loop.abort("save")
    engine.loop.run(lambda: not engine.loop.scheduler.has_requests())

    # 150 prompt tokens and the 3 answered ones that were fed back.
    assert len(engine.sidecar.manifests[A].token_ids) == 153


@pytest.mark.parametrize("batch", [16, 64, 100])
def test_a_prompt_computed_in_chunks_is_saved_whole(start_engine: Callable[..., Engine], batch: int) -> None:
    engine = start_engine(max_num_batched_tokens=batch)
    answer = engine.save(PROMPT, A, forgets=True)
    engine.loop.play("again", [*PROMPT, *answer, 5], params=transfer(load=(A,)))

    assert engine.loop.computed["again"] == 155 - 153 + 3


def test_two_requests_under_one_name_are_saved_once(engine: Engine) -> None:
    free = engine.loop.free_blocks
    engine.loop.add("one", PROMPT, params=transfer(save=A))
    engine.loop.add("two", PROMPT, params=transfer(save=A))
    engine.loop.run(lambda: not engine.loop.scheduler.has_requests())

    assert engine.counted("saves") == 1
    assert engine.counted("skipped_saves", "twice") == 1
    assert engine.loop.free_blocks == free


def test_nothing_is_remembered_of_finished_requests(engine: Engine) -> None:
    engine.save(PROMPT, A)
    engine.loop.play("again", PROMPT, params=transfer(load=(A,)))

    assert engine.loop.connector.scheduler_side._requests == {}


def test_resetting_the_cache_touches_nothing_the_sidecar_has(engine: Engine) -> None:
    engine.save(PROMPT, A)

    assert engine.loop.scheduler.reset_prefix_cache(reset_connector=True)
    assert A in engine.sidecar.manifests


def _settle_copies(engine: Engine) -> None:
    for future in list(engine.loop.worker.worker_side._save_pool._live):
        future.result(30)
