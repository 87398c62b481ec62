"""Runs parts, one after the other, and tells at the end what each took and which tests were slowest."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.local.table import render
from tests.suite import coverage as cover
from tests.suite.parts import Part

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".build" / "suite"
NUM_SLOWEST = 30
_BEGAN_S = time.monotonic()
_LAST_TESTS_S = 120
"""Before the time is up, so long no test is begun: what runs then ends, and what was started with it."""
_TEAR_DOWN_S = 120
"""What is interrupted may take so long to end what it has started."""


@dataclass(slots=True)
class Outcome:
    """What became of one part."""

    name: str
    status: str
    """`passed`, `failed`, `out of time` where that was bounded, or `not run` after one that failed."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """User and system time of all its processes that were waited for."""
    tests: dict[str, float] = field(default_factory=dict)
    """Seconds of each test that was run, its fixtures with the first that used them."""
    unreached: list[str] = field(default_factory=list)


def run_part(part: Part, *, seed: int, within_s: float | None = None, coverage: bool = False) -> Outcome:
    """Run a part; `within_s`: it ends by then and is not to blame for what it did not reach."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    record = FOLDER / f"{part.name}.json"
    covered = FOLDER / f"{part.name}-coverage.json"
    for file in (record, covered):
        file.unlink(missing_ok=True)
    command = part.command(seed)
    if not part.module:
        command += ["-p", "tests.suite.record", "--record", str(record)]
        command += ["--stop-at", str(time.time() + within_s - _LAST_TESTS_S)] if within_s else []
        command += cover.options(covered) if coverage else []
    print(f"\n== {part.name}: {part.proves} (seed {seed})", flush=True)
    began_s, cpu_s = time.monotonic(), _cpu_of_children_s()
    exit_status = _run(command, seed=seed, within_s=within_s)
    if covered.exists():
        print(f"\nCoverage by {part.name}\n{cover.by_package(covered)}")
    wall_s, cpu_s = time.monotonic() - began_s, _cpu_of_children_s() - cpu_s
    told = json.loads(record.read_text()) if record.exists() else {"failed": [], "seconds": {}, "unreached": []}
    stopped = exit_status == pytest.ExitCode.INTERRUPTED and told["unreached"]
    bounded = within_s is not None and not told["failed"] and (stopped or wall_s >= within_s)
    status = "passed" if exit_status == 0 else "out of time" if bounded else "failed"
    return Outcome(part.name, status, wall_s, cpu_s, told["seconds"], told["unreached"])


def _run(command: list[str], *, seed: int, within_s: float | None) -> int:
    # In the terminal's process group: an interrupt reaches pytest as well, which then ends what it has started.
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"SEED": str(seed)}) as process:
        for stop, patience_s in ((signal.SIGINT, within_s), (signal.SIGKILL, _TEAR_DOWN_S)):
            try:
                return process.wait(patience_s)
            except subprocess.TimeoutExpired:
                process.send_signal(stop)
            except KeyboardInterrupt:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_TEAR_DOWN_S)
                raise
        return process.wait()


class Lane:
    """Parts that run one after the other beside others, in a process of its own. What it says comes at the end.

    Engines compute with one thread there: of two that wait for each other, one is always out of its turn.
    """

    def __init__(self, parts: Sequence[Part], *, seed: int, keep_going: bool) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        self._said, self._told = FOLDER / "beside.log", FOLDER / "beside.json"
        self._told.unlink(missing_ok=True)
        for part in parts:
            print(f"\n== {part.name} beside what follows: {part.proves}", flush=True)
        chosen = [word for part in parts for word in ("--part", part.name)] + ["--keep-going"] * keep_going
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.suite", *chosen, "--told", str(self._told)],
                cwd=ROOT,
                env=os.environ | {"SEED": str(seed), "OMP_NUM_THREADS": "1"},
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def stop(self) -> None:
        """Interrupt it where it still runs: what it has started ends with it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def outcomes(self) -> list[Outcome]:
        """Wait for its end and return what became of it: nothing where it was stopped."""
        try:
            self._process.wait()
        except KeyboardInterrupt:
            self._process.wait(_TEAR_DOWN_S)
            raise
        print(self._said.read_text(), flush=True)
        return [Outcome(**told) for told in json.loads(self._told.read_text())] if self._told.exists() else []


def _cpu_of_children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tell(outcomes: Iterable[Outcome], *, seed: int) -> None:
    """Print the slowest tests, then a row for each part."""
    outcomes = list(outcomes)
    slowest = sorted(((seconds, test) for one in outcomes for test, seconds in one.tests.items()), reverse=True)
    if slowest:
        rows = [[f"{seconds:.1f}", test] for seconds, test in slowest[:NUM_SLOWEST]]
        print(f"\nThe slowest {len(rows)} of {len(slowest)} tests\n{render(['seconds', 'test'], rows)}")
    for one in outcomes:
        if one.unreached:
            cases = Counter(test.partition("[")[0] for test in one.unreached)
            listing = [f"{test} ({count})" if count > 1 else test for test, count in sorted(cases.items())]
            print(f"\n{one.name} did not reach {len(one.unreached)} tests:", *listing, sep="\n  ")
    rows = [
        [one.name, str(len(one.tests) or "-"), f"{one.wall_s:.0f}", f"{one.cpu_s:.0f}", one.status] for one in outcomes
    ]
    total = [f"{time.monotonic() - _BEGAN_S:.0f}", f"{sum(one.cpu_s for one in outcomes):.0f}"]
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    rows.append(
        ["all", str(len(slowest)), *total, "failed" if any(one.status == "failed" for one in outcomes) else "passed"]
    )
    print(f"\n{render(['part', 'tests', 'wall s', 'CPU s', 'ended'], rows)}")
    print(f"seed {seed} (SEED={seed} repeats it); {os.cpu_count()} cores, load now {load}", flush=True)
