"""Which port each part gets, and whether they are free.

One number chooses all: Envoy's. The gateway's three follow it, the others begin ten above it, so two stacks need only
different `PORT`s that are not within 24 of each other.
"""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from dataclasses import dataclass

import psutil

from deploy.local.progress import StepFailed

DEFAULT_PORT = 8000
LOOPBACK = "127.0.0.1"
MAX_ENGINES = 4
PORTS_OF_A_STACK = 24
_OTHERS = 10
_TURNS = 20


@dataclass(frozen=True, slots=True)
class PortPlan:
    """The TCP ports of one stack, all on loopback."""

    envoy: int
    """Where clients go."""
    gateway: int
    """The gateway's HTTP front."""
    ext_proc: int
    """The gateway's external processor, which Envoy asks."""
    envoy_admin: int
    """Envoy's own pages."""
    gateway_metrics: int
    """The gateway's metrics, and its view of the pods."""
    s3: int
    """The S3 server, where the stack has one."""
    redis: int
    """Sessions."""
    manager: int
    """The context manager."""

    def sidecar(self, number: int) -> int:
        """Return the port of a sidecar, counted from 0."""
        return self.manager + 1 + 2 * number

    def engine(self, number: int) -> int:
        """Return the port of an engine, counted from 0."""
        return self.sidecar(number) + 1

    def turn(self, number: int) -> int:
        """Return the port of an engine's turn process, counted from 0."""
        return self.envoy + _TURNS + number


def plan_ports(port: int) -> PortPlan:
    """Return the plan for Envoy's port. Raises StepFailed when it leaves no room for the others."""
    if not 1024 <= port <= 65536 - PORTS_OF_A_STACK:
        raise StepFailed(f"PORT={port} is out of range: 1024 to {65536 - PORTS_OF_A_STACK}")
    return PortPlan(*(port + after for after in (0, 1, 2, 3, 4, 5, _OTHERS, _OTHERS + 1)))


def check_ports_free(ports: list[tuple[str, int]]) -> None:
    """Raise StepFailed naming every port that something listens on, and by what."""
    taken = [f"  port {port} ({part}): {holder_of(port)}" for part, port in ports if not is_free(port)]
    if taken:
        listing = "\n".join(taken)
        raise StepFailed(
            f"these ports are in use:\n{listing}\nset another PORT=<n> for Envoy; the other ports follow it"
        )


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
    """Return the process that listens on a port, with its command line, as far as this user may see it."""
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid:
            with suppress(psutil.Error):  # ended meanwhile
                return f"in use by pid {found.pid} ({' '.join(psutil.Process(found.pid).cmdline())[:120]})"
    return "in use by a process of another user"
