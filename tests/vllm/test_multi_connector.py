"""vLLM's MultiConnector over ours and its ExampleConnector, in both orders, each failing: answers equal cold ones."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contextcache.names import new_cache_ref
from kv_sidecar.client import EngineSidecarClient
from tests.kit.several_connectors import ORDERS, several
from tests.kit.sidecar_process import SidecarProcess, fault
from tests.kit.tiny_engine import Start, TinyEngine
from tests.kit.tiny_model import make_tiny_model
from tests.kit.until import wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.thorough]

TOLERANCE = 1e-3
PROMPT = random.Random(1).choices(range(400), k=300)
IN_BLOCKS = 288
"""Tokens of the prompt in whole blocks of 32, which the other connector keeps."""


def start(order: str, sidecar: SidecarProcess, folder: Path) -> TinyEngine:
    transfer = several(order, sidecar.address, folder / "secret", folder / "other")
    arguments = {"disable_hybrid_kv_cache_manager": True, "disable_log_stats": False}
    return TinyEngine(Start(str(folder / "model"), engine_args=arguments, kv_transfer=transfer))


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    process = SidecarProcess(tmp_path)
    process.start()
    yield process
    process.kill()


@pytest.mark.parametrize("order", ORDERS)
def test_the_first_with_tokens_loads_both_save_and_neither_s_failure_changes_an_answer(
    order: str, sidecar: SidecarProcess, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path / "model", seed=0)
    others = tmp_path / "other"
    others.mkdir()
    cache_ref = new_cache_ref()
    answers: dict[str, dict[str, Any]] = {}
    with start(order, sidecar, tmp_path) as engine:

        def ask(name: str, **orders: Any) -> None:
            assert engine.order("forget", connector=False)
            answers[name] = engine.ask(PROMPT, **orders)

        ask("cold")
        ask("saved by ours too", save=cache_ref)
        client = EngineSidecarClient(sidecar.address, timeout_s=5)
        wait_until(lambda: fault(lambda: client.get_manifest("demo", cache_ref, 1)) is None, what="the KV is durable")
        client.close()
        ask("by the first", load=(cache_ref,))
        (others / "fail").touch()
        ask("the other fails", load=(cache_ref,))
        (others / "fail").unlink()
        shutil.rmtree(others)
        others.mkdir()
        ask("ours alone", load=(cache_ref,))
        sidecar.kill()
        ask("ours fails", load=(cache_ref,))
        (others / "fail").touch()
        ask("both fail", load=(cache_ref,))

    cold, cached = answers["cold"], {name: answer["cached_tokens"] for name, answer in answers.items()}
    first = len(PROMPT) - 1 if order == "ours first" else IN_BLOCKS
    assert {name: answer["token_ids"] for name, answer in answers.items()} == dict.fromkeys(answers, cold["token_ids"])
    for answer in answers.values():
        assert max(abs(a - b) for a, b in zip(answer["logprobs"], cold["logprobs"], strict=True)) < TOLERANCE
    assert (cached["cold"], cached["saved by ours too"], cached["by the first"]) == (0, IN_BLOCKS, first)
    assert (cached["ours alone"], cached["ours fails"]) == (len(PROMPT) - 1, IN_BLOCKS)
