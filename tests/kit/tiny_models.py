"""Tiny random checkpoints of several architectures: one for each way in which vLLM lays out the KV cache.

    python -m tests.kit.tiny_models '<JSON of Start>'   (the engine's end of ModelEngine)

Real files with seeded weights: restored KV is compared with cold runs of other engine processes. No tokenizer, as
token ids are sent. Windows are of 64 tokens. Where a plain initialization would leave attention without a say, the
weights are larger than usual, so that a wrong page moves the log-probabilities by far more than 1e-3.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers  # its classes are imported at their first use

from tests.kit.tiny_engine import Start, TinyEngine, _say, _Served

VOCABULARY = 512
WINDOW = 64
MAX_MODEL_LEN = 2048
_SLIDING, _FULL = "sliding_attention", "full_attention"
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": None,
}
_ATTENTION: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_MODEL_LEN,
}


def make_gemma3(directory: Path) -> Path:
    """Write six layers, every third with full attention: two groups of windows and one without, of two layers each."""
    config = transformers.Gemma3TextConfig(
        **_COMMON,
        **_ATTENTION,
        num_hidden_layers=6,
        sliding_window=WINDOW,
        layer_types=[_SLIDING, _SLIDING, _FULL] * 2,
        query_pre_attn_scalar=4,
    )
    return _write(transformers.Gemma3ForCausalLM, config, directory)


def make_gpt_oss(directory: Path) -> Path:
    """Write four layers in turns with and without a window, of two experts, with sinks: two groups."""
    config = transformers.GptOssConfig(
        **_COMMON,
        **_ATTENTION,
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=[_SLIDING, _FULL] * 2,
    )
    return _write(transformers.GptOssForCausalLM, config, directory)


def make_mistral(directory: Path) -> Path:
    """Write two layers, both with a window: one group, and it has a window."""
    config = transformers.MistralConfig(**_COMMON, **_ATTENTION, num_hidden_layers=2, sliding_window=WINDOW)
    return _write(transformers.MistralForCausalLM, config, directory)


def make_gemma4_32_64(directory: Path) -> Path:
    """Write a Gemma 4 whose full layers have heads of twice the size: groups with blocks of 64 and of 32 tokens."""
    return _make_gemma4(directory, head_dim=32, global_head_dim=64)


def make_gemma4_64_96(directory: Path) -> Path:
    """Write a Gemma 4 whose full layers have heads of half as much again: groups whose pages are padded."""
    return _make_gemma4(directory, head_dim=64, global_head_dim=96)


def _make_gemma4(directory: Path, *, head_dim: int, global_head_dim: int) -> Path:
    config = transformers.Gemma4TextConfig(
        **_COMMON,
        **_ATTENTION | {"head_dim": head_dim},
        global_head_dim=global_head_dim,
        num_hidden_layers=6,
        sliding_window=WINDOW,
        layer_types=[_SLIDING, _SLIDING, _FULL] * 2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=0,
    )
    return _write(transformers.Gemma4ForCausalLM, config, directory)


def make_qwen3(directory: Path) -> Path:
    """Write two layers with full attention: one group."""
    config = transformers.Qwen3Config(**_COMMON, **_ATTENTION, num_hidden_layers=2)
    return _write(transformers.Qwen3ForCausalLM, config, directory)


def make_qwen3next(directory: Path) -> Path:
    """Write four layers in turns with a state and with full attention: two groups. Smaller heads the kernel refuses."""
    config = transformers.Qwen3NextConfig(
        **_COMMON,
        **_ATTENTION,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return _write(transformers.Qwen3NextForCausalLM, config, directory, dtype=torch.bfloat16)


def make_gpt2(directory: Path) -> Path:
    """Write two layers with learned positions and as many KV heads as heads: one group."""
    config = transformers.GPT2Config(
        **_COMMON,
        n_embd=128,
        n_layer=2,
        n_head=4,
        n_positions=MAX_MODEL_LEN,
        n_ctx=MAX_MODEL_LEN,
        tie_word_embeddings=True,
    )
    return _write(transformers.GPT2LMHeadModel, config, directory)


MODELS: dict[str, Callable[[Path], Path]] = {
    "gemma3": make_gemma3,
    "gpt-oss": make_gpt_oss,
    "mistral": make_mistral,
    "gemma4-32-64": make_gemma4_32_64,
    "gemma4-64-96": make_gemma4_64_96,
    "qwen3": make_qwen3,
    "qwen3next": make_qwen3next,
    "gpt2": make_gpt2,
}
ENGINE_ARGS: dict[str, dict[str, Any]] = {"qwen3next": {"dtype": "bfloat16"}}
"""What a model's engine needs beside the rest; most need nothing."""


def _write(kind: Any, config: Any, directory: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    config.dtype = dtype
    torch.manual_seed(0)
    model = kind(config).to(dtype)
    for name, weights in model.named_parameters():
        if "post_" in name and "norm" in name and config.model_type.startswith("gemma"):
            # Else what Gemma's layers add is so little beside its embeddings that it repeats the last token for ever.
            torch.nn.init.constant_(weights, 3)
    model.save_pretrained(directory)
    return directory


class ModelEngine(TinyEngine):
    """A TinyEngine of which tests ask whole distributions, and whose KV memory they can spoil."""

    module = "tests.kit.tiny_models"


class _Probed(_Served):
    """The engine's end."""

    def __init__(self, start: Start) -> None:
        self._pages = _remember_pages()
        super().__init__(start)
        self._spoil: dict[str, Any] | None = None
        """What the next request that starts from KV gets spoiled; then what was."""
        self._step_tokens = self._core.scheduler.max_num_scheduled_tokens
        schedule = self._core.scheduler.schedule

        def schedule_and_spoil(*args: Any, **more: Any) -> Any:
            scheduled = schedule(*args, **more)
            for new in scheduled.scheduled_new_reqs:
                if self._spoil is not None and new.num_computed_tokens > 0:
                    self._spoil_a_page(new)
            return scheduled

        self._core.scheduler.schedule = schedule_and_spoil

    def facts(self) -> dict[str, Any]:
        """What vLLM made of the model: its groups, and what each layer's entry in `kv_caches` is."""
        groups = []
        for group in self._core.scheduler.kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            groups.append(
                {
                    "kind": type(spec).__name__,
                    "block_size": spec.block_size,
                    "window": getattr(spec, "sliding_window", None),
                    "page_bytes": spec.page_size_bytes,
                    "unpadded_page_bytes": getattr(spec, "unpadded_page_size_bytes", None),
                    "layers": list(group.layer_names),
                    "kv_caches": [_shape_of(self._pages[name]) for name in group.layer_names],
                    "values": [_shape_of(self._values_of(name)) for name in group.layer_names],
                }
            )
        return {"groups": groups}

    def probe(
        self,
        *,
        prompt: list[int],
        load: list[str],
        save: str | None,
        num_tokens: int,
        spoil: dict[str, Any] | None = None,
        cut: int = 0,
    ) -> dict[str, Any]:
        """Generate greedily; return the tokens, five log-probabilities a token, and where the KV came from.

        `cut`: compute the prompt by pieces of so many tokens; 0: in one.
        """
        params = self._params({"load": load, "save": save, "num_tokens": num_tokens})
        params.logprobs = 5
        self._spoil = spoil
        self._core.scheduler.max_num_scheduled_tokens = cut or self._step_tokens
        output = self._llm.generate([{"prompt_token_ids": prompt}], [params], use_tqdm=False)[0]
        while self._core.scheduler.has_requests():
            self._llm.llm_engine.step()
        answer = output.outputs[0]
        return {
            "token_ids": list(answer.token_ids),
            "logprobs": [{str(token): found.logprob for token, found in step.items()} for step in answer.logprobs],
            "cached_tokens": output.num_cached_tokens,
            "spoiled": (spoil or {}).get("done", False),
        }

    def wipe(self) -> bool:
        """Forget the prefix cache and fill all KV memory with noise: what lies there by chance helps nobody."""
        is_forgotten = self.forget(connector=False)
        for name in self._pages:
            for tensor in self._values_of(name):
                tensor.copy_(torch.rand(tensor.shape) * 2 - 1)
        return is_forgotten

    def _spoil_a_page(self, new: Any) -> None:
        """Add 0.5 to one layer's page: the `edge` of the blocks that hold the KV this request starts from."""
        from vllm.v1.kv_cache_interface import group_kernel_blocks

        spoil, self._spoil = self._spoil, None
        assert spoil is not None
        config = self._core.scheduler.kv_cache_config
        group = config.kv_cache_groups[spoil["group"]]
        num_blocks = -(-new.num_computed_tokens // group.kv_cache_spec.block_size)
        held = [block for block in new.block_ids[spoil["group"]][:num_blocks] if block]
        for tensor in self._values_of(group.layer_names[spoil["layer"]]):
            group_kernel_blocks(tensor, config.num_blocks)[held[spoil["edge"]]] += 0.5
        spoil["done"] = True

    def _values_of(self, layer: str) -> list[torch.Tensor]:
        """Return a layer's KV memory as the layer sees it; what is registered of a state are mere bytes."""
        if isinstance(self._pages[layer], torch.Tensor) and self._pages[layer].is_floating_point():
            return [self._pages[layer]]
        layers = self._llm.llm_engine.vllm_config.compilation_config.static_forward_context
        return list(_tensors_of(layers[layer].kv_cache))


def _remember_pages() -> dict[str, Any]:
    """Return what will be the tensors of vLLM's KV memory, by layer."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    found: dict[str, Any] = {}
    initialize = GPUModelRunner.initialize_kv_cache_tensors

    def remember(*args: Any, **more: Any) -> Any:
        pages = initialize(*args, **more)
        found.update(pages)
        return pages

    GPUModelRunner.initialize_kv_cache_tensors = remember
    return found


def _tensors_of(pages: Any) -> Iterator[torch.Tensor]:
    yield from pages if isinstance(pages, list | tuple) else [pages]


def _shape_of(pages: Any) -> dict[str, Any]:
    return {
        "is": type(pages).__name__,
        "tensors": [
            [list(one.shape), list(one.stride()), str(one.dtype), one.data_ptr()] for one in _tensors_of(pages)
        ],
    }


def main() -> None:
    served = _Probed(Start(**json.loads(sys.argv[1])))
    _say(served.facts())
    for line in sys.stdin:
        order = json.loads(line)
        _say(getattr(served, order.pop("what"))(**order))


if __name__ == "__main__":
    main()
