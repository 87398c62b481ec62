"""Requests that came in while the gateway was away: Envoy let them through unrouted and says so in a header. Pure.

Such a request may be stateless and nothing else: a context needs the gateway's signature, and what only our own parts
may tell the engine was not removed on the way. A claim and a forbidden key are found as the gateway finds them.
"""

from __future__ import annotations

from collections.abc import Mapping

from contextcache.errors import NoReadyEndpoint
from contextcache.request_body import needs_parsing, parse_leniently, without_forbidden_keys
from contextcache.session_claim import SESSION_HEADER, session_claim
from vllm_plugin.turn.request import CHAT_PATH, COMPLETIONS_PATH, CONTEXT_PATH

_RETRY_AFTER_S = 1


def stateless_body(path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return the body the engine may have. Raises NoReadyEndpoint for a context's request, InvalidRequest."""
    if path == CONTEXT_PATH:
        raise _away()
    parsed = parse_leniently(body) if needs_parsing(body, headers.get("content-type", "")) else None
    may_be_turn = path in {COMPLETIONS_PATH, CHAT_PATH}
    if may_be_turn and session_claim(parsed, headers.get(SESSION_HEADER)) is not None:
        raise _away()
    changed = None if parsed is None else without_forbidden_keys(parsed)
    return body if changed is None else changed


def _away() -> NoReadyEndpoint:
    return NoReadyEndpoint("the gateway is not there to route this session", retry_after_s=_RETRY_AFTER_S)
