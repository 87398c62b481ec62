"""Leases on KV: what a load was promised stays, in memory and on disk, until the engine says that it is done.

A lease that nobody ends is over at its deadline. Pure but for the memory tier's pins; used from one event loop.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from contextcache.clock import Clock
from contextcache.errors import InvalidRequest
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.tiers.memory_store import Pins

_LEASE_ID = re.compile(r"[0-9a-z]{16,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What an engine asks for with a load."""

    lease_id: str
    """Unguessable, of the engine's making."""
    life_ms: int
    """After that the lease is over, ended or not."""

    def check(self) -> None:
        """Raise InvalidRequest for a field that cannot be."""
        if not _LEASE_ID.fullmatch(self.lease_id):
            raise InvalidRequest("a lease id must have 16 to 64 letters and digits", param="lease_id")
        if self.life_ms < 1:
            raise InvalidRequest("a lease must have a duration above 0", param="lease_ms")


@dataclass(slots=True)
class _Lease:
    """One load's."""

    deadline_ms: int
    pins: Pins
    keys: set[BlockKey] = field(default_factory=set)


class Leases:
    """At most `max_leases`, each for at most `life_ms_max`."""

    def __init__(
        self,
        pins: Callable[[], Pins],
        *,
        clock: Clock,
        metrics: SidecarMetrics,
        max_leases: int,
        life_ms_max: int,
    ) -> None:
        """`pins` makes an empty set of pins in the memory tier."""
        self._pins = pins
        self._clock = clock
        self._metrics = metrics
        self._max_leases = max_leases
        self._life_ms_max = life_ms_max
        self._leases: dict[str, _Lease] = {}
        self._holders: Counter[BlockKey] = Counter()

    def __len__(self) -> int:
        return len(self._leases)

    def holds(self, key: BlockKey) -> bool:
        """Return whether a block is under lease: it is neither freed nor evicted."""
        return key in self._holders

    def open(self, terms: LeaseTerms, keys: Iterable[BlockKey]) -> Pins | None:
        """Put blocks under a lease and return its pins; None when there are too many leases already.

        An id that is known gets these blocks too, and its time anew. Raises InvalidRequest.
        """
        terms.check()
        lease = self._leases.get(terms.lease_id)
        if lease is None:
            if len(self._leases) >= self._max_leases:
                self._metrics.leases.labels("refused").inc()
                return None
            lease = self._leases[terms.lease_id] = _Lease(0, self._pins())
        lease.deadline_ms = self._clock.now_ms() + min(terms.life_ms, self._life_ms_max)
        fresh = set(keys) - lease.keys
        lease.keys |= fresh
        self._holders.update(fresh)
        return lease.pins

    def end(self, lease_id: str) -> list[BlockKey]:
        """End a lease; return its blocks, some of which nobody may want any more. Harmless when there is none."""
        return self._end(lease_id, "ended")

    def expire(self) -> list[BlockKey]:
        """End the leases whose time is over; return their blocks."""
        now_ms = self._clock.now_ms()
        over = [lease_id for lease_id, lease in self._leases.items() if lease.deadline_ms <= now_ms]
        return [key for lease_id in over for key in self._end(lease_id, "expired")]

    def _end(self, lease_id: str, how: str) -> list[BlockKey]:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return []
        lease.pins.close()
        self._metrics.leases.labels(how).inc()
        for key in lease.keys:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
        return list(lease.keys)
