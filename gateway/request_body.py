"""What the gateway reads in a request body. Pure; what the pod looks for as well is contextcache.request_body's."""

from __future__ import annotations

import json
import re
from typing import Any

from contextcache.request_body import (
    FORBIDDEN_KEYS,
    is_opaque,
    needs_parsing,
    parse_leniently,
    without_forbidden_keys,
)

__all__ = [
    "FORBIDDEN_KEYS",
    "is_opaque",
    "model_of",
    "needs_parsing",
    "parse_leniently",
    "with_cache_salt",
    "without_forbidden_keys",
]

_OBJECT_BEGINS = re.compile(rb"[ \t\r\n]*\{(?!\0)[ \t\r\n]*(\})?")


def model_of(parsed: dict[str, Any] | None) -> str | None:
    """Return the model the request names, if it names one."""
    model = None if parsed is None else parsed.get("model")
    return model if isinstance(model, str) else None


def with_cache_salt(body: bytes, salt: str) -> bytes | None:
    """Return a body that has no `cache_salt` with this one in first place, the rest as it came; None: it is no object.

    `salt` is letters and digits. An object in another encoding than plain UTF-8 is written anew.
    """
    begins = _OBJECT_BEGINS.match(body)
    if begins is not None:
        at = begins.start(1) if begins[1] else begins.end()
        whole = memoryview(body)  # prompts are long: copied once
        return b"".join((whole[:at], b'"cache_salt":"', salt.encode(), b'"' if begins[1] else b'",', whole[at:]))
    parsed = parse_leniently(body)
    return None if parsed is None else json.dumps({"cache_salt": salt, **parsed}).encode()
