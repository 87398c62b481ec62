"""The errors that clients see as a table: status of the server's class, meaning of the client's."""

from __future__ import annotations

import gateway.envoy.front
import gateway.paths  # noqa: F401  # their errors
from contextcache.client.errors import BY_CODE
from contextcache.errors import ContextCacheError


def statuses() -> dict[str, int]:
    """Return the HTTP status of every code that the server has."""
    found: dict[str, int] = {}
    classes = [ContextCacheError]
    while classes:
        error = classes.pop()
        found[error.code] = error.http_status
        classes += error.__subclasses__()
    return found


def errors_table(_name: str) -> str:
    """Return a row for each code that a client may get, by status."""
    known = statuses()
    rows = sorted((known[code], code, " ".join((error.__doc__ or "").split())) for code, error in BY_CODE.items())
    lines = [f"| {status} | `{code}` | {meaning} |" for status, code, meaning in rows]
    return "\n".join(["| status | `code` | meaning |", "| --- | --- | --- |", *lines])
