"""Fields of a request's body that are ours, and the refusal of names that are nearly ours. Pure.

The engine ignores fields that it does not know. A misspelt field of ours would so get a 200 and no context. Names that
are far from ours pass: they belong to the engine or to the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from contextcache.errors import InvalidRequest
from contextcache.spelling import NAME_CHARS_MAX, nearest

HANDLE_FIELDS = frozenset({"session_id", "context_mode", "context_commit", "context_create"})
"""Fields that make a request a context's: misspelt, the request would run without its context."""
OUR_FIELDS = HANDLE_FIELDS | {"ttl", "ttl_policy", "mode", "metadata", "truncation"}
"""Body fields of a create or a turn that the engine never sees."""
FOREIGN_FIELDS = frozenset({"model"})
"""Fields of vLLM's, OpenAI's and Anthropic's requests that are near ours and must pass."""
NAMES_MAX = 64
"""A body with more unknown names than this is not checked: comparing names takes some 10 us each."""
_OTHER_NAMES: Mapping[str, str] = {"context_id": "session_id", "contextId": "session_id", "ttl_seconds": "ttl"}
"""Names that other APIs have for our fields."""


def refuse_misspelt(names: Iterable[str], ours: frozenset[str]) -> None:
    """Raise InvalidRequest naming a field that is none of `ours` and near one of them."""
    unknown = sorted(set(names) - ours - FOREIGN_FIELDS)
    if len(unknown) > NAMES_MAX:
        return
    for name in unknown:
        if (meant := meant_by(name, ours)) is not None:
            raise InvalidRequest(f"unknown field `{name}`: did you mean `{meant}`?", param=name)


def refuse_unknown(names: Iterable[str], allowed: frozenset[str], *, kind: str = "field") -> None:
    """Raise InvalidRequest naming a field, or whatever `kind` is, that is not allowed, and the nearest that is."""
    for name in sorted(set(names) - allowed):
        meant, shown = meant_by(name, allowed), name[:NAME_CHARS_MAX]
        told = f"allowed: {', '.join(sorted(allowed)) or 'none'}" if meant is None else f"did you mean `{meant}`?"
        raise InvalidRequest(f"unknown {kind} `{shown}`: {told}", param=shown)


def meant_by(name: str, allowed: frozenset[str]) -> str | None:
    """Return the allowed field that an unknown name most likely means; None if none is near."""
    # Before it is remembered: a client may send names of megabytes.
    return None if len(name) > NAME_CHARS_MAX else _meant_by(name, allowed)


@lru_cache(maxsize=4096)
def _meant_by(name: str, allowed: frozenset[str]) -> str | None:
    """Remember answers, because clients send the same fields with every request."""
    other = _OTHER_NAMES.get(name)
    return other if other in allowed else nearest(name, allowed)
