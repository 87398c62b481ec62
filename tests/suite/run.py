"""Runs parts of the suite, and compares the CPU seconds of each with its budget."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from threading import Event

from deploy.local.table import render
from tests.suite.parts import Part

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".build" / "suite"
LAST_TESTS_S = 60
"""No test begins in the last minute of a bounded run: the tests that run then can end."""
_TEAR_DOWN_S = 120
"""An interrupted part has this long to end the processes that it started."""
_LOOP_CPU_S = 0.028
"""CPU seconds of one calibration loop on the machine on which the budgets were measured, while it was idle."""
_LOOP_INTERVAL_S = 5.0
_INTERRUPTED = 2
"""pytest's exit status when a test run was stopped."""
_STOPPED = {False: "out of time", True: "not run"}


@dataclass(frozen=True, slots=True)
class Run:
    """How parts are run."""

    seed: int
    shard: tuple[int, int] | None = None
    """Number and count; None: the whole part, against its budget."""
    within_s: float | None = None
    options: tuple[str, ...] = ()
    """Further options of pytest."""
    stop: Event = field(default_factory=Event)
    """Once set, parts that run are interrupted, and no further one begins."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one part."""

    part: Part
    status: str
    """`passed`, `failed`, `over budget`, `out of time` for a bounded run, or `not run` after a failure."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """User and system time of the part's processes."""
    budget_cpu_s: float | None = None
    """The part's budget on this machine; None: the part has none, or ran as a shard."""

    @property
    def is_failure(self) -> bool:
        return self.status in {"failed", "over budget"}


def run_part(part: Part, run: Run, *, log: Path | None = None) -> Outcome:
    """Run a part, or one shard of it; `log` takes its output."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    stop_at = None if run.within_s is None else time.time() + run.within_s - LAST_TESTS_S
    command = [
        sys.executable,
        "-m",
        "tests.suite.reaper",
        *part.command(run.seed, shard=run.shard, stop_at=stop_at),
        *run.options,
    ]
    environment = os.environ | {"SEED": str(run.seed)} | ({"OMP_NUM_THREADS": "1"} if part.beside else {})
    began_s, loops_s = time.monotonic(), [_loop_cpu_s()]
    # The child stays in the terminal's process group: an interrupt reaches pytest, which ends its processes.
    with log.open("w") if log else nullcontext() as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file and subprocess.STDOUT)
        exit_status, cpu_s, is_stopped = _wait(process, run, loops_s)
    is_late = is_stopped or (stop_at is not None and exit_status == _INTERRUPTED and time.time() > stop_at)
    status = "passed" if exit_status == 0 else _STOPPED[run.stop.is_set()] if is_late else "failed"
    budget_cpu_s = None
    if part.budget_cpu_s and run.shard is None and not run.options:
        # A core that runs the loop faster does not run tests as much faster: they wait for memory and the kernel too.
        budget_cpu_s = part.budget_cpu_s * max(1.0, mean(loops_s) / _LOOP_CPU_S)
        if status == "passed" and cpu_s > budget_cpu_s:
            status = "over budget"
    return Outcome(part, status, time.monotonic() - began_s, cpu_s, budget_cpu_s)


def _loop_cpu_s() -> float:
    """Return the CPU seconds of a fixed loop: they grow on a slower core and beside busy neighbours."""
    began_s = time.process_time()
    total = 0
    for number in range(1_000_000):
        total += number
    return time.process_time() - began_s


def _wait(process: subprocess.Popen[bytes], run: Run, loops_s: list[float]) -> tuple[int, float, bool]:
    """Return exit status, CPU seconds, and whether this function has interrupted the process.

    Meanwhile calibration loops run and their CPU seconds go into `loops_s`.
    """
    now_s = time.monotonic()
    ends_at_s = None if run.within_s is None else now_s + run.within_s
    next_loop_s = now_s + _LOOP_INTERVAL_S
    signals = [signal.SIGTERM, signal.SIGKILL]
    while True:
        try:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return process.returncode, usage.ru_utime + usage.ru_stime, len(signals) < 2
            if run.stop.is_set() and len(signals) == 2:
                ends_at_s = time.monotonic()
            if ends_at_s is not None and time.monotonic() >= ends_at_s and signals:
                process.send_signal(signals.pop(0))  # the reaper interrupts its command
                ends_at_s += _TEAR_DOWN_S
            if time.monotonic() > next_loop_s:
                loops_s.append(_loop_cpu_s())
                next_loop_s = time.monotonic() + _LOOP_INTERVAL_S
            time.sleep(0.1)
        except KeyboardInterrupt:
            run.stop.set()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TEAR_DOWN_S)
            raise


def run_quick(parts: Sequence[Part], run: Run, *, keep_going: bool) -> list[Outcome]:
    """Run parts in their order, and the `beside` ones in a second lane, whose output follows at the end.

    The second lane starts after the first part, which fails soonest. A failure stops both lanes unless `keep_going`.
    """
    here = [part for part in parts if not part.beside] or list(parts)
    beside = [part for part in parts if part not in here]

    def lane(parts: Sequence[Part], *, is_beside: bool = False) -> list[Outcome]:
        outcomes = []
        for part in parts:
            if run.stop.is_set():
                outcomes.append(Outcome(part, "not run"))
                continue
            print(f"\n== {part.name}{' (beside)' if is_beside else ''}: {part.proves} (seed {run.seed})", flush=True)
            outcomes.append(run_part(part, run, log=FOLDER / f"{part.name}.log" if is_beside else None))
            if outcomes[-1].is_failure and not keep_going:
                run.stop.set()
        return outcomes

    with ThreadPoolExecutor(1) as second:
        outcomes = lane(here[:1])
        others = second.submit(lane, beside, is_beside=True)
        outcomes += lane(here[1:])
        outcomes += others.result()
    for part in beside:
        with suppress(FileNotFoundError):
            print(f"\n== {part.name}\n{(FOLDER / f'{part.name}.log').read_text()}", flush=True)
    return outcomes


def tell(outcomes: Sequence[Outcome], *, seed: int, began_s: float) -> None:
    """Print a row for each part."""
    rows = [
        [
            one.part.name,
            f"{one.wall_s:.0f}",
            f"{one.cpu_s:.0f}",
            f"{one.budget_cpu_s:.0f}" if one.budget_cpu_s else "-",
            one.status,
        ]
        for one in outcomes
    ]
    is_failure = any(one.is_failure for one in outcomes)
    total_s, cpu_s = time.monotonic() - began_s, sum(one.cpu_s for one in outcomes)
    rows.append(["all", f"{total_s:.0f}", f"{cpu_s:.0f}", "-", "failed" if is_failure else "passed"])
    print(f"\n{render(['part', 'wall s', 'CPU s', 'budget', 'ended'], rows)}")
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"seed {seed} (SEED={seed} repeats it); {os.cpu_count()} cores, load now {load}", flush=True)
