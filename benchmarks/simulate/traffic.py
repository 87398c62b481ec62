"""Made-up traffic: agents, chat and shared documents, in bursts of turns. Seeded.

A burst is a conversation that goes on for a while: each turn is followed by another one with some chance, after a
pause. It begins a context, or takes one up that has been there. Three in four of those are among the newest tenth.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random

import numpy as np


@dataclass(frozen=True)
class Kind:
    """One way to use a model."""

    name: str
    share: float
    """Of all contexts."""
    prefixes: int
    """Beginnings that its contexts share, one each; how often one is used falls with its number."""
    prefix_tokens: int
    first_tokens: int
    """Of a prompt after the shared beginning, on average."""
    new_tokens: int
    """Of each turn after the first."""
    answer_tokens: int
    goes_on: float
    """Chance that another turn follows."""
    pause_s: float
    is_session: bool
    """A context with a holder; else a kept conversation, which is found by how it begins."""


KINDS = (
    Kind("chat", 0.6, 200, 1000, 300, 300, 250, 0.80, 30.0, is_session=True),
    Kind("agent", 0.25, 20, 6000, 4000, 1200, 200, 0.93, 8.0, is_session=False),
    Kind("document", 0.15, 2000, 20_000, 200, 150, 250, 0.70, 25.0, is_session=True),
)
TOKENS_MAX = 120_000
CONTINUED = 0.7
"""Of bursts, those of a context that is there."""
_NEWEST = 0.1
_AMONG_NEWEST = 0.75


class Contexts:
    """All contexts by number: a few bytes each."""

    def __init__(self, count: int, num_pods: int, seed: int) -> None:
        """Those that are there at the start lie evenly over the pods, as bounded shares leave them."""
        rng = np.random.default_rng(seed)
        kind = rng.choice(len(KINDS), size=count, p=[one.share for one in KINDS])
        num_turns = 1 + rng.geometric(np.array([1 - one.goes_on for one in KINDS])[kind])
        per_turn = np.array([one.new_tokens + one.answer_tokens for one in KINDS])[kind]
        first = np.array([one.prefix_tokens + one.first_tokens for one in KINDS])[kind]
        tokens = np.minimum(first + num_turns * per_turn, TOKENS_MAX)
        prefix = (rng.random(count) ** 2 * np.array([one.prefixes for one in KINDS])[kind]).astype(np.int32)
        self.kind = array("b", kind.astype(np.int8).tobytes())
        self.prefix = array("i", prefix.tobytes())
        self.tokens = array("i", tokens.astype(np.int32).tobytes())
        self.holder = array("h", rng.integers(0, num_pods, size=count, dtype=np.int16).tobytes())
        self.in_store = array("i", self.tokens)
        """Tokens that the store has."""
        self.in_store_at = array("f", bytes(4 * count))
        """Since when."""
        self.is_busy = bytearray(count)

    def __len__(self) -> int:
        return len(self.kind)

    def add(self, rng: Random) -> int:
        """Begin one more, on no pod yet; return its number."""
        number = rng.choices(range(len(KINDS)), [one.share for one in KINDS])[0]
        kind = KINDS[number]
        self.kind.append(number)
        self.prefix.append(int(rng.random() ** 2 * kind.prefixes))
        self.tokens.append(kind.prefix_tokens)
        self.holder.append(-1)
        self.in_store.append(0)
        self.in_store_at.append(0.0)
        self.is_busy.append(0)
        return len(self.kind) - 1

    def taken_up(self, rng: Random) -> int:
        """Return one that is there."""
        count = len(self.kind)
        if rng.random() < _AMONG_NEWEST:
            return count - 1 - int(rng.random() * _NEWEST * count)
        return int(rng.random() * count)

    def own_tokens(self, number: int) -> int:
        """Return its tokens after the shared beginning."""
        return self.tokens[number] - KINDS[self.kind[number]].prefix_tokens
