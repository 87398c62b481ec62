"""Processes of the stack: each leads its own session, is known by pid *and* start time, and ends with all it forked.

A pid alone is not a name: the kernel gives it out again. Pid, start time and boot together are. Linux only
(`/proc`), like the engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")
_POLL_S = 0.05
_KILL_WAIT_S = 30.0
"""The kernel frees gigabytes of a killed engine in well under a second; thirty mean that something is wrong."""


@dataclass(frozen=True, slots=True)
class ProcessName:
    """One process, for ever: `started` is boot id and start ticks, so a reused pid is somebody else."""

    pid: int
    started: str


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What `/proc/<pid>/stat` says, as far as it matters here."""

    state: str
    num_threads: int
    session: int
    started_ticks: int

    @property
    def is_over(self) -> bool:
        """Whether nothing of it runs. Of a zombie other threads may, for a moment, with its ports and files."""
        return self.state == "Z" and self.num_threads <= 1

    @classmethod
    def parse(cls, text: str) -> ProcessStat:
        """Read a stat line; the command in it may hold spaces and parentheses."""
        fields = text.rpartition(")")[2].split()
        return cls(state=fields[0], num_threads=int(fields[17]), session=int(fields[3]), started_ticks=int(fields[19]))


def start_process(command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a command as leader of a new session, deaf to this terminal, its output appended to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def name_of(pid: int) -> ProcessName:
    """Return the lasting name of a process that runs now. Raises ProcessLookupError."""
    stat = read_stat(pid)
    if stat is None:
        raise ProcessLookupError(pid)
    return ProcessName(pid, f"{_boot_id()}:{stat.started_ticks}")


def is_alive(name: ProcessName) -> bool:
    """Return whether exactly this process runs: not a zombie, not a later one with its pid."""
    stat = read_stat(name.pid)
    return stat is not None and not stat.is_over and name.started == f"{_boot_id()}:{stat.started_ticks}"


def session_members(name: ProcessName) -> list[int]:
    """Return the living processes of the session this process led, itself included.

    The leader may be gone: as long as a member lives, the kernel does not give the number to another session.
    """
    stat = read_stat(name.pid)
    boot_id, _, ticks = name.started.rpartition(":")
    if boot_id != _boot_id() or (stat is not None and str(stat.started_ticks) != ticks):
        return []
    pids = [int(path.name) for path in _PROC.glob("[0-9]*")]
    stats = ((pid, read_stat(pid)) for pid in pids)
    return [pid for pid, stat in stats if stat is not None and stat.session == name.pid and not stat.is_over]


def stop_session(name: ProcessName, *, grace_s: float, child: subprocess.Popen[bytes] | None = None) -> bool:
    """Ask the leader to end, and end the whole session when `grace_s` is over.

    `child` is reaped when this process started it. Returns False when it had to be killed.
    """
    if is_alive(name):
        _signal(name.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    while session_members(name) and time.monotonic() < deadline_s:
        if child is not None:
            child.poll()
        time.sleep(_POLL_S)
    clean = not session_members(name)
    kill_session(name, child=child)
    return clean


def kill_session(name: ProcessName, *, child: subprocess.Popen[bytes] | None = None) -> None:
    """SIGKILL every process of the session and return when all are gone, with the shared memory they had made.

    Raises TimeoutError after ten seconds.
    """
    deadline_s = time.monotonic() + _KILL_WAIT_S
    abandoned: set[Path] = set()
    while members := session_members(name):
        abandoned |= {path for pid in members for path in _shared_memory_of(pid)}
        for pid in members:
            _signal(pid, signal.SIGKILL)
        if child is not None:
            child.poll()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"processes {members} still run after SIGKILL")
        time.sleep(_POLL_S)
    for path in abandoned:
        path.unlink(missing_ok=True)
    if child is not None:
        child.wait(timeout=_KILL_WAIT_S)


def read_stat(pid: int) -> ProcessStat | None:
    """Return a process's stat, or None when there is no such process."""
    try:
        return ProcessStat.parse((_PROC / str(pid) / "stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def _shared_memory_of(pid: int) -> list[Path]:
    """Return the multiprocessing segments and semaphores a process has mapped: nobody unlinks them after SIGKILL.

    By inode, because a semaphore is mapped under a name it had only while it was made.
    """
    try:
        mapped = {
            line.split()[4] for line in (_PROC / str(pid) / "maps").read_text().splitlines() if "/dev/shm/" in line
        }
    except OSError:
        return []  # ended meanwhile
    named = [path for pattern in ("psm_*", "sem.mp-*") for path in _SHARED_MEMORY.glob(pattern)]
    return [path for path in named if str(_inode(path)) in mapped]


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None  # its owner was faster


def _boot_id() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # ended by itself between look and signal
        os.kill(pid, number)
