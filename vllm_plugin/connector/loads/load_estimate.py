"""Estimate whether a load takes longer than computing the same tokens; such a load is not promised.

Both sides are measured as the engine runs: tokens a second of the fastest recent prefill steps, and by tier the times
of loads with the queue before them. Without a measurement a load is made, while its queue is short. After a restart all
requests ask at once: the first are loaded, the rest is computed. That measures both sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from contextcache.v1 import kv_sidecar_pb2 as pb

_LARGE_BYTES = 16 << 20
"""Smallest load that is measured: smaller ones say more of the way there and back than of the rate."""
_LARGE_STEP_TOKENS = 64
"""Smallest step that is measured: steps with fewer tokens decode for the most part."""
_FORGET = 0.1
"""Decay per sample: a slower measurement moves a rate 10 % of the way towards it. Each skipped load makes its estimate
10 % better, so that a load is tried again eventually."""
_UNMEASURED_BYTES = 1 << 30
"""Most bytes in the queue of loads while one side is not measured. With all loaded there is nothing to compare with,
and sixty contexts of an 8B model take a disk a minute."""
_SAME = 2
"""Factor on the size of a small load: only larger loads measure the time of further bytes."""
_AT_BEST = 4
"""How much faster than a small load a large one may be expected to be that was never tried. On a GPU
150 tokens of an 8B model take 12 ms, which is the way there and back; 3 000 take 30 ms."""


@dataclass(frozen=True, slots=True)
class _Begun:
    tier: pb.Tier.ValueType
    size_bytes: int
    queued_bytes: int
    """Its own and those before it."""
    at_ms: int


@dataclass(slots=True)
class _Speed:
    """Time of loads from one tier: a constant for small loads, and a rate for further bytes."""

    small_bytes: int
    small_ms: float
    bytes_per_ms: float = 0.0
    """Rate of the bytes beyond a small load; 0: no larger load was measured."""

    def expected_ms(self, size_bytes: int, *, is_alone: bool) -> float:
        """Return the time of a load with its queue. Without a queue, a size that was never tried may be tried."""
        if self.bytes_per_ms and size_bytes > self.small_bytes:
            return self.small_ms + (size_bytes - self.small_bytes) / self.bytes_per_ms
        times = size_bytes / self.small_bytes
        return self.small_ms * (max(1.0, times / _AT_BEST) if is_alone and times > 1 else times)

    def measure(self, size_bytes: int, took_ms: float) -> None:
        """Note the time of a load."""
        times = size_bytes / self.small_bytes
        if times > _SAME and took_ms <= self.small_ms * (1 + _FORGET):
            self.small_ms = took_ms / times  # the small one was disturbed
        if times > _SAME:
            rate = (size_bytes - self.small_bytes) / max(took_ms - self.small_ms, 1)
            self.bytes_per_ms = _kept(self.bytes_per_ms, rate)
            return
        self.small_ms = 1 / _kept(1 / self.small_ms, max(1.0, times) / took_ms)
        self.small_bytes = min(self.small_bytes, size_bytes)

    def forget(self) -> None:
        """Take all loads for a little faster than they were."""
        self.small_ms /= 1 + _FORGET
        self.bytes_per_ms *= 1 + _FORGET


class LoadEstimate:
    """Used by the engine's thread only. Times are of one monotonic clock, in ms."""

    def __init__(self, *, always_ms: int, soon_ms: int = 0) -> None:
        """`always_ms`: a load with a shorter estimate is always made.

        `soon_ms`: shortest possible time of a load.
        """
        self._always_ms = always_ms
        self._soon_ms = soon_ms
        self._tokens_per_ms = 0.0
        self._measured_tokens = 0
        """Tokens of the step that set the rate."""
        self._speeds: dict[pb.Tier.ValueType, _Speed] = {}
        self._begun: dict[str, _Begun] = {}
        self._steps: deque[tuple[int, int, frozenset[str]]] = deque(maxlen=2)
        """The last two: when each was ordered, how many tokens of prompts it has, and its requests."""

    def step(self, num_tokens: int, now_ms: int, requests: Collection[str]) -> None:
        """Note that a step is ordered that computes so many tokens of prompts, and for which requests.

        Where none of them was in the step before, the engine may have stood idle in between: nothing is measured
        across that. The engine orders one step ahead, so of the one before the last it is known that it is over. That
        makes a prompt of several steps look half as fast as it is, at worst: then a load is made that takes up to twice
        as long.
        """
        if self._steps and self._steps[-1][2].isdisjoint(requests):
            self._steps.clear()
        if len(self._steps) == self._steps.maxlen:
            began_ms, before, _ = self._steps[0]
            if before >= _LARGE_STEP_TOKENS and now_ms > began_ms:
                self._computed(before, before / (now_ms - began_ms))
        self._steps.append((now_ms, num_tokens, frozenset(requests)))

    def _computed(self, num_tokens: int, tokens_per_ms: float) -> None:
        """Take a step's rate. On a GPU a small one takes as long as one of a token: it raises only."""
        if tokens_per_ms > self._tokens_per_ms:
            self._measured_tokens = num_tokens
        elif 2 * num_tokens < self._measured_tokens:
            return
        self._tokens_per_ms = _kept(self._tokens_per_ms, tokens_per_ms)

    def begin(self, request_id: str, size_bytes: int, tier: pb.Tier.ValueType, now_ms: int) -> None:
        """Note that a load is queued."""
        self._begun[request_id] = _Begun(tier, size_bytes, size_bytes + self._queued_bytes, now_ms)

    def end(self, request_id: str, now_ms: int, *, is_loaded: bool) -> None:
        """Note that a load has ended. Harmless when there is none."""
        begun = self._begun.pop(request_id, None)
        if begun is None or begun.queued_bytes < _LARGE_BYTES:
            return
        took_ms = float(max(now_ms - begun.at_ms, 1))
        speed = self._speeds.get(begun.tier)
        # One that failed soon says nothing; one that ran out of time, that it would have been slower still.
        if not is_loaded and (speed is None or took_ms < speed.expected_ms(begun.queued_bytes, is_alone=False)):
            return
        if speed is None:
            self._speeds[begun.tier] = _Speed(begun.queued_bytes, took_ms)
        else:
            speed.measure(begun.queued_bytes, took_ms)

    def is_slower(self, num_tokens: int, size_bytes: int, tier: pb.Tier.ValueType) -> bool:
        """Return whether loading is expected to take longer than computing so many tokens."""
        speed = self._speeds.get(tier)
        if speed is None or not self._tokens_per_ms:
            return bool(self._begun) and self._queued_bytes + size_bytes > _UNMEASURED_BYTES
        load_ms = speed.expected_ms(size_bytes + self._queued_bytes, is_alone=not self._begun)
        is_slower = load_ms > max(num_tokens / self._tokens_per_ms, self._always_ms)
        if is_slower and not self._begun:
            speed.forget()  # no measurement is on its way that could say otherwise
        return is_slower

    def is_soon(self, num_tokens: int) -> bool:
        """Return whether so many tokens are computed before any load of them could have ended."""
        return num_tokens < self._tokens_per_ms * self._soon_ms

    @property
    def compute_us_per_token(self) -> float:
        """Time to compute a token of a prompt; 0: unknown yet."""
        return 1000 / self._tokens_per_ms if self._tokens_per_ms else 0.0

    @property
    def _queued_bytes(self) -> int:
        return sum(begun.size_bytes for begun in self._begun.values())


def _kept(known: float, measured: float) -> float:
    """Return a rate after a measurement: the best of late, as one that was disturbed says little."""
    return measured if measured > known else known + _FORGET * (measured - known)
