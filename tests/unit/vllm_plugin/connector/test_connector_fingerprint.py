"""The fingerprint changes with all that makes KV something else, and with nothing more."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_plugin.connector.copies.pages import LayerShape
from vllm_plugin.connector.engine_check import LayerGroup
from vllm_plugin.connector.identity.fingerprint import (
    attention_kinds,
    canonical_json,
    engine_facts,
    engine_groups,
    fingerprint,
)
from vllm_plugin.connector.metadata import EngineGroup

SHAPES = (LayerShape("l0", 1, 2, 16, 64), LayerShape("l1", 1, 2, 16, 64))
PLAIN = (EngineGroup("full_attention", 16),)


@dataclass
class Arguments:
    linear: str


class Backend:
    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


def config(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "model": "some/model",
        "revision": None,
        "quantization": None,
        "dtype": "float32",
        "cache_dtype": "auto",
        "block_size": 16,
        "tensor_parallel_size": 1,
        "rank": 0,
        "isa": "vec",
        "max_model_len": 4096,
        "model_impl": "auto",
        "quantization_config": None,
        "model_class_overrides": {},
        "load_format": "auto",
        "hf": {"rope_theta": 10000.0, "_name_or_path": "/somewhere", "transformers_version": "5.1"},
    } | changes
    own = ("model", "revision", "quantization", "dtype", "max_model_len", "model_impl", "quantization_config")
    model = {name: values[name] for name in (*own, "model_class_overrides")}
    layer = SimpleNamespace(attn_backend=Backend, isa=values["isa"])
    return SimpleNamespace(
        model_config=SimpleNamespace(**model, hf_config=SimpleNamespace(to_dict=lambda: values["hf"])),
        load_config=SimpleNamespace(load_format=values["load_format"]),
        cache_config=SimpleNamespace(cache_dtype=values["cache_dtype"], block_size=values["block_size"]),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=values["tensor_parallel_size"],
            rank=values["rank"],
        ),
        compilation_config=SimpleNamespace(static_forward_context={f"l{i}": layer for i in range(5)}),
    )


def name_of(
    *, shapes: tuple[LayerShape, ...] = SHAPES, weights: str = "w", weights_epoch: str = "0", **changes: Any
) -> str:
    made = config(**changes)
    groups = engine_groups([LayerGroup("full_attention", changes.get("block_size", 16), 0, ())], [shapes])
    facts = engine_facts(made, groups, shapes, weights=weights, weights_epoch=weights_epoch)
    return fingerprint(canonical_json(facts))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "another/model"},
        {"revision": "abc"},
        {"quantization": "fp8"},
        {"dtype": "bfloat16"},
        {"cache_dtype": "fp8"},
        {"block_size": 32},
        {"tensor_parallel_size": 2},
        {"isa": "amx"},
        {"max_model_len": 131072},  # other factors of LongRoPE: seen to restore the KV of the others
        {"quantization_config": {"linear": "int8_per_channel_static"}},
        {"quantization_config": Arguments("int8_per_channel_static")},
        {"load_format": "pt"},
        {"model_impl": "transformers"},
        {"model_class_overrides": {"LlamaForCausalLM": "mine:Llama"}},
        {"hf": {"rope_theta": 500000.0}},
        {"weights": "others"},
        {"weights_epoch": "1"},
        {"shapes": SHAPES[:1]},
        {"shapes": (LayerShape("l0", 2, 2, 8, 64), SHAPES[1])},
        {"shapes": SHAPES[::-1]},
    ],
)
def test_what_changes_kv_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert name_of(**change) != name_of()


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 1},
        {"quantization_config": {}},
        {"hf": {"rope_theta": 10000.0, "_name_or_path": "/elsewhere", "transformers_version": "5.2"}},
        {"hf": {"transformers_version": "5.1", "rope_theta": 10000.0}},
    ],
)
def test_what_does_not_change_kv_leaves_it_alone(change: dict[str, Any]) -> None:
    assert name_of(**change) == name_of()


def test_values_json_cannot_spell_do_not_make_it_change_from_run_to_run() -> None:
    assert name_of(hf={"odd": object()}) == name_of(hf={"odd": object()})


def test_the_facts_are_one_line_a_person_can_read() -> None:
    spelled = canonical_json(engine_facts(config(), PLAIN, SHAPES, weights="w", weights_epoch="0"))

    assert "\n" not in spelled
    assert json.loads(spelled)["attention"] == ["CPU_ATTN/vec"]


def test_layers_without_a_backend_count_by_their_kind() -> None:
    assert attention_kinds({"l0": SimpleNamespace()}, SHAPES[:1]) == ["SimpleNamespace"]
