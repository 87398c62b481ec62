"""The directory on disk: durable writing, putting aside, leftovers, and the lock that keeps a second process out.

Every change goes temp -> fsync -> rename -> fsync of the directory. `step` is called with `<verb> <file name>` before
each step and after the last, so that tests can stop the world between any two; in a real process it is a crash point.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

from contextcache.errors import StorageFull
from kv_sidecar.crash_points import at_step
from kv_sidecar.store import Buffer

Step = Callable[[str], None]
MAX_QUARANTINED = 32
"""Files put aside for a person to look at; the oldest go first."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class DataDirectory:
    """`blocks/`, `tails/`, `manifests/`, `quarantine/` and `tmp/` under one root, owned by one process."""

    def __init__(self, root: Path, *, step: Step = at_step) -> None:
        self.root = root
        self.tmp = root / "tmp"
        self.quarantine = root / "quarantine"
        self._step = step
        self._count_lock = threading.Lock()
        self.num_quarantined = 0
        """Files put aside since the start."""
        self._lock: int | None = None

    def open(self) -> None:
        """Create what is missing, take the lock and remove unfinished writes. Raises OSError when it is locked."""
        for directory in (self.root, self.tmp, self.quarantine):
            directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            self.close()
            raise OSError(f"{self.root} belongs to another kv-sidecar that is running") from exc
        for path in self.tmp.iterdir():
            path.unlink()

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def publish(self, data: Buffer, final: Path) -> None:
        """Make `data` appear at `final`, whole and durable, or not at all. Raises StorageFull."""
        temporary = self._temporary_path(final)
        try:
            self._step(f"write {final.name}")
            _write_synced(temporary, data)
            _make_directory(final.parent)
            self._step(f"rename {final.name}")
            temporary.rename(final)
        except OSError as exc:
            temporary.unlink(missing_ok=True)
            if exc.errno in _NO_ROOM:
                raise StorageFull("the disk is full") from exc
            raise
        self._step(f"sync {final.name}")
        try:
            _fsync_directory(final.parent)
        except OSError:
            # Nobody was told that the file is there, so it must not be.
            final.unlink(missing_ok=True)
            raise
        self._step(f"published {final.name}")

    def remove(self, path: Path, *, durable: bool) -> None:
        """Remove a file if it is there; `durable`: it cannot come back after a crash."""
        self._step(f"unlink {path.name}")
        path.unlink(missing_ok=True)
        if durable:
            self._step(f"sync-unlink {path.name}")
            _fsync_directory(path.parent)
            self._step(f"unlinked {path.name}")

    def put_aside(self, path: Path) -> None:
        """Move a bad file into `quarantine/`, where at most `MAX_QUARANTINED` are kept."""
        self._step(f"quarantine {path.name}")
        aside = self.quarantine / path.name
        try:
            path.rename(aside)
            os.utime(aside)
        except FileNotFoundError:
            return
        with self._count_lock:
            self.num_quarantined += 1
        kept = sorted(self.quarantine.iterdir(), key=_modified_ns)
        for old in kept[:-MAX_QUARANTINED]:
            old.unlink(missing_ok=True)

    def remove_leftovers(self, *, before_ms: int) -> int:
        """Remove unfinished and quarantined files last written before a Unix time in ms; return their bytes."""
        return remove_old_files(self.tmp, before_ms=before_ms) + remove_old_files(self.quarantine, before_ms=before_ms)

    def _temporary_path(self, final: Path) -> Path:
        return self.tmp / f"{final.name}.{os.urandom(8).hex()}"


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0  # another thread was faster


def remove_old_files(directory: Path, *, before_ms: int) -> int:
    """Remove the files of a directory last written before a Unix time in ms; return their bytes."""
    removed_bytes = 0
    for path in directory.iterdir():
        try:
            status = path.stat(follow_symlinks=False)
            if status.st_mtime_ns // 1_000_000 < before_ms:
                path.unlink()
                removed_bytes += status.st_size
        except OSError:
            # Its owner was faster, or it is no file: the next pass looks again.
            continue
    return removed_bytes


def _write_synced(path: Path, data: Buffer) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: Buffer) -> None:
    """Write all of `data`; one `write` takes at most 2 GiB and may take less."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _make_directory(path: Path) -> None:
    """Create a fan-out directory that outlives a crash like the files in it."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        _fsync_directory(path.parent)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
