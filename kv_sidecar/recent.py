"""Names that are remembered for a while, bounded by number and age. Used from one event loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import takewhile
from typing import Generic, TypeVar

from contextcache.clock import Clock

BEGINNINGS_MAX = 4096

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


class Beginnings:
    """Beginnings of the last prompts here: gateways send prompts that begin alike to the same pod."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers: OrderedDict[str, int] = OrderedDict()
        """When they came, in ms, each later than those before: they grow from one life of the process to the next."""
        self._end = clock.now_ms()

    def note(self, beginning: str) -> None:
        """Remember one more; the one asked for longest ago goes for it."""
        if not beginning:
            return
        self._end = max(self._end + 1, self._clock.now_ms())
        self._numbers[beginning] = self._end
        self._numbers.move_to_end(beginning)
        if len(self._numbers) > BEGINNINGS_MAX:
            self._numbers.popitem(last=False)

    def since(self, after: int) -> tuple[dict[str, int], int]:
        """Return the beginnings after a number, newest last, with their age in ms, and the number for the next call."""
        if after > self._end:  # the number is of an earlier process, and the clock was put back
            after = 0
        new = list(takewhile(lambda named: named[1] > after, reversed(self._numbers.items())))
        now_ms = self._clock.now_ms()
        return {beginning: max(now_ms - number, 0) for beginning, number in reversed(new)}, self._end
