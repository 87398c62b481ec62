"""The plan: which cells are measured on which ways, in which order, and what their rounds come to.

A cell is one kind of load; a round measures every cell on every way, one way after the other, so that whatever the
machine does besides meets all of them. Medians over rounds are what counts; `added` is the median of the differences
within each round. A cell in which a request failed, or which did not go the way it is called after, has errors and
meets no bar. What a part uses while nobody asks anything (probes, health checks) is measured once and taken off the CPU
of paced streams: it is there whether chunks flow or not.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.front.load import Job, Outcome
from benchmarks.front.parts import Parts, Way
from benchmarks.front.process_figures import CpuSample
from benchmarks.processes import ROOT
from deploy.local.plain_text import plain_text
from deploy.local.progress import Step, StepFailed, say

DIRECT, ENVOY = "direct", "envoy"
SMALL, LARGE = "small", "64 KB"
NUM_CHUNKS = 200
PACE_MS = 10.0
NUM_IDLE = 1000
_SETTLE_S = 0.3
_SETTLE_MAX_S = 10.0
_IDLE_SHARE = 0.1
_BACKGROUND_S = 5.0
_IDLE_GRACE_S = 45.0
"""For a peer that takes 30 ms to open a stream."""
IDLE_WAYS = (DIRECT, ENVOY, "envoy+plugin body", "http front", "vllm-router", "litellm")
"""In this order, on processes that have done little yet: memory once taken is not given back, and would hide it."""
CONTENT = {SMALL: "Where does the cat like to sit?", LARGE: plain_text(20_000, seed=1)[: 64 << 10]}


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of load."""

    kind: str
    """requests: whole answers in a closed loop; stream: 200 chunks as fast as they come; paced: 200 chunks, one in
    10 ms, measured while all streams flow; idle: streams that say nothing after their first chunk."""
    size: str
    connections: int

    def job(self, way: Way, parts: Parts, seconds: float) -> Job:
        """Return the load on one way."""
        stream = self.kind != "requests"
        return Job(
            kind="requests" if not stream else "idle" if self.kind == "idle" else "streams",
            port=way.port,
            request=way.request(CONTENT[self.size], stream=stream),
            connections=self.connections,
            pids=parts.pids([*way.parts, "stub"]),
            seconds=seconds,
            grace_s=_IDLE_GRACE_S if self.kind == "idle" else 15.0,
            num_events=NUM_CHUNKS,
            steady=self.kind == "paced",
        )

    @property
    def stub(self) -> dict[str, Any]:
        """How the pod answers."""
        return {
            "num_chunks": NUM_CHUNKS,
            "pace_ms": PACE_MS if self.kind == "paced" else 0,
            "hold": self.kind == "idle",
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    seconds: float
    """Of one cell's measured window."""
    connections: Sequence[int]
    budget_s: float
    """No round begins after so long."""

    def cells(self) -> list[Cell]:
        """Return the cells of a round."""
        requests = [Cell("requests", size, count) for size in (SMALL, LARGE) for count in self.connections]
        return [*requests, Cell("stream", SMALL, 16), Cell("paced", SMALL, 64)]


class Load:
    """The load generator's process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.front.load"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, job: Job) -> Outcome:
        """Run one job; it bounds itself. Raises StepFailed when the generator has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise StepFailed(f"the load generator ended with exit {self._process.wait()}")
        return Outcome(**json.loads(line))

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def load_generator() -> Iterator[Load]:
    """Run a load generator for the length of the `with` block."""
    load = Load()
    try:
        yield load
    finally:
        load.stop()


Samples = dict[tuple[Cell, str], list[Outcome]]


@dataclass(slots=True)
class Measured:
    """What one run measured."""

    samples: Samples
    """Outcomes by cell and way, in order of rounds."""
    idle: list[dict[str, Any]]
    """One row for each way that held idle streams."""
    background: dict[str, float]
    """By part: share of a core that it uses while nobody asks anything."""
    rounds: int = 0
    """How many there was time for."""


def measure(parts: Parts, load: Load, plan: Plan) -> Measured:
    """Run the plan. Raises StepFailed when a part has died."""
    started_s = time.monotonic()
    samples: Samples = defaultdict(list)
    with Step("warming up"):
        for way in parts.ways:
            _one(parts, load, Cell("requests", SMALL, 4), way, seconds=1.0)
    background = _background(parts)
    idle = [_idle_row(parts, load, way) for name in IDLE_WAYS for way in parts.ways if way.name == name]
    measured = Measured(samples, idle, background)
    for number in range(plan.rounds):
        if time.monotonic() - started_s > plan.budget_s:
            say(f"  {number} of {plan.rounds} rounds: there is no time for more")
            break
        with Step(f"round {number + 1} of {plan.rounds}") as step:
            for cell in plan.cells():
                # Begun elsewhere in each round, so that no way always comes after the same other.
                turned = number % len(parts.ways)
                for way in [*parts.ways[turned:], *parts.ways[:turned]]:
                    samples[cell, way.name].append(_one(parts, load, cell, way, seconds=plan.seconds))
                    step.beat(lambda cell=cell: f"{cell.kind}, {cell.size}, {cell.connections} connections")  # type: ignore[misc]
        measured.rounds += 1
    return measured


def _background(parts: Parts) -> dict[str, float]:
    with Step("what the parts do when nobody asks"):
        time.sleep(_SETTLE_S)
        before = CpuSample.of(parts.pids(parts.names))
        started_s = time.monotonic()
        time.sleep(_BACKGROUND_S)
        elapsed_s = time.monotonic() - started_s
        return {part: round(used_s / elapsed_s, 5) for part, used_s in before.since().items()}


def _one(parts: Parts, load: Load, cell: Cell, way: Way, *, seconds: float) -> Outcome:
    """Measure one cell on one way, and check that its requests went that way."""
    parts.check_alive()
    before = parts.set_stub(**cell.stub).get(way.name, {})
    outcome = load.do(cell.job(way, parts, seconds))
    if outcome.num_broken_off:
        _settle(parts)
    after = parts.set_stub(**cell.stub).get(way.name, {})
    came, signed, unrouted = (after.get(key, 0) - before.get(key, 0) for key in ("completions", "signed", "unrouted"))
    astray = came - signed if way.signed else signed
    astray += unrouted if way.routed else came - unrouted
    if astray:
        outcome.num_errors += astray
        outcome.errors.append(f"{astray} of {came} requests came to the pod another way")
    return outcome


def _settle(parts: Parts) -> None:
    """Wait until all parts are idle for a moment: a slow proxy goes on with what its client has given up."""
    deadline_s = time.monotonic() + _SETTLE_MAX_S
    pids = parts.pids(parts.names)
    while time.monotonic() < deadline_s:
        before = CpuSample.of(pids)
        time.sleep(_SETTLE_S)
        if sum(before.since().values()) < _IDLE_SHARE * _SETTLE_S:
            return


def _idle_row(parts: Parts, load: Load, way: Way) -> dict[str, Any]:
    with Step(f"{NUM_IDLE} idle streams: {way.name}"):
        if way.name == "http front":
            parts.restart("gateway")  # its memory has grown with the plugin's streams
        _one(parts, load, Cell("requests", SMALL, 64), way, seconds=1.0)
        outcome = _one(parts, load, Cell("idle", SMALL, NUM_IDLE), way, seconds=1.0)
    count = max(1, outcome.num_done)
    grown = {part: outcome.resident_bytes.get(part, 0) for part in way.parts}
    return {
        "way": way.name,
        "streams": outcome.num_done,
        "kib_per_stream": {part: round(size / count / 1024, 1) for part, size in grown.items()},
        "kib_per_stream_total": round(sum(grown.values()) / count / 1024, 1),
        "cpu_share": {part: round(outcome.cpu_s.get(part, 0.0) / max(outcome.seconds, 1e-9), 3) for part in way.parts},
        "errors": outcome.num_errors,
        "first_errors": outcome.errors,
    }


def rows(measured: Measured, ways: Sequence[Way]) -> list[dict[str, Any]]:
    """Return one row for each cell and way."""
    cells = list(dict.fromkeys(cell for cell, _ in measured.samples))
    return [_row(cell, way, measured) for cell in cells for way in ways]


def _row(cell: Cell, way: Way, measured: Measured) -> dict[str, Any]:
    samples = measured.samples
    own = samples[cell, way.name]
    if cell.kind == "paced":
        own = [_without(found, measured.background) for found in own]
    first = cell.kind != "requests"
    return {
        **asdict(cell),
        "way": way.name,
        "p50_ms": _median(_p50(found, first=first) for found in own),
        "p99_ms": _median(found.first_p99_ms if first else found.p99_ms for found in own),
        "p50_ms_range": _range(_p50(found, first=first) for found in own),
        "added_p50_ms": _added(own, samples[cell, DIRECT], first=first),
        "added_p50_ms_over_envoy": _added(own, samples[cell, ENVOY], first=first),
        "per_s": _median(found.num_done / found.seconds if found.seconds else 0.0 for found in own),
        "chunks_per_s": _median(found.num_events / found.seconds if found.seconds else 0.0 for found in own)
        if first
        else None,
        "cpu_us": _cpu_us(own, way.parts, chunks=first),
        "cpu_us_total": _median(_cpu_us_of(found, way.parts, chunks=first) for found in own),
        "stub_us": _median(_cpu_us_of(found, ("stub",), chunks=first) for found in own),
        "load_us": _median(_cpu_us_of(found, ("load",), chunks=first) for found in own),
        "load_share": _median(found.cpu_s.get("load", 0.0) / found.seconds if found.seconds else 0.0 for found in own),
        "errors": sum(found.num_errors for found in own),
        "first_errors": [error for found in own for error in found.errors][:3],
    }


def _without(outcome: Outcome, background: Mapping[str, float]) -> Outcome:
    above = {part: cpu_s - background.get(part, 0.0) * outcome.seconds for part, cpu_s in outcome.cpu_s.items()}
    used = {part: max(0.0, cpu_s) for part, cpu_s in above.items()}
    return replace(outcome, cpu_s=used)


def _p50(outcome: Outcome, *, first: bool) -> float | None:
    return outcome.first_p50_ms if first else outcome.p50_ms


def _added(own: Sequence[Outcome], base: Sequence[Outcome], *, first: bool) -> float | None:
    pairs = [(_p50(a, first=first), _p50(b, first=first)) for a, b in zip(own, base, strict=True)]
    return _median(a - b for a, b in pairs if a is not None and b is not None)


def _cpu_us(own: Sequence[Outcome], parts: Sequence[str], *, chunks: bool) -> dict[str, float | None]:
    return {part: _median(_cpu_us_of(found, (part,), chunks=chunks) for found in own) for part in parts}


def _cpu_us_of(outcome: Outcome, parts: Sequence[str], *, chunks: bool) -> float | None:
    count = outcome.num_events if chunks else outcome.num_done
    return 1e6 * sum(outcome.cpu_s.get(part, 0.0) for part in parts) / count if count else None


def _range(values: Iterable[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None
