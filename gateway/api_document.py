"""The OpenAPI document: FastAPI's words on the control calls, the calls carried to the pods, every answer's shape.

Data only. Bounds are those of a deployment that changes none; schemathesis sends what this allows and what it does
not (tests/fuzz), so a lie in here is a test that fails.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from contextcache.model import (
    DEFAULT_TTL_S,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_KEYS,
    MAX_METADATA_VALUE_CHARS,
    MAX_TTL_S,
    MIN_TTL_S,
    SESSION_ID_PATTERN,
)

DESCRIPTION = (
    "Create a context once, then send its `session_id` and only the new turn. Errors have OpenAI's body plus "
    "`detail`. Everything else under `/v1/` is the engine's own API, passed through."
)

_STRING = {"type": "string"}
_NULL = {"type": "null"}
"""As if the field were not there."""
_MODEL = {"type": "string", "minLength": 1, "maxLength": 256}
_SESSION_ID = {"type": "string", "pattern": f"^{SESSION_ID_PATTERN.pattern}$"}
_SESSION_ID_OR_NULL = {**_SESSION_ID, "type": ["string", "null"]}
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
_PROMPT = {"anyOf": [{"type": "string", "minLength": 1}, _TOKEN_IDS]}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _STRING},
    "required": ["text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": _STRING,
        "content": {"anyOf": [_STRING, {"type": "array", "items": _PART}, {"type": "null"}]},
    },
    "required": ["role"],
}
_MESSAGES = {"type": "array", "minItems": 1, "items": _MESSAGE}
_METADATA = {
    "type": ["object", "null"],
    "maxProperties": MAX_METADATA_KEYS,
    "propertyNames": {"minLength": 1, "maxLength": MAX_METADATA_KEY_CHARS},
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE_CHARS},
}
_ANSWER_FIELDS: dict[str, Any] = {
    "max_tokens": {
        "type": ["integer", "null"],
        "minimum": 0,
        "description": "0: compute and keep the prompt, answer nothing; of a context only.",
    },
    "stream": {"type": ["boolean", "null"], "default": False},
}
_CREATE_FIELDS: dict[str, Any] = {
    "model": _MODEL,
    "prompt": {"anyOf": [_PROMPT, _NULL]},
    "messages": {"anyOf": [_MESSAGES, _NULL]},
    "ttl": {
        "type": "integer",
        "default": DEFAULT_TTL_S,
        "minimum": MIN_TTL_S,
        "maximum": MAX_TTL_S,
        "description": "Life in seconds; never clamped.",
    },
    "ttl_policy": {"enum": ["fixed", "sliding", None], "default": "fixed"},
    "mode": {"enum": ["session", "prefix", None], "default": "session"},
    "session_id": {**_SESSION_ID_OR_NULL, "description": "The client's own name for the context; minted when absent."},
    "metadata": _METADATA,
    **_ANSWER_FIELDS,
}
_TURN_FIELDS: dict[str, Any] = {
    "model": _MODEL,
    "session_id": {**_SESSION_ID_OR_NULL, "description": "The context to continue; also as header X-Session-ID."},
    "context_mode": {"enum": ["auto", "append", "replay", None], "default": "auto"},
    "context_commit": {"type": ["boolean", "null"], "default": True},
    **_ANSWER_FIELDS,
}
_CREATE_BODY = {
    "type": "object",
    "properties": _CREATE_FIELDS,
    "oneOf": [
        {"required": ["model", "prompt"], "properties": {"prompt": _PROMPT, "messages": _NULL}},
        {"required": ["model", "messages"], "properties": {"prompt": _NULL, "messages": _MESSAGES}},
    ],
}

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _STRING,
                "type": _STRING,
                "code": _STRING,
                "param": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "code", "param"],
        },
        "detail": {**_STRING, "description": "The message again."},
    },
    "required": ["error", "detail"],
    "example": {
        "error": {
            "message": "no context has this session_id",
            "type": "invalid_request_error",
            "code": "context_not_found",
            "param": "session_id",
        },
        "detail": "no context has this session_id",
    },
}
_ERRORS: dict[str, tuple[str, str]] = {
    "400": ("InvalidRequest", "invalid_request, model_mismatch, ttl_out_of_range, context_length_exceeded"),
    "401": ("Unauthorized", "invalid_api_key"),
    "404": ("NotFound", "context_not_found, model_not_found, not_found"),
    "405": ("MethodNotAllowed", "method_not_allowed"),
    "409": ("Conflict", "context_busy, context_exists, generation_mismatch, lease_lost"),
    "410": ("Gone", "context_expired"),
    "413": ("TooLarge", "body_too_large"),
    "429": ("TooMany", "rate_limit_exceeded, too_many_in_flight, endpoints_saturated, context_quota_exceeded"),
    "502": ("EngineFailed", "engine_error"),
    "503": ("Unavailable", "no_ready_endpoint, store_unavailable; behind Envoy gateway_unavailable, deadline_exceeded"),
}
_REQUEST_ID = {"X-Request-ID": {"required": True, "schema": _STRING}}
_RETRY_AFTER = {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 0}}}
_ERROR_HEADERS = {
    "401": {"WWW-Authenticate": {"required": True, "schema": _STRING}},
    "405": {"Allow": {"required": True, "schema": _STRING}},
    "503": _RETRY_AFTER,
}
_OF_THE_ENGINE = "What the engine itself refuses, of a request without a context"


def completed(document: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's document with the carried calls, and with the answers of every call."""
    document = copy.deepcopy(document)
    paths, parts = document["paths"], document.setdefault("components", {})
    schemas = parts.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Error"] = _ERROR
    parts["responses"] = {name: _error(status, text) for status, (name, text) in _ERRORS.items()}
    parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    for path, operation in _carried():
        paths.setdefault(path, {})["post"] = operation
    _complete_contexts(paths)
    for path in ("/healthz", "/readyz", "/metrics"):
        paths[path]["get"]["security"] = []
    text = {"schema": _STRING}
    paths["/metrics"]["get"]["responses"]["200"]["content"] = {"text/plain": text, "application/openmetrics-text": text}
    paths["/readyz"]["get"]["responses"]["503"] = {
        "description": "Not ready; the body says what is missing.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
    for item in paths.values():
        for operation in item.values():
            operation["responses"].pop("422", None)
            operation["responses"]["200"].setdefault("headers", {}).update(_REQUEST_ID)
    return document


def _complete_contexts(paths: dict[str, Any]) -> None:
    paths["/v1/context"]["get"]["responses"] |= _refusals("400", "401", "503")
    for parameter in paths["/v1/context"]["get"]["parameters"]:
        if parameter["name"] == "after":
            parameter["description"] = "`last_id` of the page before; an id that is not in the list is 400."
    for operation in paths["/v1/context/{session_id}"].values():
        operation["parameters"][0]["schema"] = _SESSION_ID
        operation["responses"] |= _refusals("401", "404", "410", "503")


def _carried() -> Iterable[tuple[str, dict[str, Any]]]:
    yield (
        "/v1/context",
        _post("create_context", "Create a context and answer its first prompt.", "contexts", _CREATE_BODY),
    )
    for path, operation_id, summary, field, schema in (
        ("/v1/completions", "completion", "Complete a prompt", "prompt", _PROMPT),
        ("/v1/chat/completions", "chat_completion", "Answer messages", "messages", _MESSAGES),
    ):
        body = {"type": "object", "properties": {**_TURN_FIELDS, field: schema}, "required": ["model", field]}
        operation = _post(operation_id, f"{summary}; with `session_id`, continue a context.", "turns", body)
        operation["responses"]["4XX"] = {
            "description": _OF_THE_ENGINE,
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
        operation["responses"]["400"] = operation["responses"]["404"] = {
            "description": f"An error of ours, or: {_OF_THE_ENGINE[0].lower()}{_OF_THE_ENGINE[1:]}",
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
        yield path, operation


def _post(operation_id: str, summary: str, tag: str, schema: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": "The engine's completion object, or its event stream, plus what the context adds.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
        "links": _links(),
    }
    return {
        "summary": summary,
        "operationId": operation_id,
        "tags": [tag],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": answer} | _refusals(*_ERRORS),
    }


def _links() -> dict[str, Any]:
    """Return what can be done next with the context that an answer names."""
    named = "$response.header.X-Session-ID"
    reads = {
        name: {"operationId": name, "parameters": {"session_id": named}} for name in ("read_context", "delete_context")
    }
    turn = {"session_id": named, "model": "$request.body#/model"}
    return reads | {name: {"operationId": name, "requestBody": turn} for name in ("completion", "chat_completion")}


def _refusals(*statuses: str) -> dict[str, Any]:
    return {status: {"$ref": f"#/components/responses/{_ERRORS[status][0]}"} for status in statuses}


def _error(status: str, codes: str) -> dict[str, Any]:
    return {
        "description": f"`code`: {codes}",
        "headers": _REQUEST_ID | _ERROR_HEADERS.get(status, {}),
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
