"""Where a sidecar can be told to die: every step on disk, around a seal, between the blocks of a pull.

A step of tiers/data_directory.py is told as `<verb> <file name>`; its point is `sidecar.<kind>.<verb>`.
"""

from __future__ import annotations

from contextcache.process.crash_points import crash_point
from kv_sidecar.format.ids import BlockKey

_PUBLISHED = ("write", "rename", "sync", "published")
"""Before the write, between it and the rename, between that and the sync of the directory, after all."""
_BLOCK_STEPS = (*_PUBLISHED, "unlink", "quarantine")
_MANIFEST_STEPS = (*_PUBLISHED, "unlink", "sync-unlink", "unlinked", "quarantine")
BEFORE_SEAL = "sidecar.seal.before"
AFTER_SEAL = "sidecar.seal.after"
BETWEEN_PULLED_BLOCKS = "sidecar.pull.between-blocks"
AFTER_STORED_BLOCKS = "sidecar.store.blocks"
"""All blocks of a context are in the shared store, its manifest is not."""
AFTER_UNSTORED_MANIFEST = "sidecar.store.manifest-gone"
"""The manifest has gone from the shared store, its blocks have not."""
AFTER_EVICTED_MANIFEST = "sidecar.store.evicted-manifest"
"""Step of the same kind, for want of room there."""
AFTER_HANDOVER_NOTE = "sidecar.handover.noted"
"""The manager knows of the peer that is to take a context over, which has nothing yet."""
AFTER_HANDOVER_SEAL = "sidecar.handover.sealed"
"""The peer has it, and is not the holder yet."""

POINTS: tuple[str, ...] = (
    *(f"sidecar.{kind}.{step}" for kind in ("block", "tail") for step in _BLOCK_STEPS),
    *(f"sidecar.manifest.{step}" for step in _MANIFEST_STEPS),
    BEFORE_SEAL,
    AFTER_SEAL,
    BETWEEN_PULLED_BLOCKS,
    AFTER_STORED_BLOCKS,
    AFTER_UNSTORED_MANIFEST,
    AFTER_EVICTED_MANIFEST,
    AFTER_HANDOVER_NOTE,
    AFTER_HANDOVER_SEAL,
)
"""All of them; a block or tail without a manifest may come back after a crash, so its removal has no sync."""


def at_step(step: str) -> None:
    """Die at a step on disk, if a test says so: the `step` of a real process's DataDirectory."""
    crash_point(point_of(step))


def point_of(step: str) -> str:
    """Return the point of a step."""
    verb, _, file_name = step.partition(" ")
    key = BlockKey.from_file_name(file_name)
    return f"sidecar.{'manifest' if key is None else key.kind}.{verb}"
