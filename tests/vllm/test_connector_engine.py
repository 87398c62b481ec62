"""The connector in a real vLLM engine with a real kv-sidecar process: restored answers equal cold ones, faults too.

One engine for the module, in this process, on a tiny random float32 model. Prefill is chunked at 256 tokens.
"""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from contextcache.errors import SidecarUnavailable
from contextcache.identity import KV_TRANSFER_KEY, KVTransfer, sign_kv_transfer
from contextcache.names import new_cache_ref
from tests.kit.patience import CONNECTOR
from tests.kit.sidecar_process import SidecarProcess, fault
from tests.kit.tiny_engine import ENVIRONMENT, SECRET
from tests.kit.until import wait_until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.thorough,
    # vLLM and torch warn about themselves in many places; what is tested here is the connector.
    pytest.mark.filterwarnings("ignore"),
]

ANSWER_TOKENS = 6
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    logprobs: list[float]
    cached_tokens: int
    text: str


class Engine:
    def __init__(self, llm: Any, sidecar: SidecarProcess) -> None:
        self._llm = llm
        self.sidecar = sidecar
        core = llm.llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self.scheduler_side = core.scheduler.connector.scheduler_side
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.worker_side = get_kv_transfer_group().worker_side
        self._names = itertools.count()

    def ask(self, prompt: list[int], *, load: tuple[str, ...] = (), save: str | None = None, **sampling: Any) -> Answer:
        """Generate greedily, then step on until the engine holds nothing."""
        from vllm import SamplingParams

        token = sign_kv_transfer(
            KVTransfer("demo", "ctx_1", f"request-{next(self._names)}", load, save, 2_000_000_000_000), SECRET
        )
        params = SamplingParams(
            temperature=0,
            max_tokens=ANSWER_TOKENS,
            ignore_eos=True,
            logprobs=1,
            extra_args={"kv_transfer_params": {KV_TRANSFER_KEY: token}} if load or save else None,
            **sampling,
        )
        (output,) = self._llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        answer = output.outputs[0]
        ids = list(answer.token_ids)
        logprobs = [step[token_id].logprob for step, token_id in zip(answer.logprobs, ids, strict=True)]
        self._drain()
        return Answer(ids, logprobs, output.num_cached_tokens, answer.text)

    def _drain(self) -> None:
        def is_idle() -> bool:
            self._llm.llm_engine.step()
            return not self._scheduler.has_requests()

        wait_until(is_idle, what="the engine holds nothing", deadline_s=90)

    def forget_prefixes(self) -> None:
        assert self._llm.reset_prefix_cache()

    def wait_sealed(self, cache_ref: str) -> None:
        client = self.scheduler_side._sidecar
        wait_until(
            lambda: fault(lambda: client.get_manifest("demo", cache_ref, 1)) is None, what="it is sealed", deadline_s=90
        )

    def save(self, prompt: list[int]) -> tuple[str, Answer]:
        """Answer a prompt cold, save it, and empty the engine."""
        cache_ref = new_cache_ref()
        self.forget_prefixes()
        answer = self.ask(prompt, save=cache_ref)
        self.wait_sealed(cache_ref)
        self.forget_prefixes()
        return cache_ref, answer

    def restart_sidecar(self) -> None:
        """Start the sidecar again and wait until both halves of the connector have found it."""
        self.sidecar.start()
        client = self.scheduler_side._sidecar
        unknown = new_cache_ref()
        wait_until(
            lambda: fault(lambda: client.get_manifest("demo", unknown, 1)),
            is_so=lambda error: not isinstance(error, SidecarUnavailable),
            what="the scheduler's half finds the sidecar",
        )
        wait_until(lambda: fault(self.worker_side._link.terms) is None, what="the worker finds it", deadline_s=90)

    def counted(self, name: str, reason: str | None = None) -> int:
        return self.worker_side.counters.get(name, reason) + self.scheduler_side.counters.get(name, reason)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("engine")
    sidecar = SidecarProcess(directory)
    sidecar.start()
    secret = directory / "secret"
    secret.write_bytes(SECRET)
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llm = _start(directory, {"sidecar": sidecar.address, "secret_file": str(secret), **CONNECTOR})
        yield Engine(llm, sidecar)
        llm.llm_engine.engine_core.shutdown()
    sidecar.kill()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def _start(directory: Path, extra: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from tests.kit.tiny_model import make_tiny_model

    return LLM(
        model=str(make_tiny_model(directory / "model")),
        dtype="float32",
        block_size=32,
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=256,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ContextCacheConnector",
            kv_connector_module_path="vllm_plugin.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
    )


@pytest.fixture
def damaged(engine: Engine) -> Iterator[Engine]:
    """An engine whose sidecar's files may be damaged: blocks are shared by content, so none may stay."""
    yield engine
    engine.sidecar.kill()
    engine.sidecar.erase()
    engine.restart_sidecar()


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    source = random.Random(f"{num_tokens} {seed}")
    return [source.randrange(400) for _ in range(num_tokens)]


def largest_difference(one: Answer, other: Answer) -> float:
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


@pytest.mark.parametrize("num_tokens", [2, 31, 32, 33, 255, 256, 257, 700])
def test_a_restored_answer_equals_the_cold_one(engine: Engine, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens)
    cache_ref, cold = engine.save(prompt)
    loads = engine.counted("loads")
    restored = engine.ask(prompt, load=(cache_ref,))

    assert restored.token_ids == cold.token_ids
    assert largest_difference(restored, cold) < TOLERANCE
    assert (cold.cached_tokens, restored.cached_tokens) == (0, num_tokens - 1)
    assert engine.counted("loads") == loads + 1


def test_a_prompt_of_one_token_is_saved_and_computed_again(engine: Engine) -> None:
    cache_ref, cold = engine.save([7])

    assert engine.ask([7], load=(cache_ref,)).token_ids == cold.token_ids


def test_a_turn_that_goes_on_equals_the_whole_history_computed_cold(engine: Engine) -> None:
    first = prompt_of(300)
    cache_ref, answer = engine.save(first)
    history = [*first, *answer.token_ids, *prompt_of(45, seed=1)]
    cold = engine.ask(history)
    engine.forget_prefixes()
    restored = engine.ask(history, load=(cache_ref,))

    assert restored.cached_tokens == 300 + ANSWER_TOKENS - 1
    assert restored.token_ids == cold.token_ids
    assert largest_difference(restored, cold) < TOLERANCE


def test_a_turn_that_diverges_inside_a_page_equals_the_cold_one(engine: Engine) -> None:
    first = prompt_of(300)
    cache_ref, _ = engine.save(first)
    other = [*first[:141], *prompt_of(100, seed=2)]
    cold = engine.ask(other)
    engine.forget_prefixes()
    restored = engine.ask(other, load=(cache_ref,))

    assert restored.cached_tokens == 141
    assert restored.token_ids == cold.token_ids
    assert largest_difference(restored, cold) < TOLERANCE


def test_wrong_bytes_with_a_right_checksum_change_the_answer_so_kv_is_really_used(damaged: Engine) -> None:
    engine = damaged
    prompt = prompt_of(300, seed=3)
    cache_ref, cold = engine.save(prompt)
    engine.sidecar.kill()
    engine.sidecar.flip_bytes(rewrite_checksum=True)
    engine.restart_sidecar()
    poisoned = engine.ask(prompt, load=(cache_ref,))

    assert poisoned.cached_tokens == 299
    assert largest_difference(poisoned, cold) > 10 * TOLERANCE


def test_wrong_bytes_are_found_and_computed_instead(damaged: Engine) -> None:
    engine = damaged
    prompt = prompt_of(300, seed=4)
    cache_ref, cold = engine.save(prompt)
    failed, missed = engine.counted("failed_loads"), engine.counted("missed_loads")
    engine.sidecar.kill()
    engine.sidecar.flip_bytes(rewrite_checksum=False)
    engine.restart_sidecar()
    recomputed = engine.ask(prompt, load=(cache_ref,))

    assert recomputed.token_ids == cold.token_ids
    assert largest_difference(recomputed, cold) < TOLERANCE
    assert recomputed.cached_tokens == 0
    assert engine.counted("failed_loads") + engine.counted("missed_loads") == failed + missed + 1


def test_kv_survives_the_sidecar(engine: Engine) -> None:
    prompt = prompt_of(700, seed=5)
    cache_ref, cold = engine.save(prompt)
    engine.sidecar.kill()
    engine.restart_sidecar()
    restored = engine.ask(prompt, load=(cache_ref,))

    assert restored.cached_tokens == 699
    assert restored.token_ids == cold.token_ids
    assert largest_difference(restored, cold) < TOLERANCE


def test_without_a_sidecar_the_engine_serves_the_same_answer(engine: Engine) -> None:
    prompt = prompt_of(300, seed=6)
    cache_ref, cold = engine.save(prompt)
    engine.sidecar.kill()
    alone = engine.ask(prompt, load=(cache_ref,), save=new_cache_ref())
    engine.restart_sidecar()

    assert alone.token_ids == cold.token_ids
    assert alone.cached_tokens == 0
    assert engine.ask(prompt_of(40, seed=7)).token_ids


def test_a_turn_that_ends_at_a_stop_string_is_saved_right(engine: Engine) -> None:
    prompt = prompt_of(100, seed=8)
    engine.forget_prefixes()
    cold = engine.ask(prompt)
    engine.forget_prefixes()
    cache_ref = new_cache_ref()
    stopped = engine.ask(prompt, save=cache_ref, stop=[cold.text[-3:]])
    engine.wait_sealed(cache_ref)
    engine.forget_prefixes()
    history = [*prompt, *cold.token_ids[:-1]]
    again = engine.ask(history, load=(cache_ref,))
    engine.forget_prefixes()

    assert len(stopped.token_ids) <= ANSWER_TOKENS
    assert again.cached_tokens >= 100
    assert again.token_ids == engine.ask(history).token_ids


def test_two_requests_at_once_each_get_their_own_kv(engine: Engine) -> None:
    prompts = [prompt_of(290, seed=9), prompt_of(410, seed=10)]
    saved = [engine.save(prompt) for prompt in prompts]
    for prompt, (cache_ref, cold) in zip(prompts, saved, strict=True):
        restored = engine.ask(prompt, load=(saved[0][0], cache_ref))

        assert restored.cached_tokens == len(prompt) - 1
        assert restored.token_ids == cold.token_ids
