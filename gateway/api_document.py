"""What the OpenAPI document says about the calls that are carried to the pods. Data only."""

from __future__ import annotations

from typing import Any

from contextcache.model import DEFAULT_TTL_S

DESCRIPTION = (
    "Create a context once, then send its `session_id` and only the new turn. Errors have OpenAI's body plus "
    "`detail`. Everything else under `/v1/` is the engine's own API, passed through."
)
EXAMPLE_ERROR: dict[str, Any] = {
    "error": {
        "message": "no context has this session_id",
        "type": "invalid_request_error",
        "code": "context_not_found",
        "param": "session_id",
    },
    "detail": "no context has this session_id",
}

_STRING = {"type": "string"}
_PROMPT = {"oneOf": [_STRING, {"type": "array", "items": {"type": "integer"}}]}
_MESSAGES = {"type": "array", "items": {"type": "object"}}
_CREATE_FIELDS: dict[str, Any] = {
    "model": _STRING,
    "prompt": _PROMPT,
    "messages": _MESSAGES,
    "ttl": {"type": "integer", "default": DEFAULT_TTL_S, "description": "Life in seconds; never clamped."},
    "ttl_policy": {"type": "string", "enum": ["fixed", "sliding"], "default": "fixed"},
    "mode": {"type": "string", "enum": ["session", "prefix"], "default": "session"},
    "session_id": {**_STRING, "description": "The client's own name for the context; minted when absent."},
    "metadata": {"type": "object", "additionalProperties": _STRING},
    "max_tokens": {"type": "integer", "description": "0: prefill only."},
    "stream": {"type": "boolean", "default": False},
}
_TURN_FIELDS: dict[str, Any] = {
    "session_id": {**_STRING, "description": "The context to continue; also as header X-Session-ID."},
    "context_mode": {"type": "string", "enum": ["auto", "append", "replay"], "default": "auto"},
    "context_commit": {"type": "boolean", "default": True},
}


def carried_paths() -> dict[str, dict[str, Any]]:
    """Return the path items of the create and turn calls."""
    return {
        "/v1/context": _post(
            "Create a context and answer its first prompt.", _CREATE_FIELDS, ["model"], "contexts", "create_context"
        ),
        "/v1/completions": _post(
            "Complete a prompt; with `session_id`, continue a context.",
            {"model": _STRING, "prompt": _PROMPT, **_TURN_FIELDS},
            ["prompt"],
            "turns",
            "completion",
        ),
        "/v1/chat/completions": _post(
            "Answer messages; with `session_id`, continue a context.",
            {"model": _STRING, "messages": _MESSAGES, **_TURN_FIELDS},
            ["messages"],
            "turns",
            "chat_completion",
        ),
    }


def _post(summary: str, fields: dict[str, Any], required: list[str], tag: str, operation_id: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": fields, "required": required, "additionalProperties": True}
    answers = {
        "200": {
            "description": "The engine's completion object, or its event stream, plus what the context adds.",
            "content": {"application/json": {}, "text/event-stream": {}},
        },
        "4XX": {"description": "Error", "content": {"application/json": {"example": EXAMPLE_ERROR}}},
    }
    return {
        "post": {
            "summary": summary,
            "operationId": operation_id,
            "tags": [tag],
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": answers,
        }
    }
