"""Check of an engine: the groups of layers whose KV we carry. Causal attention over all tokens or a window, and states.

Only exact kinds of layers count. A subclass may keep gaps or attend to later tokens, and its KV then depends on more
than the tokens before. An engine that we cannot carry is left alone, with a reason, and starts all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from contextcache.model import KVKind

NULL_BLOCK = 0
"""vLLM's block of nothing: it stands where a request has no block. Its bytes belong to no request."""


_PLAIN_MODES = frozenset({KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR})
"""Modes whose pages say everything: plain values, and fp8 whose scales come from the checkpoint or are 1."""


class UncarriedEngine(Exception):  # a finding about an engine, not a fault
    """The KV of this engine cannot be carried."""

    def __init__(self, reason: str, text: str) -> None:
        """`reason`: one short fixed phrase, a label. `text`: for people, with the cure if there is one."""
        super().__init__(text)
        self.reason = reason
        self.text = text


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one block table."""

    kind: KVKind
    block_tokens: int
    """Tokens in one engine block."""
    window: int
    """Tokens that a token sees, itself included; 0: all before it."""
    layer_names: tuple[str, ...]


def check_failure_policy(vllm_config: Any) -> None:
    """Raise UncarriedEngine if vLLM ends requests whose load has failed. Called in a worker.

    A connector under a MultiConnector sees its own policy, and vLLM obeys the MultiConnector's. vLLM's current config
    has that one, and only workers have a current config.
    """
    engine = get_current_vllm_config_or_none() or vllm_config
    if engine.kv_transfer_config.kv_load_failure_policy != "recompute":
        text = 'a failed load would end its request: set "kv_load_failure_policy": "recompute"'
        raise UncarriedEngine("failure_policy", text)


def carried_groups(vllm_config: Any, kv_cache_config: Any) -> tuple[LayerGroup, ...]:
    """Return the groups of an engine. Raises UncarriedEngine when its KV cannot be saved and loaded page by page."""
    if vllm_config.model_config.is_encoder_decoder:
        raise UncarriedEngine("encoder_decoder", "encoder-decoder models keep KV of data outside the prompt")
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise UncarriedEngine("context_parallel", f"{name} above 1 splits pages")
    if parallel.pipeline_parallel_size > 1:
        raise UncarriedEngine("pipeline_parallel", "with pipeline parallelism the ranks have different layers")
    layers = vllm_config.compilation_config.static_forward_context
    found = tuple(_layer_group(group, layers) for group in kv_cache_config.kv_cache_groups)
    if not found:
        raise UncarriedEngine("no_layers", "the engine has no KV layers")
    return found


def _layer_group(group: Any, layers: Mapping[str, Any]) -> LayerGroup:
    if not group.enable_kv_transfer or group.host_resident:
        raise UncarriedEngine("unsupported_layers", "vLLM moves the KV of this model itself")
    _require_decoders(group.layer_names, layers)
    kinds = {_kind(spec) for spec in _layer_specs(group.kv_cache_spec)}
    if len(kinds) != 1:
        raise UncarriedEngine("unsupported_layers", "layers of different kinds share a block table")
    [(kind, window)] = kinds
    return LayerGroup(kind, group.kv_cache_spec.block_size, window, tuple(group.layer_names))


def _kind(spec: Any) -> tuple[KVKind, int]:
    """Return the kind of a layer, and its window."""
    name = type(spec).__name__
    if type(spec) is MambaSpec:
        if spec.mamba_cache_mode not in {"none", "align"} or spec.num_speculative_blocks:
            raise UncarriedEngine("unsupported_layers", "the state layers use an unsupported cache mode")
        return "state", 0
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
        raise UncarriedEngine("unsupported_layers", f"layers of kind {name} are neither attention nor state layers")
    is_mla = type(spec) is MLAAttentionSpec
    if (type(spec) is not SlidingWindowSpec and spec.non_causal) or (is_mla and spec.non_causal_multi_token_decode):
        raise UncarriedEngine("unsupported_layers", "layers attend to later tokens")
    if spec.tokens_per_state != 1 or (is_mla and spec.model_version):
        raise UncarriedEngine("unsupported_layers", f"layers of kind {name} keep one state for several tokens")
    if spec.kv_quant_mode not in _PLAIN_MODES:
        raise UncarriedEngine("kv_dtype", f"KV of kind {spec.kv_quant_mode.name} may have scales outside its pages")
    # A window as an attribute of full attention is fine: blocks of all tokens are kept, and only fewer are read.
    if type(spec) is not SlidingWindowSpec:
        return "full_attention", 0
    # Several draft modules look back further: vLLM lets go of blocks as if the window were so much longer, and takes
    # each block that it has made room for to be filled (0.32 SlidingWindowManager.get_num_skipped_tokens).
    return "sliding_window", spec.sliding_window + spec.extra_retained_tokens


def _require_decoders(names: Iterable[str], layers: Mapping[str, Any]) -> None:
    for name in names:
        if (kind := getattr(layers.get(name), "attn_type", None) or "decoder") != "decoder":
            raise UncarriedEngine("unsupported_layers", f"layers of kind {kind} are not causal attention")


def _layer_specs(spec: Any) -> list[Any]:
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
