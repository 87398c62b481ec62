"""An engine's process that has a slot of the arena and writes to it, until it is ended: what a test kills or stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from contextcache.clock import SystemClock
from tests.kit.engine_rank import EngineRank
from tests.kit.kv_blocks import new_save

SIZE_BYTES = 20_000
FILL = b"\x5a"


class Borrower:
    """One such process; a context manager."""

    def __init__(self, address: str, cache_ref: str, *, forks: bool = False) -> None:
        """`forks`: it has a child that lives on."""
        command = [sys.executable, "-m", "tests.kit.borrower", address, cache_ref, *(["forks"] if forks else [])]
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        told = json.loads(self._process.stdout.readline())
        self.offset: int = told["offset"]
        self._child: int = told["child"]

    def __enter__(self) -> Borrower:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        if self._child:
            os.kill(self._child, signal.SIGKILL)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def stop(self) -> None:
        """Have it stand still, as a machine does that swaps."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    address, cache_ref, *forks = sys.argv[1:]
    rank = EngineRank(address)
    rank.prepare(new_save((1, 2, 3), now_ms=SystemClock().now_ms(), cache_ref=cache_ref))
    (slot,) = rank.lend({"cache_ref": cache_ref, "rank": 0, "block_index": 0}, SIZE_BYTES)
    rank.view(slot)[:] = FILL * SIZE_BYTES
    child = os.fork() if forks else -1
    if child:
        print(json.dumps({"offset": slot.offset, "child": max(child, 0)}), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
