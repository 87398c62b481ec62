"""The fingerprint: everything that must be equal for KV to be exchangeable, as canonical JSON and its SHA-256.

Equal on all ranks of an engine, because a manifest has one. Left out on purpose: the physical layout but for the order
of bytes in a page, ranks, ports, and vLLM's block hash seed and algorithm (we match token ids, never vLLM's hashes).
KV of requests with a LoRA adapter is under this fingerprint and the adapter's own (adapters.py): KV under
this one alone is the base model's. The scheduler's half decides which one the engine's KV goes under now.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from typing import Any

import torch
import vllm

from vllm_plugin.connector.copies.pages import LayerShape
from vllm_plugin.connector.engine_check import LayerGroup
from vllm_plugin.connector.identity.weights import models
from vllm_plugin.connector.metadata import EngineGroup, RankFacts

FORMAT_VERSION = 1
"""Version of the page bytes and their order in a block file; a reader of another version must not inject them."""

_VOLATILE_CONFIG_KEYS = frozenset({"_name_or_path", "transformers_version", "_attn_implementation"})


def engine_groups(groups: Sequence[LayerGroup], shapes: Sequence[Sequence[LayerShape]]) -> tuple[EngineGroup, ...]:
    """Return the groups with their names: the one group of a plain engine has no name, as before there were more."""
    if len(groups) == 1 and groups[0].kind == "full_attention":
        return (EngineGroup("full_attention", groups[0].block_tokens),)
    found = []
    for group, own in zip(groups, shapes, strict=True):
        named = json.dumps([group.kind, _page_tokens(group), group.window, [_layer(shape) for shape in own]])
        digest = hashlib.sha256(named.encode()).hexdigest()[:16]
        found.append(EngineGroup(group.kind, group.block_tokens, group.window, digest))
    return tuple(found)


def engine_facts(
    vllm_config: Any,
    groups: Sequence[EngineGroup],
    shapes: Sequence[LayerShape],
    *,
    weights: str | None,
    weights_epoch: str,
) -> dict[str, Any]:
    """Return the facts of the fingerprint, as JSON values. `weights`: their identity (weights.py), None: not known."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative = getattr(vllm_config, "speculative_config", None)
    # Rope, windows, sizes.
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in _VOLATILE_CONFIG_KEYS}
    block_tokens: Any = groups[0].block_tokens
    if groups[0].digest:
        block_tokens = [[group.kind, _page_tokens(group), group.window, group.digest] for group in groups]
    return {
        "format_version": FORMAT_VERSION,
        "vllm_version": vllm.__version__,
        "model": str(model.model),
        "revision": model.revision,
        "model_config_sha256": _hash(config),
        "quantization": model.quantization,
        "computed_by": [_computed_by(one, load) for one, load in models(vllm_config)],
        "speculative_model": str(speculative.model) if speculative is not None else None,
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "weights": weights,
        "weights_epoch": weights_epoch,
        "attention": attention_kinds(vllm_config.compilation_config.static_forward_context, shapes),
        # Beside the backend, the CPU's widest vectors decide the order of bytes in a page.
        "machine": "cuda" if torch.cuda.is_available() else f"cpu/{torch.backends.cpu.get_cpu_capability()}",
        "engine_block_tokens": block_tokens,
        "layers": [_layer(shape) for shape in shapes],
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
    }


def _page_tokens(group: LayerGroup | EngineGroup) -> int:
    """Return the tokens whose KV lies in one page. A state is the same whatever block size stands beside it."""
    return 0 if group.kind == "state" else group.block_tokens


def canonical_json(facts: Mapping[str, Any]) -> str:
    """Return one spelling: sorted keys, no white space, ASCII."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint(facts_json: str) -> str:
    """Return the hex SHA-256 of canonical JSON."""
    return hashlib.sha256(facts_json.encode()).hexdigest()


def attention_kinds(layers: Mapping[str, Any], shapes: Sequence[LayerShape]) -> list[str]:
    """Return `backend` or `backend/isa` of the layers, each once: CPU pages are packed by instruction set."""
    kinds = set()
    for shape in shapes:
        layer = layers.get(shape.name)
        backend = getattr(layer, "attn_backend", None)
        name = backend.get_name() if backend is not None else type(layer).__name__
        isa = getattr(layer, "isa", None)
        kinds.add(f"{name}/{isa}" if isa else name)
    return sorted(kinds)


def _layer(shape: LayerShape) -> list[Any]:
    return [shape.name, shape.ratio, shape.heads, shape.kernel_block_tokens, shape.content_bytes]


def _computed_by(model: Any, load: Any) -> dict[str, Any]:
    """Return the engine's settings that change the KV of the same files (vLLM 0.32 ModelConfig.compute_hash).

    The window's length too: LongRoPE and Llama 4 compute otherwise for a longer one.
    """
    return {
        "max_model_len": model.max_model_len,
        "load_format": str(load.load_format),
        "model_impl": str(getattr(model, "model_impl", "auto")),
        "quantization_config": _hash(getattr(model, "quantization_config", None)),
        "model_class_overrides": _hash(getattr(model, "model_class_overrides", None)),
    }


def _hash(values: Any) -> str | None:
    """Hash settings; values JSON cannot spell count by their type."""
    if not values:
        return None
    told = asdict(values) if is_dataclass(values) and not isinstance(values, type) else values
    spelled = json.dumps(told, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(spelled.encode()).hexdigest()


_WEIGHTS = "weights"
_EPOCH = "weights_epoch"


class EngineIdentity:
    """The fingerprint an engine's KV goes under now: learned from its ranks, moved when its weights may have changed.

    The scheduler's half alone decides it; workers adopt it. A moved fingerprint holds a random epoch:
    KV made under it is never mixed up with any other, and dies with the engine. After a restart the weights are those
    of the files again, and so is the fingerprint. Not thread-safe: the engine's thread alone.
    """

    def __init__(self) -> None:
        self.facts: RankFacts | None = None
        """None: the ranks are not known, or do not agree. Then nothing is loaded or saved."""
        self.are_weights_known = True
        self._first_epoch = ""
        self._news = ""
        self._settled: RankFacts | None = None
        """Facts before the moves that are in doubt."""
        self._num_moves = 0
        """Moves in doubt; also those that came before the facts."""

    def learn(self, ranks: Iterable[RankFacts]) -> bool:
        """Take the workers' facts; return whether they agree.

        Weights that one of them could not look into are new weights: the epoch moves.
        """
        known = list(ranks)
        documents = [json.loads(rank.fingerprint_json) for rank in known]
        weights = {document.pop(_WEIGHTS, None) for document in documents}
        self.are_weights_known = None not in weights
        agree = bool(known) and len({canonical_json(document) for document in documents}) == 1
        if not agree or len(weights - {None}) > 1:
            self.facts = None
            return False
        self.facts, self._first_epoch = known[0], documents[0].get(_EPOCH, "")
        if not self.are_weights_known:
            self.move()
            self._settled, self._num_moves = None, 0
        elif self._num_moves:  # before the first step, with which these facts came
            self._num_moves -= 1
            self.move()
        return True

    def move(self) -> None:
        """Take a fingerprint that no saved KV has: nothing that was saved before is loaded."""
        self._num_moves += 1
        if self.facts is None:
            return
        self._settled = self._settled or self.facts
        document = json.loads(self.facts.fingerprint_json)
        document[_EPOCH] = f"{self._first_epoch}/{secrets.token_hex(16)}"
        if not self.are_weights_known:
            document[_WEIGHTS] = None
        spelled = canonical_json(document)
        self.facts = replace(self.facts, fingerprint=fingerprint(spelled), fingerprint_json=spelled)
        self._news = spelled

    @property
    def is_in_doubt(self) -> bool:
        """Whether it has moved, and may still turn out to have moved for sleeps alone."""
        return self._num_moves > 0

    def settle(self, num_sleeps: int) -> None:
        """End the doubt. Sleeps with equal weights move nothing: if each move was one, the facts are as before.

        Moves of facts that are not known yet stay in doubt.
        """
        if self.facts is None:
            return
        if self._settled is not None and num_sleeps == self._num_moves:
            self.facts, self._news = self._settled, self._settled.fingerprint_json
        self._settled, self._num_moves = None, 0

    def take_news(self) -> str:
        """Return the JSON that workers have to adopt; empty: nothing new since the last call."""
        news, self._news = self._news, ""
        return news
