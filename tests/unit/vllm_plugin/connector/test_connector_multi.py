"""Ours and another connector under vLLM's MultiConnector, in both orders: the first with tokens loads, both save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.request import RequestStatus

from tests.kit.scheduler_loop import LoopConfig, make_vllm_config, ours
from tests.unit.vllm_plugin.connector.conftest import Engine, cache_ref, transfer
from tests.unit.vllm_plugin.connector.toy_connector import PlainToyConnector, ToyConnector, ToyHandshake
from vllm_plugin.connector.connector import ConnectorStats
from vllm_plugin.connector.engine_check import UncarriedEngine, check_failure_policy

A, B = (cache_ref(number) for number in (1, 2))
PROMPT = list(range(1, 151))
LONG = [1 + (7 * number) % 800 for number in range(900)]
HERE = "tests.unit.vllm_plugin.connector"
ORDERS = ["ours first", "ours last"]


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> type[PlainToyConnector]:
    for name, value in (("stored", {}), ("handshakes", []), ("num_loaded", 0), ("fails", False), ("is_held", False)):
        monkeypatch.setattr(PlainToyConnector, name, value)
    monkeypatch.setattr(PlainToyConnector, "is_async", False)
    return PlainToyConnector


@pytest.fixture
def start(start_engine: Callable[..., Engine], tmp_path: Path) -> Callable[..., Engine]:
    def start(order: str, *, other: str = "ToyConnector", extra: dict[str, Any] | None = None, **more: Any) -> Engine:
        return start_engine(multi=children(order, tmp_path / "secret", other=other, extra=extra), **more)

    return start


def children(order: str, secret: Path, *, other: str, extra: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    settings = {"sidecar": "unix:///nowhere", "secret_file": str(secret), **(extra or {})}
    own = {
        "kv_connector": "LoopConnector",
        "kv_connector_module_path": f"{HERE}.loop_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    toy = {"kv_connector": other, "kv_connector_module_path": f"{HERE}.toy_connector", "kv_role": "kv_both"}
    return [own, toy] if order == ORDERS[0] else [toy, own]


def ask(engine: Engine, prompt: list[int] = PROMPT, *, name: str = "again", **orders: Any) -> tuple[list[int], int]:
    """Return the answer, and how many tokens of the prompt were computed."""
    engine.loop.forget_prefixes()
    answer = engine.loop.play(name, prompt, params=transfer(**orders) if orders else None)
    return answer, engine.loop.computed[name] - len(answer) + 1


@pytest.mark.parametrize("is_async", [True, False])
def test_the_first_that_has_tokens_loads_and_both_save(
    start: Callable[..., Engine], toy: type[PlainToyConnector], order: str, is_async: bool
) -> None:
    toy.is_async = is_async
    engine = start(order)
    answer = engine.save(PROMPT, A)
    by_us, computed = ask(engine, load=(A,), save=B)

    assert (A in engine.sidecar.manifests, B in engine.sidecar.manifests) == (True, True)
    assert by_us == answer
    assert computed == (1 if order == ORDERS[0] else len(PROMPT) % 16)
    assert bool(PlainToyConnector.num_loaded) is (order != ORDERS[0])
    toy.stored.clear()
    assert ask(engine, name="ours alone", load=(B,)) == (answer, 1)
    ask(engine, name="plain")
    assert ask(engine, name="the other alone") == (answer, len(PROMPT) % 16)


def test_where_ours_fails_the_other_loads(
    start: Callable[..., Engine], toy: type[PlainToyConnector], order: str
) -> None:
    engine = start(order)
    answer = engine.save(PROMPT, A)
    engine.sidecar.down = True

    assert ask(engine, load=(A,), save=B) == (answer, len(PROMPT) % 16)
    assert B not in engine.sidecar.manifests


@pytest.mark.parametrize("is_async", [True, False])
def test_where_the_other_fails_all_is_computed_and_no_wrong_kv_is_saved(
    start: Callable[..., Engine], toy: type[PlainToyConnector], order: str, is_async: bool
) -> None:
    engine = start(order, extra={"early_saves": "on"})
    toy.is_async = is_async
    answer = engine.loop.play("first", LONG)
    toy.fails = True
    again, computed = ask(engine, LONG, save=A)

    assert again == answer
    assert computed >= len(LONG)
    toy.stored.clear()
    assert ask(engine, LONG, name="third", load=(A,)) == (answer, 1)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_request_that_ends_while_the_other_loads_is_not_saved(
    start: Callable[..., Engine], toy: type[PlainToyConnector], order: str, is_async: bool
) -> None:
    """Seen failing: vLLM counts tokens as computed before they are loaded, and blocks of others were saved."""
    engine = start(order)
    toy.is_async = is_async
    engine.loop.play("first", PROMPT)
    engine.loop.forget_prefixes()
    toy.is_held = True
    request = engine.loop.add("gone", PROMPT, params=transfer(save=A))
    if is_async:
        engine.loop.run(lambda: request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)
    else:
        engine.loop.scheduler.schedule()
    assert request.num_computed_tokens >= len(PROMPT) // 16 * 16
    engine.loop.abort("gone")
    toy.is_held = False
    for _ in range(3):
        engine.loop.step()
        engine.loop.settle()

    assert engine.sidecar.manifests == {}
    assert engine.sidecar.abandoned == {A: "not_computed"}


def test_beside_one_without_hybrid_memory_ours_saves_too(start: Callable[..., Engine], order: str) -> None:
    """Found by reading: vLLM then calls `request_finished`, whose default saves nothing."""
    engine = start(order, other="PlainToyConnector")
    answer = engine.save(PROMPT, A)
    PlainToyConnector.stored.clear()

    assert ask(engine, load=(A,)) == (answer, 1)


def test_the_other_s_handshake_is_its_own(start: Callable[..., Engine], order: str) -> None:
    """Found by reading: each got the first one's handshake, and the engine did not start."""
    engine = start(order)
    worker, scheduler = engine.loop.worker, engine.loop.connector
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
    engine.save(PROMPT, A)

    assert [type(each) for each in ToyConnector.handshakes] == [ToyHandshake]
    assert A in engine.sidecar.manifests


def test_the_first_request_of_an_engine_waits_for_the_ranks(start: Callable[..., Engine], order: str) -> None:
    engine = start(order)
    ours(engine.loop.connector).scheduler_side.identity.facts = None
    rank = ours(engine.loop.worker).worker_side.facts
    engine.loop.add("first", PROMPT, params=transfer(save=A))
    engine.loop.step()
    waiting = engine.loop.computed["first"]
    ours(engine.loop.connector).scheduler_side.learn_ranks([rank])
    engine.loop.run_to_end("first")

    assert waiting == 0
    assert A in engine.sidecar.manifests


def test_without_the_ranks_a_request_is_computed_after_a_second(start: Callable[..., Engine], order: str) -> None:
    engine = start(order)
    ours(engine.loop.connector).scheduler_side.identity.facts = None
    engine.loop.add("first", PROMPT, params=transfer(save=A))
    engine.loop.step()
    engine.clock.advance(s=2)
    engine.loop.run_to_end("first")
    engine.loop.settle()

    assert engine.sidecar.abandoned == {A: "ranks_unknown"}


def test_counts_of_a_child_are_read_in_another_process() -> None:
    """Found by reading: vLLM's logger raised because it did not know the class by its name."""
    stats = MultiConnector.build_kv_connector_stats({"ContextCacheConnector": {"saves": 1}})

    assert stats is not None
    assert stats["ContextCacheConnector"] == ConnectorStats(data={"saves": 1})


def test_a_worker_obeys_the_policy_of_the_multiconnector(tmp_path: Path, model_directory: Path) -> None:
    """Found by reading: the child's own policy was read, and a failed load would have ended its request."""
    extra = {"connectors": children(ORDERS[0], tmp_path / "secret", other="ToyConnector")}
    name = f"{MultiConnector.__module__}:MultiConnector"
    fails, recomputes = (
        make_vllm_config(LoopConfig(model_directory, name, extra=extra, policy=policy))
        for policy in ("fail", "recompute")
    )

    with set_current_vllm_config(recomputes):
        check_failure_policy(fails)
    with set_current_vllm_config(fails), pytest.raises(UncarriedEngine, match="would end its request"):
        check_failure_policy(recomputes)


@pytest.mark.parametrize(("layout", "other", "is_refused"), [("BLNHC", "LBHNC", True), ("", "LBHNC", False)])
def test_beside_one_that_asks_for_a_layout_ours_asks_for_none(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, other: str, is_refused: bool
) -> None:
    monkeypatch.setattr(ToyConnector, "get_required_kvcache_layout", classmethod(lambda _, __: other))
    extra = {"connectors": children(ORDERS[0], tmp_path / "secret", other="ToyConnector", extra={"layout": layout})}
    config = make_vllm_config(LoopConfig(model_directory, f"{MultiConnector.__module__}:MultiConnector", extra=extra))
    config.device_config.device_type = "cuda"

    if is_refused:
        with pytest.raises(ValueError, match="layout mismatch"):
            MultiConnector.get_required_kvcache_layout(config)
    else:
        assert MultiConnector.get_required_kvcache_layout(config) == other
