"""What a crash, a person or another program left where our files belong. Nothing here follows a link.

A sidecar must come up over anything, so what cannot be removed is left, logged and counted as nothing.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)


def entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield what lies in a directory; nothing when it cannot be read, or is a link."""
    try:
        if directory.is_symlink():
            return
        with os.scandir(directory) as found:
            yield from found
    except OSError:
        log.warning("directory cannot be read", extra={"directory": directory.name})


def remove_whatever(path: Path) -> int:
    """Remove a file, link, FIFO, socket or a whole directory; return a file's bytes. Raises nothing."""
    try:
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(path)
            return 0
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError:
        log.warning("leftover cannot be removed", extra={"directory": path.parent.name}, exc_info=True)
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def remove_old(directory: Path, *, before_ms: int) -> int:
    """Remove what was last written before a Unix time in ms; return the bytes of the files."""
    removed_bytes = 0
    for entry in entries(directory):
        try:
            is_old = entry.stat(follow_symlinks=False).st_mtime_ns // 1_000_000 < before_ms
        except OSError:
            continue  # its owner was faster
        if is_old:
            removed_bytes += remove_whatever(Path(entry.path))
    return removed_bytes


def make_real_directory(path: Path) -> None:
    """Create a directory; a file or link in its place is removed, not what a link points to. Raises OSError."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        log.warning("something lay where a directory belongs", extra={"directory": path.name})
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)
