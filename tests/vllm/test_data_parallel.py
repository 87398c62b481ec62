"""Two engines of one pod on one sidecar, both rank 0 of 1: saves and loads at once, none of them mixed up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from contextcache.names import new_cache_ref
from tests.kit.caller import Caller
from tests.kit.sidecar_process import SidecarProcess
from tests.kit.tiny_engine import SECRET, Start, TinyEngine
from tests.kit.tiny_model import make_tiny_model
from tests.kit.tiny_stack import TinyStack

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

TOLERANCE = 1e-3
ROUNDS, AT_ONCE = 3, 4
BLOCK_TOKENS = 64


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    process = SidecarProcess(tmp_path, block_tokens=BLOCK_TOKENS, memory_limit_bytes=1 << 20)
    process.start()
    yield process
    process.kill()


def test_engines_that_save_and_load_at_once_get_what_either_has_saved(tmp_path: Path, sidecar: SidecarProcess) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    model = str(make_tiny_model(tmp_path / "model"))
    start = Start(model, sidecar.address, str(tmp_path / "secret"), connector={"early_saves": "on"})
    source = random.Random(1)
    with ThreadPoolExecutor(2) as callers, TinyEngine(start) as one, TinyEngine(start) as other:
        engines, saved = (one, other), []
        for _ in range(ROUNDS):
            # Half of the prompts begin alike: both engines then save the same blocks.
            begin = source.choices(range(400), k=300)
            asked = [
                [
                    {"prompt": begin[: 300 * (n % 2)] + source.choices(range(400), k=400), "save": new_cache_ref()}
                    for n in range(AT_ONCE)
                ]
                for _ in engines
            ]
            # Each also loads what the other one saved in the round before.
            loads = [[{"prompt": p, "load": (ref,)} for p, ref, _ in mine] for mine in reversed(saved[-2:])] or [[], []]
            both = [ask + load for ask, load in zip(asked, loads, strict=True)]
            answers = list(callers.map(lambda pair: pair[0].ask_all(pair[1]), zip(engines, both, strict=True)))
            for answered, load, before in zip(answers, loads, reversed(saved[-2:]), strict=False):
                for warm, (prompt, _, cold) in zip(answered[AT_ONCE:], before, strict=True):
                    assert (warm["cached_tokens"], warm["token_ids"]) == (len(prompt) - 1, cold["token_ids"])
                    assert warm["logprobs"] == pytest.approx(cold["logprobs"], abs=TOLERANCE)
                assert len(load) == AT_ONCE
            for ask, answered in zip(asked, answers, strict=True):
                saved.append([(q["prompt"], q["save"], a) for q, a in zip(ask, answered, strict=False)])
                for question, answer in zip(ask, answered, strict=False):
                    manifest = sidecar.wait_sealed(question["save"])
                    assert list(manifest.token_ids) == [*question["prompt"], *answer["token_ids"][:-1]]
            for engine in engines:
                engine.order("forget", connector=False)
        counts = [engine.order("counts") for engine in engines]

    assert [count["saves"] for count in counts] == 2 * [ROUNDS * AT_ONCE]
    assert [count["loads"] for count in counts] == 2 * [(ROUNDS - 1) * AT_ONCE]


def test_vllms_own_data_parallel_engines_restore_what_the_other_has_saved(tmp_path: Path) -> None:
    """One API server deals turns out: a context is loaded by whichever engine its turn meets."""
    stack = TinyStack(tmp_path / "tiny", engine_args=["--data-parallel-size", "2"], patient=True)
    with stack:
        caller = Caller(stack)
        sessions = [caller.create(prompt=f"{n}: {'a long story ' * 20}")["session_id"] for n in range(8)]
        for session_id in sessions:
            caller.wait_sealed(session_id)
        turns = []
        for _ in range(2):
            caller.forget_prefixes()
            turns.append(
                [caller.complete(session_id=id_, prompt=" and then", context_commit=False) for id_ in sessions]
            )
        counts = [
            stack.counted("engine", "contextcache_connector_events_total", event=event, engine=engine)
            for event in ("saves", "loads")
            for engine in "01"
        ]
        caller.close()
    stack.clean()

    assert min(counts) > 0
    for one, other in zip(*turns, strict=True):
        assert one["choices"][0]["text"] == other["choices"][0]["text"]
        for turn in (one, other):
            assert turn["usage"]["context"]["cached_tokens"] == turn["usage"]["context"]["context_tokens"] - 1
