"""What turns may have done to a context, and whether a transcript can be explained by them. Pure.

A turn's answer follows from its whole prompt, so an acknowledged answer tells what stood in the transcript before it.

The rule, by what a client was told of its turn:
- `committed: true` at generation g: it is the g-th turn of the transcript's history, exactly once;
- an error before the answer (409, 404, 410, 503 and 4xx), or `committed: false` with any reason but
  `store_unavailable`: it is not there;
- a broken connection, a 502 or 504, or `store_unavailable`: it may be there, once. The gateway's 502 is among them
  because a pod may have committed when it broke off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Told(Enum):
    """What a client knows of its turn's fate."""

    COMMITTED = "committed"
    ABSENT = "absent"
    UNKNOWN = "unknown"
    READ_ONLY = "read only"


@dataclass
class Attempt:
    """One turn as its client saw it."""

    prompt: str
    """Unique, for it holds the attempt's own tag; of a replay, the whole conversation up to it."""
    is_replay: bool = False
    is_create: bool = False
    told: Told = Told.UNKNOWN
    generation: int = 0
    """Of a committed turn its own, of one that only read, the one it read."""
    answer: str = ""
    lives: tuple[int, int] = (0, 0)
    """First and last life of the session's name it may have met: deletes completed at its start, begun at its end."""
    why: str = ""
    """Status or fault, for the report."""

    def applied(self, text: str) -> str:
        """Return the transcript after this turn."""
        whole = self.prompt if self.is_replay or self.is_create else text + self.prompt
        return whole + answer_to(whole)


def answer_to(text: str) -> str:
    """Return what the engine answers to a whole prompt."""
    return "[" + hashlib.sha256(text.encode()).hexdigest()[:6] + "]"


def explain(attempts: Sequence[Attempt], *, life: int, generation: int, text: str) -> str:
    """Return why a transcript is no serial order of the attempts that are acknowledged; empty when it is one."""
    known: dict[int, Attempt] = {}
    maybe: list[Attempt] = []
    for attempt in attempts:
        if attempt.told is Told.UNKNOWN and attempt.lives[0] <= life <= attempt.lives[1]:
            maybe.append(attempt)
        if attempt.told is not Told.COMMITTED:
            continue
        if attempt.lives == (life, life):
            if (other := known.get(attempt.generation)) is not None:
                return f"two turns are generation {attempt.generation}: {other} and {attempt}"
            known[attempt.generation] = attempt
        elif attempt.lives[0] <= life <= attempt.lives[1]:
            maybe.append(attempt)
    if known and max(known) > generation:
        return f"generation {generation}, but a turn was acknowledged as {max(known)}: {known[max(known)]}"
    readers = [a for a in attempts if a.told is Told.READ_ONLY and a.lives == (life, life)]
    search = _Search(known, readers, generation, text)
    if not search.has_order("", 1, maybe):
        return f"no order of {known} with some of {maybe}, read by {readers}, gives generation {generation}, {text!r}"
    return ""


@dataclass(frozen=True)
class _Search:
    """For an order of turns that gives a transcript; what is known at a generation prunes what may have been before."""

    known: dict[int, Attempt]
    readers: Sequence[Attempt]
    generation: int
    text: str

    def has_order(self, before: str, number: int, maybe: list[Attempt]) -> bool:
        """Return whether the generations from `number` on can follow the transcript `before`."""
        if number > self.generation:
            return before == self.text
        given = self.known.get(number)
        for attempt in [given] if given else maybe:
            if attempt.is_create != (number == 1):
                continue
            after = attempt.applied(before)
            if (given and not after.endswith(attempt.answer)) or not self._is_read(after, number):
                continue
            if self.has_order(after, number + 1, [other for other in maybe if other is not attempt]):
                return True
        return False

    def _is_read(self, text: str, number: int) -> bool:
        return all(
            reader.applied(text).endswith(reader.answer) for reader in self.readers if reader.generation == number
        )
