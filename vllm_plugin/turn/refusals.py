"""vLLM's refusals of a turn, told in one sentence with the field at fault. Pure.

The bodies of its error answers may show Python values of the request. Errors of requests without a context pass as vLLM
wrote them.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from contextcache.errors import (
    ContextCacheError,
    ContextLengthExceeded,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    NoReadyEndpoint,
)

_SENTENCE_CHARS_MAX = 1000
_PARAM_CHARS_MAX = 200
_LISTED = re.compile(r"^\d+ validation errors?:")
"""How vLLM 0.32 begins the message of a body with wrong fields; the errors follow as Python dictionaries."""
_MESSAGE = re.compile(r"""'msg': ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")
_DETAILS = " (parameter="
"""Where vLLM 0.32 adds the field and its value to a message (exceptions.py VLLMValidationError)."""
_SHOULD_BE = re.compile(r"^(?:Input|Value) should (be|have|match) (.*?)(?:, unable to .*)?$", re.DOTALL)
_POSITION = re.compile(r"\.(\d+)(?=\.|$)", re.ASCII)


def engine_error(status: int, body: bytes) -> ContextCacheError:
    """Return the engine's own error as ours: 4xx stays the client's."""
    try:
        told = json.loads(body)["error"]
        message, param = str(told["message"]), _param(told.get("param"))
    except (ValueError, KeyError, TypeError, AttributeError):
        message, param = f"the engine answered with status {status}", None
    if status == 404:
        return ModelNotFound(_sentence(message), param="model")
    if status == 503:
        return NoReadyEndpoint(_sentence(message), retry_after_s=1)
    if not 400 <= status < 500:
        return EngineFailed(_sentence(message))
    if _LISTED.match(message):
        found = _MESSAGE.search(message)
        return _field_error(param, ast.literal_eval(found[1]) if found else "is not valid")
    kind = ContextLengthExceeded if "maximum context length" in message else InvalidRequest
    return kind(_sentence(message), param=param)


def _field_error(param: str | None, fault: str) -> InvalidRequest:
    """Return the error of one field, from pydantic's message."""
    if found := _SHOULD_BE.match(fault):
        fault = f"must {found[1]} {found[2]}"
    else:
        fault = fault.removeprefix("Value error, ").replace("Field required", "is required")
    fault = _sentence(fault)
    return InvalidRequest(fault if param is None else f"`{param}`: {fault}", param=param)


def _sentence(message: str) -> str:
    """Return the first paragraph of a message in one line, without the details that vLLM adds for its logs."""
    first = message.split("\n\n", maxsplit=1)[0].rsplit(_DETAILS, 1)[0]
    return " ".join(first.split())[:_SENTENCE_CHARS_MAX]


def _param(said: Any) -> str | None:
    """Return a field as OpenAI writes it: `input[3].content`."""
    if not isinstance(said, str):
        return None
    return _POSITION.sub(r"[\1]", said.removeprefix("body.")[:_PARAM_CHARS_MAX]) or None
