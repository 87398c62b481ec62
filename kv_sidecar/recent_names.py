"""Names remembered for a while: tombstones of deleted contexts, saves that were dropped. Pure, bounded twice."""

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
        self._added_at_ms: OrderedDict[Name, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._added_at_ms)

    def __contains__(self, name: Name) -> bool:
        """Return whether the name was remembered when old ones were last forgotten."""
        return name in self._added_at_ms

    def add(self, name: Name, now_ms: int) -> None:
        """Remember a name from now on."""
        self._added_at_ms[name] = now_ms
        self._added_at_ms.move_to_end(name)
        self.forget_old(now_ms)
        while len(self._added_at_ms) > self._max_names:
            self._added_at_ms.popitem(last=False)

    def discard(self, name: Name) -> None:
        """Forget a name."""
        self._added_at_ms.pop(name, None)

    def added_at_ms(self, name: Name, now_ms: int) -> int | None:
        """Return when the name was last added (Unix time in ms), or None when it is not, or no longer, remembered."""
        self.forget_old(now_ms)
        return self._added_at_ms.get(name)

    def forget_old(self, now_ms: int) -> None:
        """Forget what is older than `keep_ms`."""
        while self._added_at_ms:
            name, added_at_ms = next(iter(self._added_at_ms.items()))
            if now_ms - added_at_ms < self._keep_ms:
                break
            del self._added_at_ms[name]
