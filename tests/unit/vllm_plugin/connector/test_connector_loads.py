"""Loads, driven by vLLM's own scheduler; the loop checks every page that a step would read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.request import RequestStatus

from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.format.ids import BlockKey
from tests.kit.until import wait_until
from tests.unit.vllm_plugin.connector.conftest import Engine, cache_ref, transfer
from tests.unit.vllm_plugin.connector.fake_sidecar import FakeSidecar
from vllm_plugin.connector.copies.pages import Landed, PageCopy, Spent
from vllm_plugin.connector.loads import loading

A, B, C = cache_ref(1), cache_ref(2), cache_ref(3)
KEPT = BlockKey("block", "e" * 64, 0)
PROMPT = list(range(1, 151))


def report_of(engine: Engine, params_load: tuple[str, ...] = (A,)) -> pb.LoadReport:
    engine.loop.settle()
    return engine.sidecar.reports[f"request--{'-'.join(params_load)}"]


def saved(engine: Engine, prompt: list[int] = PROMPT, ref: str = A) -> list[int]:
    """Save a prompt and empty the engine; return the answer."""
    return engine.save(prompt, ref, forgets=True)


@pytest.mark.parametrize("num_tokens", [2, 15, 16, 17, 300])
def test_a_saved_prompt_is_loaded_whole_and_only_its_last_token_is_computed(engine: Engine, num_tokens: int) -> None:
    prompt = [(7 * i) % 401 for i in range(num_tokens)]
    answer = saved(engine, prompt)
    assert engine.loop.play("again", prompt, params=transfer(load=(A,))) == answer
    # 4 tokens are answered: the last prompt token and 3 of the answer are computed.
    assert engine.loop.computed["again"] == 4
    report = report_of(engine)
    assert (report.outcome, report.loaded_tokens, report.device_tokens) == (pb.LOAD_OUTCOME_LOADED, num_tokens - 1, 0)
    assert report.tier == pb.TIER_HOST
    assert report.size_bytes > 0


@pytest.mark.parametrize("num_shared", [33, 100, 149])
def test_a_new_context_starts_from_its_parents_kv_up_to_the_first_other_token(engine: Engine, num_shared: int) -> None:
    """A child's order names KV of another context. Its answer is that of an engine without any KV.

    Seen failing: without the name, 33 shared tokens were too few for a search by prefix.
    """
    child = PROMPT[:num_shared] + [400 - at for at in range(150 - num_shared)]
    cold = engine.loop.play("cold", child)
    saved(engine)
    assert engine.loop.play("child", child, params=transfer(load=(A,), save=B)) == cold
    assert engine.loop.computed["child"] == 150 - num_shared + 3


def test_a_prompt_of_one_token_is_computed_as_there_is_nothing_to_gain(engine: Engine) -> None:
    answer = saved(engine, [7])
    assert engine.loop.play("again", [7], params=transfer(load=(A,))) == answer
    assert report_of(engine).outcome == pb.LOAD_OUTCOME_NOT_NEEDED
    assert engine.sidecar.served_bytes == 0


def test_a_prompt_that_goes_on_is_loaded_up_to_the_last_saved_token(engine: Engine) -> None:
    answer = saved(engine)
    longer = [*PROMPT, *answer, 9, 9, 9]
    engine.loop.play("more", longer, params=transfer(load=(A,)))

    # 150 prompt tokens and 3 of the 4 answered ones have KV; the last answer token never was computed.
    assert report_of(engine).loaded_tokens == 153
    assert engine.loop.computed["more"] == len(longer) - 153 + 3


def test_a_prompt_that_differs_in_the_middle_of_a_page_keeps_what_comes_before(engine: Engine) -> None:
    saved(engine)
    other = [*PROMPT[:70], *(400 - i for i in range(60))]
    engine.loop.play("other", other, params=transfer(load=(A,)))

    assert report_of(engine).loaded_tokens == 70
    assert engine.loop.computed["other"] == 60 + 3


def test_the_candidate_with_the_longest_common_prefix_wins(engine: Engine) -> None:
    saved(engine, PROMPT[:40], A)
    saved(engine, PROMPT, B)
    engine.loop.play("again", PROMPT, params=transfer(load=(A, B)))

    assert report_of(engine, (A, B)).loaded_tokens == 149


def test_a_context_whose_name_holds_other_tokens_is_a_miss_that_says_so(engine: Engine) -> None:
    saved(engine, [token + 300 for token in PROMPT], A)
    engine.loop.play("turn", PROMPT, params=transfer(load=(A,)))

    assert (report_of(engine).outcome, report_of(engine).reason) == (pb.LOAD_OUTCOME_MISS, "other_tokens")
    assert engine.counted("missed_loads", "other_tokens") == 1


def test_only_what_the_engine_lacks_is_loaded_into_its_own_blocks(engine: Engine) -> None:
    engine.save(PROMPT, A, forgets=True)
    engine.loop.play("warm", PROMPT[:40])
    engine.sidecar.served_bytes = 0
    engine.loop.play("again", PROMPT, params=transfer(load=(A,)))

    report = report_of(engine)
    assert (report.device_tokens, report.loaded_tokens) == (32, 117)


def test_nothing_is_loaded_when_the_engine_has_it_all(engine: Engine) -> None:
    engine.save(PROMPT[:32], A)
    longer = PROMPT[:48]
    engine.loop.play("warm", longer)
    engine.loop.play("again", [*PROMPT[:32], 9], params=transfer(load=(A,)))

    report = report_of(engine)
    assert (report.outcome, report.device_tokens) == (pb.LOAD_OUTCOME_NOT_NEEDED, 32)
    assert engine.sidecar.served_bytes == 0


def test_another_engine_loads_what_this_one_saved(start_engine: Callable[..., Engine]) -> None:
    first = start_engine()
    answer = first.save(PROMPT, A)
    second = start_engine(sidecar=first.sidecar)
    assert second.loop.play("again", PROMPT, params=transfer(load=(A,))) == answer
    assert second.loop.computed["again"] == 4


def test_kv_of_another_fingerprint_is_a_miss(start_engine: Callable[..., Engine]) -> None:
    first = start_engine()
    first.save(PROMPT, A)
    second = start_engine(sidecar=first.sidecar, extra={"weights_epoch": "1"})
    second.loop.play("again", PROMPT, params=transfer(load=(A,)))

    report = report_of(second)
    assert (report.outcome, report.reason) == (pb.LOAD_OUTCOME_MISS, "fingerprint_mismatch")
    assert first.sidecar.served_bytes == 0


def test_an_unknown_ref_is_a_miss(engine: Engine) -> None:
    engine.loop.play("again", PROMPT, params=transfer(load=(A,)))

    report = report_of(engine)
    assert (report.outcome, report.reason) == (pb.LOAD_OUTCOME_MISS, "cache_ref_not_found")
    assert engine.loop.computed["again"] == 153


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"context_cache": None},
        {"context_cache": {"load": [A]}},
        {"context_cache": "v1.e30.00"},
        {"do_remote_prefill": True},
        transfer(load=(A,), save=B, secret=b"another secret, 32 bytes or more too"),
    ],
)
def test_without_a_token_of_ours_nothing_happens(engine: Engine, params: object) -> None:
    saved(engine)
    engine.loop.play("again", PROMPT, params=params)

    assert engine.loop.computed["again"] == 153
    assert engine.sidecar.served_bytes == 0
    assert set(engine.sidecar.manifests) == {A}


def test_a_request_that_must_not_read_caches_loads_nothing(engine: Engine) -> None:
    saved(engine)
    engine.loop.play("again", PROMPT, params=transfer(load=(A,)), skip_reading=True)

    assert engine.loop.computed["again"] == 153
    assert report_of(engine).reason == "prefix_cache_reading_off"


def test_a_corrupt_block_is_computed_instead_with_the_same_answer(engine: Engine) -> None:
    answer = saved(engine)
    engine.sidecar.corrupt(A)
    assert engine.loop.play("again", PROMPT, params=transfer(load=(A,))) == answer
    assert engine.loop.computed["again"] == 153
    report = report_of(engine)
    assert (report.outcome, report.reason) == (pb.LOAD_OUTCOME_FAILED, "corrupt_block")
    assert engine.counted("failed_loads", "corrupt_block") == 1


def test_a_bad_copy_in_the_arena_is_compared_by_the_sidecar_and_nothing_is_computed_again(engine: Engine) -> None:
    """Seen failing: without the second question the load fails, as does every later one that meets the copy."""
    answer = saved(engine)
    engine.sidecar.slot_copy = lambda data: bytes([*data[:-1], data[-1] ^ 0xFF])
    assert engine.loop.play("again", PROMPT, params=transfer(load=(A,))) == answer
    assert engine.loop.computed["again"] == 4
    report = report_of(engine)
    assert (report.outcome, report.tier) == (pb.LOAD_OUTCOME_LOADED, pb.TIER_DISK)
    assert engine.counted("failed_loads", "corrupt_block") == 0


def test_a_block_under_anothers_name_is_not_taken_for_it(engine: Engine) -> None:
    """Seen failing with the comparison left out: the request runs on the KV of other tokens."""
    answer = saved(engine)
    first, second = (engine.sidecar.files[file.name] for file in engine.sidecar.manifests[A].files[:2])
    engine.sidecar.slot_copy = lambda data: {first: second, second: first}.get(data, data)
    engine.sidecar.vouched = lambda data: ""
    assert engine.loop.play("again", PROMPT, params=transfer(load=(A,))) == answer
    assert report_of(engine).tier == pb.TIER_DISK


def test_a_slot_that_changes_while_it_is_copied_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the lease of a stopped engine has ended. Seen failing when the bytes are compared before the copy."""
    answer = saved(engine)
    layers = engine.loop.worker.worker_side._layers
    scatter, is_first = layers.scatter, [True]

    def overtaken(copies: Sequence[PageCopy], spent: Spent) -> list[Landed]:
        memory = np.frombuffer(engine.sidecar.memory.region.view, dtype=np.uint8)
        for copy in copies if is_first.pop() else ():
            start = copy.pages.ctypes.data - memory.ctypes.data
            memory[start : start + copy.pages.nbytes] ^= 0xFF
        is_first.append(False)
        return scatter(copies, spent)

    monkeypatch.setattr(layers, "scatter", overtaken)
    assert engine.loop.play("again", PROMPT, params=transfer(load=(A,))) == answer
    assert engine.counted("renewed_loads") == 1
    assert engine.counted("loads") == 1


def test_a_slot_that_was_lent_again_meanwhile_is_not_believed_whatever_it_holds(engine: Engine) -> None:
    """Seen failing without the comparison of generations."""
    answer = saved(engine)
    arena, seen = engine.sidecar.arena, list[int]()
    assert arena is not None

    def generation(offset: int) -> int:
        seen.append(offset)
        return 1 if len(seen) == 1 else 0

    arena.generation = generation
    assert engine.loop.play("again", PROMPT, params=transfer(load=(A,))) == answer
    assert engine.counted("renewed_loads") == 1
    assert len(seen) > 1


def test_a_block_whose_bytes_the_manifest_does_not_vouch_for_is_computed_instead(engine: Engine) -> None:
    """Seen failing: without the comparison in `Loader._arrival` the request is loaded and computes one token."""
    answer = saved(engine)
    engine.sidecar.vouched = lambda data: "0" * 32
    assert engine.loop.play("again", PROMPT, params=transfer(load=(A,))) == answer
    assert engine.loop.computed["again"] == 153
    assert report_of(engine).reason == "corrupt_block"


@pytest.mark.parametrize("vouched", [lambda data: "", None], ids=["a release before", "this one"])
def test_a_block_that_is_vouched_for_or_that_nobody_vouches_for_is_loaded(engine: Engine, vouched: object) -> None:
    answer = saved(engine)
    if vouched is not None:
        engine.sidecar.vouched = vouched
    assert engine.loop.play("again", PROMPT, params=transfer(load=(A,))) == answer
    assert report_of(engine).outcome == pb.LOAD_OUTCOME_LOADED


@pytest.mark.parametrize("answered", [[0], [0, 1, 2, 0], [0, 2, 1, 2], []])
def test_a_sidecar_that_answers_with_other_blocks_than_asked_for_is_not_believed(
    engine: Engine, answered: list[int]
) -> None:
    answer = saved(engine)
    engine.sidecar.answered_indices = lambda asked: answered
    assert engine.loop.play("again", PROMPT, params=transfer(load=(A,))) == answer
    assert report_of(engine).reason == "corrupt_block"


def test_a_sidecar_that_dies_in_the_middle_of_a_load_costs_time_only(engine: Engine) -> None:
    answer = saved(engine)
    engine.sidecar.hang["load_block"] = threading.Event()
    engine.loop.add("again", PROMPT, params=transfer(load=(A,)))
    engine.loop.connector.scheduler_side.begin(engine.loop.scheduler.requests["again"])
    _settle_lookup(engine)
    engine.loop.step()
    engine.sidecar.down = True
    engine.sidecar.hang["load_block"].set()

    assert engine.loop.run_to_end("again") == answer
    assert engine.loop.computed["again"] == 153


def test_a_load_past_its_deadline_fails_and_the_request_goes_on(engine: Engine) -> None:
    answer = saved(engine)
    hang = engine.sidecar.hang["load_block"] = threading.Event()
    engine.loop.add("again", PROMPT, params=transfer(load=(A,)))
    _settle_lookup(engine)
    engine.loop.step()
    engine.sidecar.wait_for("load_block")
    engine.clock.advance(s=60)
    hang.set()

    assert engine.loop.run_to_end("again") == answer
    assert engine.counted("failed_loads", "load_deadline") == 1


def test_a_load_that_no_thread_has_begun_is_given_up_at_its_deadline(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(bounds={"load_threads": 1})
    answer = saved(engine)
    hang = engine.sidecar.hang["load_block"] = threading.Event()
    engine.loop.add("first", PROMPT, params=transfer(load=(A,)))
    engine.loop.add("second", PROMPT[:149], params=transfer(load=(A,)))
    _settle_lookup(engine)
    engine.loop.step()
    engine.sidecar.wait_for("load_block")
    engine.clock.advance(s=60)
    engine.loop.step()

    # The first too: its thread hangs, and nobody waits for it any longer.
    assert engine.counted("failed_loads", "load_deadline") == 2
    hang.set()
    assert engine.loop.run_to_end("first") == answer
    assert engine.loop.run_to_end("second")


def test_an_engine_step_is_never_held_by_a_sidecar_that_does_not_answer(engine: Engine) -> None:
    saved(engine)
    engine.sidecar.hang["resolve"] = threading.Event()
    engine.loop.add("again", PROMPT, params=transfer(load=(A,)))
    engine.loop.add("other", [5, 6, 7], max_tokens=2)
    engine.loop.steps(3)

    assert "other" in engine.loop.finished
    assert engine.loop.computed["again"] == 0
    engine.clock.advance(ms=2_250)
    engine.loop.step()
    assert engine.loop.computed["again"] > 0
    engine.sidecar.hang["resolve"].set()
    engine.loop.run_to_end("again")
    assert report_of(engine).reason == "manifest_deadline"


@pytest.mark.parametrize(("tokens_per_ms", "limit_ms"), [(0.0, 2_250), (50.0, 562), (0.1, 1_687), (0.01, 2_250)])
def test_a_sidecar_is_waited_for_no_longer_than_the_prompt_takes_to_compute(
    engine: Engine, tokens_per_ms: float, limit_ms: int
) -> None:
    """Seen failing: each wait was 2 250 ms, and a prompt of 3 ms waited as long for a sidecar that hung."""
    saved(engine)
    engine.loop.connector.scheduler_side._estimate._tokens_per_ms = tokens_per_ms
    hang = engine.sidecar.hang["resolve"] = threading.Event()
    engine.loop.add("again", PROMPT, params=transfer(load=(A,)))
    engine.loop.step()
    engine.clock.advance(ms=limit_ms - 1)
    engine.loop.step()
    assert engine.loop.computed["again"] == 0
    engine.clock.advance(ms=1)
    engine.loop.step()

    assert engine.loop.computed["again"] > 0
    hang.set()


def test_a_sidecar_that_stays_silent_is_waited_for_only_briefly(engine: Engine) -> None:
    answer = saved(engine)
    engine.sidecar.forget("resolve")
    hang = engine.sidecar.hang["resolve"] = threading.Event()
    engine.loop.add("first", PROMPT, params=transfer(load=(A,)))
    engine.sidecar.wait_for("resolve")
    engine.clock.advance(ms=2_250)
    engine.sidecar.down = True
    hang.set()
    engine.loop.run_to_end("first")
    engine.loop.forget_prefixes()
    engine.sidecar.down = False
    hang.clear()
    engine.loop.add("second", PROMPT, params=transfer(load=(A,)))
    engine.loop.step()
    before = engine.loop.computed["second"]
    engine.clock.advance(ms=225)
    engine.loop.step()

    assert before == 0
    assert engine.loop.computed["second"] > 0
    hang.set()
    engine.loop.run_to_end("second")
    engine.loop.forget_prefixes()
    assert engine.loop.play("third", PROMPT, params=transfer(load=(A,))) == answer
    assert engine.loop.computed["third"] == 4


def test_aborting_a_request_while_it_loads_gives_its_blocks_back(engine: Engine) -> None:
    saved(engine)
    free = engine.loop.free_blocks
    hang = engine.sidecar.hang["load_block"] = threading.Event()
    engine.loop.add("again", PROMPT, params=transfer(load=(A,), save=B))
    _settle_lookup(engine)
    engine.loop.step()
    engine.loop.abort("again")
    engine.loop.step()

    assert engine.loop.free_blocks < free
    hang.set()
    engine.loop.run(lambda: not engine.loop.scheduler.has_requests())
    assert engine.loop.free_blocks == free
    assert B not in engine.sidecar.prepared


def test_a_preempted_request_loads_again_and_ends_right(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(num_blocks=26)
    answer = saved(engine)
    engine.loop.add("again", PROMPT, max_tokens=60, params=transfer(load=(A,)))
    engine.loop.add("rival", [3] * 150, max_tokens=90)
    request = engine.loop.scheduler.requests["again"]
    rival = engine.loop.scheduler.requests["rival"]
    engine.loop.run(lambda: {"again", "rival"} <= set(engine.loop.finished), steps=600)

    assert request.num_preemptions + rival.num_preemptions > 0
    assert engine.loop.finished["again"][:4] == answer


def test_aborting_a_preempted_request_while_it_loads_again_saves_nothing(engine: Engine) -> None:
    saved(engine)
    free = engine.loop.free_blocks
    request = engine.loop.add("again", PROMPT, max_tokens=90, params=transfer(load=(A,), save=B))
    engine.loop.run(lambda: request.num_output_tokens > 5)
    hang = engine.sidecar.hang["load_block"] = threading.Event()
    assert engine.loop.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.loop.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.loop.abort("again")
    hang.set()
    engine.loop.run(lambda: not engine.loop.scheduler.has_requests(), steps=300)

    # The load promised the whole prompt, so only that it had not ended tells that there is nothing to save.
    assert request.num_computed_tokens >= 150
    assert set(engine.sidecar.manifests) == {A}
    assert engine.loop.free_blocks == free


def test_each_turn_loads_the_one_before_and_saves_itself(engine: Engine) -> None:
    history, refs = PROMPT, [cache_ref(number) for number in range(10, 14)]
    engine.save(history, refs[0], name="turn0")
    for turn, (before, after) in enumerate(pairwise(refs), 1):
        engine.loop.forget_prefixes()
        history = [*history, *engine.loop.finished[f"turn{turn - 1}"], 7, 8, 9]
        engine.loop.play(f"turn{turn}", history, params=transfer(load=(before,), save=after))

        # The last answered token of the turn before, three new ones, and three of this answer.
        assert engine.loop.computed[f"turn{turn}"] == 7
        assert engine.sidecar.manifests[after].token_ids[: len(history)] == tuple(history)


def test_the_next_turn_waits_for_a_save_of_its_own_engine(engine: Engine) -> None:
    hang = engine.sidecar.hang["seal"] = threading.Event()
    engine.loop.add("first", PROMPT, params=transfer(save=A))
    while "first" not in engine.loop.finished:
        engine.loop.step()
    engine.loop.step()
    for copying in list(engine.loop.worker.worker_side._save_pool._live):
        copying.result(30)
    engine.loop.step()
    assert not engine.loop.scheduler.has_requests()
    engine.loop.forget_prefixes()
    engine.loop.add("again", PROMPT, params=transfer(load=(A,)))
    engine.loop.step()
    engine.clock.advance(ms=1_000)
    engine.loop.step()

    assert engine.loop.computed["again"] == 0
    hang.set()
    engine.loop.run_to_end("again")
    assert report_of(engine).outcome == pb.LOAD_OUTCOME_LOADED


def test_nobody_waits_for_a_save_that_was_given_up(engine: Engine) -> None:
    engine.sidecar.deleted.add(A)
    engine.save(PROMPT, A, forgets=True)
    engine.loop.add("again", PROMPT, params=transfer(load=(A,)))
    engine.loop.step()
    engine.loop.settle()
    engine.loop.step()

    assert engine.loop.computed["again"] > 0


def _start_while_pulled(engine: Engine, *, load: tuple[str, ...] = (A,)) -> None:
    """Begin a request whose first candidate is being pulled; return once its lookup has heard so."""
    engine.sidecar.pulling.add(load[0])
    engine.loop.add("again", PROMPT, params=transfer(load=load))
    engine.loop.step()
    engine.sidecar.wait_for("waiting")


def test_kv_on_its_way_from_a_peer_is_waited_for_beyond_the_manifest_deadline(engine: Engine) -> None:
    answer = saved(engine)
    _start_while_pulled(engine)
    engine.clock.advance(ms=2_000)
    engine.loop.step()

    assert engine.loop.computed["again"] == 0
    engine.sidecar.pulling.clear()
    assert engine.loop.run_to_end("again") == answer
    assert engine.loop.computed["again"] == 4


def test_a_pull_that_takes_too_long_is_computed_instead(engine: Engine) -> None:
    answer = saved(engine)
    _start_while_pulled(engine)
    engine.sidecar.limit_passed.set()

    assert engine.loop.run_to_end("again") == answer
    assert engine.loop.computed["again"] == 153
    report = report_of(engine)
    assert (report.outcome, report.reason) == (pb.LOAD_OUTCOME_MISS, "cache_ref_pending")


@pytest.mark.parametrize(("coming_ms", "num_computed"), [(2_900, 4), (3_100, 153)])
def test_a_pull_that_moves_is_waited_for_up_to_half_of_the_time_to_compute(
    engine: Engine, coming_ms: int, num_computed: int
) -> None:
    """Seen failing for the one in time: at 2 s all of the prompt was computed, 14 s for KV that came after 3 s."""
    answer = saved(engine)
    engine.loop.connector.scheduler_side._estimate._tokens_per_ms = len(PROMPT) / 10_000
    engine.sidecar.coming_ms = coming_ms
    _start_while_pulled(engine)
    num_asked = len(engine.sidecar.questions)
    engine.clock.advance(ms=2_000)
    engine.sidecar.limit_passed.set()
    if num_computed == 4:
        wait_until(lambda: len(engine.sidecar.questions) > num_asked, what="it asks again")
        engine.clock.advance(ms=2_000)
        engine.loop.step()
        assert engine.loop.computed["again"] == 0
        engine.sidecar.pulling.clear()

    assert engine.loop.run_to_end("again") == answer
    assert engine.loop.computed["again"] == num_computed


@pytest.mark.parametrize("announced_ms", [-1, 2_900])
def test_a_pull_that_brings_less_than_the_engine_computes_in_that_time_is_not_waited_for(
    engine: Engine, announced_ms: int
) -> None:
    """Seen failing, asked again: an estimate below 0 without an end, another one despite 144 tokens on the device."""
    answer = engine.save(PROMPT, A, forgets=announced_ms < 0)
    engine.loop.connector.scheduler_side._estimate._tokens_per_ms = len(PROMPT) / 10_000
    engine.sidecar.coming_ms = announced_ms
    _start_while_pulled(engine)
    num_asked = len(engine.sidecar.questions)
    engine.sidecar.limit_passed.set()
    lookup = engine.loop.connector.scheduler_side._requests["again"].lookup
    wait_until(lambda: lookup.future.done() or len(engine.sidecar.questions) > num_asked, what="it is over, or asks")
    engine.sidecar.pulling.clear()

    assert len(engine.sidecar.questions) == num_asked
    assert engine.loop.run_to_end("again") == answer


def test_a_request_that_ends_asks_no_longer_for_its_pull(engine: Engine) -> None:
    """Seen failing: the look-up of a client that had left kept its thread as long as half of the prompt takes."""
    saved(engine)
    engine.loop.connector.scheduler_side._estimate._tokens_per_ms = len(PROMPT) / 10_000
    engine.sidecar.coming_ms = 2_900
    _start_while_pulled(engine)
    num_asked = len(engine.sidecar.questions)
    lookup = engine.loop.connector.scheduler_side._requests["again"].lookup
    engine.loop.abort("again")
    engine.sidecar.limit_passed.set()
    wait_until(lambda: lookup.future.done() or len(engine.sidecar.questions) > num_asked, what="it is over, or asks")
    engine.sidecar.pulling.clear()

    assert len(engine.sidecar.questions) == num_asked


def test_one_question_names_all_that_the_sidecar_needs_to_choose(engine: Engine) -> None:
    saved(engine)
    engine.loop.connector.scheduler_side._estimate._tokens_per_ms = 4.0
    engine.loop.connector.scheduler_side._pending_saves.add(B)
    engine.sidecar.limit_passed.set()
    engine.loop.play("again", PROMPT, params=transfer(load=(A, B)))

    [asked] = engine.sidecar.questions[-1:]
    assert (list(asked.cache_refs), list(asked.saving)) == ([A, B], [B])
    assert (asked.wait_ms, asked.pull_wait_ms, asked.compute_us_per_token) == (500, 500, 250)
    assert np.frombuffer(asked.token_ids, "<u4").tolist() == PROMPT
    assert (asked.tenant, asked.tokens_min, asked.bring) == ("demo", 64, True)


def test_a_pull_that_ends_with_nothing_is_not_waited_for_any_longer(engine: Engine) -> None:
    _start_while_pulled(engine)
    engine.sidecar.pulling.clear()
    engine.loop.run_to_end("again")

    assert engine.loop.computed["again"] == 153
    assert report_of(engine).reason == "cache_ref_not_found"


def test_an_answer_with_other_tokens_is_never_loaded(engine: Engine) -> None:
    """The sidecar compares tokens too; the engine believes its own comparison alone."""
    saved(engine, [token + 300 for token in PROMPT], A)
    other = engine.sidecar.manifests[A]
    engine.sidecar.resolve = lambda *_: (other, pb.ResolveResponse(tier=pb.TIER_HOST))
    engine.loop.play("again", PROMPT, params=transfer(load=(A,)))

    assert engine.loop.computed["again"] == 153
    assert report_of(engine).reason == "other_tokens"


def test_a_sidecar_that_falls_silent_during_a_pull_holds_nothing_up(engine: Engine) -> None:
    saved(engine)
    _start_while_pulled(engine)
    engine.clock.advance(ms=2_250)
    engine.loop.step()

    assert engine.loop.computed["again"] > 0
    engine.sidecar.limit_passed.set()
    engine.loop.run_to_end("again")


def test_requests_that_wait_for_pulls_hold_no_other_lookup_up(engine: Engine) -> None:
    saved(engine)
    pulling = [cache_ref(100 + number) for number in range(8)]
    engine.sidecar.pulling.update(pulling)
    for number, ref in enumerate(pulling):
        engine.loop.add(f"waits {number}", [number, *PROMPT], max_tokens=1, params=transfer(load=(ref,)))
    engine.sidecar.wait_for("waiting")
    engine.loop.add("again", PROMPT, params=transfer(load=(A,)))
    engine.loop.connector.scheduler_side._requests["again"].lookup.future.result(30)

    assert engine.loop.connector.scheduler_side._requests["again"].lookup.result(0).num_tokens == 150
    engine.sidecar.pulling.clear()


def _settle_lookup(engine: Engine) -> None:
    pool = engine.loop.connector.scheduler_side._lookup._pool
    for future in list(pool._live):
        future.result(30)


def test_a_load_in_the_middle_of_a_shutdown_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing: what the shutdown had cancelled was waited for without an end."""
    monkeypatch.setattr(loading, "_PART_BYTES", 1)  # a part for each file
    saved(engine, [(7 * i) % 401 for i in range(900)])
    loader, hang = engine.loop.worker.worker_side._loader, threading.Event()
    write = loader._write

    def late_write(*arguments: Any) -> None:
        assert hang.wait(20)
        write(*arguments)

    loader._write = late_write
    engine.loop.add("again", [(7 * i) % 401 for i in range(900)], params=transfer(load=(A,)))
    for _ in range(3):
        engine.loop.step()
        for looking_up in list(engine.loop.connector.scheduler_side._lookup._pool._live):
            looking_up.result(30)
    wait_until(lambda: loader._copiers._work_queue.qsize() > 1, what="two files wait for a thread")
    loader.close()
    hang.set()

    engine.loop.settle(20)
    assert engine.counted("failed_loads") == 1


def test_a_context_larger_than_the_arena_is_loaded_through_it_by_batches(start_engine: Callable[..., Engine]) -> None:
    """Seen failing with one lease for all: what the arena could not hold beside the rest came in frames."""
    engine = start_engine(sidecar=FakeSidecar(arena_bytes=40_000))
    prompt = [(7 * i) % 401 for i in range(900)]
    answer = engine.save(prompt, A, forgets=True)
    engine.loop.play("again", [*prompt, *answer, 5], params=transfer(load=(A,)))

    assert engine.sidecar.served_bytes > 3 * 40_000
    assert report_of(engine).tier == pb.TIER_HOST
    assert engine.sidecar.leases == set()


def test_copied_blocks_make_room_for_the_rest_of_a_load(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(sidecar=FakeSidecar(arena_bytes=40_000))
    answer = engine.save(PROMPT, A, forgets=True)
    assert engine.sidecar.memory.allocate(20_000)
    engine.loop.play("again", [*PROMPT, *answer, 5], params=transfer(load=(A,)))

    assert engine.counted("loads") == 1
    assert engine.counted("failed_loads") == 0
    assert engine.sidecar.leases == set()


def test_a_load_that_the_arena_has_no_room_for_at_all_is_computed(
    start_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(sidecar=FakeSidecar(arena_bytes=40_000))
    answer = engine.save(PROMPT, A, forgets=True)
    assert engine.sidecar.memory.allocate(39_000)
    waits_ms, load_blocks = [], engine.sidecar.load_blocks

    def asked(request: Any, timeout_s: float) -> Any:
        waits_ms.append(request.room_wait_ms)
        return load_blocks(request, timeout_s)

    monkeypatch.setattr(engine.sidecar, "load_blocks", asked)
    assert engine.loop.play("again", PROMPT, params=transfer(load=(A,))) == answer
    assert engine.counted("failed_loads", "storage_full") == 1
    assert waits_ms == [500], "one question, which waits in the sidecar"


@pytest.mark.parametrize("spoil", [False, True])
def test_the_engine_ends_the_lease_of_every_load(engine: Engine, spoil: bool) -> None:
    engine.save(PROMPT, A, forgets=True)
    if spoil:
        engine.sidecar.corrupt(A)
    engine.loop.play("again", PROMPT, params=transfer(load=(A,)))
    engine.sidecar.wait_for("end_load" if spoil else "report_load")  # what is told of a load ends its lease
    engine.loop.settle()

    assert engine.counted("loads") == (0 if spoil else 1)
    assert engine.sidecar.leases == set()


def test_a_new_request_starts_from_whatever_the_tenant_has_when_that_is_enough_to_matter(
    start_engine: Callable[..., Engine],
) -> None:
    for tokens_min, matches, loads in ((64, True, 1), (len(PROMPT) + 1, True, 0), (64, False, 0)):
        engine = start_engine(extra={"match_prefix": matches}, bounds={"match_tokens_min": tokens_min})
        engine.loop.play("first", PROMPT, params=transfer(save=A))
        engine.loop.forget_prefixes()
        engine.loop.play("other", [*PROMPT, 7], params=transfer(save=B))

        assert engine.counted("loads") == loads


def test_kept_text_is_never_taken_for_the_same_tokens_with_an_image(start_engine: Callable[..., Engine]) -> None:
    """Two images of one size have the same tokens. Seen to fail with images not looked at: KV of the text was found."""
    engine = start_engine()
    engine.save(PROMPT, A, forgets=True)
    side = engine.loop.connector.scheduler_side

    def asks(name: str, **fields: Any) -> bool:
        params = {"request_id": name, "kv_transfer_params": transfer(save=B), "prompt_token_ids": [*PROMPT, 7]}
        plain = {"num_prompt_tokens": len(PROMPT) + 1, "lora_request": None, "mm_features": [], "prompt_embeds": None}
        side.begin(SimpleNamespace(**params, **plain | fields, skip_reading_prefix_cache=False, arrival_time=1.0))
        return side._requests[name].lookup is not None

    assert asks("text")
    assert not asks("one image", mm_features=["one"])
    assert not asks("another image", mm_features=["another"])


def test_nothing_is_promised_while_a_rank_has_no_arena_and_again_when_it_has(engine: Engine) -> None:
    """Seen failing: each load was promised, failed in the worker, and was computed after all."""
    answer, sidecar, link = engine.save(PROMPT, A), engine.sidecar, engine.loop.worker.worker_side._link
    arena, sidecar.arena = sidecar.arena, None
    link.lost(link.terms())
    engine.save([9, *PROMPT], B, name="other", forgets=True)
    assert engine.loop.play("without", PROMPT, params=transfer(load=(A,))) == answer
    assert (engine.counted("missed_loads", "no_arena"), engine.counted("failed_loads")) == (1, 0)

    sidecar.arena = arena
    engine.clock.advance(s=10)
    engine.save([8, *PROMPT], C, name="later", forgets=True)
    engine.loop.play("again", PROMPT, params=transfer(load=(A,)))

    assert engine.counted("loads") == 1
