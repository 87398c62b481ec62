"""First turn after a compaction beside a warm turn, and the latency of other requests meanwhile.

Real vLLM with SmolLM2 and the local stack, through Envoy. Each round creates a context of OLD token ids. A second
client sends short requests one after the other, in three segments: quiet, while the context is compacted to NEW ids,
and while a plain create computes as many ids at once. Then two turns of the compacted context run: the first, and a
warm one. All have 16 new ids and 4 tokens. The order of the segments turns with each round.
"""

from __future__ import annotations

import argparse
import http.client
import json
import secrets
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.estimates import cell, percentile
from benchmarks.result import parser_of, write_result
from deploy.local.model import MODEL_NAME
from deploy.local.ports import LOOPBACK
from deploy.local.progress import Step, exit_code
from deploy.local.stack import Stack
from deploy.local.state import API_KEYS
from deploy.local.table import render

ROOT = Path(__file__).resolve().parents[1]
STACK_DIRECTORY = ROOT / ".build" / "bench-compaction-stack"
ME, OTHER = list(API_KEYS)[:2]
SEGMENTS = ("quiet", "compaction", "create")
TURN_IDS, TURN_TOKENS = 16, 4


@exit_code
def main() -> int:
    """Measure, print the tables, write the JSON."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--old", type=int, default=6000, help="token ids of the old context")
    parser.add_argument("--new", type=int, default=1500, help="token ids of the compacted context")
    parser.add_argument("--port", type=int, default=8320, help="Envoy's port in the stack")
    options = parser.parse_args()
    stack = Stack(STACK_DIRECTORY, port=options.port)
    try:
        stack.clean()
        stack.up()
        report = _measured(options)
    finally:
        stack.clean()
    write_result(options.out, report)
    print(render(["turn", "n", "p50_ms", "computed_tokens"], [[*map(cell, row.values())] for row in report["turns"]]))
    print(render(["others", "n", "p50_ms", "p99_ms"], [[*map(cell, row.values())] for row in report["others"]]))
    print(f"first turn / warm turn: {report['first_to_warm']}")
    return 0


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    client = _Client(options.port)
    turns: dict[str, list[tuple[float, int]]] = defaultdict(list)
    others: dict[str, list[float]] = defaultdict(list)
    took_ms: dict[str, list[float]] = defaultdict(list)
    for number in range(-1, options.rounds):
        with Step(f"round {number + 1} of {options.rounds}"):
            _, old = client.post("/v1/context", {"prompt": _ids(options.old), "max_tokens": 0})
            segment_s, compacted = 2.0, ""
            at = number % len(SEGMENTS)
            for name in (*SEGMENTS[at:], *SEGMENTS[:at]):
                with client.others() as found:
                    began_s = time.perf_counter()
                    if name == "compaction":
                        path = f"/v1/context/{old['session_id']}/compact"
                        _, made = client.post(path, {"prompt": _ids(options.new)}, status=201)
                        compacted = made["session_id"]
                    elif name == "create":
                        client.post("/v1/context", {"prompt": _ids(options.new), "max_tokens": 0})
                    else:
                        time.sleep(segment_s)
                    lasted_ms = (time.perf_counter() - began_s) * 1000
                if number >= 0:
                    others[name] += found
                    took_ms[name].append(lasted_ms)
            for turn in ("first", "warm"):
                body = {"session_id": compacted, "prompt": _ids(TURN_IDS), "max_tokens": TURN_TOKENS}
                ms, answer = client.post("/v1/completions", body)
                if number >= 0:
                    turns[turn].append((ms, answer["usage"]["context"]["computed_tokens"]))
    first, warm = (percentile([ms for ms, _ in turns[turn]]) or 0.0 for turn in ("first", "warm"))
    return {
        "rounds": options.rounds,
        "old_tokens": options.old,
        "new_tokens": options.new,
        "first_to_warm": round(first / warm, 3),
        "compaction_ms": percentile(took_ms["compaction"]),
        "create_ms": percentile(took_ms["create"]),
        "turns": [_turn(turn, some) for turn, some in turns.items()],
        "others": [{"others": name, "n": len(some)} | _latencies(some) for name, some in others.items()],
    }


def _turn(name: str, some: list[tuple[float, int]]) -> dict[str, Any]:
    computed = percentile([float(computed) for _, computed in some])
    return {"turn": name, "n": len(some), "p50_ms": percentile([ms for ms, _ in some]), "computed_tokens": computed}


def _latencies(some_ms: list[float]) -> dict[str, Any]:
    return {"p50_ms": percentile(some_ms), "p99_ms": percentile(some_ms, 99)}


class _Client:
    """Sends requests through Envoy."""

    def __init__(self, port: int) -> None:
        self._port = port

    def post(
        self, path: str, body: dict[str, Any], *, status: int = 200, key: str = ME
    ) -> tuple[float, dict[str, Any]]:
        """Return milliseconds and answer of a request."""
        model = {} if path.endswith("/compact") else {"model": MODEL_NAME}
        data = json.dumps({**model, **body})
        connection = http.client.HTTPConnection(LOOPBACK, self._port, timeout=600)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        began_s = time.perf_counter()
        connection.request("POST", path, data, headers)
        answer = connection.getresponse()
        told = answer.read()
        took_ms = (time.perf_counter() - began_s) * 1000
        connection.close()
        assert answer.status == status, told
        return took_ms, json.loads(told)

    @contextmanager
    def others(self) -> Iterator[list[float]]:
        """Send another client's requests during the block; yield their milliseconds."""
        found: list[float] = []
        ended = threading.Event()

        def send() -> None:
            while not ended.is_set():
                body = {"prompt": _ids(TURN_IDS), "max_tokens": TURN_TOKENS, "ignore_eos": True}
                found.append(self.post("/v1/completions", body, key=OTHER)[0])

        with _thread(send):
            try:
                yield found
            finally:
                ended.set()


@contextmanager
def _thread(run: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _ids(count: int) -> list[int]:
    return [1000 + secrets.randbelow(20_000) for _ in range(count)]


if __name__ == "__main__":
    sys.exit(main())
