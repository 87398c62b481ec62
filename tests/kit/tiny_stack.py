"""A stack over a tiny random model whose caches are so small that a little traffic meets every edge and evicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.kit.stack import Stack
from tests.kit.tiny_model import make_tiny_model

MAX_MODEL_LEN = 2048
ENGINE_BLOCK_TOKENS = 32
BLOCK_TOKENS = 64
"""SIDECAR_BLOCK_TOKENS: two engine blocks, so that a conversation of some hundred tokens meets many edges."""
ENGINE_BLOCKS = 256
"""The engine's whole KV cache: 8 192 tokens, so that a little traffic evicts."""


class TinyStack(Stack):
    """As Stack."""

    def __init__(
        self,
        directory: Path,
        *,
        env: Mapping[str, str] | None = None,
        engine_args: Sequence[str] = (),
        engine_blocks: int = ENGINE_BLOCKS,
        **more: Any,
    ) -> None:
        small = {
            "SIDECAR_BLOCK_TOKENS": str(BLOCK_TOKENS),
            "SIDECAR_MEMORY_LIMIT_BYTES": str(256 << 20),
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        sizes = ["--max-model-len", str(MAX_MODEL_LEN), "--num-gpu-blocks-override", str(engine_blocks)]
        self._model = directory / "model"
        super().__init__(
            directory,
            model_dir=self._model,
            env={**small, **(env or {})},
            engine_args=[*sizes, *engine_args],
            **more,
        )

    def __enter__(self) -> Self:
        """Make the model, unless there is one, and start."""
        if not self._model.exists():
            make_tiny_model(self._model, max_model_len=MAX_MODEL_LEN)
        return super().__enter__()
