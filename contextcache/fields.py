"""Fields of a request's body that are ours, and the refusal of misspelt ones. Pure.

The engine ignores unknown fields, so a misspelt field of ours would get a 200 without a context. Names far from ours
pass: they belong to the engine or to the client. Two names are near if few edits turn one into the other. An edit
inserts, deletes or replaces a character, or swaps two neighbours. Case, `_` and `-` do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from contextcache.errors import InvalidRequest

HANDLE_FIELDS = frozenset({"session_id", "context_mode", "context_commit", "context_create"})
"""Fields that make a request a context's: misspelt, the request would run without its context."""
OUR_FIELDS = HANDLE_FIELDS | {"ttl", "ttl_policy", "mode", "metadata", "truncation", "kv_hints"}
"""Body fields of a create or a turn that the engine never sees."""
FOREIGN_FIELDS = frozenset({"model"})
"""Fields of vLLM's, OpenAI's and Anthropic's requests that are near ours and must pass."""
NAMES_MAX = 64
"""A body with more unknown names than this is not checked: comparing names takes some 10 us each."""
_OTHER_NAMES: Mapping[str, str] = {"context_id": "session_id", "contextId": "session_id", "ttl_seconds": "ttl"}
"""Names of our fields in other APIs."""
_SHORT_CHARS = 8
"""Shorter names may differ by one edit, longer ones by two: `tools` must not be near `ttl`."""
NAME_CHARS_MAX = 64
"""Maximum length of a compared name. Longer names are near none."""


def refuse_misspelt(names: Iterable[str], ours: frozenset[str]) -> None:
    """Raise InvalidRequest for a field near one of `ours` that is none of them."""
    unknown = sorted(set(names) - ours - FOREIGN_FIELDS)
    if len(unknown) > NAMES_MAX:
        return
    for name in unknown:
        if (meant := meant_by(name, ours)) is not None:
            raise InvalidRequest(f"unknown field `{name}`: did you mean `{meant}`?", param=name)


def refuse_unknown(names: Iterable[str], allowed: frozenset[str], *, kind: str = "field") -> None:
    """Raise InvalidRequest for a name that is not allowed, with the nearest allowed one. `kind`: noun for the name."""
    for name in sorted(set(names) - allowed):
        meant, shown = meant_by(name, allowed), name[:NAME_CHARS_MAX]
        told = f"allowed: {', '.join(sorted(allowed)) or 'none'}" if meant is None else f"did you mean `{meant}`?"
        raise InvalidRequest(f"unknown {kind} `{shown}`: {told}", param=shown)


def meant_by(name: str, allowed: frozenset[str]) -> str | None:
    """Return the allowed field that an unknown name most likely means; None if none is near."""
    # Before the cache: a client may send names of megabytes.
    return None if len(name) > NAME_CHARS_MAX else _meant_by(name, allowed)


@lru_cache(maxsize=4096)
def _meant_by(name: str, allowed: frozenset[str]) -> str | None:
    # Cached, because clients send the same fields with every request.
    other = _OTHER_NAMES.get(name)
    return other if other in allowed else nearest(name, allowed)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name nearest to `name`; None if none is near."""
    plain = _plain(name)
    if not plain or len(name) > NAME_CHARS_MAX:
        return None
    found: tuple[int, str] | None = None
    for candidate in sorted(known):
        meant = _plain(candidate)
        edits_max = 0 if len(meant) <= 2 else 1 if len(meant) < _SHORT_CHARS else 2  # two letters
        # The cheap test first: an edit changes at most two of the letters that the names do not share.
        if abs(len(plain) - len(meant)) > edits_max or len(set(plain) ^ set(meant)) > 2 * edits_max:
            continue
        edits = _edits(plain, meant, edits_max)
        if edits <= edits_max and (found is None or edits < found[0]):
            found = (edits, candidate)
    return None if found is None else found[1]


def _plain(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def _edits(one: str, other: str, edits_max: int) -> int:
    """Return the optimal string alignment distance of two short names; any number above `edits_max` if it is above."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, above, row = row, before, [i]
        for j, meant in enumerate(other, 1):
            edits = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != meant))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == meant:
                edits = min(edits, above[j - 2] + 1)
            row.append(edits)
        if min(*row, *before) > edits_max:  # a swap reaches back two rows
            return edits_max + 1
    return row[-1]
