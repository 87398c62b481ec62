"""Which port each part gets, and whether they are free.

One number chooses all: the gateway's. The others follow ten above it, so two stacks need only different `PORT`s
that are not within twenty of each other.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from deploy.local.progress import StepFailed

DEFAULT_PORT = 8000
LOOPBACK = "127.0.0.1"
_LISTEN_STATE = "0A"


@dataclass(frozen=True, slots=True)
class PortPlan:
    """One TCP port on loopback for each part."""

    gateway: int
    redis: int
    manager: int
    sidecar: int
    engine: int

    def items(self) -> list[tuple[str, int]]:
        """Return (part, port) pairs."""
        return list(asdict(self).items())


def plan_ports(gateway_port: int) -> PortPlan:
    """Return the plan for a gateway port. Raises StepFailed when it leaves no room for the others."""
    if not 1024 <= gateway_port <= 65535 - 13:
        raise StepFailed(f"PORT={gateway_port} is out of range: 1024 to {65535 - 13}")
    return PortPlan(gateway_port, *(gateway_port + offset for offset in range(10, 14)))


def check_ports_free(ports: list[tuple[str, int]]) -> None:
    """Raise StepFailed naming every port that something listens on, and by what."""
    taken = [f"  port {port} ({part}): {holder_of(port)}" for part, port in ports if not is_free(port)]
    if taken:
        listing = "\n".join(taken)
        raise StepFailed(f"ports are taken:\n{listing}\nchoose others with PORT=<n>: the gateway's, the rest follow it")


def is_free(port: int) -> bool:
    """Return whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                return False
            raise StepFailed(f"cannot listen on {LOOPBACK}:{port}: {exc}") from exc
    return True


def holder_of(port: int) -> str:
    """Return `taken by pid N (command line)` as far as this user may see it."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(link.readlink()) in inodes for link in (directory / "fd").iterdir()):
                command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"taken by pid {directory.name} ({command[:120]})"
        except OSError:
            continue  # ended meanwhile, or another user's
    return "taken by another user's process"


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for fields in (line.split() for line in lines):
            if fields[3] == _LISTEN_STATE and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes
