"""vLLM's own converters of `/v1/messages`, with which ours are compared."""

from __future__ import annotations

import warnings
from typing import Any


def anthropic_serving() -> Any:
    """Return what serves `/v1/messages`: its converters alone. Imports vLLM: some seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    return object.__new__(AnthropicServingMessages)
