"""Opening a file that may be anything: no link is followed, no FIFO waited for, nothing but a regular file read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from contextcache.errors import CorruptBlock


def open_regular(path: Path) -> tuple[int, int]:
    """Return a descriptor to read from, and the file's size in bytes.

    Raises FileNotFoundError, CorruptBlock when something else lies there, OSError.
    """
    try:
        # Without O_NONBLOCK the open of a FIFO waits for a writer, for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        if exc.errno in {errno.ELOOP, errno.ENXIO}:
            raise CorruptBlock("a link or socket lies where a file belongs") from exc
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CorruptBlock("something else lies where a file belongs")
    return descriptor, status.st_size


def regular_size(path: Path) -> int | None:
    """Return the size of a regular file in bytes; None when there is none, or something else. Raises OSError."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
