"""Memory of a process, as the kernel counts it."""

from contextlib import suppress
from pathlib import Path


def memory_bytes(pid: int | str, name: str) -> int:
    """Return a line of `/proc/<pid>/status`: `VmRSS`, `VmHWM`, `RssAnon`; `pid` may be `self`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def arenas_of(pid: int) -> set[int]:
    """Return the inodes of the arenas that a process has mapped or open: it keeps their memory."""
    name, found = "/memfd:context-cache", set()
    with suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found |= {int(line.split()[4]) for line in maps if name in line}
        links = list(Path(f"/proc/{pid}/fd").iterdir())
        found |= {link.stat().st_ino for link in links if link.is_symlink() and str(link.readlink()).startswith(name)}
    return found
