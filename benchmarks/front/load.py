"""The load generator: a process that runs one job after another, so that its start costs no cell anything.

A job is a line of JSON on stdin, its outcome a line on stdout. Connections are raw asyncio protocols that send the
same prepared bytes again and again, one request in flight each (a closed loop), 10 to 15 µs a request. CPU and
memory of the processes under test are read here, at the very moments the measured window begins and ends.
It checks what it is sent: status 200, a whole body, all events of a stream and `[DONE]`; all else is an error.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, cast

from typing_extensions import override

from benchmarks.front.event_loop import run
from benchmarks.front.process_figures import CpuSample, resident_bytes

_GRACE_S = 15.0
"""Time a job may take beyond its own plan before what is missing counts as errors."""
_PATIENCE = 5
"""A way so slow that little ended in the window gets up to so many windows."""
_ENOUGH = 20
_STALLED_S = 5.0
_MAX_ERRORS_KEPT = 3
_EVENT = b"data: "
_DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Job:
    """One cell of one path."""

    kind: Literal["requests", "streams", "idle"]
    """requests: closed loop of whole answers; streams: of streams; idle: streams that send one chunk and stay."""
    port: int
    request: str
    """Base64 of the bytes to send."""
    connections: int
    pids: Mapping[str, Sequence[int]]
    """Processes under test by part."""
    warm_s: float = 0.3
    seconds: float = 1.2
    grace_s: float = _GRACE_S
    num_events: int = 200
    """A stream has at least as many."""
    steady: bool = False
    """streams: one stream a connection, measured while all of them flow and no request begins or ends."""
    num_each: int = 0
    """Above 0: each connection asks so often and then stops; the window lasts until the last has."""


@dataclass(slots=True)
class Outcome:
    """What one job measured; times in ms."""

    num_done: int = 0
    """Requests or streams that ended well inside the window."""
    num_events: int = 0
    num_errors: int = 0
    num_broken_off: int = 0
    """Requests still under way when the job ended: a proxy may go on with them for a while."""
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    p50_ms: float | None = None
    p99_ms: float | None = None
    first_p50_ms: float | None = None
    """To the first event of a stream."""
    first_p99_ms: float | None = None
    cpu_s: dict[str, float] = field(default_factory=dict)
    """By part, and `load` for this process."""
    resident_bytes: dict[str, int] = field(default_factory=dict)
    """By part: grown by all streams of an idle job together."""


class Run:
    """One job while it runs."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.request = base64.b64decode(job.request)
        self.latencies: list[float] = []
        self.firsts: list[float] = []
        self.outcome = Outcome()
        self.measuring = False
        self.stopping = False
        self.num_opened = 0
        self.num_first = 0
        self.num_ended = 0
        self.num_events = 0

    def error(self, what: str) -> None:
        """Count a request that did not go well."""
        self.outcome.num_errors += 1
        if len(self.outcome.errors) < _MAX_ERRORS_KEPT:
            self.outcome.errors.append(what)


class Connection(asyncio.Protocol):
    """Sends the request, reads the answer, sends it again."""

    def __init__(self, of: Run) -> None:
        self._run = of
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._left = 0
        """Bytes of the body still to come; -1: chunked."""
        self._tail = b""
        self._sent_s = 0.0
        self._num_done = 0
        self.num_events = 0
        self.waiting = False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by its methods only
        self._run.num_opened += 1
        self._send()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.waiting and not self._run.stopping:
            self._run.error(f"connection lost: {exc}")

    @override
    def data_received(self, data: bytes) -> None:
        if not self.waiting:
            self._run.error("bytes that nobody asked for")
        elif self._left:
            self._body(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end >= 0:
                head, rest, self._head = self._head[:end], self._head[end + 4 :], b""
                self._start(head, rest)

    def close(self) -> None:
        """Go, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def _send(self) -> None:
        assert self._transport is not None
        self.waiting = True
        self.num_events = 0
        self._tail = b""
        self._sent_s = time.perf_counter()
        self._transport.write(self._run.request)

    def _start(self, head: bytes, rest: bytes) -> None:
        if not head.startswith(b"HTTP/1.1 200"):
            self._failed(f"{head.split(bytes([13]), 1)[0].decode('latin-1')}: {rest[:200].decode('latin-1')}")
            return
        lower = head.lower()
        at = lower.find(b"content-length:")
        self._left = -1 if at < 0 else int(lower[at + 15 :].split(b"\r\n", 1)[0])
        if self._left == 0:
            self._failed("an empty answer")
        elif rest:
            self._body(rest)

    def _body(self, data: bytes) -> None:
        if self._left > 0:
            self._left -= len(data)
            if self._left == 0:
                self._done()
            return
        seen = self._tail + data
        found = seen.count(_EVENT) - self._tail.count(_EVENT)
        if found:
            self._events(found)
        self._tail = seen[-64:]
        if seen.endswith(b"\r\n0\r\n\r\n"):
            self._left = 0
            if self._run.job.kind == "requests":
                self._done()
            elif self.num_events < self._run.job.num_events or _DONE not in self._tail:
                self._failed(f"a stream of {self.num_events} events without an end")
            else:
                self._done()

    def _events(self, found: int) -> None:
        run = self._run
        if not self.num_events:
            run.num_first += 1
            if run.measuring or run.job.kind == "idle":
                run.firsts.append(time.perf_counter() - self._sent_s)
        self.num_events += found
        run.num_events += found
        if run.measuring:
            run.outcome.num_events += found

    def _done(self) -> None:
        run = self._run
        self.waiting = False
        if run.measuring:
            run.latencies.append(time.perf_counter() - self._sent_s)
        run.num_ended += 1
        self._num_done += 1
        if not run.stopping and not run.job.steady and self._num_done != run.job.num_each:
            self._send()

    def _failed(self, what: str) -> None:
        """Count and do not go on: a path that errs would otherwise look fast."""
        self.waiting = False
        self._left = 0
        self._run.error(what)
        self.close()


async def do(job: Job) -> Outcome:
    """Run one job. Never takes longer than its plan and a grace; what did not come by then is an error."""
    this = Run(job)
    connections: list[Connection] = []
    limit_s = job.warm_s + job.seconds * _PATIENCE + job.grace_s
    try:
        async with asyncio.timeout(limit_s):
            await _JOBS[job.kind](this, connections)
    except TimeoutError:
        this.error(f"not done after {limit_s:.0f} s: {this.num_first} first events, {this.num_ended} ends")
    finally:
        this.stopping = True
        this.outcome.num_broken_off = sum(connection.waiting for connection in connections)
        for connection in connections:
            connection.close()
        await asyncio.sleep(0.05)  # lets the closed connections go before the next job counts CPU
    return _summed(this)


async def _connect(run: Run, connections: list[Connection], *, at_once: int) -> None:
    """Open the job's connections, `at_once` at a time, so that no backlog overflows."""
    loop = asyncio.get_running_loop()

    def made() -> Connection:
        connections.append(Connection(run))
        return connections[-1]

    for start in range(0, run.job.connections, at_once):
        count = min(at_once, run.job.connections - start)
        opening = (loop.create_connection(made, "127.0.0.1", run.job.port) for _ in range(count))
        for failure in await asyncio.gather(*opening, return_exceptions=True):
            if isinstance(failure, BaseException):
                run.error(f"cannot connect: {failure}")


async def _closed_loop(run: Run, connections: list[Connection]) -> None:
    """Warm up, then count what begins and ends for a fixed time."""
    await _connect(run, connections, at_once=64)
    await asyncio.sleep(run.job.warm_s)
    enough = min(run.job.connections, _ENOUGH)
    with _window(run):
        await asyncio.sleep(run.job.seconds)
        await _until(run, lambda: len(run.latencies) >= enough, within_s=run.job.seconds * (_PATIENCE - 1))
    run.stopping = True
    # What is still under way after that is broken off; it was not counted.
    await _until(run, lambda: not any(connection.waiting for connection in connections), within_s=_GRACE_S / 2)


async def _steady(run: Run, connections: list[Connection]) -> None:
    """Measure streams only while all of them flow, or what flows when a way is too slow for all of them."""
    await _connect(run, connections, at_once=run.job.connections)
    margin = max(1, run.job.num_events // 20)
    await _until(run, lambda: min(c.num_events for c in connections) >= margin, within_s=run.job.seconds)
    longest_s = run.job.seconds * _PATIENCE
    with _window(run):
        last = run.job.num_events - margin
        await _until(run, lambda: max(c.num_events for c in connections) >= last, within_s=longest_s)
    run.stopping = True
    await _until(run, lambda: not any(connection.waiting for connection in connections), within_s=_GRACE_S / 3)


async def _fixed_work(run: Run, connections: list[Connection]) -> None:
    """Measure from the first request to the last answer."""
    with _window(run):
        await _connect(run, connections, at_once=run.job.connections)
        await _until(run, lambda: not any(connection.waiting for connection in connections))


async def _loop(run: Run, connections: list[Connection]) -> None:
    shape = _steady if run.job.steady else _fixed_work if run.job.num_each else _closed_loop
    await shape(run, connections)


async def _idle(run: Run, connections: list[Connection]) -> None:
    """Open many streams, wait for the first event of each, see what they hold in memory.

    A way may have a limit of its own: when nothing more comes for a while, it is measured with as many as it has.
    """
    before = {part: sum(map(resident_bytes, pids)) for part, pids in run.job.pids.items()}
    await _connect(run, connections, at_once=50)
    before_first = -1
    while before_first < run.num_first < run.job.connections:
        before_first = run.num_first
        await _until(run, lambda: run.num_first >= run.job.connections, within_s=_STALLED_S)
    for part, pids in run.job.pids.items():
        run.outcome.resident_bytes[part] = sum(map(resident_bytes, pids)) - before[part]
    with _window(run):
        await asyncio.sleep(run.job.seconds)
    run.outcome.num_done = sum(connection.num_events > 0 and connection.waiting for connection in connections)


_JOBS = {"requests": _loop, "streams": _loop, "idle": _idle}


@contextlib.contextmanager
def _window(run: Run) -> Iterator[None]:
    """Count answers and CPU for the length of the `with` block."""
    before = CpuSample.of({**run.job.pids, "load": [os.getpid()]})
    started_s = time.perf_counter()
    run.measuring = True
    try:
        yield
    finally:
        run.measuring = False
        run.outcome.seconds = time.perf_counter() - started_s
        run.outcome.cpu_s = before.since()


async def _until(run: Run, condition: Callable[[], bool], *, within_s: float = math.inf) -> None:
    """Return when the condition holds (looked at every other millisecond), time is up, or nothing can fulfil it."""
    deadline_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline_s:
        if run.outcome.num_errors >= run.job.connections:
            return
        await asyncio.sleep(0.002)


def _summed(run: Run) -> Outcome:
    outcome = run.outcome
    outcome.num_done = outcome.num_done or (run.num_ended if run.job.steady else len(run.latencies))
    if not outcome.num_done and not outcome.num_events:
        run.error("nothing was answered in the measured window")
    outcome.p50_ms, outcome.p99_ms = _quantile(run.latencies, 0.5), _quantile(run.latencies, 0.99)
    outcome.first_p50_ms, outcome.first_p99_ms = _quantile(run.firsts, 0.5), _quantile(run.firsts, 0.99)
    return outcome


def _quantile(seconds: list[float], share: float) -> float | None:
    if not seconds:
        return None
    return round(sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))] * 1000, 4)


def main() -> None:
    """Do the jobs of stdin one by one until it ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 16_384)), hard))
    for line in sys.stdin:
        outcome = run(do(Job(**json.loads(line))))
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
