"""Injected time: `SystemClock` in processes, `ManualClock` in tests."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall-clock milliseconds. Not monotonic, because TTLs, leases and expiries compare across machines."""

    def now_ms(self) -> int:
        """Return Unix time in ms."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """Return Unix time in ms."""
        return time.time_ns() // 1_000_000


class ManualClock:
    """A clock that moves only by `advance`."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """Return the set time in ms."""
        return self._now_ms

    def advance(self, *, ms: int = 0, s: float = 0.0) -> None:
        """Move forward by `ms` plus `s`."""
        self._now_ms += ms + round(s * 1000)
