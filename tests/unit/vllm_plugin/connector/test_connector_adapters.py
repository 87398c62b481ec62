"""What an adapter is follows from what vLLM holds in memory, and a name that has meant two things means none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.request import LoRARequest

from contextcache.clock import ManualClock
from tests.kit.scheduler_loop import ToyAdapter
from tests.kit.until import wait_until
from tests.unit.vllm_plugin.connector.conftest import Engine, cache_ref, transfer
from vllm_plugin.connector.identity import adapters
from vllm_plugin.connector.identity.adapters import AdapterWord, KnownAdapters, LoadedAdapters, content_digest
from vllm_plugin.connector.metadata import Adapter

SETTINGS = {"lora_dtype": "auto"}
PROMPT = list(range(1, 101))


def adapter(*, adapter_id: int = 1, value: float = 1.0, module: str = "q", shape: tuple[int, int] = (2, 4)) -> Any:
    layer = LoRALayerWeights(module, 2, 4, torch.full(shape, value), torch.ones(4, 2))
    packed = PackedLoRALayerWeights("kv", 2, [4, None], [torch.ones(2, 4), None], [torch.ones(4, 2), None], [1, None])
    return LoRAModel(adapter_id, 2, {module: layer, "kv": packed})


def request(name: str = "a", adapter_id: int = 1, *, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=adapter_id, load_inplace=load_inplace)


@pytest.fixture
def loaded() -> LoadedAdapters:
    return LoadedAdapters(0, None)


def word_of(loaded: LoadedAdapters, adapter_id: int = 1) -> AdapterWord:
    """Ask until the adapter is read."""

    def ask() -> AdapterWord:
        loaded.ask([adapter_id])
        (word,) = (word for word in loaded.take_words() if word.adapter_id == adapter_id)
        return word

    return wait_until(ask, is_so=lambda word: bool(word.digest or word.reason), what="it is read")


def test_a_digest_is_of_the_content_alone() -> None:
    first = content_digest(adapter(), SETTINGS)

    assert content_digest(adapter(adapter_id=7), SETTINGS) == first
    others = [adapter(value=1.5), adapter(module="k"), adapter(shape=(4, 2))]
    digests = {content_digest(other, SETTINGS) for other in others} | {content_digest(adapter(), {"lora_dtype": "x"})}
    assert len(digests | {first}) == 5


def test_an_adapter_with_what_nobody_knows_has_no_digest(loaded: LoadedAdapters) -> None:
    odd = adapter()
    odd.loras["q"].secret = object()
    loaded.seen(request(), odd)

    assert word_of(loaded).reason == "adapter_unknown"


def test_the_same_content_read_again_is_the_same_adapter(loaded: LoadedAdapters) -> None:
    first, again = adapter(), adapter(adapter_id=2)
    loaded.seen(request(), first)
    found = Adapter(1, "a", word_of(loaded).digest)
    assert loaded.is_loaded(found)
    del first
    assert loaded.holds(found)
    assert not loaded.is_loaded(found)
    loaded.seen(request(adapter_id=2), again)
    word_of(loaded, 2)

    assert loaded.holds(found)
    assert loaded.is_loaded(Adapter(2, "a", found.digest))


def test_while_an_adapter_is_read_its_name_holds_nothing(
    loaded: LoadedAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = adapter()
    loaded.seen(request(), first)
    found = Adapter(1, "a", word_of(loaded).digest)
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(loaded._pool, "try_submit", lambda work: waiting.append(work) or object())
    loaded.seen(request(adapter_id=2), adapter(adapter_id=2))

    assert not loaded.holds(found)
    waiting[0]()
    assert loaded.holds(found)


@pytest.mark.parametrize(
    "then",
    [request(), request(adapter_id=2), request("b"), request(load_inplace=True)],
    ids=["in its place", "other number", "other name", "in place"],
)
def test_a_name_that_has_meant_something_else_is_spoilt_for_good(loaded: LoadedAdapters, then: Any) -> None:
    first, other = adapter(), adapter(value=2.0)
    loaded.seen(request(), first)
    found = Adapter(1, "a", word_of(loaded).digest)
    loaded.seen(then, other)
    word_of(loaded, then.lora_int_id)
    wait_until(lambda: not loaded.holds(found), what="it is noticed")
    loaded.seen(request(), first)

    assert word_of(loaded).reason == "adapter_changed"
    assert not loaded.holds(found)


def test_after_one_was_used_and_not_seen_no_adapter_is_known(loaded: LoadedAdapters) -> None:
    held = adapter()
    loaded.seen(request(), held)
    known = Adapter(1, "a", word_of(loaded).digest)
    assert loaded.holds(known)
    loaded.give_up()

    assert not loaded.holds(known)
    assert word_of(loaded).reason == "adapter_unknown"


def test_an_adapter_that_no_thread_had_time_for_is_read_when_it_is_used_again(
    loaded: LoadedAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = adapter()
    with monkeypatch.context() as patch:
        patch.setattr(loaded._pool, "try_submit", lambda _: None)
        loaded.seen(request(), held)
    assert word_of(loaded).reason == "adapter_unknown"
    loaded.seen(request(), held)

    assert wait_until(lambda: word_of(loaded), is_so=lambda word: bool(word.digest), what="it is read")


def test_names_beyond_those_that_are_remembered_are_left_alone(
    loaded: LoadedAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing: each was read and remembered."""
    monkeypatch.setattr(adapters, "_MOST_NAMES", 1)
    held = [adapter(adapter_id=number) for number in (1, 2)]
    loaded.seen(request("a"), held[0])
    assert word_of(loaded).digest
    loaded.seen(request("b", 2), held[1])

    assert word_of(loaded, 2).reason == "adapter_unknown"
    assert list(loaded._contents) == ["a"]


def test_an_adapter_is_known_when_all_ranks_say_the_same() -> None:
    known = KnownAdapters()
    assert known.find(request(), 2) is None
    assert known.take_asked() == (1,)
    known.learn([AdapterWord(0, 1, "a", "d1")])
    assert known.find(request(), 2) is None
    known.learn([AdapterWord(1, 1, "a")])
    assert known.find(request(), 2) is None
    known.learn([AdapterWord(1, 1, "a", "d1")])

    assert known.find(request(), 2) == Adapter(1, "a", "d1")
    assert known.find(request(load_inplace=True), 2) == "adapter_changed"
    known.learn([AdapterWord(1, 1, "a", "d2")])
    assert known.find(request(), 2) == "adapter_unknown"


def test_names_that_share_a_number_are_both_left_alone() -> None:
    known = KnownAdapters()
    known.learn([AdapterWord(0, 1, "a", "d1"), AdapterWord(0, 2, "c", "d2")])
    known.observe(request())
    assert known.find(request(), 1) == Adapter(1, "a", "d1")
    known.observe(request("b"))

    assert {known.find(request(name), 1) for name in "ab"} == {"adapter_changed"}
    assert known.find(request("other", 2), 1) == "adapter_changed"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"mm_features": ["an image"]}, "multimodal"), ({"prompt_embeds": torch.ones(1)}, "prompt_embeds")],
)
def test_requests_whose_tokens_do_not_say_all_are_left_out_by_name(
    engine: Engine, fields: dict[str, Any], reason: str
) -> None:
    side = engine.loop.connector.scheduler_side
    asked = {"request_id": "turn", "kv_transfer_params": transfer(load=(cache_ref(2),), save=cache_ref(1))}
    plain = {"lora_request": None, "mm_features": [], "prompt_embeds": None, "skip_reading_prefix_cache": False}
    turn = SimpleNamespace(**asked, **(plain | fields), arrival_time=1.0, num_preemptions=0, status=None)
    assert side.match(turn, 0) == (0, False)
    side.allocated(turn, ((),), 0)

    assert not side.finished(turn, ((),))
    wait_until(lambda: engine.sidecar.abandoned == {cache_ref(1): reason}, what="the sidecar is told")
    wait_until(lambda: [report.reason for report in engine.sidecar.reports.values()] == [reason], what="it is reported")
    assert engine.counted("unsupported_requests", reason) == 1


def test_a_request_waits_for_its_adapter_to_be_read_and_no_longer_than_for_a_manifest(engine: Engine) -> None:
    side, clock = engine.loop.connector.scheduler_side, engine.clock
    assert isinstance(clock, ManualClock)
    asked = {"kv_transfer_params": transfer(load=(cache_ref(2),), save=cache_ref(1)), "prompt_token_ids": [1, 2]}
    plain = {"mm_features": [], "prompt_embeds": None, "skip_reading_prefix_cache": False}
    turn = SimpleNamespace(request_id="turn", **asked, **plain, lora_request=request(), arrival_time=1.0)

    assert side.match(turn, 0) == (None, False)
    assert side.adapters.take_asked() == (1,)
    assert side.match(turn, 0) == (None, False)
    clock.advance(s=60)
    assert side.match(turn, 0) == (0, False)


def lora(name: str, adapter_id: int) -> LoRARequest:
    return LoRARequest(lora_name=name, lora_int_id=adapter_id, lora_path=f"/{name}")


def test_kv_comes_back_to_the_adapter_it_was_computed_with_and_to_nobody_else(engine: Engine) -> None:
    """The loop notices each value that is not the request's own adapter's."""
    engine.loop.adapters = {1: ToyAdapter(0.25), 2: ToyAdapter(0.5)}
    kinds = {"a": lora("a", 1), "b": lora("b", 2), "base": None}
    refs = {name: cache_ref(number) for number, name in enumerate(kinds)}
    for name, kind in kinds.items():
        engine.loop.play(name, PROMPT, params=transfer(save=refs[name]), adapter=kind)
    engine.loop.forget_prefixes()
    for name, kind in kinds.items():
        others = tuple(ref for ref in refs.values() if ref != refs[name])
        engine.loop.play(f"{name} others", PROMPT, params=transfer(load=others), adapter=kind)
        engine.loop.forget_prefixes()
        engine.loop.play(f"{name} own", PROMPT, params=transfer(load=(refs[name],)), adapter=kind)
        engine.loop.forget_prefixes()

    assert len({manifest.fingerprint for manifest in engine.sidecar.manifests.values()}) == 3
    # The KV of others that is named serves nothing; its own is found by its tokens.
    assert engine.counted("loads") == 6


def test_what_was_computed_while_an_adapter_was_replaced_is_not_saved(engine: Engine) -> None:
    engine.loop.adapters = {1: ToyAdapter(0.25)}
    engine.loop.play("known", PROMPT, adapter=lora("a", 1))
    engine.loop.add("turn", PROMPT, params=transfer(save=cache_ref(1)), adapter=lora("a", 1), max_tokens=8)
    engine.loop.run(lambda: len(engine.loop.outputs["turn"]) > 3)
    engine.loop.worker.worker_side.adapters.seen(lora("a", 1), ToyAdapter(0.5))
    engine.loop.run_to_end("turn")
    engine.loop.settle()

    assert engine.sidecar.abandoned == {cache_ref(1): "adapter_changed"}
    assert not engine.sidecar.manifests


def test_a_load_is_given_up_when_the_adapter_is_another_by_the_time_it_begins(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.loop.adapters = {1: ToyAdapter(0.25)}
    engine.loop.play("turn", PROMPT, params=transfer(save=cache_ref(1)), adapter=lora("a", 1))
    engine.loop.forget_prefixes()
    start = engine.loop.worker.worker_side.start

    def replace_and_start(loads: Any, saves: Any, overtaken: Any = ()) -> None:
        if loads:
            engine.loop.adapters[1] = ToyAdapter(0.5)
            engine.loop.worker.worker_side.adapters.seen(lora("a", 1), engine.loop.adapters[1])
        start(loads, saves, overtaken)

    monkeypatch.setattr(engine.loop.worker.worker_side, "start", replace_and_start)
    engine.loop.play("next", PROMPT, params=transfer(load=(cache_ref(1),)), adapter=lora("a", 1))

    assert engine.counted("failed_loads", "adapter_changed") == 1
    assert engine.counted("loads") == 0
