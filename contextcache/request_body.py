r"""What is looked for and removed in a request body, by the gateway and by a pod that it was away for. Pure.

Most bodies are carried unparsed: a substring search proves that none of the keys we care about is in them. JSON
can hide a key behind `\u` escapes, or in UTF-16 and UTF-32 (whose ASCII holds NUL bytes), which the engine's
parser understands: such bodies are parsed to know.
"""

from __future__ import annotations

import json
from typing import Any

from contextcache.errors import InvalidRequest
from contextcache.json_body import parse_object
from contextcache.session_claim import may_claim_session

FORBIDDEN_KEYS = ("cache_salt", "kv_transfer_params")
"""What only our own parts may tell the engine: whose prefix cache it may hit, and which KV to load."""
_QUOTED_KEYS = tuple(f'"{key}"'.encode() for key in FORBIDDEN_KEYS)
_EXTRA_ARGUMENTS = "vllm_xargs"
"""vLLM puts this object's keys where `kv_transfer_params` ends up too."""


def is_opaque(content_type: str) -> bool:
    """Return whether a body of this type is never looked into: an upload."""
    return content_type.lower().startswith("multipart/")


def needs_parsing(body: bytes, content_type: str) -> bool:
    """Return whether `body` could hold a session claim or a forbidden key."""
    if is_opaque(content_type):
        return False
    return may_claim_session(body) or b"\0" in body or any(key in body for key in _QUOTED_KEYS)


def parse_leniently(body: bytes) -> dict[str, Any] | None:
    """Return the object the engine would see, or None when it is not for us to judge.

    An invalid body that names a `session_id` is a session request gone wrong: it raises InvalidRequest with line
    and column. Any other invalid body is the engine's business.
    """
    try:
        return parse_object(body)
    except InvalidRequest as strict:
        try:
            # As the engine reads it: any Unicode encoding, a byte order mark, NaN.
            seen = json.loads(body)
        except RecursionError:
            raise strict from None
        except ValueError:
            seen = None
        if b'"session_id"' in body or (isinstance(seen, dict) and seen.get("session_id") is not None):
            raise
        return seen if isinstance(seen, dict) else None


def without_forbidden_keys(parsed: dict[str, Any]) -> bytes | None:
    """Return the body without the forbidden keys, or None when it has none and can stay as it is."""
    return json.dumps(parsed).encode() if remove_forbidden_keys(parsed) else None


def remove_forbidden_keys(parsed: dict[str, Any]) -> bool:
    """Remove the forbidden keys from a body, and from its extra arguments; return whether there were any."""
    extra = parsed.get(_EXTRA_ARGUMENTS)
    objects = [parsed, extra] if isinstance(extra, dict) else [parsed]
    found = [(held, key) for held in objects for key in FORBIDDEN_KEYS if key in held]
    for held, key in found:
        del held[key]
    return bool(found)
