"""Bounds of one sidecar, in one value that its parts share. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times, counts and bytes. A field without a setting of its name never varies in production."""

    block_tokens: int
    """Least tokens in one block; a peer with smaller blocks has nothing for us."""
    save_deadline_ms: int = 120_000
    """A save ends if no block arrives for this long. Longer than an engine's pause under load."""
    max_saves: int = 1024
    """Saves in flight; a further save is refused. More than an engine has requests."""
    tombstone_ms: int = 3_600_000
    """Deleted refs and sessions refuse saves for this long. Longer than any request runs."""
    max_tombstones: int = 65_536
    """Deleted names remembered, and as many failed saves, each about 10 MB; the oldest are forgotten first."""
    spare_ms: int = 300_000
    """Blocks of an incomplete context stay for this long, for the save that follows its recompute."""
    interrupted_ms: int = 600_000
    """Life of KV whose turn ended without a commit. Clients retry within seconds, people within minutes."""
    max_leases: int = 1024
    """Loads that hold a lease; a further load holds its blocks until its stream ends."""
    lease_ms: int = 300_000
    """Longest life of a lease without an end. Longer than any load takes."""
    tenant_guarantee_bytes: int = 0
    """Bytes on disk that saves of other tenants do not evict, for each tenant."""
    promised_share: float = 0.5
    """Share of the disk tier that promises may take. In memory they may take half of this share."""
    max_pulls: int = 8
    """Pulls at once, half of them for prefixes; a further pull is refused. They share one link and one disk.

    Here and for saves, tenants below their equal share have up to as many again."""
    pull_timeout_s: float = 10.0
    """Longest time of one pull, beyond the time of its bytes at the slowest rate."""
    pull_bytes_per_s_min: int = 50_000_000
    """Slowest rate of a pull: below half a gigabit, computing is faster."""
    manifest_timeout_s: float = 1.0
    """Longest wait for a peer's manifest, which has a few KB."""
    store_bytes_per_s: int = 0
    """Bytes of KV written to the shared store per second; 0: no limit."""
    store_queue_max: int = 100_000
    """Contexts and kept conversations that wait to be written, about 20 MB. The oldest are dropped, kept ones first."""
    store_limit_bytes: int = 0
    """Bytes of blocks in the store; the least recently used contexts are evicted first. 0: no limit."""
    store_tenant_limit_bytes: int = 0
    """Bytes of each tenant, counted alike."""
    store_grace_s: float = 3600
    """Age from which an unreferenced object of the store is removed. Longer than the write of any context."""
    store_interval_s: float = 900
    """Time between two passes over the store, over all pods together. A pass lists every object."""
    handover_bytes_max: int = 16 << 30
    """Bytes of all contexts handed over, shared blocks counted with each: peers keep most of their own KV."""
