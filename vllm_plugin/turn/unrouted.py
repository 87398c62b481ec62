"""Requests that came in while the gateway was away: Envoy let them through unrouted and says so in a header. Pure.

Such a request may be stateless and nothing else: a context needs the gateway's signature, and what only our own parts
may tell the engine was not removed on the way. A claim and a forbidden key are found as the gateway finds them.
"""

from __future__ import annotations

from collections.abc import Mapping

from contextcache.claim import SESSION_HEADER, TURN_PATHS, is_opaque, read_claims, refuse_session
from contextcache.errors import GatewayUnavailable
from contextcache.responses import continued_by
from vllm_plugin.turn.request import CONTEXT_PATH

_RETRY_AFTER_S = 1


def stateless_body(path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return the body the engine may have. Raises GatewayUnavailable for a context's request, InvalidRequest."""
    if path == CONTEXT_PATH:
        raise _away()
    claims = None if is_opaque(headers.get("content-type", "")) else read_claims(body)
    if path not in TURN_PATHS:
        refuse_session(claims)
    elif continued_by(path, claims, headers.get(SESSION_HEADER)) is not None:
        raise _away()
    changed = None if claims is None else claims.changed()
    return body if changed is None else changed


def _away() -> GatewayUnavailable:
    return GatewayUnavailable("no gateway is there to route this session", retry_after_s=_RETRY_AFTER_S)
