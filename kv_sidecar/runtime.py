"""Clock, metrics and threads of one sidecar process, in one value that sidecar.py passes to the parts."""

from __future__ import annotations

from dataclasses import dataclass

from contextcache.clock import Clock
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.tiers.store import IoThreads


@dataclass(frozen=True, slots=True)
class Runtime:
    """Every part that needs two of these takes all of them."""

    clock: Clock
    metrics: SidecarMetrics
    threads: IoThreads
    """Threads for disk reads, disk writes and hashing."""
