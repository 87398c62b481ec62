"""A disk that is small, full or slow: a tmpfs where mounting is allowed, a limit on one process's files where not.

A process over `RLIMIT_FSIZE` sees EFBIG where a full disk says ENOSPC; to whoever writes, both mean "no room". How to
make a disk slow is in clock_shift.py.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

_BALLAST = "ballast"


@contextlib.contextmanager
def small_disk(directory: Path, *, size_bytes: int) -> Iterator[SmallDisk | None]:
    """Mount a tmpfs of `size_bytes` at `directory`; None where that is not allowed."""
    directory.mkdir(parents=True, exist_ok=True)
    options = f"size={size_bytes},mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", os.fspath(directory)], check=False, capture_output=True
    )
    if done.returncode != 0:
        yield None
        return
    try:
        yield SmallDisk(directory)
    finally:
        # Lazily: a process that is just ending may still have a file open.
        subprocess.run(["umount", "--lazy", os.fspath(directory)], check=True, capture_output=True)


class SmallDisk:
    """A file system of its own, that a test fills and empties."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def fill(self, *, leave_bytes: int = 0) -> None:
        """Write until no more than about `leave_bytes` are free."""
        chunk = bytes(1 << 16)
        with (self.directory / _BALLAST).open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while self.free_bytes > leave_bytes:
                file.write(chunk[: max(min(len(chunk), self.free_bytes - leave_bytes), 1)])

    def free(self) -> None:
        """Give the room back."""
        (self.directory / _BALLAST).unlink(missing_ok=True)

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be written."""
        status = os.statvfs(self.directory)
        return status.f_bavail * status.f_frsize


def limit_file_size(pid: int, size_bytes: int | None) -> None:
    """Let no file of a running process grow beyond `size_bytes` from now on; None: as large as before."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    soft = hard if size_bytes is None else size_bytes
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
