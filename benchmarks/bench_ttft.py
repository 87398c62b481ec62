"""Time to the first token of the same conversation: computed, from the engine's prefix cache, restored.

Starts a stack of its own (real processes; SmolLM2, or --model), creates contexts, kills engine and sidecar with
SIGKILL, starts them again, then takes every way once a round, all in that one run of the engine:

- cold: a completion without a context, of a prompt never seen; create: a context of a prompt never seen;
- hit: that completion goes on, sent whole: the engine's own prefix cache;
- memory: the next turn of the context of the round before, after the engine's prefix cache was emptied;
- disk: the next turn of a context from before the crash, its first: it is on disk only;
- store (with --store): the first turn of a context whose pod has lost its disk since: the shared store has it;
- turn: one more turn of the context that came from memory, whose KV the engine has by now;
- peer (with --peer, which takes a second engine): another turn of that context while the first engine is drained, but
  lives: the gateway sends it to the second, whose sidecar pulls the KV from the first one's. All other ways see the
  first engine only, with all threads, as one works at a time; short contexts have no more rounds than long ones.

Cold and create take turns at being first, and so do hit, memory, disk and store. A sample counts when `usage` says that
its tokens came from where they should; the others are dropped and counted. Round 0 is not counted: the first answers of
a process are slow. On two cores some answers take longer, plain vLLM's too: p25 shows how long without, and short
contexts have more rounds. A ratio is that of two medians; its interval is a bootstrap of each, drawn by
itself. Not measured: throughput, and a disk without a page cache (the operating system may still have the files).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engines import REST_S, add_engine_options, forget_prefixes, running
from benchmarks.estimates import cell, interval, percentile, ratio_row
from benchmarks.result import parser_of, write_result
from deploy.local.demo import wait_sealed
from deploy.local.engine import engine_defaults
from deploy.local.gateway_client import Answer, GatewayClient
from deploy.local.model import MODEL_NAME
from deploy.local.plain_text import plain_text
from deploy.local.progress import Step, exit_code
from deploy.local.stack import Stack
from deploy.local.state import API_KEYS
from deploy.local.table import render

ROOT = Path(__file__).resolve().parents[1]
STACK_DIRECTORY = ROOT / ".build" / "bench-stack"
SIZES = (150, 1200, 5800)
WAYS = {
    "cold": "none",
    "create": "none",
    "hit": "device",
    "turn": "device",
    "memory": "host",
    "disk": "disk",
    "store": "object",
    "peer": "peer",
}
"""And where the tokens of a sample come from, as `usage` has it."""
MAX_COMPUTED = 64
"""By a sample that comes from a cache: the new tokens, and what is left of a block."""
BARS: Mapping[tuple[str, str], Mapping[int, float]] = {
    ("create", "cold"): dict.fromkeys(SIZES, 1.03),
    ("memory", "hit"): {150: 1.15, 1200: 1.05, 5800: 1.05},
    ("disk", "hit"): {150: 1.5, 1200: 1.3, 5800: 1.3},
    ("memory", "cold"): {1200: 0.05, 5800: 0.018},
    ("disk", "cold"): {1200: 0.06, 5800: 0.022},
    ("hit", "cold"): {},
    ("turn", "hit"): {},
    ("memory", "turn"): {},
    ("disk", "turn"): {},
    ("store", "cold"): {},
    ("store", "disk"): {},
    ("peer", "cold"): {},
    ("peer", "memory"): {},
}
"""What is compared with what; tokens → the largest ratio."""
LONG_TOKENS, TIMES_SHORT = 4000, 3
"""Contexts that are shorter have so many times the rounds."""
_NEXT_TURN = " And what happened then?"
_TTFT_HEADS = ("tokens", "way", "n", "dropped", "computed", "cached", "TTFT ms", "95 %", "p25", "p90", "restore ms")
_RATIO_HEADS = ("tokens", "ratio", "", "95 %", "at most", "met")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured answer."""

    number: int
    """Of its round."""
    way: str
    size: int
    ttft_ms: float
    computed_tokens: int
    cached_tokens: int
    source: str
    restore_ms: float | None

    @classmethod
    def of(cls, number: int, way: str, size: int, answer: Answer) -> Sample:
        """Return the sample of an answer."""
        figures = (answer.computed_tokens, answer.cached_tokens, answer.source, answer.restore_ms)
        return cls(number, way, size, round(answer.ttft_ms, 2), *figures)

    @property
    def counts(self) -> bool:
        """Whether its tokens came from where they should."""
        is_whole = self.cached_tokens == 0 if WAYS[self.way] == "none" else self.computed_tokens <= MAX_COMPUTED
        return is_whole and self.source == WAYS[self.way]


@exit_code
def main() -> int:
    """Measure, print the tables, write the JSON; exit 1 when that failed, with --check also when a bar is missed."""
    parser = parser_of(__file__, __doc__, has_stack=True, has_bars=True)
    parser.add_argument("--size", type=int, action="append", help=f"about so many tokens; default: {SIZES}")
    parser.add_argument("--rounds", type=int, default=9, help="of the long; the short have three times as many")
    parser.add_argument("--peer", action="store_true", help="from another pod's sidecar too: needs a second engine")
    # The S3 server of the local stack forgets all when it is stopped, and all is here before the measuring begins.
    parser.add_argument("--store", choices=("dir",), default="", help="from a shared store too, a directory")
    parser.add_argument("--dtype", default="bfloat16")
    add_engine_options(parser)
    options = parser.parse_args()
    # Each round of 5 800 tokens saves a few contexts of 130 MB, and is to find its own in memory.
    os.environ.setdefault("SIDECAR_MEMORY_LIMIT_BYTES", str(1 << 30))
    if options.peer:  # each as large as one alone, and drained at once
        for name, value in {**engine_defaults(), "GATEWAY_PROBE_INTERVAL_S": "0.2"}.items():
            os.environ.setdefault(name, value)
    engines = 1 + options.peer
    stack = Stack(
        STACK_DIRECTORY,
        port=options.port,
        dtype=options.dtype,
        engines=engines,
        model_dir=options.model,
        engine_args=options.engine_arg,
        store=options.store,
        dev=True,
    )
    load, began_s, sizes = os.getloadavg(), time.monotonic(), sorted(options.size or SIZES)
    with running(stack):
        times_short = 1 if options.peer or options.store else TIMES_SHORT
        places = rounds(sizes, options.rounds, times_short=times_short)
        samples = Bench(stack, places, store=options.store, rest_s=options.rest_s).measure()
    rows = ratios(samples, sizes)
    report = {
        "dtype": options.dtype,
        "store": options.store,
        "rounds": options.rounds,
        "load": [load, os.getloadavg()],
        "took_s": round(time.monotonic() - began_s),
        "ttft": times(samples, sizes),
        "rows": rows,
    }
    show(report["ttft"], rows)
    write_result(options.out, report, model=options.model.name)
    return 1 if options.check and any(row["met"] is False for row in rows) else 0


class Bench:
    """A running stack, its client, and prompts that were never seen."""

    def __init__(
        self, stack: Stack, places: Sequence[tuple[int, int]], *, store: str = "", rest_s: float = REST_S
    ) -> None:
        """`places`: all rounds, number and tokens."""
        self._stack, self._places, self._store, self._rest_s = stack, places, store, rest_s
        self._client = GatewayClient(stack.url, next(iter(API_KEYS)))
        self._seed = time.time_ns() // 1_000_000 % 900_000_000

    def measure(self) -> list[Sample]:
        """Create contexts, crash and restart engine and sidecar, then take the rounds; return what is counted."""
        in_store = self._stored() if self._store else {}
        self._move_to("engine")
        on_disk = {place: self._created(*place) for place in self._places}
        for part in ("engine", "sidecar"):
            self._stack.kill(part)
        for part in ("sidecar", "engine"):
            self._stack.start(part)
        in_memory = {size: self._created(0, size) for number, size in self._places if not number}
        samples: list[Sample] = []
        for number, size in self._places:
            with Step(f"round {number}, about {size} tokens"):
                lost = in_store.get((number, size), "")
                answers = self._round(number, size, in_memory[size], on_disk[number, size], lost)
            in_memory[size] = answers["create"].session_id
            samples += [Sample.of(number, way, size, answer) for way, answer in answers.items() if number]
        return samples

    def _stored(self) -> dict[tuple[int, int], str]:
        """Create the contexts of all rounds, and leave nothing of their KV but in the store."""
        found = {place: self._created(*place) for place in self._places}
        self._stack.down()  # a sidecar that ends writes what the store lacks
        shutil.rmtree(self._stack.paths.sidecar_data("sidecar"))
        self._stack.up()
        return found

    def _round(self, number: int, size: int, in_memory: str, on_disk: str, in_store: str) -> dict[str, Answer]:
        """Take every way once, and return the answers."""
        prompt, answers = self._prompt(size), {}
        ask = partial(self._asked, "/v1/completions")
        forget_prefixes(self._stack.engine_urls[0])
        time.sleep(self._rest_s)
        for way in ("cold", "create") if number % 2 else ("create", "cold"):
            answers[way] = ask(prompt) if way == "cold" else self._asked("/v1/context", self._prompt(size), ttl=3600)
        bodies: dict[str, dict[str, Any]] = {
            "hit": {"prompt": prompt + answers["cold"].text + _NEXT_TURN},
            "memory": {"prompt": _NEXT_TURN, "session_id": in_memory},
            "disk": {"prompt": _NEXT_TURN, "session_id": on_disk},
        }
        if in_store:
            bodies["store"] = {"prompt": _NEXT_TURN, "session_id": in_store}
        ways = list(bodies)
        first = number % len(ways)
        for way in ways[first:] + ways[:first]:
            answers[way] = ask(**bodies[way])
        answers["turn"] = ask(**bodies["memory"])
        if len(self._stack.names_of("engine")) > 1:
            self._move_to("engine-1")
            answers["peer"] = ask(**bodies["memory"])
            self._move_to("engine")
        for session_id in (in_memory, on_disk, in_store):  # at 2 GB each, they would be many
            if session_id:
                self._client.call("DELETE", f"/v1/context/{session_id}")
        return answers

    def _move_to(self, wanted: str) -> None:
        """Let only this engine get work."""
        for name in sorted(self._stack.names_of("engine"), key=lambda name: name != wanted):
            self._stack.drain(name, draining=name != wanted)

    def _created(self, number: int, size: int) -> str:
        with Step(f"context {number}, about {size} tokens"):
            return self._asked("/v1/context", self._prompt(size), ttl=3600).session_id

    def _asked(self, path: str, prompt: str, **more: Any) -> Answer:
        """Stream four tokens, of which only the first is timed; return when what follows an answer is done."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
        answer = self._client.stream(path, body)
        if answer.session_id:
            wait_sealed(self._client, answer.session_id)
        time.sleep(self._rest_s)
        return answer

    def _prompt(self, size: int) -> str:
        self._seed += 1
        return plain_text(size, seed=self._seed)


def rounds(sizes: Sequence[int], num_rounds: int, *, times_short: int = TIMES_SHORT) -> list[tuple[int, int]]:
    """Return all rounds, number and tokens, in their order: those of every length over the whole run, 0 first."""
    of_size = {size: num_rounds * (1 if size >= LONG_TOKENS else times_short) for size in sizes}
    places = [(number, size) for size in sizes for number in range(of_size[size] + 1)]
    return sorted(places, key=lambda place: (place[0] / of_size[place[1]], place[1]))


def times(samples: Sequence[Sample], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return one row per length and way that was taken, with what was dropped."""
    rows = []
    for size, way, taken in ((size, way, _of(samples, size, way)) for size in sizes for way in _taken(samples)):
        counted = [sample for sample in taken if sample.counts]
        restores_ms = [sample.restore_ms for sample in counted if sample.restore_ms is not None]
        row = {"size": size, "way": way, "n": len(counted), "dropped": len(taken) - len(counted)}
        row |= {"computed_tokens": percentile([sample.computed_tokens for sample in counted])}
        row |= {"cached_tokens": percentile([sample.cached_tokens for sample in counted])}
        ttfts_ms = [sample.ttft_ms for sample in counted]
        row |= {"ttft_ms_median": percentile(ttfts_ms), "ttft_ms_95": interval(ttfts_ms)}
        row |= {f"ttft_ms_p{q}": percentile(ttfts_ms, q) for q in (25, 90)}
        rows.append(row | {"restore_ms_median": percentile(restores_ms)})
    return rows


def ratios(samples: Sequence[Sample], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return one row per length and comparison; a bar on what no sample counts for is missed."""
    rows = []
    for size, (way, of) in ((size, pair) for size in sizes for pair in BARS if {*pair} <= _taken(samples).keys()):
        above, below = ([s.ttft_ms for s in _of(samples, size, name) if s.counts] for name in (way, of))
        rows.append({"size": size, "way": way, "of": of} | ratio_row(above, below, BARS[way, of].get(size)))
    return rows


def show(ttft_rows: Sequence[Mapping[str, Any]], ratio_rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables."""
    print(render(_TTFT_HEADS, [[cell(value) for value in row.values()] for row in ttft_rows]))
    cells = []
    for row in ratio_rows:
        figures = [cell(row[name], ".3f") for name in ("ratio", "ratio_95", "bar", "met")]
        cells.append([str(row["size"]), f"{row['way']} / {row['of']}", *figures])
    print(f"\n{render(_RATIO_HEADS, cells)}")


def _taken(samples: Iterable[Sample]) -> dict[str, None]:
    """Return the ways, in their order; from a store and a peer only where that was taken."""
    missing = {"store", "peer"} - {sample.way for sample in samples}
    return dict.fromkeys(way for way in WAYS if way not in missing)


def _of(samples: Iterable[Sample], size: int, way: str) -> list[Sample]:
    return [sample for sample in samples if (sample.size, sample.way) == (size, way)]


if __name__ == "__main__":
    sys.exit(main())
