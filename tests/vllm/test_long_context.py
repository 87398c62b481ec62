"""A context of 100 000 tokens through an arena of a quarter of its bytes: saved by pieces, restored whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from contextcache.names import new_cache_ref
from tests.kit.sidecar_process import SidecarProcess
from tests.kit.tiny_engine import SECRET, Start, TinyEngine
from tests.kit.tiny_model import make_tiny_model
from tests.kit.until import wait_until

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

NUM_TOKENS = 100_000
BYTES_A_TOKEN = 1024
"""Two layers' keys and values of two heads of 32 float32."""
TOLERANCE = 1e-3


def test_a_hundred_thousand_tokens_pass_through_an_arena_of_a_quarter_of_them(tmp_path: Path) -> None:
    sidecar = SidecarProcess(tmp_path, memory_limit_bytes=NUM_TOKENS * BYTES_A_TOKEN // 4)
    sidecar.start()
    (tmp_path / "secret").write_bytes(SECRET)
    model = str(make_tiny_model(tmp_path / "model", max_model_len=NUM_TOKENS + 128))
    arguments = {"max_model_len": NUM_TOKENS + 128, "max_num_batched_tokens": 8192}
    start = Start(
        model, sidecar.address, str(tmp_path / "secret"), engine_args=arguments, connector={"early_saves": "on"}
    )
    prompt, ref = random.Random(1).choices(range(400), k=NUM_TOKENS), new_cache_ref()
    with TinyEngine(start) as engine:
        cold = engine.ask(prompt, save=ref)
        wait_until(
            lambda: "saves" in (counts := engine.order("counts")) or "skipped" in str(counts), what="it is saved"
        )
        assert engine.order("counts")["saves"] == 1
    with TinyEngine(start) as engine:
        warm = engine.ask(prompt, load=(ref,))
        counts = engine.order("counts")
    sidecar.kill()

    assert (warm["cached_tokens"], warm["token_ids"]) == (NUM_TOKENS - 1, cold["token_ids"])
    assert warm["logprobs"] == pytest.approx(cold["logprobs"], abs=TOLERANCE)
    assert counts["loads"] == 1
    assert counts["loaded_bytes"] >= NUM_TOKENS * BYTES_A_TOKEN
