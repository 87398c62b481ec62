"""Requests that end in the middle of their prompt: what was computed is saved, and a retry goes on there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.vllm_plugin.connector.conftest import Engine, cache_ref, transfer
from tests.unit.vllm_plugin.connector.test_connector_saves_again import CONTEXT, read_only

A = cache_ref(1)
PROMPT = [1 + (7 * number) % 800 for number in range(1000)]
CHUNK = 256
"""Tokens that the loop computes in a step."""


def interrupt(engine: Engine, num_steps: int, prompt: list[int] = PROMPT) -> int:
    """Abort a request after some chunks of its prompt; return how many tokens were computed."""
    engine.loop.add("gone", prompt, params=transfer(save=A))
    request = engine.loop.scheduler.requests["gone"]
    engine.loop.run(lambda: request.num_computed_tokens >= num_steps * CHUNK or request.num_output_tokens > 0)
    num_tokens = int(request.num_computed_tokens)
    engine.loop.abort("gone")
    engine.loop.run(lambda: not engine.loop.scheduler.has_requests())
    engine.loop.step()
    engine.loop.settle()
    return num_tokens


@pytest.mark.parametrize("early", ["on", "off"])
@pytest.mark.parametrize("windows", [(0,), (40, 0)], ids=["full attention", "window and full"])
def test_a_retry_computes_what_the_interrupted_request_did_not(
    start_engine: Callable[..., Engine], early: str, windows: tuple[int, ...]
) -> None:
    """Seen failing with the whole prompt as the least: nothing was saved."""
    engine = start_engine(extra={"early_saves": early}, windows=windows)
    num_tokens = interrupt(engine, 3)
    engine.loop.forget_prefixes()
    engine.loop.play("again", PROMPT, params=transfer(load=(A,)))

    assert CHUNK <= num_tokens < len(PROMPT)
    assert engine.sidecar.manifests[A].token_ids == tuple(PROMPT[:num_tokens])
    assert engine.loop.computed["again"] - 3 == len(PROMPT) - num_tokens
    assert engine.counted("failed_loads") == 0


def test_no_block_is_kept_from_others_once_the_save_has_ended(engine: Engine) -> None:
    free = engine.loop.free_blocks
    interrupt(engine, 2)

    assert engine.loop.free_blocks == free
    assert engine.sidecar.memory.lent_bytes == 0


def test_a_beginning_that_no_retry_would_find_is_not_saved(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(bounds={"match_tokens_min": 600})
    interrupt(engine, 1)

    assert engine.sidecar.manifests == {}
    assert engine.sidecar.abandoned == {A: "not_computed"}


def test_a_part_of_lost_kv_is_not_saved_under_the_name_of_all_of_it(start_engine: Callable[..., Engine]) -> None:
    """Seen failing without the look at `again`: no later turn would have brought the rest back."""
    engine = start_engine(max_num_batched_tokens=64)
    engine.loop.add("gone", [*CONTEXT, 7, 7], params=read_only(A, name="gone"))
    request = engine.loop.scheduler.requests["gone"]
    engine.loop.run(lambda: request.num_computed_tokens >= 64)
    engine.loop.abort("gone")
    engine.loop.run(lambda: not engine.loop.scheduler.has_requests())
    engine.loop.step()
    engine.loop.settle()

    assert engine.sidecar.manifests == {}
