"""KV in eight bits: it comes back as it was, and no engine that keeps its KV otherwise is given it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from contextcache.names import new_cache_ref
from tests.kit.sidecar_process import SidecarProcess
from tests.kit.tiny_engine import SECRET, Start, TinyEngine
from tests.kit.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.thorough,
    pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="this CPU keeps no KV in eight bits"),
]

TOLERANCE = 1e-3
PROMPT = random.Random(1).choices(range(400), k=300)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    process = SidecarProcess(tmp_path)
    process.start()
    yield process
    process.kill()


def test_kv_in_eight_bits_is_restored_and_is_nothing_to_engines_with_other_bits(
    tmp_path: Path, sidecar: SidecarProcess
) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    model = str(make_tiny_model(tmp_path / "model"))

    def start(kv_dtype: str) -> TinyEngine:
        arguments = {"kv_cache_dtype": kv_dtype}
        return TinyEngine(Start(model, sidecar.address, str(tmp_path / "secret"), engine_args=arguments))

    cold: dict[str, dict[str, Any]] = {}
    refs: dict[str, str] = {}
    for kv_dtype in ("fp8_e4m3", "fp8_e5m2", "auto"):
        with start(kv_dtype) as engine:
            loaded = engine.ask(PROMPT, load=tuple(refs.values()))
            engine.order("forget", connector=False)
            ref = refs[kv_dtype] = new_cache_ref()
            cold[kv_dtype] = engine.ask(PROMPT, save=ref)
            sidecar.wait_sealed(ref)
            refused = engine.order("counts").get("refused_manifests fingerprint_mismatch", 0)

        assert (loaded["cached_tokens"], refused) == (0, min(1, len(cold) - 1))
        assert loaded["token_ids"] == cold[kv_dtype]["token_ids"]
    with start("fp8_e4m3") as engine:
        restored = engine.ask(PROMPT, load=(refs["fp8_e5m2"], refs["auto"], refs["fp8_e4m3"]))
    own = cold["fp8_e4m3"]
    apart = [abs(a - b) for a, b in zip(cold["auto"]["logprobs"], own["logprobs"], strict=True)]

    assert (restored["cached_tokens"], restored["token_ids"]) == (len(PROMPT) - 1, own["token_ids"])
    assert restored["logprobs"] == pytest.approx(own["logprobs"], abs=TOLERANCE)
    assert max(apart) > TOLERANCE, "nothing was kept in eight bits"
