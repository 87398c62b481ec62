"""Which sidecars may be pulled from. Pure.

Whoever can call a sidecar names the peer of a pull, so without a list it could be sent to any address.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

_ANY = "*"
_HOST = r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\])"
_ADDRESS = re.compile(_HOST + r":(?P<port>[1-9][0-9]{0,4})", re.ASCII)
_ENTRY = re.compile(_HOST + r"(?::[1-9][0-9]{0,4})?", re.ASCII)


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
                raise ValueError(f"{entry!r} is no host:port, host, network or '*'")

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
