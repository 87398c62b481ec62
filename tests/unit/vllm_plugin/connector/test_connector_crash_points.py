"""The connector's crash points are those it passes, and a save has been counted when it is said to have ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.vllm_plugin.connector.conftest import Engine, cache_ref, transfer
from vllm_plugin.connector.loads import loading
from vllm_plugin.connector.saves import saving
from vllm_plugin.crash_points import BETWEEN_HANDED_BLOCKS, BETWEEN_LOADED_BLOCKS, POINTS

A = cache_ref(1)
PROMPT = list(range(1, 151))


def test_a_save_and_a_load_pass_every_point_and_no_other(
    start_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing with a point taken out of saving.py."""
    passed: list[str] = []
    monkeypatch.setattr(saving, "crash_point", passed.append)
    monkeypatch.setattr(loading, "crash_point", passed.append)
    monkeypatch.setattr(loading, "_PART_BYTES", 1)  # a part for each file
    engine = start_engine()
    engine.save(PROMPT, A, forgets=True)
    engine.loop.play("again", PROMPT, params=transfer(load=(A,)))

    assert tuple(dict.fromkeys(passed)) == POINTS
    # Two whole blocks and a tail: the first one is handed over alone, the others together.
    assert passed.count(BETWEEN_HANDED_BLOCKS) == 2
    assert passed.count(BETWEEN_LOADED_BLOCKS) == 3


def test_a_save_is_counted_and_its_files_are_gone_before_it_is_said_to_have_ended(engine: Engine) -> None:
    """Seen failing with `end_save` called in `_hand_over`, as it was: nothing was counted yet."""
    seen: list[tuple[int, int]] = []
    worker = engine.loop.worker.worker_side
    end_save = worker._results.end_save

    def watched(ref: str) -> None:
        seen.append((engine.counted("saves"), engine.sidecar.memory.lent_bytes))
        end_save(ref)

    worker._results.end_save = watched
    engine.save(PROMPT, A)
    engine.loop.settle()

    assert seen == [(1, 0)]
