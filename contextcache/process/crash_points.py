"""Named places where a process dies when a test says so; nothing, and one look at the environment, otherwise.

A test starts the process with `CONTEXT_CACHE_CRASH_FILE=<path>` and later writes one line into that file:
`<point>` (die there), `<point>@3` (at the third passing) or `<point> stop` (stand still there, SIGSTOP). The line is
used up: a process that is started again lives. Each package lists its points.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

VARIABLE = "CONTEXT_CACHE_CRASH_FILE"
"""Set by tests only; it is no setting."""
_LOCK = threading.Lock()


def crash_point(name: str) -> None:
    """Die or stop here, by a signal to this very process, when the file asks for `name`. Any thread may call it."""
    path = os.environ.get(VARIABLE)
    if path is not None:
        _obey(Path(path), name)


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
