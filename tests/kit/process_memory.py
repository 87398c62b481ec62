"""Memory of a process, as the kernel counts it."""

from pathlib import Path


def memory_bytes(pid: int | str, name: str) -> int:
    """Return a line of `/proc/<pid>/status`: `VmRSS`, `VmHWM`, `RssAnon`; `pid` may be `self`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
