"""No field that vLLM reads is refused as a misspelt field of ours."""

from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from contextcache.fields import FOREIGN_FIELDS, OUR_FIELDS, meant_by, refuse_misspelt
from contextcache.responses import RESPONSE_FIELDS

KINDS: tuple[type[BaseModel], ...] = (
    AnthropicMessagesRequest,
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
)
OURS = OUR_FIELDS | RESPONSE_FIELDS


def fields_of(kind: type[BaseModel]) -> set[str]:
    return {*kind.model_fields, *(field.alias for field in kind.model_fields.values() if field.alias)}


def test_no_field_of_the_engine_is_near_one_of_ours_or_it_is_exempt_by_name():
    """Seen to fail with FOREIGN_FIELDS empty: `model` is one edit from `mode`."""
    known = set().union(*map(fields_of, KINDS))
    for name in known:
        refuse_misspelt([name], OURS)

    assert len(known) > 80
    assert {name for name in known - OURS if meant_by(name, OURS) is not None} == FOREIGN_FIELDS
