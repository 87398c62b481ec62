"""How a kv-sidecar's bytes and times grow with contexts, tenants and tokens: an exponent for each, and its bar.

Real sidecar processes with the local stack's settings, saves and loads by the connector's worker half (bench_transfer).

- contexts: of 48 tokens, each in one whole block and one tail; a sidecar for each number, all running at once
  (`--contexts 100000` besides: it writes and removes 300 000 files);
- tenants: the same, 3 000 contexts dealt out to so many tenants;
- tokens, 8B: one context of so many tokens with the KV of Llama-3-8B, 128 KiB a token;
- tokens, long: one context of up to 128 000 tokens with next to no KV: what names and heads cost by themselves.

A context is saved by a sidecar, all others are made from it as it would write them, under other names and tokens; that
they load is measured. Each round takes every sidecar once, in turn. Contexts are drawn at random, each once: its first
load is from disk, the operating system has most files in memory. A save of many tokens waits for the disk, which may be
slower for much than for little: beside it files of the same sizes are written and made durable, one after the other.
A start is from the first instruction to the log line that says that it serves, less that of a sidecar with nothing;
memory is that of the process after the collector's first pass, without the arena, and also less. While the collector
passes again and again, the longest of 50 look-ups says for how long a load's question waits.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fit import Bar, grown, table
from benchmarks.processes import Processes
from benchmarks.result import parser_of, write_result
from deploy.local.progress import Step
from deploy.local.table import figure

CONTEXTS = (1000, 5000, 30_000)
TENANTS = (1, 50, 3000)
OF_TENANTS = 3000
"""Contexts that are dealt out to them."""
TOKENS = {"tokens, 8B": (256, 512, 1024, 2048), "tokens, long": (2000, 8000, 32_000, 128_000)}
STARTS = 3

FLAT: Bar = (None, 0.1)
"""A hundred times as many cost 1.6 times as much at most."""
LINEAR: Bar = (None, 1.1)
EXACT: Bar = (0.95, 1.05)
_CALLS = ("look-up", "load from disk", "load from memory", "save, until sealed", "touch", "delete")
BARS: Mapping[str, Mapping[str, Bar]] = {
    "contexts": dict.fromkeys(_CALLS, FLAT) | {"start": LINEAR, "memory": LINEAR, "disk": EXACT},
    "tenants": dict.fromkeys((*_CALLS, "start", "memory", "disk", "stats", "usage of a tenant"), FLAT),
    **{axis: dict.fromkeys(_CALLS[:3], LINEAR) | {"save / raw write": FLAT, "disk": EXACT} for axis in TOKENS},
}
UNITS = {"start": "s", "memory": "MiB", "disk": "MiB", "save / raw write": ""}
MEMORY_OF_A_CONTEXT = 8192
"""Bytes of a sidecar's memory that a context of two files may take."""

Samples = dict[str, dict[int, list[float]]]


def main() -> int:
    """Measure, print the tables, write the JSON; with --check, exit 1 when a bar is missed."""
    parser = parser_of(__file__, __doc__, has_bars=True)
    parser.add_argument("--axis", choices=BARS, action="append", help="default: all")
    parser.add_argument("--contexts", type=int, action="append", help=f"default: {CONTEXTS}; 1 000 or more")
    parser.add_argument("--rounds", type=int, default=9, help="after one that is not counted")
    options = parser.parse_args()
    load, began_s, axes = os.getloadavg(), time.monotonic(), options.axis or list(BARS)
    samples = {axis: _samples(axis, options.rounds, options.contexts or CONTEXTS) for axis in axes}
    rows = [row for axis, taken in samples.items() for row in _rows(axis, taken)]
    report = {
        "rounds": options.rounds,
        "load": [load, os.getloadavg()],
        "took_s": round(time.monotonic() - began_s),
        "rows": rows,
    }
    for axis in axes:
        print(f"\n{axis}\n{table([row for row in rows if row['axis'] == axis])}")
    if per_context := bytes_per_context(samples.get("contexts", {}).get("memory", {})):
        report["memory_of_a_context_bytes"] = {"bytes": per_context, "bar": MEMORY_OF_A_CONTEXT}
        print(f"\nmemory of a context: {figure(per_context)} bytes, at most {MEMORY_OF_A_CONTEXT}")
    write_result(options.out, report)
    is_missed = any(row["met"] is False for row in rows) or per_context > MEMORY_OF_A_CONTEXT
    return 1 if options.check and is_missed else 0


def bytes_per_context(memory_mib: Mapping[int, Sequence[float]]) -> float:
    """Return what one more context takes of memory, by the two largest numbers of them; 0 where there are not two."""
    if len(memory_mib) < 2:
        return 0.0
    (few, less), (many, more) = sorted((size, float(np.median(taken))) for size, taken in memory_mib.items())[-2:]
    return (more - less) * 2**20 / (many - few)


def _rows(axis: str, samples: Samples) -> list[dict[str, Any]]:
    bars = BARS[axis]
    return [{"axis": axis} | grown(what, UNITS.get(what, "ms"), of, bars.get(what)) for what, of in samples.items()]


def _samples(axis: str, num_rounds: int, contexts: Sequence[int]) -> Samples:
    with (
        tempfile.TemporaryDirectory(prefix="bench-scale-") as directory,
        Processes(Path(directory)) as processes,
    ):
        if axis in TOKENS:
            return _of_tokens(axis, processes, num_rounds)
        if axis == "contexts":
            worlds = {size: (size, 1) for size in sorted(set(contexts))}
        else:
            worlds = {size: (OF_TENANTS, size) for size in TENANTS}
        return _of_contexts(axis, processes, worlds, num_rounds)


def _of_contexts(axis: str, processes: Processes, sizes: Mapping[int, tuple[int, int]], num_rounds: int) -> Samples:
    """Measure sidecars with so many contexts of so many tenants, by size."""
    from benchmarks.scale_worlds import Template, World

    samples: Samples = defaultdict(lambda: {size: [] for size in sizes})
    empty, template = World(processes, f"{axis} none", 0, 1), Template(processes)
    worlds = {size: World(processes, f"{axis} {size}", *of) for size, of in sizes.items()}
    for size, world in worlds.items():
        with Step(f"{world.name}: files"):
            world.fill(template)
        samples["disk"][size].append(world.disk_bytes() / 2**20)
    for _ in range(STARTS):
        start_s, memory_bytes = empty.start()
        for size, world in worlds.items():
            its_start_s, its_memory_bytes = world.start()
            samples["start"][size].append(its_start_s - start_s)
            samples["memory"][size].append((its_memory_bytes - memory_bytes) / 2**20)
    processes.end(empty.name)
    for world in worlds.values():
        world.join()
    for number in range(num_rounds + 1):
        with Step(f"{axis}: round {number}"):
            order = list(worlds) if number % 2 else list(reversed(worlds))
            for size in order:
                for what, ms in worlds[size].measure():
                    samples[what][size] += [ms] if number else []
    for size, world in worlds.items():
        with Step(f"{world.name}: collector"):
            world.leave()
            samples["longest look-up while collecting"][size] = world.longest_questions_ms(3)
    return dict(samples)


def _of_tokens(axis: str, processes: Processes, num_rounds: int) -> Samples:
    """Measure one context of each number of tokens, saved and loaded by one sidecar."""
    from benchmarks.scale_worlds import SHAPE_OF, Tokens

    sizes = TOKENS[axis]
    samples: Samples = defaultdict(lambda: {size: [] for size in sizes})
    with closing(Tokens(processes, SHAPE_OF[axis], sizes[-1])) as bench:
        for number in range(num_rounds + 1):
            with Step(f"{axis}: round {number}"):
                for size, what, cost in bench.take(sizes, number):
                    samples[what][size] += [cost] if number else []
    return dict(samples)


if __name__ == "__main__":
    sys.exit(main())
