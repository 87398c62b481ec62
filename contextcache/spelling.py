"""Which known name a misspelt one most likely means. Pure.

Two names are near when few edits turn one into the other. An edit inserts, deletes or replaces a character, or swaps
two neighbours. Case, `_` and `-` do not count: `sessionId` and `session_id` are the same name.
"""

from __future__ import annotations

from collections.abc import Iterable

_SHORT_CHARS = 8
"""Shorter names may differ by one edit, longer ones by two: `tools` must not be near `ttl`."""
NAME_CHARS_MAX = 64
"""Longer names are near nothing, and comparing them would cost time."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is near `name`, the nearest one of several; None if none is near."""
    plain = _plain(name)
    if not plain or len(name) > NAME_CHARS_MAX:
        return None
    found: tuple[int, str] | None = None
    for candidate in sorted(known):
        meant = _plain(candidate)
        edits_max = 0 if len(meant) <= 2 else 1 if len(meant) < _SHORT_CHARS else 2  # two letters
        # Cheap first: an edit changes at most two of the letters that the names do not share.
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
