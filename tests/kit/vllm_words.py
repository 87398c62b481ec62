"""vLLM's own converters of other dialects over a toy engine: the code that a pod runs, without what it is served by."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

from tests.kit.fake_vllm import EOS


def anthropic_serving() -> Any:
    """Return what serves `/v1/messages`: its converters alone. Imports vLLM: some seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    return object.__new__(AnthropicServingMessages)


def responses_state() -> SimpleNamespace:
    """Return an application's state with what serves `/v1/responses`: it reads items; the toy engine answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
        from vllm.renderers.online_renderer import OnlineRenderer

    renderer: Any = object.__new__(OnlineRenderer)
    renderer.use_harmony = renderer.exclude_tools_when_tool_choice_none = False
    renderer.renderer = SimpleNamespace(get_eos_token_id=lambda: EOS)
    serving: Any = object.__new__(OpenAIServingResponses)
    serving.online_renderer = renderer
    serving.engine_client = SimpleNamespace(input_processor=SimpleNamespace(generation_config_fields={}))
    return SimpleNamespace(openai_serving_responses=serving)
