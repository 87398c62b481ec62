"""vLLM's own converters of other dialects over a toy engine: the code that a pod runs, without what it is served by."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any


def anthropic_state(*, merge_inline_system: bool = False) -> SimpleNamespace:
    """Return an application's state with what serves `/v1/messages`. Imports vLLM: some seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    serving: Any = object.__new__(AnthropicServingMessages)
    serving._merge_inline_system = merge_inline_system
    serving._disabled_thinking_effort = "none"
    return SimpleNamespace(anthropic_serving_messages=serving)
