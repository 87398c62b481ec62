"""The engine beside this sidecar, as its ranks introduced themselves. Pure.

Known from the first handshake on; after a start of the sidecar not before the engine speaks to it again.
"""

from __future__ import annotations

import logging

from kv_sidecar.fingerprint import differences

log = logging.getLogger(__name__)


class EngineRanks:
    """The ranks of the last engine."""

    def __init__(self) -> None:
        self.world_size = 0
        """Ranks of the engine; 0 before the first handshake."""
        self._fingerprints: dict[int, str] = {}
        self._fingerprint_json = ""
        """Of the last rank that introduced itself, to name what a new engine changed."""

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprints in rank order; empty before the first handshake."""
        return [fingerprint for _, fingerprint in sorted(self._fingerprints.items())]

    @property
    def fingerprint(self) -> str | None:
        """The one fingerprint of all ranks; None when no rank is known, or while the ranks differ."""
        known = set(self._fingerprints.values())
        return known.pop() if len(known) == 1 else None

    def introduce(self, rank: int, world_size: int, fingerprint: str, fingerprint_json: str) -> None:
        """Note what a rank said of itself; another number of ranks is another engine."""
        changed = differences(self._fingerprint_json, fingerprint_json) if self._fingerprint_json else []
        log.info("engine introduced", extra={"fingerprint": fingerprint, "rank": rank})
        if changed:
            log.warning("engine has another fingerprint than the one before", extra={"changed": changed})
        if world_size != self.world_size:
            self._fingerprints.clear()
        self.world_size = world_size
        self._fingerprints[rank] = fingerprint
        self._fingerprint_json = fingerprint_json
