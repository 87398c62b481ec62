"""Bounds of what the catalog remembers and the pulls do. Pure values; settings.py makes them from the environment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CatalogLimits:
    """Times in ms, counts in entries."""

    block_tokens: int
    save_deadline_ms: int
    """A save of which nothing came for this time is dropped."""
    max_saves: int
    """Saves in flight; one more is refused."""
    tombstone_ms: int
    """How long deleted refs and sessions are refused."""
    max_tombstones: int
    spare_ms: int
    """How long the blocks of a context that misses a file are kept, for the save that follows its recompute."""
    max_waiters: int
    max_leases: int
    """Loads that hold their blocks at once; one more holds them until its stream ends."""
    lease_ms: int
    """Longest life of a lease nobody ends."""
    tenant_guarantee_bytes: int = 0
    """On disk, of each tenant: no other tenant's saves push them out."""


@dataclass(frozen=True, slots=True)
class PullLimits:
    """What pulls from peers may cost."""

    max_pulls: int
    """Pulls at once; one more is refused."""
    timeout_s: float
    """Longest time of one pull, beyond what its bytes take at the slowest rate."""
    bytes_per_s_min: int
    """The slowest rate a pull may have."""
    block_tokens: int
    """Least tokens in one block here; a peer with smaller blocks has nothing for us."""
