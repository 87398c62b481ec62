"""Full blocks are shipped while their request runs; what is left at its end is the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from contextcache.errors import SaveIncomplete, StorageFull
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import parse_block_file
from tests.kit.until import wait_until
from tests.unit.vllm_plugin.connector.conftest import Engine, cache_ref, transfer
from vllm_plugin.connector import connector
from vllm_plugin.connector.saves.saving import Part
from vllm_plugin.connector.settings import ConnectorSettings

A, B = cache_ref(1), cache_ref(2)
FILE_TOKENS = 64
NOT_HELD = {"match_tokens_min": 2_000}
"""Bounds under which no interrupted prompt is saved: its blocks go to others at once."""


@pytest.fixture
def engine(start_engine: Callable[..., Engine]) -> Engine:
    return start_engine(extra={"early_saves": "on"})


def tokens(count: int, *, start: int = 0) -> list[int]:
    return [1 + (7 * number + start) % 800 for number in range(count)]


def sent(engine: Engine) -> list[tuple[int, ...]]:
    """Note the tokens of each file that the sidecar takes from now on, in order."""
    taken: list[tuple[int, ...]] = []

    class Noted(dict[str, bytes]):
        def __setitem__(self, name: str, data: bytes) -> None:
            taken.append(parse_block_file(data).meta.token_ids)
            super().__setitem__(name, data)

    engine.sidecar.files = Noted(engine.sidecar.files)
    return taken


def test_nothing_is_read_unheld_where_blocks_are_zeroed_before_the_worker_hears_of_it(
    start_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second model runner (vLLM's default on GPUs) over states or mixed precisions: zeros would have been sealed."""
    monkeypatch.setattr(connector, "_zeroes_early", lambda _config, _kv: True)
    engine = start_engine(extra={"early_saves": "on"})
    engine.loop.play("save", tokens(900), params=transfer(save=A), max_tokens=40)
    engine.loop.settle()

    assert (engine.counted("early_saves"), engine.counted("saves")) == (0, 1)


@pytest.mark.parametrize(("is_second", "zeroes"), [(True, True), (True, False), (False, True)])
def test_blocks_are_zeroed_early_by_the_second_model_runner_where_they_are_zeroed_at_all(
    *, is_second: bool, zeroes: bool
) -> None:
    config, kv = SimpleNamespace(use_v2_model_runner=is_second), SimpleNamespace(needs_kv_cache_zeroing=zeroes)

    assert connector._zeroes_early(config, kv) is (is_second and zeroes)


def test_a_long_prompt_is_shipped_in_its_chunks_and_each_file_once(engine: Engine) -> None:
    """Chunks of 256: files go as soon as there are 512 tokens more, and at the end only what is left."""
    prompt, taken = tokens(900), sent(engine)
    engine.loop.add("save", prompt, params=transfer(save=A), max_tokens=40)
    engine.loop.run(lambda: len(engine.loop.outputs["save"]) > 20)
    shipped = list(taken)
    answer = engine.loop.run_to_end("save")
    engine.loop.settle()

    whole = [tuple(prompt[start : start + FILE_TOKENS]) for start in range(0, 512, FILE_TOKENS)]
    assert sorted(shipped) == sorted(whole)
    assert engine.sidecar.early_tokens == [512]
    assert len(taken) == len(set(taken)) == 15
    assert engine.sidecar.manifests[A].token_ids == (*prompt, *answer[:-1])
    assert (engine.counted("early_saves"), engine.counted("saves")) == (1, 1)
    assert engine.sidecar.memory.lent_bytes == 0


def test_what_was_shipped_is_loaded_as_it_was_computed(engine: Engine) -> None:
    prompt = tokens(900)
    answer = engine.save(prompt, A, forgets=True)
    engine.loop.play("again", [*prompt, *answer, 5], params=transfer(load=(A,)))

    assert engine.counted("early_saves") == 1
    assert engine.loop.computed["again"] == 1 + 1 + 3


@pytest.mark.parametrize("num_tokens", [400, 500])
def test_a_short_prompt_is_saved_at_its_end_alone(engine: Engine, num_tokens: int) -> None:
    engine.save(tokens(num_tokens), A)

    assert engine.sidecar.early_tokens == []
    assert engine.counted("saves") == 1


def test_a_request_that_is_not_to_be_saved_ships_nothing(engine: Engine) -> None:
    engine.save(tokens(600), A, forgets=True)
    engine.sidecar.early_tokens.clear()
    engine.loop.add("again", [*tokens(600), *tokens(300, start=3)], params=transfer(load=(A,)))
    engine.loop.add("plain", tokens(700, start=9))
    engine.loop.run(lambda: {"again", "plain"} <= engine.loop.finished.keys())

    assert engine.sidecar.early_tokens == []


def test_an_early_save_that_fails_costs_the_save_nothing(engine: Engine) -> None:
    prepare_save = engine.sidecar.prepare_save

    def refuse_early(request: pb.PrepareSaveRequest, timeout_s: float) -> object:
        if request.early:
            raise StorageFull("for now")
        return prepare_save(request, timeout_s)

    engine.sidecar.prepare_save = refuse_early
    engine.save(tokens(900), A)
    engine.loop.settle()

    assert A in engine.sidecar.manifests
    assert engine.sidecar.abandoned == {}
    assert engine.counted("lost_early_saves", "storage_full") == 1
    assert engine.counted("skipped_saves") == 0


def finish_behind(engine: Engine, prompt: list[int], ref: str, is_hanging: Callable[[], object]) -> None:
    """Run a request to its end while its early part hangs."""
    request = engine.loop.add("save", prompt, params=transfer(save=ref))
    while request.num_computed_tokens < 513:
        engine.loop.step()
    wait_until(is_hanging, what="the early part hangs")
    while "save" not in engine.loop.finished:
        engine.loop.step()
    engine.loop.step()


def test_early_files_that_are_lost_late_cost_the_save_nothing(engine: Engine) -> None:
    """Seen failing: the last part was copied, then an early hand-over failed, and the save ended with it."""
    save_blocks, num_calls = engine.sidecar.save_blocks, 0

    def refuse_first(requests: Any, timeout_s: float) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            assert gate.wait(30)
            raise SaveIncomplete("for now")
        return save_blocks(requests, timeout_s)

    gate, engine.sidecar.save_blocks = threading.Event(), refuse_first
    finish_behind(engine, tokens(900), A, lambda: num_calls)
    wait_until(lambda: engine.loop.step() and not engine.loop.scheduler.has_requests(), what="the rest is copied")
    gate.set()
    engine.loop.settle()

    assert engine.sidecar.manifests[A].token_ids[:900] == tuple(tokens(900))
    assert engine.counted("lost_early_saves", "save_incomplete") == 1
    assert (engine.counted("saves"), engine.counted("skipped_saves")) == (1, 0)
    assert engine.sidecar.memory.lent_bytes == 0


def test_a_full_queue_that_refuses_early_files_costs_the_save_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing: the request had ended meanwhile, and the refusal was taken for one of its last part."""
    gate = engine.sidecar.hang["prepare_save"] = threading.Event()
    uploads, refused = engine.loop.worker.worker_side._upload_pool, [True]
    finish_behind(engine, tokens(900), A, engine.sidecar._arrival("prepare_save").is_set)
    try_submit = uploads.try_submit
    monkeypatch.setattr(uploads, "try_submit", lambda *work: None if refused and refused.pop() else try_submit(*work))
    gate.set()
    engine.loop.run(lambda: not engine.loop.scheduler.has_requests())

    assert A in engine.sidecar.manifests
    assert engine.counted("lost_early_saves", "queue_full") == 1
    assert (engine.counted("saves"), engine.counted("skipped_saves")) == (1, 0)
    assert engine.sidecar.memory.lent_bytes == 0


def test_early_saves_that_wait_keep_no_save_that_holds_blocks(engine: Engine) -> None:
    """Seen failing: four prompts that filled faster than the disk, and a chat's save ran out of time in the queue."""
    gate, prepare_save, num_waiting = threading.Event(), engine.sidecar.prepare_save, 0

    def early_waits(request: pb.PrepareSaveRequest, timeout_s: float) -> object:
        nonlocal num_waiting
        if request.early:
            num_waiting += 1
            gate.wait(10)
            num_waiting -= 1
        return prepare_save(request, timeout_s)

    engine.sidecar.prepare_save = early_waits
    for number in range(engine.loop.worker.worker_side._settings.save_threads + 1):
        engine.loop.add(
            f"long{number}", tokens(900, start=number), params=transfer(save=cache_ref(10 + number)), max_tokens=90
        )
    engine.loop.steps(40)
    engine.loop.add("chat", tokens(100, start=5), params=transfer(save=B))
    while "chat" not in engine.loop.finished:
        engine.loop.step()
    engine.loop.step()
    wait_until(lambda: B in engine.sidecar.manifests, what="the chat is saved")
    assert num_waiting > 0
    gate.set()
    engine.loop.settle()


def test_blocks_that_become_somebody_elses_are_not_shipped(start_engine: Callable[..., Engine]) -> None:
    """The copy begins only when the request has gone and a neighbour computes into its blocks.

    Seen failing without `take_overtaken`: what the neighbour computed was shipped under the first one's tokens. And, by
    the last two, without the look at its fault in `Saver.run`.
    """
    # No look-up: its thread may take longer than three steps.
    engine = start_engine(num_blocks=64, extra={"early_saves": "on", "match_prefix": False}, bounds=NOT_HELD)
    side, gate = engine.loop.worker.worker_side, threading.Event()
    for _ in range(side._settings.save_threads):
        side._upload_pool.try_submit(lambda: gate.wait(30) and None, "demo")
    engine.loop.add("gone", tokens(900), params=transfer(save=A))
    engine.loop.steps(3)
    engine.loop.abort("gone")
    engine.loop.add("neighbour", tokens(900, start=3), max_tokens=2)
    engine.loop.steps(4)
    gate.set()
    engine.loop.settle()

    assert engine.counted("lost_early_saves", "overtaken") == 1
    assert engine.sidecar.files == {}
    assert engine.sidecar.early_tokens == [], "a request that is over is not announced"
    side.take_results()
    assert side._saver._saves == {}, "its tokens do not stay"


def test_what_is_copied_during_the_step_that_overwrites_it_is_dropped(start_engine: Callable[..., Engine]) -> None:
    """vLLM 0.32 calls `start_load_kv` after the forward; before it, `handle_preemptions`.

    Seen failing with the word in the first one: a neighbour's KV was sealed under these tokens, and loaded.
    """
    # A lookup would decide in which step the first tokens are computed.
    extra = {"early_saves": "on", "match_prefix": False}
    engine = start_engine(num_blocks=64, max_num_batched_tokens=1024, extra=extra, bounds=NOT_HELD)
    loop, copying = engine.loop, threading.Event()
    saver, scheduler = loop.worker.worker_side._saver, loop.scheduler
    fill, start_load_kv = saver._fill, loop.worker.start_load_kv

    def late_fill(part: Part, *what: Any) -> None:
        if part.plan.cache_ref == A:
            assert copying.wait(20)
        fill(part, *what)

    def after_the_forward(*arguments: Any, **names: Any) -> None:
        if A in loop.worker._get_connector_metadata().overtaken and not copying.is_set():
            copying.set()
            loop.settle()
        start_load_kv(*arguments, **names)

    saver._fill, loop.worker.start_load_kv = late_fill, after_the_forward
    scheduler.max_num_scheduled_tokens = 600
    loop.add("gone", tokens(900), params=transfer(save=A))
    loop.step()
    scheduler.max_num_scheduled_tokens = 16
    loop.step()
    scheduler.max_num_scheduled_tokens = 1024
    loop.abort("gone")
    loop.play("neighbour", tokens(800, start=3), max_tokens=2)
    loop.forget_prefixes()
    answer = engine.save(tokens(900), B, name="second")
    loop.forget_prefixes()
    loop.play("again", [*tokens(900), *answer, 5], params=transfer(load=(B,)))

    assert engine.counted("lost_early_saves", "overtaken") == 1


def test_that_one_rank_is_done_does_not_keep_the_word_from_the_others(start_engine: Callable[..., Engine]) -> None:
    """Seen failing: one rank's end was taken for all, and another went on reading blocks of the next request."""
    engine = start_engine(extra={"early_saves": "on"}, bounds=NOT_HELD)
    side = engine.loop.connector.scheduler_side
    engine.loop.add("gone", tokens(900), params=transfer(save=A))
    engine.loop.run(lambda: bool(engine.sidecar.early_tokens))
    side.saves_ended([f"{A}@0"])
    engine.loop.abort("gone")

    assert side._running.take_overtaken() == (A,)


def test_a_preempted_request_ships_on_and_every_file_is_right(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(num_blocks=100, extra={"early_saves": "on"})
    prompts = {A: tokens(800), B: tokens(780, start=3)}
    requests = [
        engine.loop.add(ref, prompt, params=transfer(save=ref), max_tokens=100) for ref, prompt in prompts.items()
    ]
    engine.loop.run(lambda: not engine.loop.scheduler.has_requests(), steps=1000)
    answers = {ref: engine.loop.finished[ref] for ref in prompts}
    engine.loop.forget_prefixes()

    assert sum(request.num_preemptions for request in requests) > 0
    for ref, prompt in prompts.items():
        engine.loop.play(f"again {ref}", [*prompt, *answers[ref], 5], params=transfer(load=(ref,)))
    assert engine.counted("loads") == 2


def test_nothing_is_shipped_after_the_engine_was_told_to_forget(engine: Engine) -> None:
    """Seen failing: what the old weights had computed was shipped under the new ones' fingerprint."""
    request = engine.loop.add("save", tokens(900), params=transfer(save=A), max_tokens=20)
    engine.loop.run(lambda: request.num_computed_tokens >= 256)
    engine.loop.connector.scheduler_side.reset()
    engine.loop.run_to_end("save")

    assert engine.sidecar.early_tokens == []
    assert engine.sidecar.manifests == {}


@pytest.mark.parametrize(
    ("early_saves", "device", "sends"),
    [("auto", "cuda", True), ("auto", "cpu", False), ("on", "cpu", True), ("off", "cuda", False)],
)
def test_an_engine_on_the_cpu_keeps_its_cores_unless_told_otherwise(early_saves: str, device: str, sends: bool) -> None:
    settings = ConnectorSettings.from_extra_config({"sidecar": "s", "secret_file": "f", "early_saves": early_saves})

    assert settings.sends_ahead(device) is sends


def test_a_cpu_engine_ships_nothing_early_by_itself(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine()
    engine.save(tokens(900), A)

    assert engine.sidecar.early_tokens == []
    assert engine.counted("saves") == 1
