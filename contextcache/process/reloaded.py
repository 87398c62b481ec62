"""Files that change while a process runs: certificates, keys, lists of pods. The last good content stays in use.

Kubernetes replaces mounted Secrets and ConfigMaps, and operators edit files. A reader is tried before its value is
used, so a broken or half-written file changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.9
"""Time between two looks at the files. With the time to read them, a change takes effect within a second."""
_TELL_AGAIN_S = 10.0
"""Time between two reports of the same broken files: alerts need a counter that keeps rising."""
PEM_BYTES_MAX = 4 << 20
"""Largest certificate, key or bundle of CAs."""
_READS_MAX = 5
"""Maximum number of attempts to read files that change while they are read."""

_Version = tuple[tuple[int, ...], ...]
ValueT = TypeVar("ValueT")


class Reloaded(Generic[ValueT]):
    """A value read from files, read again when they change. Safe to use from several threads."""

    def __init__(
        self,
        *files: Path,
        read: Callable[[], ValueT],
        name: str,
        on_failure: Callable[[], object] = lambda: None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the files. Raises the errors of `read`: OSError or ValueError.

        `name`: the subject of log lines, such as "key file". `on_failure` is called when changed files are first
        rejected, and every `_TELL_AGAIN_S` while they stay broken.
        """
        self._files, self._read, self._name = files, read, name
        self._on_failure, self._monotonic_s = on_failure, monotonic_s
        self._lock = Lock()
        self._rejected: _Version | None = None
        self._tell_at_s = 0.0
        self._version, self.value = self._read_whole()
        self._look_at_s = monotonic_s() + LOOK_INTERVAL_S

    def current(self) -> ValueT:
        """Return the last good value. Looks at the files first if the last look is `LOOK_INTERVAL_S` ago."""
        if self._monotonic_s() >= self._look_at_s:
            with self._lock:
                if self._monotonic_s() >= self._look_at_s:
                    self._look()
        return self.value

    def look(self) -> bool:
        """Read the files if they differ from the last good ones; return whether there is a new value."""
        with self._lock:
            return self._look()

    async def follow(self, interval_s: float = LOOK_INTERVAL_S) -> None:
        """Look every `interval_s` until cancelled, in a thread: reading a large file takes a while."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await asyncio.to_thread(self.look)
            except Exception:
                # The loop must survive: without it a key that was taken back would stay valid.
                self._on_failure()
                log.exception("%s check failed", self._name)

    def _look(self) -> bool:
        now_s = self._monotonic_s()
        self._look_at_s = now_s + LOOK_INTERVAL_S
        seen = self._seen()
        if seen == self._version:
            return False
        try:
            self._version, self.value = self._read_whole()
        except (OSError, ValueError) as exc:
            # Retried at every look: a file found half-written may become whole with an equal version.
            if seen != self._rejected or now_s >= self._tell_at_s:
                self._rejected, self._tell_at_s = seen, now_s + _TELL_AGAIN_S
                log.warning("%s reload failed, last good one stays", self._name, extra={"error": str(exc)})
                self._on_failure()
            return False
        self._rejected = None
        log.info("%s reloaded", self._name)
        return True

    def _read_whole(self) -> tuple[_Version, ValueT]:
        """Return files that belong together: a mounted Secret may be replaced between two reads."""
        for _ in range(_READS_MAX):
            seen = self._seen()
            try:
                value = self._read()
            except (OSError, ValueError):
                if self._seen() == seen:
                    raise
                continue
            if self._seen() == seen:
                return seen, value
        raise ValueError(f"{self._files[0]} changes faster than it can be read")

    def _seen(self) -> _Version:
        return tuple(map(_version, self._files))


def read_bounded(path: Path, bytes_max: int = PEM_BYTES_MAX) -> bytes:
    """Return the content of a regular file. Raises OSError, or ValueError for a larger file or another kind."""
    # Non-blocking: opening a pipe would wait for its writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is not a regular file")
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise ValueError(f"{path} is larger than {bytes_max} bytes")
    return data


def _version(path: Path) -> tuple[int, ...]:
    """Return numbers that differ after a change; empty for a file that cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return ()
    # The inode: a mounted Secret is replaced by switching a link. The change time: `chmod` may repair a file.
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_ctime_ns
