"""Speculative decoding: a context has the tokens the model has said, and the KV of those, never a guess's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from contextcache.names import new_cache_ref
from tests.kit.sidecar_process import SidecarProcess
from tests.kit.tiny_engine import SECRET, Start, TinyEngine
from tests.kit.tiny_model import make_tiny_model, make_tiny_windowed_model

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

TOLERANCE = 1e-3
PROMPT = random.Random(1).choices(range(400), k=300)
OTHERS = [random.Random(seed).choices(range(400), k=200) for seed in (2, 3)]
NUM_ANSWERED = 350
"""With the prompt more than is shipped early, and no multiple of what a step may say."""


@dataclass
class Place:
    """An engine that guesses, started as often as wanted beside one sidecar."""

    start: Start
    sidecar: SidecarProcess

    def save(self, engine: TinyEngine, prompt: list[int], **more: Any) -> tuple[str, dict[str, Any], list[int]]:
        """Answer and save; return the ref, the answer and the tokens that were saved."""
        cache_ref = new_cache_ref()
        answer = engine.ask(prompt, save=cache_ref, **more)
        return cache_ref, answer, list(self.sidecar.wait_sealed(cache_ref).token_ids)


@pytest.fixture(scope="module", params=["ngram", "ngram-windows", "draft-model"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp(request.param)
    guessing: dict[str, Any] = {"num_speculative_tokens": 4}
    if request.param == "draft-model":
        guessing |= {"method": "draft_model", "model": str(_make_draft_model(directory / "draft"))}
    else:
        guessing |= {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if request.param == "ngram-windows":
        model = make_tiny_windowed_model(directory / "model", full_layers=True)
    else:
        model = make_tiny_model(directory / "model")
    sidecar = SidecarProcess(directory)
    sidecar.start()
    (directory / "secret").write_bytes(SECRET)
    arguments = {"speculative_config": guessing, "disable_log_stats": False}
    start = Start(str(model), sidecar.address, str(directory / "secret"), arguments, {"early_saves": "on"})
    yield Place(start, sidecar)
    sidecar.kill()


def _make_draft_model(directory: Path) -> Path:
    """Write what often says the same as the model, but not always."""
    import torch

    make_tiny_model(directory)
    path, source = directory / "model.safetensors", torch.Generator().manual_seed(1)
    noisy = {name: w + 0.001 * torch.randn(w.shape, generator=source) for name, w in load_file(path).items()}
    save_file(noisy, path, metadata={"format": "pt"})
    return directory


def test_what_is_saved_are_the_tokens_the_model_said_and_a_new_engine_goes_on_from_them(place: Place) -> None:
    with TinyEngine(place.start) as engine:
        cache_ref, answer, saved = place.save(engine, PROMPT, num_tokens=NUM_ANSWERED)
        history = [*PROMPT, *answer["token_ids"], 5]
        totals = engine.order("totals")
        engine.order("forget", connector=False)
        cold = engine.ask(history, num_tokens=40)
    with TinyEngine(place.start) as engine:
        restored = engine.ask(history, load=(cache_ref,), num_tokens=40)

    assert 0 < totals["vllm:spec_decode_num_accepted_tokens"] < totals["vllm:spec_decode_num_draft_tokens"]
    assert saved == history[:-2]
    assert (cold["cached_tokens"], restored["cached_tokens"]) == (0, len(saved))
    assert restored["token_ids"] == cold["token_ids"]
    assert restored["logprobs"] == pytest.approx(cold["logprobs"], abs=TOLERANCE)


def test_an_answer_may_end_anywhere_among_guesses(place: Place) -> None:
    with TinyEngine(place.start) as engine:
        for num_answered in range(1, 9):
            cache_ref, answer, saved = place.save(engine, PROMPT, num_tokens=num_answered)
            history = [*PROMPT, *answer["token_ids"]]
            engine.order("forget", connector=False)
            restored = engine.ask([*history, 5], load=(cache_ref,))
            engine.order("forget", connector=False)
            cold = engine.ask([*history, 5])
            engine.order("forget", connector=False)

            assert saved == history[:-1]
            assert (restored["cached_tokens"], restored["token_ids"]) == (len(saved), cold["token_ids"])
            assert restored["logprobs"] == pytest.approx(cold["logprobs"], abs=TOLERANCE)


@pytest.mark.parametrize("place", ["ngram"], indirect=True)
def test_requests_that_are_preempted_while_they_guess_are_saved_and_restored_right(place: Place) -> None:
    few = {**place.start.engine_args, "num_gpu_blocks_override": 34, "enable_prefix_caching": False}
    with TinyEngine(replace(place.start, engine_args=few)) as engine:
        refs = [new_cache_ref() for _ in OTHERS]
        asked = [{"prompt": p, "save": ref, "num_tokens": NUM_ANSWERED} for p, ref in zip(OTHERS, refs, strict=True)]
        answers = engine.ask_all(asked)
        histories = [[*p, *a["token_ids"], 5] for p, a in zip(OTHERS, answers, strict=True)]
        saved = [list(place.sidecar.wait_sealed(ref).token_ids) for ref in refs]
        loads = [{"prompt": h, "load": (ref,)} for h, ref in zip(histories, refs, strict=True)]
        restored = engine.ask_all(loads)
        cold = [engine.ask(history) for history in histories]

        assert engine.order("totals")["vllm:num_preemptions"] > 0
        assert saved == [history[:-2] for history in histories]
        assert [answer["cached_tokens"] for answer in restored] == [len(tokens) for tokens in saved]
        for warm, computed in zip(restored, cold, strict=True):
            assert warm["token_ids"] == computed["token_ids"]
            assert warm["logprobs"] == pytest.approx(computed["logprobs"], abs=TOLERANCE)
