"""The seed of the day: every choice a test leaves to chance follows from it, and a run prints it."""

from __future__ import annotations

import os
import time
from random import Random

VARIABLE = "SEED"


def seed_of_the_day() -> int:
    """Return `SEED`, or the date in UTC as a number."""
    return int(os.environ.get(VARIABLE) or time.strftime("%Y%m%d", time.gmtime()))


SEED = seed_of_the_day()


def random_of(name: str) -> Random:
    """Return a generator of its own for what is named so."""
    return Random(f"{SEED}/{name}")
