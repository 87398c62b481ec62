"""Latency of a client's stateless requests while another client sends long prompts, beside quiet times.

Real vLLM with SmolLM2 and the local stack. The other client creates contexts, one after the other without a pause, in a
process of low priority, because a real one has a machine of its own. vLLM has the first core, and all other parts and
both clients share the second, as engines on GPUs share no core with them. Segments of requests alternate: quiet, then
one for each kind of prompt. Each request has a new prompt of 16 ids and one token. It goes through Envoy and, right
after that, to vLLM itself: both share vLLM, and only the first shares Envoy and gateway.

- over-long: 8 MB of words, 200 times the window;
- ids: 131 072 of them;
- slow: 8 MB of letters without a space, which a tokeniser merges in one piece.

Each is refused, because it cannot fit the window.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.estimates import cell, interval, percentile
from benchmarks.result import parser_of, write_result
from deploy.local.model import MODEL_NAME
from deploy.local.ports import LOOPBACK
from deploy.local.progress import Step
from deploy.local.stack import Stack
from deploy.local.state import API_KEYS
from deploy.local.table import render

ROOT = Path(__file__).resolve().parents[1]
STACK_DIRECTORY = ROOT / ".build" / "bench-neighbours-stack"
ME, OTHER = list(API_KEYS)[:2]
TEXT_BYTES, NUM_IDS = 8_000_000, 131_072
QUIET = "quiet"
SEGMENT = 20
"""Requests of a segment."""
_LETTERS = bytes(ord("a") + byte % 26 for byte in range(256))


def _prompts() -> dict[str, Any]:
    """Return the other client's prompts by kind."""
    return {
        "over-long": "word " * (TEXT_BYTES // 5),
        "ids": [1000 + number % 20_000 for number in range(NUM_IDS)],
        "slow": secrets.token_bytes(TEXT_BYTES).translate(_LETTERS).decode(),
    }


KINDS = (QUIET, "over-long", "ids", "slow")


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--port", type=int, default=8300, help="Envoy's port in the stack")
    parser.add_argument("--send", choices=KINDS[1:], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        return _send(options.send, options.port)
    os.environ["OMP_NUM_THREADS"] = "1"  # two threads that share a core wait for each other
    stack = Stack(STACK_DIRECTORY, port=options.port)
    try:
        stack.clean()
        stack.up()
        _pin(stack)
        (engine,) = stack.engine_urls
        report = _measured({"Envoy": options.port, "vLLM": int(engine.rpartition(":")[2])}, options.rounds)
    finally:
        stack.clean()
    write_result(options.out, report)
    print(_table(report["rows"]))
    return 0


def _pin(stack: Stack) -> None:
    """Give vLLM's threads the first core, and those of all other parts and of this process the second."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    engines = {part.pid for part in stack.status() if part.name.startswith("engine")}
    ours = {part.pid for part in stack.status()} - engines
    for process in Path("/proc").glob("[0-9]*"):
        session = _session(process)
        if session in engines | ours:
            for thread in (process / "task").iterdir():
                os.sched_setaffinity(int(thread.name), {first if session in engines else second})
    os.sched_setaffinity(0, {second})


def _session(process: Path) -> int | None:
    """Return the session of a process, which its part leads; None of one that has ended."""
    try:
        return os.getsid(int(process.name))
    except ProcessLookupError:
        return None


def _measured(ports: Mapping[str, int], rounds: int) -> dict[str, Any]:
    took_ms: dict[tuple[str, str], list[float]] = defaultdict(list)
    medians_ms: dict[tuple[str, str], list[float]] = defaultdict(list)
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    loads = []
    for number in range(-1, rounds):
        with Step(f"round {number + 1} of {rounds}"):
            for kind in _turned(KINDS, number):
                found: dict[str, list[float]] = defaultdict(list)
                with _other(kind, ports["Envoy"], answers[kind]):
                    for _ in range(SEGMENT):
                        for way, port in ports.items():
                            found[way].append(_asked_ms(port))
                for way, some_ms in found.items() if number >= 0 else ():
                    took_ms[way, kind] += some_ms
                    medians_ms[way, kind].append(percentile(some_ms, digits=3) or 0.0)
        loads.append(os.getloadavg()[0])
    rows = []
    for way in ports:
        quiet_ms = medians_ms[way, QUIET]
        for kind in KINDS:
            added = [one - quiet for one, quiet in zip(medians_ms[way, kind], quiet_ms, strict=True)]
            some_ms = took_ms[way, kind]
            row = {"way": way, "other": kind, "n": len(some_ms), "answers": dict(answers[kind])}
            row |= {"p50_ms": percentile(some_ms), "p99_ms": percentile(some_ms, 99)}
            rows.append(row | {"added_p50_ms": percentile(added), "added_p50_95": interval(added)})
    return {"rounds": rounds, "segment": SEGMENT, "load_average": percentile(loads), "rows": rows}


def _asked_ms(port: int) -> float:
    body = {"model": MODEL_NAME, "prompt": [1000 + one for one in secrets.token_bytes(16)], "max_tokens": 1}
    data = json.dumps(body)
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=60)
    began_s = time.perf_counter()
    connection.request("POST", "/v1/completions", data, _headers(ME))
    answer = connection.getresponse()
    told = answer.read()
    took_ms = (time.perf_counter() - began_s) * 1000
    connection.close()
    assert answer.status == 200, told
    return took_ms


@contextmanager
def _other(kind: str, port: int, answers: Counter[str]) -> Iterator[None]:
    """Have the other client send during the block; add its answers by status."""
    if kind == QUIET:
        yield
        return
    command = [sys.executable, "-m", "benchmarks.bench_neighbours", "--send", kind, "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=_nice) as other:  # noqa: PLW1509  # it has one thread here
        assert other.stdout is not None
        other.stdout.readline()  # it has had its first answer
        try:
            yield
        finally:
            other.send_signal(signal.SIGTERM)
            answers.update(other.stdout.read().split())


def _nice() -> None:
    os.nice(10)


def _send(kind: str, port: int) -> int:
    data = json.dumps({"model": MODEL_NAME, "prompt": _prompts()[kind], "max_tokens": 1}).encode()
    for _ in itertools.count():
        connection = http.client.HTTPConnection(LOOPBACK, port, timeout=120)
        connection.request("POST", "/v1/context", data, _headers(OTHER))
        answer = connection.getresponse()
        answer.read()
        connection.close()
        print(answer.status, flush=True)
    return 0


def _headers(key: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}


def _turned(kinds: tuple[str, ...], number: int) -> tuple[str, ...]:
    at = number % len(kinds)
    return kinds[at:] + kinds[:at]


def _table(rows: list[Mapping[str, Any]]) -> str:
    keys = ("way", "other", "n", "answers", "p50_ms", "p99_ms", "added_p50_ms", "added_p50_95")
    return render(list(keys), [[cell(row[key]) for key in keys] for row in rows])


if __name__ == "__main__":
    sys.exit(main())
