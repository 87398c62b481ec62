"""Found by Python at its start when this directory is on PYTHONPATH: slows or shifts one process, as a file says.

`CONTEXT_CACHE_INTERPOSED` names a directory; the process started as `python -m <module>` obeys `<module>.json` in it,
which may change at any time: {"shift_ms": …, "write_ms": …, "fsync_ms": …}. Other processes are left alone. Used by
tests only (disk.py, clock_shift.py); imports nothing of the project, for it runs before everything else.
"""

import json
import os
import sys
import time
from pathlib import Path

_LOOK_EVERY_S = 0.02


def _module() -> str:
    words = sys.orig_argv
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


class _Orders:
    """The file, looked at rarely: time is asked for all the time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_at_s = -1.0
        self._values: dict[str, float] = {}

    def get(self, name: str) -> float:
        now_s = time.monotonic()
        if now_s - self._looked_at_s >= _LOOK_EVERY_S:
            self._looked_at_s = now_s
            try:
                self._values = json.loads(self._path.read_text())
            except (FileNotFoundError, ValueError):
                self._values = {}
        return self._values.get(name, 0)


def _interpose(orders: _Orders) -> None:
    true_time, true_time_ns = time.time, time.time_ns
    true_write, true_fsync = os.write, os.fsync

    def shifted_time() -> float:
        return true_time() + orders.get("shift_ms") / 1000

    def shifted_time_ns() -> int:
        return true_time_ns() + int(orders.get("shift_ms") * 1_000_000)

    def slow_write(descriptor: int, data: object, /) -> int:
        time.sleep(orders.get("write_ms") / 1000)
        return true_write(descriptor, data)

    def slow_fsync(descriptor: int) -> None:
        time.sleep(orders.get("fsync_ms") / 1000)
        return true_fsync(descriptor)

    time.time, time.time_ns = shifted_time, shifted_time_ns
    os.write, os.fsync = slow_write, slow_fsync


_directory = os.environ.get("CONTEXT_CACHE_INTERPOSED")
if _directory and _module():
    _interpose(_Orders(Path(_directory) / f"{_module()}.json"))
