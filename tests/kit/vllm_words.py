"""vLLM's own converters of other dialects over a toy engine: the code that a pod runs, without what it is served by."""

from __future__ import annotations

import warnings
from typing import Any


def anthropic_serving() -> Any:
    """Return what serves `/v1/messages`: its converters alone. Imports vLLM: some seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    return object.__new__(AnthropicServingMessages)
