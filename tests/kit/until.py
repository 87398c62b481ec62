"""How tests wait for what others do: `until` on a loop, `wait_until` in a thread.

Both look again and again, return the first thing seen that is so, and at the deadline name what was waited for and what
was seen last. The deadline is there so that nothing hangs; no test measures time with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any

DEADLINE_S = 60.0

Exceptions = tuple[type[Exception], ...]


async def until(
    look: Callable[[], Awaitable[Any] | Any],
    *,
    what: str | Callable[[], str],
    deadline_s: float = DEADLINE_S,
    interval_s: float = 0.02,
    is_so: Callable[[Any], Any] = bool,
    despite: Exceptions = (),
) -> Any:
    """Return the first of what `look` returns that `is_so`; it may be a coroutine function.

    `what` may be asked for at the deadline, to tell how things stand then.
    An exception of a kind in `despite` means "not yet"; another ends the waiting.
    """
    seen: Any = "nothing"
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            while True:
                try:
                    found = look()
                    seen = await found if isawaitable(found) else found
                    if is_so(seen):
                        return seen
                except despite as exc:
                    seen = exc
                await asyncio.sleep(interval_s)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise AssertionError(_late(what if isinstance(what, str) else what(), deadline_s, seen)) from None


def wait_until(
    look: Callable[[], Any],
    *,
    what: str,
    deadline_s: float = DEADLINE_S,
    interval_s: float = 0.02,
    is_so: Callable[[Any], Any] = bool,
    despite: Exceptions = (),
) -> Any:
    """As `until`, without a loop; a look that hangs is not broken off."""
    ends_at_s = time.monotonic() + deadline_s
    while True:
        seen: Any
        try:
            if is_so(seen := look()):
                return seen
        except despite as exc:
            seen = exc
        if time.monotonic() >= ends_at_s:
            raise AssertionError(_late(what, deadline_s, seen))
        time.sleep(interval_s)


def _late(what: str, deadline_s: float, seen: object) -> str:
    return f"not within {deadline_s:g} s: {what}; seen last: {seen!r}"
