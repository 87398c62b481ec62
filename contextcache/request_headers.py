"""A request's headers by name, read the same way by the gateway and the pod. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def joined_headers(raw: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Join repeated headers, so that a second one can never hide the first, which is the one the pod reads."""
    headers: dict[str, str] = {}
    for name, value in raw:
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
