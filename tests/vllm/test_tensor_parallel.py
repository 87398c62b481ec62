"""Two ranks of one model, each with half of the heads: saved when both have sealed, restored by two new ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from contextcache.names import new_cache_ref
from tests.kit.sidecar_process import SidecarProcess
from tests.kit.tiny_engine import SECRET, Start, TinyEngine
from tests.kit.tiny_model import make_tiny_model

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

TOLERANCE = 1e-3


def test_what_two_ranks_saved_two_new_ones_restore(tmp_path: Path) -> None:
    sidecar = SidecarProcess(tmp_path, block_tokens=64, memory_limit_bytes=32 << 20)
    sidecar.start()
    (tmp_path / "secret").write_bytes(SECRET)
    model = str(make_tiny_model(tmp_path / "model"))
    start = Start(
        model,
        sidecar.address,
        str(tmp_path / "secret"),
        engine_args={"tensor_parallel_size": 2},
        connector={"early_saves": "on"},
    )
    prompt, ref = random.Random(1).choices(range(400), k=900), new_cache_ref()
    with TinyEngine(start) as engine:
        cold = engine.ask(prompt, save=ref)
        again = engine.ask([*prompt, *cold["token_ids"], 5], load=(ref,))
    sidecar.kill()
    sidecar.start()
    with TinyEngine(start) as engine:
        warm = engine.ask(prompt, load=(ref,))
    sidecar.kill()

    assert again["cached_tokens"] > 0
    assert (warm["cached_tokens"], warm["token_ids"]) == (len(prompt) - 1, cold["token_ids"])
    assert warm["logprobs"] == pytest.approx(cold["logprobs"], abs=TOLERANCE)
