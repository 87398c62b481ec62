"""What the gateway reads in a request body. Pure; what the pod looks for as well is contextcache.request_body's."""

from __future__ import annotations

from typing import Any

from contextcache.request_body import (
    FORBIDDEN_KEYS,
    is_opaque,
    needs_parsing,
    parse_leniently,
    without_forbidden_keys,
)

__all__ = ["FORBIDDEN_KEYS", "is_opaque", "model_of", "needs_parsing", "parse_leniently", "without_forbidden_keys"]


def model_of(parsed: dict[str, Any] | None) -> str | None:
    """Return the model the request names, if it names one."""
    model = None if parsed is None else parsed.get("model")
    return model if isinstance(model, str) else None
