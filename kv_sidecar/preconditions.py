"""Check once, at the start, that the sidecar's container has enough memory and disk.

A shortage is only a warning, because an operator may raise the limits later.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

_PROCESS_BYTES = 512 << 20
"""Memory beside the arena: the process, blocks on their way to a shared store, a block for each thread and stream."""
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Files of this process's own container (cgroup v2)."""


def unmet(
    *, memory_bytes: int, disk_limit_bytes: int, data_dir: Path, container_limit: Path = _CONTAINER_LIMIT
) -> Iterator[str]:
    """Yield a warning for each limit that is too small. `data_dir` exists."""
    try:
        limit = container_limit.read_text().strip()
    except OSError:
        limit = "max"
    if limit.isdecimal() and int(limit) < memory_bytes + _PROCESS_BYTES:
        wanted = memory_bytes + _PROCESS_BYTES
        yield (f"the kernel may kill the container: its memory limit is {limit} bytes, arena and process need {wanted}")
    size_bytes = shutil.disk_usage(data_dir).total
    if size_bytes < disk_limit_bytes:
        yield (
            "the disk fills before its limit, and saves then fail: SIDECAR_DISK_LIMIT_BYTES is "
            f"{disk_limit_bytes}, the filesystem of SIDECAR_DATA_DIR has {size_bytes} bytes"
        )
