"""Leases on KV: a load's blocks stay in memory and on disk until the engine ends the load, or until a deadline.

Used from one event loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from contextcache.errors import InvalidRequest
from kv_sidecar.blocks import Blocks
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.runtime import Runtime

_LEASE_ID = re.compile(r"[0-9a-z]{16,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Lease that an engine asks for with a load."""

    lease_id: str
    """Unguessable, made by the engine."""
    life_ms: int
    """Time after which the lease expires."""

    def check(self) -> None:
        """Raise InvalidRequest for a field with an illegal value."""
        if not _LEASE_ID.fullmatch(self.lease_id):
            raise InvalidRequest("a lease id must have 16 to 64 letters and digits", param="lease_id")
        if self.life_ms < 1:
            raise InvalidRequest("a lease must have a duration above 0", param="lease_ms")


class Leases:
    """At most `max_leases`, each for at most `life_ms_max`."""

    def __init__(self, blocks: Blocks, runtime: Runtime, *, max_leases: int, life_ms_max: int) -> None:
        self._blocks = blocks
        self._runtime = runtime
        self._max_leases = max_leases
        self._life_ms_max = life_ms_max
        self._leases: dict[str, tuple[int, dict[BlockKey, None]]] = {}
        """Deadline in ms and blocks by id, in the order of the load: at its end the last block is the latest used."""

    def open(self, terms: LeaseTerms, keys: Iterable[BlockKey]) -> bool:
        """Put blocks under a lease; False when there are too many leases already.

        A known id gets these blocks too, and its time anew. Raises InvalidRequest.
        """
        terms.check()
        if terms.lease_id not in self._leases and len(self._leases) >= self._max_leases:
            self._runtime.metrics.leases.labels("refused").inc()
            return False
        _, held = self._leases.get(terms.lease_id, (0, {}))
        fresh = {key: None for key in keys if key not in held}
        deadline_ms = self._runtime.clock.now_ms() + min(terms.life_ms, self._life_ms_max)
        self._leases[terms.lease_id] = (deadline_ms, held | fresh)
        self._blocks.hold(fresh, "lease")
        return True

    def end(self, lease_id: str, how: Literal["ended", "expired"] = "ended") -> list[BlockKey]:
        """End a lease; return the blocks without a reference: the caller frees them. Idempotent."""
        if lease_id not in self._leases:
            return []
        self._runtime.metrics.leases.labels(how).inc()
        _, held = self._leases.pop(lease_id)
        return self._blocks.let_go(held, "lease")

    def expire(self) -> None:
        """End the leases past their deadline; the collector frees the blocks without a reference."""
        now_ms = self._runtime.clock.now_ms()
        for lease_id in [lease_id for lease_id, (deadline_ms, _) in self._leases.items() if deadline_ms <= now_ms]:
            self.end(lease_id, "expired")
