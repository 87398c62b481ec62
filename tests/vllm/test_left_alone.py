"""Models whose KV is not carried: the engine starts as it would without us, keeps vLLM's memory, answers the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from contextcache.model import new_cache_ref
from tests.kit.stack import KEY, MODEL
from tests.kit.tiny_engine import SECRET, Start, TinyEngine
from tests.kit.tiny_model import make_tiny_windowed_model
from tests.kit.tiny_stack import TinyStack

pytestmark = [pytest.mark.timeout(300), pytest.mark.thorough]

PROMPT = random.Random(3).choices(range(400), k=200)


@pytest.mark.parametrize(
    ("full_layers", "reason"), [(True, "several_groups"), (False, "unsupported_layers")], ids=["mixed", "all sliding"]
)
def test_a_model_with_windows_starts_with_its_own_memory_and_answers_as_without_the_connector(
    tmp_path: Path, full_layers: bool, reason: str
) -> None:
    model = str(make_tiny_windowed_model(tmp_path / "model", full_layers=full_layers))
    (tmp_path / "secret").write_bytes(SECRET)
    with TinyEngine(Start(model)) as plain:
        groups, answer = plain.facts["groups"], plain.ask(PROMPT)
    with TinyEngine(Start(model, f"unix://{tmp_path}/nobody.sock", str(tmp_path / "secret"))) as engine:
        found = engine.ask(PROMPT, load=(new_cache_ref(),), save=new_cache_ref())

        assert engine.facts["groups"] == groups
        assert engine.order("counts").get(f"left_alone {reason}") == 1
        assert sum("is left alone" in line for line in engine.log) == 1
    assert "SlidingWindowSpec" in groups
    assert (found["token_ids"], found["cached_tokens"]) == (answer["token_ids"], 0)
    assert found["logprobs"] == pytest.approx(answer["logprobs"], abs=1e-6)


def test_contexts_of_a_model_with_windows_are_computed_each_turn_and_say_why(tmp_path: Path) -> None:
    make_tiny_windowed_model(tmp_path / "model", full_layers=True)
    body = {"model": MODEL, "temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    with (
        TinyStack(tmp_path, engine_blocks=1024, patient=True) as stack,
        httpx.Client(base_url=stack.url, headers={"authorization": f"Bearer {KEY}"}, timeout=120) as client,
    ):

        def ask(path: str, **more: object) -> dict[str, Any]:
            return client.post(path, json=body | more).raise_for_status().json()  # type: ignore[no-any-return]

        created = ask("/v1/context", prompt=PROMPT)
        known = ask("/v1/completions", prompt=PROMPT, session_id=created["session_id"])
        context = client.get(f"/v1/context/{created['session_id']}").raise_for_status().json()
        cold = ask("/v1/completions", prompt=PROMPT)

        assert stack.counted("engine", "contextcache_connector_events_total", event="left_alone") == 1
        assert stack.counted("sidecar", "contextcache_sidecar_refused_saves_total", code="several_groups") == 2
    assert created["usage"]["context"]["reason"] == "several_groups"
    assert known["usage"]["context"]["reason"] == "several_groups"
    assert context["holder"]["reason"] == "several_groups"
    assert [answer["choices"][0]["token_ids"] for answer in (created, known)] == 2 * [cold["choices"][0]["token_ids"]]
