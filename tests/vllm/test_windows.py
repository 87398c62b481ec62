"""A model with windows behind the whole stack: vLLM's own memory for it, and contexts that outlive all processes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from contextcache.names import new_cache_ref
from tests.kit.stack import KEY, MODEL
from tests.kit.tiny_engine import SECRET, Start, TinyEngine
from tests.kit.tiny_model import make_tiny_windowed_model
from tests.kit.tiny_stack import TinyStack

pytestmark = [pytest.mark.timeout(300), pytest.mark.thorough]

PROMPT = random.Random(3).choices(range(400), k=200)
MORE = [5, 6, 7]


@pytest.mark.parametrize("full_layers", [True, False], ids=["mixed", "all sliding"])
def test_a_model_with_windows_starts_with_its_own_memory_and_answers_as_without_the_connector(
    tmp_path: Path, full_layers: bool
) -> None:
    """Its blocks are as many and as large: a connector without hybrid memory would cost it several times the KV."""
    model = str(make_tiny_windowed_model(tmp_path / "model", full_layers=full_layers))
    (tmp_path / "secret").write_bytes(SECRET)
    with TinyEngine(Start(model)) as plain:
        groups, answer = plain.facts["groups"], plain.ask(PROMPT)
    with TinyEngine(Start(model, f"unix://{tmp_path}/nobody.sock", str(tmp_path / "secret"))) as engine:
        found = engine.ask(PROMPT, load=(new_cache_ref(),), save=new_cache_ref())

        assert engine.facts["groups"] == groups
        assert not [name for name in engine.order("counts") if name.startswith("left_alone")]
    assert "SlidingWindowSpec" in groups
    assert (found["token_ids"], found["cached_tokens"]) == (answer["token_ids"], 0)
    assert found["logprobs"] == pytest.approx(answer["logprobs"], abs=1e-6)


@pytest.mark.parametrize("full_layers", [True, False], ids=["mixed", "all sliding"])
def test_a_context_of_a_model_with_windows_goes_on_after_everything_was_killed(
    tmp_path: Path, full_layers: bool
) -> None:
    make_tiny_windowed_model(tmp_path / "model", full_layers=full_layers)
    body = {"model": MODEL, "temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    with (
        TinyStack(tmp_path, engine_blocks=1024, patient=True) as stack,
        httpx.Client(base_url=stack.url, headers={"authorization": f"Bearer {KEY}"}, timeout=120) as client,
    ):

        def ask(path: str, **more: object) -> dict[str, Any]:
            return client.post(path, json=body | more).raise_for_status().json()  # type: ignore[no-any-return]

        created = ask("/v1/context", prompt=PROMPT)
        session_id, first = created["session_id"], created["choices"][0]["token_ids"]
        for part in ("engine", "sidecar"):
            stack.kill(part)
        for part in ("sidecar", "engine"):
            stack.start(part)
        restored = ask("/v1/completions", prompt=MORE, session_id=session_id, context_mode="append")
        cold = ask("/v1/completions", prompt=[*PROMPT, *first, *MORE])

        assert stack.counted("engine", "contextcache_connector_events_total", event="left_alone") == 0
    context = restored["usage"]["context"]
    assert (context["source"], context["cached_tokens"]) == ("disk", len(PROMPT) + len(first) - 1)
    assert restored["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
