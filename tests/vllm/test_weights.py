"""Other weights under the same path, and an engine that is told to forget: everything is computed, equal to cold."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from contextcache.names import new_cache_ref
from kv_sidecar.client import EngineSidecarClient
from tests.kit.sidecar_process import SidecarProcess, fault
from tests.kit.tiny_engine import SECRET, Start, TinyEngine
from tests.kit.tiny_model import make_tiny_model
from tests.kit.until import wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.thorough]

TOLERANCE = 1e-3
PROMPT = random.Random(1).choices(range(400), k=300)
OTHER = random.Random(2).choices(range(400), k=300)


@dataclass
class Place:
    """A model's directory, whose content tests change, and a sidecar that outlives the engines."""

    model: Path
    sidecar: SidecarProcess
    secret_file: Path

    def start(self) -> TinyEngine:
        return TinyEngine(Start(str(self.model), self.sidecar.address, str(self.secret_file)))

    def put(self, seed: int) -> None:
        """Put a model of the same shape, with weights of its own, into the directory."""
        shutil.rmtree(self.model, ignore_errors=True)
        make_tiny_model(self.model, seed=seed)

    def save(self, engine: TinyEngine, prompt: list[int]) -> tuple[str, dict[str, Any]]:
        """Answer a prompt, save it, and empty the engine's own cache."""
        cache_ref = new_cache_ref()
        answer = engine.ask(prompt, save=cache_ref)
        client = EngineSidecarClient(self.sidecar.address, timeout_s=5)
        wait_until(lambda: fault(lambda: client.get_manifest("demo", cache_ref, 1)) is None, what="the KV is durable")
        client.close()
        assert engine.order("forget", connector=False)
        return cache_ref, answer


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    sidecar = SidecarProcess(tmp_path)
    sidecar.start()
    (tmp_path / "secret").write_bytes(SECRET)
    found = Place(tmp_path / "model", sidecar, tmp_path / "secret")
    found.put(seed=0)
    yield found
    sidecar.kill()


def differs(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True))


def test_kv_of_other_weights_under_the_same_path_is_computed_again_and_the_own_is_restored(place: Place) -> None:
    with place.start() as engine:
        cache_ref, of_the_old = place.save(engine, PROMPT)
    place.put(seed=1)
    with place.start() as engine:
        loaded = engine.ask(PROMPT, load=(cache_ref,))
        engine.order("forget", connector=False)
        cold = engine.ask(PROMPT)
    place.put(seed=0)
    with place.start() as engine:
        restored = engine.ask(PROMPT, load=(cache_ref,))

    assert differs(of_the_old, cold) > 10 * TOLERANCE
    assert (loaded["cached_tokens"], loaded["token_ids"]) == (0, cold["token_ids"])
    assert differs(loaded, cold) < TOLERANCE
    assert restored["cached_tokens"] == len(PROMPT) - 1
    assert differs(restored, of_the_old) < TOLERANCE


def test_after_a_sleep_an_engine_on_a_cpu_computes_and_is_never_wrong(place: Place) -> None:
    """vLLM 0.32 pauses, clears its caches and calls its worker, which keeps its memory.

    The CPU's kernels pack weights into memory of their own, where they cannot be compared. Seen failing: expected a
    restore.
    """
    with place.start() as engine:
        before, cold = place.save(engine, PROMPT)
        engine.order("sleep", level=1)
        awake = engine.ask(PROMPT, load=(before,))
        engine.order("sleep", level=2, change=0.01)
        updated = engine.ask(PROMPT, load=(before,))
        engine.order("forget", connector=False)
        updated_cold = engine.ask(PROMPT)

    assert awake["token_ids"] == cold["token_ids"]
    assert differs(awake, cold) < TOLERANCE
    assert awake["cached_tokens"] == 0
    assert (updated["cached_tokens"], updated["token_ids"]) == (0, updated_cold["token_ids"])
    assert differs(updated, updated_cold) < TOLERANCE


def test_an_engine_told_to_forget_loads_nothing_it_saved_before(place: Place) -> None:
    with place.start() as engine:
        for forget, prompt in ((("forget", {"connector": True}), PROMPT), (("pause", {}), OTHER)):
            before, cold = place.save(engine, prompt)
            assert engine.order(forget[0], **forget[1])
            computed = engine.ask(prompt, load=(before,))

            assert (computed["cached_tokens"], computed["token_ids"]) == (0, cold["token_ids"])
            assert differs(computed, cold) < TOLERANCE
            engine.order("forget", connector=False)
            after, _ = place.save(engine, prompt)
            assert engine.ask(prompt, load=(after,))["cached_tokens"] == len(prompt) - 1
