"""CPU time and memory of processes, from `/proc`. Linux only, like the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process with all its threads; 0 when it is gone.

    From the scheduler's own clock where the kernel shows it, thread by thread, because a tick of 10 ms is a lot beside
    a thousand chunks; a thread that has ended is not in it any more.
    """
    try:
        tasks = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        if tasks:
            return sum(int(task.split()[0]) for task in tasks) / 1e9
    except (OSError, IndexError):
        pass  # a thread ended between the two looks, or there is no such clock
    return _ticked_cpu_seconds(pid)


def _ticked_cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """Return the bytes of physical memory a process holds of its own (not its files'); 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


@dataclass(frozen=True, slots=True)
class CpuSample:
    """CPU seconds by part at one moment."""

    pids: Mapping[str, Sequence[int]]
    seconds: Mapping[str, float]

    @classmethod
    def of(cls, pids: Mapping[str, Sequence[int]]) -> CpuSample:
        """Sample now."""
        return cls(pids, {part: sum(map(cpu_seconds, of_part)) for part, of_part in pids.items()})

    def since(self) -> dict[str, float]:
        """Return what each part has used since this sample."""
        now = CpuSample.of(self.pids).seconds
        return {part: round(max(0.0, now[part] - before), 6) for part, before in self.seconds.items()}
