"""Whether a load is expected to take longer than computing the same tokens; such a load is not promised.

Both sides are measured as the engine runs: tokens a second of the fastest prefill steps of late, bytes a second of the
loads by tier, with what waited before them. Where nothing was measured yet a load is made. After a restart everybody
asks at once: the first of the line are loaded, those behind them are computed as soon as that is expected to be faster.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass

from contextcache.v1 import kv_sidecar_pb2 as pb

_LARGE_BYTES = 16 << 20
"""Less says more of the way there and back than of the rate."""
_LARGE_STEP_TOKENS = 64
"""Steps with fewer are decoding for the most part."""
_FORGET = 0.1
"""Of a rate, with each measurement that is lower; and with a load that is not made, so that one is tried again."""


@dataclass(frozen=True, slots=True)
class _Begun:
    tier: pb.Tier.ValueType
    size_bytes: int
    queued_bytes: int
    """Its own and those before it."""
    at_ms: int


class LoadEstimate:
    """Used by the engine's thread only. Times are of one monotonic clock, in ms."""

    def __init__(self, *, always_ms: int) -> None:
        """`always_ms`: a load that is expected to take no longer is made whatever computing takes."""
        self._always_ms = always_ms
        self._tokens_per_ms = 0.0
        self._bytes_per_ms: defaultdict[pb.Tier.ValueType, float] = defaultdict(float)
        self._begun: dict[str, _Begun] = {}
        self._steps: deque[tuple[int, int]] = deque(maxlen=2)
        """The last two: when each was ordered, and how many tokens of prompts it has."""
        self._requests: frozenset[str] = frozenset()
        """Of the last one."""

    def step(self, num_tokens: int, now_ms: int, requests: Collection[str]) -> None:
        """Note that a step is ordered that computes so many tokens of prompts, and for which requests.

        Where none of them was in the step before, the engine may have stood idle in between: nothing is measured
        across that. The engine orders one step ahead, so of the one before the last it is known that it is over. That
        makes a prompt of several steps look half as fast as it is, at worst: then a load is made that takes up to twice
        as long.
        """
        if self._requests.isdisjoint(requests):
            self._steps.clear()
        self._requests = frozenset(requests)
        if len(self._steps) == self._steps.maxlen:
            began_ms, before = self._steps[0]
            if before >= _LARGE_STEP_TOKENS and now_ms > began_ms:
                self._tokens_per_ms = _kept(self._tokens_per_ms, before / (now_ms - began_ms))
        self._steps.append((now_ms, num_tokens))

    def begin(self, request_id: str, size_bytes: int, tier: pb.Tier.ValueType, now_ms: int) -> None:
        """Note that a load is queued."""
        self._begun[request_id] = _Begun(tier, size_bytes, size_bytes + self._queued_bytes, now_ms)

    def end(self, request_id: str, now_ms: int, *, is_loaded: bool) -> None:
        """Note that a load has ended. Harmless when there is none."""
        begun = self._begun.pop(request_id, None)
        if begun is None or begun.queued_bytes < _LARGE_BYTES:
            return
        rate = begun.queued_bytes / max(now_ms - begun.at_ms, 1)
        known = self._bytes_per_ms[begun.tier]
        # One that failed soon says nothing; one that ran out of time, that it would have been slower still.
        if is_loaded or rate < known:
            self._bytes_per_ms[begun.tier] = _kept(known, rate)

    def is_slower(self, num_tokens: int, size_bytes: int, tier: pb.Tier.ValueType) -> bool:
        """Return whether loading is expected to take longer than computing so many tokens."""
        rate = self._bytes_per_ms[tier]
        if not rate or not self._tokens_per_ms:
            return False
        load_ms = (size_bytes + self._queued_bytes) / rate
        is_slower = load_ms > max(num_tokens / self._tokens_per_ms, self._always_ms)
        if is_slower and not self._begun:
            # No measurement is on its way that could say otherwise.
            self._bytes_per_ms[tier] = rate * (1 + _FORGET)
        return is_slower

    @property
    def compute_us_per_token(self) -> float:
        """What a token of a prompt takes to compute; 0: not known yet."""
        return 1000 / self._tokens_per_ms if self._tokens_per_ms else 0.0

    @property
    def _queued_bytes(self) -> int:
        return sum(begun.size_bytes for begun in self._begun.values())


def _kept(known: float, measured: float) -> float:
    """Return a rate after a measurement: the best of late, as one that was disturbed says little."""
    return measured if measured > known else known + _FORGET * (measured - known)
