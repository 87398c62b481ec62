"""Engines whose KV cannot be carried start and answer as if the connector were not there, and it says why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from contextcache.v1 import kv_sidecar_pb2 as pb
from tests.unit.vllm_plugin.connector.conftest import Engine, cache_ref, transfer
from vllm_plugin.connector.engine_check import LayerGroup, UncarriedEngine, carried_groups
from vllm_plugin.connector.metadata import EngineGroup

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 4, "dtype": torch.float32}
FULL = FullAttentionSpec(**SIZES)
SLIDING = SlidingWindowSpec(**SIZES, sliding_window=32)
STATE = MambaSpec(block_size=64, shapes=((2, 4),), dtypes=(torch.float32,))
LATENT = MLAAttentionSpec(**(SIZES | {"num_kv_heads": 1}))
PROMPT = list(range(1, 101))


def config(
    *,
    encoder_decoder: bool = False,
    attention: str = "decoder",
    **parallel: int,
) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(is_encoder_decoder=encoder_decoder),
        parallel_config=SimpleNamespace(
            **{
                "decode_context_parallel_size": 1,
                "prefill_context_parallel_size": 1,
                "pipeline_parallel_size": 1,
                **parallel,
            }
        ),
        compilation_config=SimpleNamespace(static_forward_context={"l0": SimpleNamespace(attn_type=attention)}),
    )


def groups(*specs: Any, **fields: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["l0"], spec, **fields) for spec in specs])


@pytest.mark.parametrize(
    "spec",
    [
        FULL,
        LATENT,
        replace(FULL, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR),
        # As vLLM spells them with its hybrid manager off: blocks of all tokens are kept.
        replace(FULL, sliding_window=32),
        replace(FULL, attention_chunk_size=32),
        UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"l0": FULL, "l1": FULL}),
    ],
)
def test_full_attention_in_one_group_is_carried(spec: Any) -> None:
    assert carried_groups(config(), groups(spec)) == (LayerGroup("full_attention", 16, 0, ("l0",)),)


def test_groups_of_windows_states_and_full_attention_are_carried_together() -> None:
    found = carried_groups(config(), groups(SLIDING, FULL, STATE))

    assert [(group.kind, group.block_tokens, group.window) for group in found] == [
        ("sliding_window", 16, 32),
        ("full_attention", 16, 0),
        ("state", 64, 0),
    ]


@pytest.mark.parametrize("extra", [0, 1, 2, 17])
def test_of_a_window_that_draft_modules_look_behind_all_is_carried_that_the_engine_keeps(extra: int) -> None:
    """Seen failing: vLLM took a block of others' KV for filled that lies before what was loaded."""
    [group] = carried_groups(config(), groups(replace(SLIDING, extra_retained_tokens=extra)))
    carried, manager = (
        EngineGroup("sliding_window", 16, group.window),
        SimpleNamespace(sliding_window=32, extra_retained_tokens=extra),
    )

    for num_tokens in range(1, 200):
        skipped = SlidingWindowManager.get_num_skipped_tokens(manager, num_tokens)  # type: ignore[arg-type]
        assert carried.first_needed(num_tokens) == skipped // 16


@pytest.mark.parametrize(
    ("vllm_config", "kv_cache_config", "reason"),
    [
        (config(encoder_decoder=True), groups(FULL), "encoder_decoder"),
        (config(decode_context_parallel_size=2), groups(FULL), "context_parallel"),
        (config(prefill_context_parallel_size=2), groups(FULL), "context_parallel"),
        (config(pipeline_parallel_size=2), groups(FULL), "pipeline_parallel"),
        (config(), groups(replace(FULL, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)), "kv_dtype"),
        (config(), groups(replace(SLIDING, kv_quant_mode=KVQuantMode.NVFP4)), "kv_dtype"),
        (config(), groups(), "no_layers"),
        (config(), groups(ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=32)), "unsupported_layers"),
        (config(), groups(FULL, replace(STATE, mamba_cache_mode="all")), "unsupported_layers"),
        (config(), groups(FULL, replace(STATE, num_speculative_blocks=1)), "unsupported_layers"),
        (config(), groups(replace(SLIDING, tokens_per_state=4)), "unsupported_layers"),
        (config(), groups(RSWASpec(**SIZES, rswa_window=32)), "unsupported_layers"),
        (config(), groups(SinkFullAttentionSpec(**SIZES, sink_len=4)), "unsupported_layers"),
        (config(), groups(replace(FULL, non_causal=True)), "unsupported_layers"),
        (config(), groups(replace(LATENT, non_causal=True)), "unsupported_layers"),
        (config(), groups(replace(LATENT, non_causal_multi_token_decode=True)), "unsupported_layers"),
        (config(), groups(replace(LATENT, model_version="deepseek_v4")), "unsupported_layers"),
        (config(), groups(replace(FULL, tokens_per_state=4)), "unsupported_layers"),
        (config(attention="encoder_only"), groups(FULL), "unsupported_layers"),
        (config(), groups(FULL, host_resident=True), "unsupported_layers"),
        (config(), groups(FULL, enable_kv_transfer=False), "unsupported_layers"),
        (
            config(),
            groups(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"l0": FULL, "l1": SLIDING})),
            "unsupported_layers",
        ),
    ],
)
def test_only_exact_kinds_of_layers_and_whole_pages_are_carried(
    vllm_config: Any, kv_cache_config: Any, reason: str
) -> None:
    with pytest.raises(UncarriedEngine) as refused:
        carried_groups(vllm_config, kv_cache_config)

    assert refused.value.reason == reason


def test_an_engine_left_alone_answers_saves_nothing_and_says_why_once(
    start_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    plain = start_engine()
    answer = plain.loop.play("plain", PROMPT)
    with caplog.at_level(logging.WARNING, logger="vllm_plugin"):
        engine = start_engine(sidecar=plain.sidecar, policy="fail")
    for number in range(2):
        params = transfer(load=(cache_ref(number),), save=cache_ref(8 + number))
        assert engine.loop.play(f"turn{number}", PROMPT, params=params) == answer
    engine.loop.settle()
    reports = list(engine.sidecar.reports.values())
    said = [record for record in caplog.records if "not saved or loaded" in record.message]

    assert [(report.outcome, report.reason) for report in reports] == 2 * [(pb.LOAD_OUTCOME_MISS, "failure_policy")]
    assert engine.sidecar.abandoned == {cache_ref(8): "failure_policy", cache_ref(9): "failure_policy"}
    assert not engine.sidecar.prepared
    assert engine.counted("left_alone", "failure_policy") == 1
    assert [record.reason for record in said] == ["failure_policy"]  # type: ignore[attr-defined]
    assert engine.loop.connector.reset_cache() is True


def test_what_a_worker_cannot_carry_leaves_the_whole_engine_alone(engine: Engine) -> None:
    """Its tensors are seen in the worker only."""
    odd = {"l0": torch.zeros(200, 2, 16, 8), "l1": torch.zeros(200, 2, 16)}
    engine.loop.worker.register_kv_caches(odd)
    engine.loop.hear_worker()
    engine.loop.play("turn", PROMPT, params=transfer(save=cache_ref(1)))

    assert engine.counted("left_alone", "unsupported_layers") == 1
    assert not engine.sidecar.manifests


def test_a_block_that_is_none_is_never_saved(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    side = engine.loop.connector.scheduler_side
    finished = side.finished
    monkeypatch.setattr(side, "finished", lambda request, block_ids: finished(request, [[0, *block_ids[0][1:]]]))
    engine.loop.play("turn", PROMPT, params=transfer(save=cache_ref(1)))

    engine.loop.settle()
    assert engine.counted("skipped_saves", "null_block") == 1
    assert engine.sidecar.abandoned == {cache_ref(1): "null_block"}
    assert not engine.sidecar.manifests


def test_a_block_that_is_none_is_never_loaded_into(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = engine.save(PROMPT, cache_ref(1), forgets=True)
    side = engine.loop.connector.scheduler_side
    allocated = side.allocated
    monkeypatch.setattr(
        side, "allocated", lambda request, block_ids, count: allocated(request, [[*block_ids[0][:-1], 0]], count)
    )
    assert engine.loop.play("again", PROMPT, params=transfer(load=(cache_ref(1),))) == answer
    assert engine.counted("failed_loads", "null_block") == 1
    assert bool((engine.loop.kv["l0"][0] == -1).all())
