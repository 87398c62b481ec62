"""Tells whether a watched file is another one than before, without reading it."""

from __future__ import annotations

from pathlib import Path


def file_version(path: Path) -> tuple[int, int, int] | None:
    """Return what differs once the file has changed; None when it cannot be had."""
    try:
        found = path.stat()
    except OSError:
        return None
    # The inode too: a mounted Secret or ConfigMap is replaced by switching a link.
    return found.st_mtime_ns, found.st_size, found.st_ino
