"""Which context a completion request claims. Pure; the gateway and the pod read it the same way.

In the body, `session_id` claims a context: an unknown id is 404. In the header `X-Session-ID` an id we do not
know is somebody's own label (vLLM and agents use it): the request passes through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contextcache.errors import InvalidRequest
from contextcache.model import SESSION_ID_PATTERN, SessionId

SESSION_HEADER = "x-session-id"


@dataclass(frozen=True, slots=True)
class SessionClaim:
    """A context named by a request."""

    session_id: SessionId
    binding: bool
    """True: named in the body, unknown is an error. False: only in the header, unknown passes through."""


def may_claim_session(body: bytes) -> bool:
    r"""Return whether `body` could hold a `session_id` key, without parsing it.

    A key can be spelled with `\u` escapes, so a body with any escape of that kind has to be parsed to know.
    """
    return b'"session_id"' in body or b"\\u" in body


def session_claim(body: dict[str, Any] | None, header: str | None) -> SessionClaim | None:
    """Return the context the request names, or None. Raises InvalidRequest.

    `header` is `X-Session-ID`, a repeated one joined with commas: once or five times, it names the same context.
    `body` is None when it was not parsed because `may_claim_session` said no.
    """
    named = None if body is None else body.get("session_id")
    if named is not None:
        if not isinstance(named, str) or not SESSION_ID_PATTERN.fullmatch(named):
            raise InvalidRequest("session_id must be 1 to 128 letters, digits, '_', '-' or '.'", param="session_id")
        if header is not None and _named_in(header) != {named}:
            raise InvalidRequest("the body and X-Session-ID name different contexts", param="session_id")
        return SessionClaim(named, binding=True)
    labels = set() if header is None else _named_in(header)
    if not labels or not all(map(SESSION_ID_PATTERN.fullmatch, labels)):
        return None
    if len(labels) > 1:
        raise InvalidRequest("X-Session-ID is repeated and names different contexts", param="X-Session-ID")
    return SessionClaim(labels.pop(), binding=False)


def _named_in(header: str) -> set[str]:
    """Return what a header names that may have been sent several times."""
    return {label.strip() for label in header.split(",")}
