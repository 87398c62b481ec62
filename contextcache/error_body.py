"""Errors as OpenAI clients expect them, plus the EP's `detail`. Pure; the gateway and the pod answer alike."""

from __future__ import annotations

import json

from contextcache.errors import ContextCacheError


def error_body(error: ContextCacheError) -> bytes:
    """Return `{"error": {"message", "type", "code", "param"}, "detail": message}` as JSON."""
    return json.dumps(
        {
            "error": {
                "message": error.message,
                "type": error.openai_type,
                "code": error.code,
                "param": error.param,
            },
            "detail": error.message,
        }
    ).encode()


def error_headers(error: ContextCacheError) -> list[tuple[str, str]]:
    """Return the headers that go with `error_body`."""
    headers = [("content-type", "application/json")]
    if error.retry_after_s is not None:
        headers.append(("retry-after", str(error.retry_after_s)))
    return headers
