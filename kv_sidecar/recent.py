"""Names that are remembered for a while, bounded by number and age. Used from one event loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class RecentNames(Generic[Name]):
    """At most `max_names` names, each for `keep_ms`; the oldest go first."""

    def __init__(self, *, keep_ms: int, max_names: int) -> None:
        self._keep_ms = keep_ms
        self._max_names = max_names
        self._added: OrderedDict[Name, int] = OrderedDict()
        """Times of the names, Unix time in ms."""

    def __len__(self) -> int:
        return len(self._added)

    def __contains__(self, name: Name) -> bool:
        """Return whether the name was remembered when old ones were last forgotten."""
        return name in self._added

    def add(self, name: Name, now_ms: int) -> None:
        """Remember a name from now on."""
        self._added[name] = now_ms
        self._added.move_to_end(name)
        self._forget_old(now_ms)
        while len(self._added) > self._max_names:
            self._added.popitem(last=False)

    def added_at_ms(self, name: Name, now_ms: int) -> int | None:
        """Return when the name was last added (Unix time in ms), or None when it is not, or no longer, remembered."""
        self._forget_old(now_ms)
        return self._added.get(name)

    def _forget_old(self, now_ms: int) -> None:
        while self._added:
            name, added_at_ms = next(iter(self._added.items()))
            if now_ms - added_at_ms < self._keep_ms:
                break
            del self._added[name]
