"""Named places where a test can kill or stop a process. Without a test each place costs one comparison.

A test starts the process with `CONTEXT_CACHE_CRASH_FILE=<path>` and later writes one line into that file: `<point>`
(kill), `<point>@3` (kill at the third passing) or `<point> stop` (SIGSTOP). The process deletes the line first, so it
survives a restart. Each package lists its points.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

VARIABLE = "CONTEXT_CACHE_CRASH_FILE"
"""Variable that only tests set. It is no setting."""
_FILE = os.environ.get(VARIABLE)
_LOCK = threading.Lock()


def crash_point(name: str) -> None:
    """Kill or stop this process if the file names this point. Any thread may call it."""
    if _FILE is not None:
        _obey(Path(_FILE), name)


def _obey(path: Path, name: str) -> None:
    with _LOCK:
        try:
            wanted, _, action = path.read_text().strip().partition(" ")
        except FileNotFoundError:
            return
        point, _, number = wanted.partition("@")
        if point != name:
            return
        if int(number or 1) > 1:
            path.write_text(f"{point}@{int(number) - 1} {action}")
            return
        path.unlink()
    os.kill(os.getpid(), signal.SIGSTOP if action == "stop" else signal.SIGKILL)
