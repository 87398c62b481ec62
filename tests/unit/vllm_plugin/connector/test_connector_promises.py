"""A save carries the promise and the placements that its order asks for; a checkpoint of its prompt carries none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from contextcache.identity import KV_TRANSFER_KEY, sign_kv_transfer, verify_kv_transfer
from contextcache.names import prompt_ref
from tests.unit.vllm_plugin.connector.conftest import SECRET, Engine, cache_ref, transfer

A = cache_ref(1)
PROMPT = list(range(1, 151))


@pytest.mark.parametrize("early", ["on", "off"])
@pytest.mark.parametrize("windows", [(0,), (40, 0)], ids=["full attention", "window and full"])
def test_a_save_asks_for_the_promise_of_its_order(
    start_engine: Callable[..., Engine], early: str, windows: tuple[int, ...]
) -> None:
    """Seen failing: without `retain_ms` in the plan the sidecar was asked for nothing."""
    engine = start_engine(extra={"early_saves": early}, windows=windows)
    order = verify_kv_transfer(transfer(save=A)[KV_TRANSFER_KEY], SECRET)
    order = replace(order, retain_ms=60_000, pinned=True, placements=("demote",))
    engine.loop.play("save", PROMPT, params={KV_TRANSFER_KEY: sign_kv_transfer(order, SECRET)})
    asked, placed = engine.sidecar.asked_promises, engine.sidecar.asked_placements

    assert asked[A] == {(60_000, True)}
    assert placed[A] == {("demote",)}
    assert placed.get(prompt_ref(A), {()}) == {()}
    assert {retain_ms for retain_ms, _ in asked.get(prompt_ref(A), {(0, True)})} == {0}
