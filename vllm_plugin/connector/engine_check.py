"""Which engines we refuse to be loaded into: those whose KV is not one group of whole full-attention pages.

Refusing at construction is kinder than a wrong answer: every ValueError says what to change.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ValueError for an engine whose KV cannot be saved and loaded page by page."""
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ValueError('context-cache needs "kv_load_failure_policy": "recompute"')
    if vllm_config.model_config.is_encoder_decoder:
        raise ValueError("context-cache cannot carry the KV of encoder-decoder models")
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"context-cache does not support {name} > 1")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ValueError(
            f"context-cache needs one KV cache group, this model has {len(groups)} (hybrid or mamba layers); "
            "for sliding-window models try --disable-hybrid-kv-cache-manager"
        )
    for spec in _layer_specs(groups[0].kv_cache_spec):
        if not isinstance(spec, FullAttentionSpec):
            kind = type(spec).__name__
            raise ValueError(  # noqa: TRY004  # what is wrong is the model, not the type of an argument
                f"context-cache cannot carry {kind} layers, only full attention"
            )


def _layer_specs(spec: Any) -> list[Any]:
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
