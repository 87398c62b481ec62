"""Ports for servers of tests: no two processes of this machine are ever given the same one.

A process claims blocks of ports by locking a file for each, which the kernel unlocks when the process ends, however it
ends. So neither the workers of one run nor two checkouts at once can collide. All blocks lie below the ports that the
kernel hands to clients.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

FIRST, LAST, BLOCK = 10_000, 30_000, 50
CLAIMS = Path(tempfile.gettempdir()) / f"context-cache-ports-{os.getuid()}"


class Ports:
    """What one process may listen on. A number is given once."""

    def __init__(self, claims: Path = CLAIMS, within: range = range(FIRST, LAST)) -> None:
        """`claims`: the folder of the files that are locked."""
        self._claims = claims
        self._starts = within[::BLOCK]
        self._held: list[int] = []
        self._left: Iterator[int] = iter(())

    def free(self, count: int = 1) -> int:
        """Return the first of `count` ports in a row, at most a block, that nothing listens on."""
        assert 0 < count <= BLOCK
        run: list[int] = []
        while len(run) < count:
            port = next(self._left, 0)
            if not port:
                self._left, run = iter(self._claim()), []
            elif _is_free(port):
                run.append(port)
            else:
                run = []
        return run[0]

    def _claim(self) -> range:
        self._claims.mkdir(exist_ok=True)
        # Not the block of a process that has just ended: who it talked to may still knock. No seed chooses either.
        for start in random.SystemRandom().sample(self._starts, len(self._starts)):
            lock = os.open(self._claims / str(start), os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._held.append(lock)
            return range(start, start + BLOCK)
        raise AssertionError(f"all {len(self._starts)} blocks of ports are claimed (locks in {self._claims})")

    def close(self) -> None:
        """Leave the blocks to others."""
        while self._held:
            os.close(self._held.pop())


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_OURS = Ports()


def free_port() -> int:
    """Return a loopback port for one server."""
    return _OURS.free()


def free_ports(count: int) -> int:
    """Return the first of `count` ports in a row, as a stack takes them."""
    return _OURS.free(count)
