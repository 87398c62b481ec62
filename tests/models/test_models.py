"""Each way in which vLLM lays out the KV cache: what is restored continues as what was computed from the first token.

One model of each kind (tests/kit/tiny_models.py), one engine process and one kv-sidecar, with and without vLLM's own
prefix cache. Before each question the engine's KV memory is filled with noise: pages that a computation has left in
the very blocks that a restore gets would prove nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from contextcache.names import new_cache_ref
from kv_sidecar.client import EngineSidecarClient
from tests.kit.sidecar_process import SidecarProcess, fault
from tests.kit.tiny_engine import SECRET, Start
from tests.kit.tiny_models import ENGINE_ARGS, MAX_MODEL_LEN, MODELS, WINDOW, ModelEngine
from tests.kit.until import wait_until

pytestmark = pytest.mark.timeout(300)

QUICK = {("gemma3", True)}
"""Models, and whether with vLLM's prefix cache: what `make test` has of all this; the rest of it has full attention."""
CASES = QUICK | {
    ("gemma3", False),
    ("gpt-oss", True),
    ("mistral", True),
    ("gemma4-32-64", True),
    ("gemma4-64-96", False),
}
CASES |= {("qwen3", False), ("qwen3next", True), ("gpt2", False)}
"""Each alone takes a minute or two."""
BLOCK = 32
TOLERANCE = 1e-4
"""Worst difference of log-probabilities."""
NUM_GENERATED = 12
LENGTHS = [
    *(pytest.param(length, marks=pytest.mark.thorough) for length in (WINDOW - 1, WINDOW, WINDOW + 1, 200)),
    95,
    1000,
]
"""95: the window's edge falls on a block's edge, which is where a promise of a token too many would read nothing."""
assert (95 - WINDOW + 1) % BLOCK == 0


@dataclass
class Place:
    """An engine that saves to and loads from a sidecar, both of which can be ended and started again."""

    start: Start
    sidecar: SidecarProcess
    is_cut_alike: bool
    """Compute cold what was restored, then the rest: in bfloat16 a state depends on how a prompt is cut into chunks."""
    engine: ModelEngine = field(init=False)

    def open(self) -> None:
        self.engine = ModelEngine(self.start)
        self.client = EngineSidecarClient(self.sidecar.address, timeout_s=5)

    def kill(self) -> None:
        self.engine.kill()
        self.client.close()

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.engine.facts["groups"]  # type: ignore[no-any-return]

    def save(self, prompt: list[int], *, num_generated: int = 1) -> tuple[str, list[int]]:
        """Save a prompt and what follows it; return the ref and the tokens whose KV is there then."""
        cache_ref = new_cache_ref()
        answer = self._probe(prompt, save=cache_ref, num_tokens=num_generated)
        # Where a state in bfloat16 was cut into chunks shows in it.
        assert not (self.is_cut_alike and answer["cached_tokens"]), "another test has saved what it begins with"
        reasons = {name for name in self.engine.order("counts") if name.startswith("left_alone")}
        assert not reasons, "nothing of this model is saved"
        wait_until(
            lambda: fault(lambda: self.client.get_manifest("demo", cache_ref, 1)) is None, what="the KV is durable"
        )
        return cache_ref, [*prompt, *answer["token_ids"][:-1]]

    def restore(self, prompt: list[int], cache_ref: str, **more: Any) -> dict[str, Any]:
        return self._probe(prompt, load=[cache_ref], **more)

    def cold(self, prompt: list[int], *, like: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """Compute a prompt from its first token; `like`: to be compared with that answer."""
        return self._probe(prompt, cut=like["cached_tokens"] if like and self.is_cut_alike else 0, **more)

    def is_comparable(self, num_loaded: int, *, is_decoded: bool = False) -> bool:
        """Return whether a cold answer is computed as what was loaded had been, to the last bit of a state in bfloat16.

        Not where that was computed token by token (`is_decoded`), nor past a state's block: there vLLM cuts by itself.
        Cut otherwise such a state gives other tokens, restored or not; how it goes on is compared with its own request.
        """
        is_cut = any(group["kind"] == "MambaSpec" and group["block_size"] < num_loaded for group in self.groups)
        return not (self.is_cut_alike and num_loaded and (is_decoded or is_cut))

    def servable(self, num_saved: int, limit: int) -> int:
        """The most tokens, of at most `limit`, that every group can continue from with what it holds at the end."""
        return next((n for n in range(limit, 0, -1) if all(_serves(group, num_saved, n) for group in self.groups)), 0)

    def assert_restored_as_cold(
        self, prompt: list[int], cache_ref: str, *, num_saved: int, num_common: int, is_decoded: bool = False
    ) -> dict[str, Any]:
        """Restore and compute a prompt, and compare where they may be; at least the servable tokens must be loaded."""
        restored = self.restore(prompt, cache_ref)
        cold = self.cold(prompt, like=restored)
        limit = min(num_common, len(prompt) - 1)
        expected = self.servable(num_saved, limit)

        assert cold["cached_tokens"] == 0
        assert expected <= restored["cached_tokens"] <= limit
        if self.is_comparable(restored["cached_tokens"], is_decoded=is_decoded):
            assert restored["token_ids"] == cold["token_ids"]
            assert difference(restored, cold) <= TOLERANCE
        return restored

    def _probe(
        self,
        prompt: list[int],
        *,
        load: list[str] | None = None,
        save: str | None = None,
        num_tokens: int = NUM_GENERATED,
        wipe: bool = True,
        **more: Any,
    ) -> dict[str, Any]:
        if wipe:
            assert self.engine.order("wipe")
        return self.engine.order(  # type: ignore[no-any-return]
            "probe", prompt=prompt, load=load or [], save=save, num_tokens=num_tokens, **more
        )


def _serves(group: dict[str, Any], num_saved: int, n: int) -> bool:
    if group["kind"] == "MambaSpec":
        return n == num_saved
    if group["window"] is None:
        return n <= num_saved
    first_block = max(0, num_saved - group["window"] + 1) // group["block_size"]
    lowest = first_block * group["block_size"] + group["window"] - 1 if first_block else 1
    return lowest <= n <= num_saved


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Worst difference of the log-probabilities, place by place and token by token."""
    worst = 0.0
    for a, b in zip(one["logprobs"], other["logprobs"], strict=True):
        pairs = list(zip(sorted(a.values()), sorted(b.values()), strict=False))
        pairs += [(a[token], b[token]) for token in a.keys() & b.keys()]
        worst = max(worst, *(abs(x - y) for x, y in pairs))
    return worst


def tokens_of(seed: int, count: int) -> list[int]:
    """Return tokens that no other call's begin with: what begins alike would be loaded, whoever saved it."""
    return random.Random(f"{seed} {count}").choices(range(400), k=count)


def _cases() -> Iterator[Any]:
    assert {model for model, _ in CASES} == set(MODELS)
    for model, caching in sorted(CASES):
        marks = [] if (model, caching) in QUICK else [pytest.mark.thorough]
        yield pytest.param((model, caching), marks=marks, id=f"{model}-{'caching' if caching else 'plain'}")


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    process = SidecarProcess(tmp_path_factory.mktemp("sidecar"), block_tokens=64)
    process.start()
    yield process
    process.kill()


@pytest.fixture(scope="module", params=_cases())
def place(
    request: pytest.FixtureRequest, sidecar: SidecarProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    model, caching = request.param
    directory = tmp_path_factory.mktemp("model")
    (directory / "secret").write_bytes(SECRET)
    sizes = {"max_model_len": MAX_MODEL_LEN, "num_gpu_blocks_override": 512, "block_size": BLOCK}
    args = {"skip_tokenizer_init": True, "enable_prefix_caching": caching, **sizes, **ENGINE_ARGS.get(model, {})}
    found = Place(
        Start(str(MODELS[model](directory / "model")), sidecar.address, str(directory / "secret"), args),
        sidecar,
        is_cut_alike="dtype" in ENGINE_ARGS.get(model, {}),
    )
    found.open()
    yield found
    found.kill()


def test_an_engine_says_the_same_twice_when_it_computes_and_what_it_says_depends_on_all_it_sees(place: Place) -> None:
    """Of the kit: without it the comparisons below would hold for nothing."""
    prompt = tokens_of(1, 200)
    one, two, other = place.cold(prompt), place.cold(prompt), place.cold([*prompt[:-20], 7, *prompt[-19:]])

    assert (one["token_ids"], one["logprobs"]) == (two["token_ids"], two["logprobs"])
    assert difference(one, other) > 10 * TOLERANCE


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_longer_prompt_starts_from_the_whole_context_and_goes_on_as_if_computed(
    place: Place, num_tokens: int
) -> None:
    cache_ref, saved = place.save(tokens_of(num_tokens, num_tokens))
    prompt = [*saved, *tokens_of(num_tokens + 1, 7)]
    restored = place.assert_restored_as_cold(prompt, cache_ref, num_saved=num_tokens, num_common=num_tokens)

    assert len(saved) == restored["cached_tokens"] == num_tokens


@pytest.mark.thorough
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_prompt_one_token_longer_computes_that_token(place: Place, num_tokens: int) -> None:
    cache_ref, saved = place.save(tokens_of(num_tokens + 2, num_tokens))
    restored = place.assert_restored_as_cold([*saved, 5], cache_ref, num_saved=num_tokens, num_common=num_tokens)

    assert restored["cached_tokens"] == num_tokens


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_the_same_prompt_again_computes_its_last_token_at_least(place: Place, num_tokens: int) -> None:
    cache_ref, saved = place.save(tokens_of(num_tokens + 3, num_tokens))

    place.assert_restored_as_cold(saved, cache_ref, num_saved=num_tokens, num_common=num_tokens)


@pytest.mark.parametrize(
    "num_common", [*(pytest.param(n, marks=pytest.mark.thorough) for n in (40, 928, 990, 991, 995)), 500, 960, 999]
)
def test_a_prompt_that_turns_off_starts_where_every_group_still_can(place: Place, num_common: int) -> None:
    cache_ref, saved = place.save(tokens_of(4, 1000))
    prompt = [*saved[:num_common], 401, *tokens_of(num_common, 30)]

    place.assert_restored_as_cold(prompt, cache_ref, num_saved=1000, num_common=num_common)


@pytest.mark.parametrize("num_generated", [2, 24, 100])
def test_an_answer_is_part_of_the_context_and_the_end_of_the_prompt_can_be_gone_back_to(
    place: Place, num_generated: int
) -> None:
    cache_ref, saved = place.save(tokens_of(5, 200), num_generated=num_generated)
    for common, more in ((saved, [6, 7, 8]), (saved[:200], [401, 7, 8])):
        place.assert_restored_as_cold(
            [*common, *more], cache_ref, num_saved=len(saved), num_common=len(common), is_decoded=True
        )


@pytest.mark.parametrize(
    ("num_tokens", "num_generated"),
    [(200, 24), *(pytest.param(1000, count, marks=pytest.mark.thorough) for count in (1, 24, 100))],
)
def test_what_was_saved_goes_on_as_the_request_that_it_was_saved_of(
    place: Place, num_tokens: int, num_generated: int
) -> None:
    """Also a state in bfloat16, whose answers depend on how it was computed: here all of it was computed once."""
    prompt = tokens_of(9 + num_generated, num_tokens)
    longer = place.cold(prompt, num_tokens=num_generated + NUM_GENERATED)
    cache_ref, saved = place.save(prompt, num_generated=num_generated)
    restored = place.restore([*saved, longer["token_ids"][num_generated - 1]], cache_ref)
    goes_on = {name: longer[name][num_generated:] for name in ("token_ids", "logprobs")}

    assert restored["cached_tokens"] == len(saved)
    assert restored["token_ids"] == goes_on["token_ids"]
    assert difference(restored, goes_on) <= TOLERANCE


def test_what_the_engine_still_has_is_continued_by_what_is_stored(place: Place) -> None:
    """Without vLLM's prefix cache: all of it is stored."""
    cache_ref, saved = place.save(tokens_of(6, 700))
    prompt = [*saved, 6, 7, 8]
    place.cold(saved[:400])
    restored = place.restore(prompt, cache_ref, wipe=False)
    cold = place.cold(prompt, like=restored)

    assert restored["cached_tokens"] == 700
    if place.is_comparable(700):
        assert restored["token_ids"] == cold["token_ids"]
        assert difference(restored, cold) <= TOLERANCE


@pytest.mark.thorough
def test_a_context_outlives_engine_and_sidecar(place: Place) -> None:
    cache_ref, saved = place.save(tokens_of(7, 200))
    prompt = [*saved, 6, 7, 8]
    before = place.restore(prompt, cache_ref)
    place.kill()
    place.sidecar.kill()
    place.sidecar.start()
    place.open()
    restored = place.assert_restored_as_cold(prompt, cache_ref, num_saved=200, num_common=200)

    assert restored["cached_tokens"] == 200
    assert restored["token_ids"] == before["token_ids"]
    assert difference(restored, before) <= TOLERANCE


def test_each_restored_page_of_each_layer_counts(place: Place) -> None:
    """The negative control: any page spoiled, at either end of what a group holds, is seen in the log-probabilities."""
    cache_ref, saved = place.save(tokens_of(8, 200))
    prompt = [*saved, 6, 7, 8]
    whole = place.restore(prompt, cache_ref)
    unseen = []
    for number, group in enumerate(place.groups):
        for layer, name in enumerate(group["layers"]):
            for edge in (0, -1):
                spoiled = place.restore(prompt, cache_ref, spoil={"group": number, "layer": layer, "edge": edge})
                assert spoiled["spoiled"]
                if difference(spoiled, whole) <= 10 * TOLERANCE:
                    unseen.append((name, edge, difference(spoiled, whole)))

    assert whole["cached_tokens"] == 200
    assert unseen == []
