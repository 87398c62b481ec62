"""What the plugin costs those who do not use it, and what a save costs a request that runs beside it.

Two engines with the same model, memory and threads, of which one works at a time: one with the connector, the turn
middleware, its sidecar and the rest of a stack, one without anything of ours. Both are asked straight, past Envoy and
the gateway (their cost: bench_front.py), for the same prompts, never seen before; who is first alternates. On a CPU
vLLM's processes spin in the second only, and that is what a user of it has.

- ttft, request, token: one request by itself, from its sending: the first token, the end, the mean time between two;
- burst: as many tokens from several requests at once, sent to answered: the inverse of the throughput;
- step: the mean time between two tokens of a request that runs while a context of 5 800 tokens beside it ends and is
  saved, from its end until its answer ends, which waits for the disk, against the same without a save, beside a
  completion of as many tokens.

Each is compared with what was taken right before or after it: the median of those ratios, with its bootstrap interval.
Round 0 is not counted: the first answers of a process are slow. A round has one pair of steps and two of all others.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engines import AFTER_STACK, add_engine_options, running, start_engine
from benchmarks.estimates import cell, interval, paired_row, percentile
from benchmarks.processes import Processes
from benchmarks.result import parser_of, write_result
from deploy.local.demo import wait_sealed
from deploy.local.gateway_client import Answer, GatewayClient
from deploy.local.model import MODEL_NAME
from deploy.local.plain_text import plain_text
from deploy.local.progress import Step, exit_code
from deploy.local.stack import Stack
from deploy.local.state import API_KEYS
from deploy.local.table import render

ROOT = Path(__file__).resolve().parents[1]
STACK_DIRECTORY = ROOT / ".build" / "bench-stack"
BARS = {"ttft": 1.02, "request": 1.02, "token": None, "burst": 1.02, "step": 1.05, "longest step": None}
"""The largest ratio of each."""
TIMES_PLAIN = 2
REQUEST_TOKENS, REQUEST_ANSWER = 1200, 64
BURST_REQUESTS, BURST_TOKENS, BURST_ANSWER = 8, 150, 32
SAVED_TOKENS, SAVED_ANSWER = 5800, 16
BESIDE_TOKENS = 320
"""Of the request beside a save: enough for the time in which 5 800 tokens are computed, and for the save."""
_BEGUN_S = 0.25
"""Until a request is computed, beside which another is asked."""
_HEADS = ("what", "n", "with ms", "95 %", "without ms", "95 %", "ratio", "95 %", "at most", "met")

Pair = dict[str, float]
"""What was measured, with ours and without."""


class Window(NamedTuple):
    """A span of the clock that times are read from, in seconds."""

    began_s: float
    ended_s: float


@exit_code
def main() -> int:
    """Measure, print the table, write the JSON; exit 1 when that failed, with --check also when a bar is missed."""
    parser = parser_of(__file__, __doc__, has_stack=True, has_bars=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=("plain", "step"), help="one kind of pairs; default: both")
    parser.add_argument("--dtype", default="bfloat16")
    add_engine_options(parser)
    options = parser.parse_args()
    more = {"model_dir": options.model, "engine_args": options.engine_arg}
    stack = Stack(STACK_DIRECTORY, port=options.port, dtype=options.dtype, **more)
    load, began_s = os.getloadavg(), time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="bench-overhead-") as directory,
        Processes(Path(directory)) as processes,
        running(stack),
    ):
        plain = {"port": options.port + AFTER_STACK, "dtype": options.dtype, "model": options.model}
        start_engine(processes, "plain", options.engine_arg, **plain)
        pairs = Bench(stack, processes.url("plain"), options.rest_s).measure(options.rounds, options.only)
    rows = [row for row in summary(pairs) if not options.only or row["n"]]
    report = {
        "dtype": options.dtype,
        "rounds": options.rounds,
        "load": [load, os.getloadavg()],
        "took_s": round(time.monotonic() - began_s),
        "rows": rows,
    }
    print(
        render(
            _HEADS,
            [
                [cell(value, ".3f" if name in {"ratio", "ratio_95", "bar"} else ".1f") for name, value in row.items()]
                for row in rows
            ],
        )
    )
    write_result(options.out, report, model=options.model.name)
    return 1 if options.check and any(row["met"] is False for row in rows) else 0


class Bench:
    """The two engines, and prompts that were never seen."""

    def __init__(self, stack: Stack, plain_url: str, rest_s: float) -> None:
        self._rest_s = rest_s
        key = next(iter(API_KEYS))
        self._gateway = GatewayClient(stack.url, key)
        self._engines = {"with": GatewayClient(stack.turn_urls[0], key), "without": GatewayClient(plain_url, key)}
        self._seed = time.time_ns() // 1_000_000 % 900_000_000

    def measure(self, num_rounds: int, only: str | None = None) -> dict[str, list[Pair]]:
        """Take all rounds, and return what is counted by what was measured; `only`: `plain` or `step`."""
        pairs: dict[str, list[Pair]] = {what: [] for what in BARS}
        for number in range(num_rounds + 1):
            with Step(f"round {number}"):
                taken = [
                    *(self._plain(TIMES_PLAIN * number + turn) for turn in range(TIMES_PLAIN if only != "step" else 0)),
                    *([self._steps(number)] if only != "plain" else []),
                ]
            for what, pair in (item for found in taken if number for item in found.items()):
                pairs[what].append(pair)
        return pairs

    def _plain(self, number: int) -> dict[str, Pair]:
        """Ask both engines for one request, then for several at once."""
        prompts = list(self._prompts(REQUEST_TOKENS, *[BURST_TOKENS] * BURST_REQUESTS))
        found: dict[str, Pair] = {what: {} for what in ("ttft", "request", "token", "burst")}
        for way in ("with", "without") if number % 2 else ("without", "with"):
            answer = self._asked(self._engines[way], prompts[0], REQUEST_ANSWER)
            token_ms = (answer.arrivals_ms[-1] - answer.ttft_ms) / (len(answer.arrivals_ms) - 1)
            time.sleep(self._rest_s)
            began_s = time.perf_counter()
            with ThreadPoolExecutor(BURST_REQUESTS) as pool:
                list(
                    pool.map(
                        lambda prompt, to: self._asked(to, prompt, BURST_ANSWER),
                        prompts[1:],
                        [self._engines[way]] * BURST_REQUESTS,
                    )
                )
            burst_ms = (time.perf_counter() - began_s) * 1000
            time.sleep(self._rest_s)
            figures = (answer.ttft_ms, answer.total_ms, token_ms, burst_ms)
            for what, value in zip(found, figures, strict=True):
                found[what][way] = round(value, 3)
        return found

    def _steps(self, number: int) -> dict[str, Pair]:
        """Let a request run beside a context that is saved, and beside a completion that is not."""
        taken = {
            way: self._beside(saves=way == "with")
            for way in (("with", "without") if number % 2 else ("without", "with"))
        }
        window_s = taken["with"][1].ended_s - taken["with"][1].began_s
        steps_ms = {
            way: steps_in(arrivals_s, Window(window.began_s, window.began_s + window_s))
            for way, (arrivals_s, window) in taken.items()
        }
        if not all(steps_ms.values()):
            return {}
        return {
            "step": {way: round(sum(steps) / len(steps), 3) for way, steps in steps_ms.items()},
            "longest step": {way: round(max(steps), 3) for way, steps in steps_ms.items()},
        }

    def _beside(self, *, saves: bool) -> tuple[list[float], Window]:
        """Return when each token of the request came, and from when until when the other one was saved."""
        short, long = self._prompts(BURST_TOKENS, SAVED_TOKENS)
        engine = self._engines["with"]
        with ThreadPoolExecutor(1) as pool:
            began_s = time.perf_counter()
            beside = pool.submit(self._asked, engine, short, BESIDE_TOKENS)
            time.sleep(_BEGUN_S)
            sent_s = time.perf_counter()
            # Both by the same way, so that what is said of their end is as late.
            path, more = ("/v1/context", {"ttl": 3600}) if saves else ("/v1/completions", {})
            answer = self._asked(self._gateway, long, SAVED_ANSWER, path, **more)
            if saves:
                wait_sealed(self._gateway, answer.session_id)
            # The last chunk of a create is held until the save is done: the one before it says when that began.
            window = Window(sent_s + answer.arrivals_ms[-2] / 1000, sent_s + answer.total_ms / 1000)
            arrivals_s = [began_s + arrival_ms / 1000 for arrival_ms in beside.result().arrivals_ms]
        time.sleep(self._rest_s)
        return arrivals_s, window

    def _asked(
        self, to: GatewayClient, prompt: str, num_tokens: int, path: str = "/v1/completions", **more: Any
    ) -> Answer:
        asked = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return to.stream(path, {"model": MODEL_NAME, "prompt": prompt, **asked, **more})

    def _prompts(self, *sizes: int) -> Iterator[str]:
        for size in sizes:
            self._seed += 1
            yield plain_text(size, seed=self._seed)


def steps_in(arrivals_s: Sequence[float], window: Window) -> list[float]:
    """Return the ms between each two tokens, from the first in the window to the first after it.

    Nothing, when the tokens do not reach from before the window to after it.
    """
    first = next((place for place, at_s in enumerate(arrivals_s) if at_s >= window.began_s), len(arrivals_s))
    last = next((place for place, at_s in enumerate(arrivals_s) if at_s >= window.ended_s), len(arrivals_s))
    if first == 0 or last == len(arrivals_s):
        return []
    return [(after_s - before_s) * 1000 for before_s, after_s in pairwise(arrivals_s[first : max(first + 1, last) + 1])]


def summary(pairs: Mapping[str, Sequence[Pair]]) -> list[dict[str, Any]]:
    """Return one row for each thing that was measured; a bar on what was not is missed."""
    rows = []
    for what, bar in BARS.items():
        row: dict[str, Any] = {"what": what, "n": len(pairs[what])}
        both = {way: [pair[way] for pair in pairs[what]] for way in ("with", "without")}
        for way, values in both.items():
            row |= {f"{way}_ms": percentile(values), f"{way}_ms_95": interval(values)}
        rows.append(row | paired_row(both["with"], both["without"], bar))
    return rows


if __name__ == "__main__":
    sys.exit(main())
