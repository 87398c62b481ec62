"""Orders to processes that run with `interposed/` on their PYTHONPATH: shift this one's clock, slow that one's disk.

Only processes started as `python -m <module>` can be reached, by that name; they look at their orders every 20 ms.
Monotonic time is never shifted: no machine's is.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

INTERPOSED = Path(__file__).parent / "interposed"


class Interposed:
    """One directory of orders. `environment` must be in a process's environment at its start."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.environment = {
            "CONTEXT_CACHE_INTERPOSED": str(directory),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(INTERPOSED), os.environ.get("PYTHONPATH", "")))),
        }

    def shift_clock(self, module: str, shift_ms: int) -> None:
        """Let a process's wall clock be this much ahead (negative: behind) from now on."""
        self._order(module, {"shift_ms": shift_ms})

    def slow_disk(self, module: str, *, write_ms: float = 0, fsync_ms: float = 0) -> None:
        """Let every `os.write` and `os.fsync` of a process take this much longer from now on."""
        self._order(module, {"write_ms": write_ms, "fsync_ms": fsync_ms})

    def heal(self) -> None:
        """Take every order back."""
        for path in self._directory.glob("*.json"):
            path.unlink()

    def _order(self, module: str, values: dict[str, float]) -> None:
        path = self._directory / f"{module}.json"
        given = json.loads(path.read_text()) if path.exists() else {}
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(given | values))
        beside.rename(path)
