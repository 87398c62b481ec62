"""Parties of a pull: the engine beside this sidecar, the allowed peers, the bounds of a pull. Pure.

The caller of a pull names its peer. Without a list, a caller could send the sidecar to any address. The engine is known
from its first handshake with this process on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from kv_sidecar.format.ids import differences

log = logging.getLogger(__name__)

_ANY = "*"
_HOST = r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\])"
_ADDRESS = re.compile(_HOST + r":(?P<port>[1-9][0-9]{0,4})", re.ASCII)
_ENTRY = re.compile(_HOST + r"(?::[1-9][0-9]{0,4})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Bounds of pulls from peers."""

    block_tokens: int
    """Least tokens in one block here; a peer with smaller blocks has nothing for us."""
    max_pulls: int = 8
    """Pulls at once, half of them for prefixes; a further pull is refused. They share one link and one disk."""
    timeout_s: float = 10.0
    """Longest time of one pull, beyond the time of its bytes at the slowest rate. A request may set less."""
    bytes_per_s_min: int = 50_000_000
    """Slowest rate of a pull: below half a gigabit, computing is faster."""
    manifest_timeout_s: float = 1.0
    """Longest wait for a peer's manifest, which has a few KB."""


class PeerRules:
    """Peers by `host:port`, by host with any port, by network in CIDR notation, or all (`*`)."""

    def __init__(self, entries: Iterable[str]) -> None:
        """Raise ValueError for an entry that is none of these."""
        self._any = False
        self._names: set[str] = set()
        self._networks: list[IPv4Network | IPv6Network] = []
        for entry in entries:
            if entry == _ANY:
                self._any = True
            elif "/" in entry:
                self._networks.append(ip_network(entry))
            elif _ENTRY.fullmatch(entry):
                self._names.add(entry.lower())
            else:
                raise ValueError(f"{entry!r} must be host:port, a host, a network or '*'")

    def allow(self, address: str) -> bool:
        """Return whether `address`, a plain `host:port`, may be pulled from. Names are compared, never resolved."""
        match = _ADDRESS.fullmatch(address)
        if match is None or int(match["port"]) > 65535:
            return False
        host = match["host"].lower()
        if self._any or host in self._names or address.lower() in self._names:
            return True
        ip = _ip(host.strip("[]"))
        return ip is not None and any(ip in network for network in self._networks)


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


class EngineRanks:
    """The ranks of the last engine."""

    def __init__(self) -> None:
        self.world_size = 0
        """Ranks of the engine; 0 before the first handshake."""
        self._fingerprints: dict[int, str] = {}
        self._fingerprint_json = ""
        """JSON of the rank that introduced itself last: the differences of a new engine are logged."""

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
        """Record a rank. Another number of ranks is another engine."""
        changed = differences(self._fingerprint_json, fingerprint_json) if self._fingerprint_json else []
        log.info("engine registered", extra={"fingerprint": fingerprint, "rank": rank})
        if changed:
            log.warning("engine fingerprint changed", extra={"changed": changed})
        if world_size != self.world_size:
            self._fingerprints.clear()
        self.world_size = world_size
        self._fingerprints[rank] = fingerprint
        self._fingerprint_json = fingerprint_json
