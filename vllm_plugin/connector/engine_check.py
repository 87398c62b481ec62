"""Which engines' KV we carry: one group of whole pages of plain causal attention over all tokens. Pure.

Only exact kinds of layers count: a subclass may keep gaps, or attend to what comes later, and its KV then depends on
more than the tokens before. What we cannot carry is left alone, with a reason; it never keeps an engine from starting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

NULL_BLOCK = 0
"""vLLM's block of nothing: it stands where a request has no block. Its bytes are nobody's KV."""


class UncarriedEngine(Exception):  # a finding about an engine, not a fault
    """The KV of this engine cannot be carried."""

    def __init__(self, reason: str, text: str) -> None:
        """`reason`: one short fixed phrase, a label. `text`: for people, with what to change where something can be."""
        super().__init__(text)
        self.reason = reason
        self.text = text


def require_carried(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise UncarriedEngine for an engine whose KV cannot be saved and loaded page by page."""
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        text = 'a load that fails would end its request: set "kv_load_failure_policy": "recompute"'
        raise UncarriedEngine("failure_policy", text)
    if vllm_config.model_config.is_encoder_decoder:
        raise UncarriedEngine("encoder_decoder", "encoder-decoder models keep KV of what is not in the prompt")
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UncarriedEngine("context_parallel", f"pages are cut by {name} > 1")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        text = (
            f"the model's layers have {len(groups)} block tables; those of models that mix sliding windows with full "
            "attention are one with --disable-hybrid-kv-cache-manager, at the cost of KV memory"
        )
        raise UncarriedEngine("several_groups", text)
    if not getattr(groups[0], "enable_kv_transfer", True) or getattr(groups[0], "host_resident", False):
        raise UncarriedEngine("unsupported_layers", "vLLM moves the KV of this model itself")
    _require_plain_layers(_layer_specs(groups[0].kv_cache_spec))
    _require_decoders(groups[0].layer_names, vllm_config.compilation_config.static_forward_context)


def _require_plain_layers(specs: Iterable[Any]) -> None:
    for spec in specs:
        kind = type(spec)
        if kind not in (FullAttentionSpec, MLAAttentionSpec):
            raise UncarriedEngine("unsupported_layers", f"layers of kind {kind.__name__} are not full attention")
        # A window or chunk as an attribute is fine: blocks of all tokens are kept, and only fewer of them are read.
        if spec.non_causal or getattr(spec, "non_causal_multi_token_decode", False):
            raise UncarriedEngine("unsupported_layers", "layers attend to tokens that come later")
        if getattr(spec, "tokens_per_state", 1) != 1 or getattr(spec, "model_version", None):
            raise UncarriedEngine("unsupported_layers", f"layers of kind {kind.__name__} keep states of several tokens")


def _require_decoders(names: Iterable[str], layers: Mapping[str, Any]) -> None:
    for name in names:
        if (kind := getattr(layers.get(name), "attn_type", None) or "decoder") != "decoder":
            raise UncarriedEngine("unsupported_layers", f"layers of kind {kind} are not causal attention")


def _layer_specs(spec: Any) -> list[Any]:
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
