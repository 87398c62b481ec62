"""A load whose thread hangs, as a disk can make it: the request goes on, and the thread never writes again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from contextcache.errors import SidecarUnavailable
from tests.unit.vllm_plugin.connector.conftest import Engine, cache_ref, transfer
from vllm_plugin.connector.loads.loading import Load, LoadPhase

A = cache_ref(1)
PROMPT = list(range(1, 151))


def start_hanging(engine: Engine, names: list[str]) -> threading.Event:
    """Begin loads that hang before their first block; return what lets them go on."""
    hang = engine.sidecar.hang["load_block"] = threading.Event()
    for name in names:
        engine.loop.add(name, PROMPT, params=transfer(load=(A,)))
    for looking_up in list(engine.loop.connector.scheduler_side._lookup._pool._live):
        looking_up.result(30)
    engine.loop.step()
    engine.sidecar.wait_for("load_block")
    return hang


def step_to_end(engine: Engine, name: str) -> list[int]:
    """Step without waiting for the threads."""
    for _ in range(50):
        if name in engine.loop.finished:
            return engine.loop.finished[name]
        engine.loop.step()
    raise AssertionError("it did not finish")


def test_a_load_that_hangs_is_taken_back_at_its_deadline_and_the_request_is_computed(engine: Engine) -> None:
    """Seen failing with the give-up of running loads taken out of `_give_up_late`: the request never finished."""
    answer = engine.save(PROMPT, A, forgets=True)
    hang = start_hanging(engine, ["again"])
    engine.clock.advance(ms=4_000)
    engine.loop.step()
    assert "again" not in engine.loop.finished

    engine.clock.advance(ms=2_000)

    assert step_to_end(engine, "again") == answer
    assert engine.loop.computed["again"] == 153
    assert engine.counted("failed_loads", "load_deadline") == 1
    hang.set()
    engine.loop.settle()
    # The thread has found out by itself, and says nothing more.
    assert engine.counted("failed_loads") == 1
    assert engine.counted("loads") == 0


def test_a_thread_that_comes_back_late_never_writes_to_blocks_that_are_somebody_elses(
    start_engine: Callable[..., Engine],
) -> None:
    """Seen failing with the check taken out of `Load.begin_writing`: wrong KV was found in the other's blocks."""
    engine = start_engine(num_blocks=16)
    engine.save(PROMPT, A, forgets=True)
    loader = engine.loop.worker.worker_side._loader
    write, begun, hang = loader._write, threading.Event(), threading.Event()

    def late_write(*args: Any) -> None:
        begun.set()
        assert hang.wait(60)
        write(*args)

    loader._write = late_write
    engine.loop.add("again", PROMPT, params=transfer(load=(A,)))
    for looking_up in list(engine.loop.connector.scheduler_side._lookup._pool._live):
        looking_up.result(30)
    engine.loop.step()
    assert begun.wait(30)
    engine.clock.advance(s=60)
    step_to_end(engine, "again")
    engine.loop.forget_prefixes()
    engine.loop.add("other", [400 - i for i in range(150)], max_tokens=20)
    engine.loop.steps(3)

    hang.set()
    engine.loop.settle()

    engine.loop.run_to_end("other")  # checks every page at every step


def test_while_every_thread_hangs_loads_fail_at_once_and_later_ones_work_again(
    start_engine: Callable[..., Engine],
) -> None:
    """Seen failing with the check taken out of `_start_load`: the load was tried, and waited for its deadline."""
    engine = start_engine(bounds={"load_threads": 1})
    answer = engine.save(PROMPT, A, forgets=True)
    hang = start_hanging(engine, ["first"])
    engine.clock.advance(s=60)
    step_to_end(engine, "first")
    engine.loop.forget_prefixes()

    engine.loop.add("second", PROMPT, params=transfer(load=(A,)))
    for looking_up in list(engine.loop.connector.scheduler_side._lookup._pool._live):
        looking_up.result(30)
    assert step_to_end(engine, "second") == answer
    assert engine.counted("failed_loads", "disk_hangs") == 1

    hang.set()
    engine.loop.settle()
    engine.loop.step()
    engine.loop.forget_prefixes()
    assert engine.loop.play("third", PROMPT, params=transfer(load=(A,))) == answer
    assert engine.loop.computed["third"] == 4


def test_a_load_that_fails_while_threads_write_ends_when_the_last_one_stops() -> None:
    """Seen failing with an `end` that looks at no phase: the blocks went back in the middle of the write."""
    load = Load(None, None, 0)
    load.begin_writing()
    load.begin_writing()

    assert not load.end("load_deadline")
    assert not load.end("another reason")
    assert (load.phase, load.is_over) == (LoadPhase.ABANDONED, True)
    with pytest.raises(SidecarUnavailable):
        load.begin_writing()
    assert not load.stop_writing()
    assert load.stop_writing()
    assert (load.phase, load.reason) == (LoadPhase.ENDED, "load_deadline")


def test_a_load_ends_once() -> None:
    load = Load(None, None, 0)
    load.begin_writing()

    assert not load.stop_writing()
    assert load.end("")
    assert not load.end("load_deadline")
    with pytest.raises(SidecarUnavailable):
        load.begin_writing()


def test_a_load_that_is_abandoned_while_a_thread_writes_gives_its_blocks_back_behind_the_write(engine: Engine) -> None:
    """Seen failing when `stop_writing` tells nobody: the request waited for ever."""
    answer = engine.save(PROMPT, A, forgets=True)
    layers, begun, hang = engine.loop.worker.worker_side._layers, threading.Event(), threading.Event()
    scatter = layers.scatter

    def slow(*args: Any) -> Any:
        begun.set()
        assert hang.wait(60)
        return scatter(*args)

    layers.scatter = slow
    engine.loop.add("again", PROMPT, params=transfer(load=(A,)))
    for looking_up in list(engine.loop.connector.scheduler_side._lookup._pool._live):
        looking_up.result(30)
    engine.loop.step()
    assert begun.wait(30)
    engine.clock.advance(s=60)
    engine.loop.steps(3)
    assert "again" not in engine.loop.finished
    hang.set()

    assert engine.loop.run_to_end("again") == answer
    assert engine.loop.computed["again"] == 153
    assert engine.counted("failed_loads", "load_deadline") == 1
