"""Time to the first token of the same conversation: cold, from the engine's prefix cache, restored after a crash.

Starts a stack of its own (real processes, SmolLM2), creates contexts of three lengths, kills engine and sidecar
with SIGKILL, starts them again, then measures the three in turn within one run of the engine, so that the ratios
compare like with like. A restored sample is the *first* turn of a context after the restart: its KV is on disk only.
One round of all is done before and not counted: the first answers of a process are slow whatever they are.
What it does not measure: throughput, and a disk without a page cache (the operating system may still have the files).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS, write_result
from deploy.local.demo import wait_sealed
from deploy.local.gateway_client import Answer, GatewayClient
from deploy.local.model import MODEL_NAME
from deploy.local.plain_text import plain_text
from deploy.local.progress import Step, StepFailed, say
from deploy.local.stack import Stack
from deploy.local.state import API_KEYS
from deploy.local.table import render

ROOT = Path(__file__).resolve().parents[1]
STACK_DIRECTORY = ROOT / ".build" / "bench-stack"
SIZES = (150, 1450, 5780)
BARS = {1450: 0.10, 5780: 0.05}
"""Tokens → largest allowed restored / cold."""
WAYS = ("cold", "prefix_cache", "restored")
_NEXT_TURN = " And what happened then?"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured answer."""

    way: str
    size: int
    ttft_ms: float
    computed_tokens: int
    cached_tokens: int
    source: str
    restore_ms: float | None

    @classmethod
    def of(cls, way: str, size: int, answer: Answer) -> Sample:
        """Return the sample of an answer."""
        figures = (answer.computed_tokens, answer.cached_tokens, answer.source, answer.restore_ms)
        return cls(way, size, round(answer.ttft_ms, 2), *figures)


def main() -> int:
    """Measure, print a table, write the JSON; the exit status is 1 only when it could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8100, help="gateway port of the benchmark's own stack")
    parser.add_argument("--samples", type=int, default=5, help="contexts per length; medians are taken over them")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_ttft.json", help="where the JSON goes")
    options = parser.parse_args()
    stack = Stack(STACK_DIRECTORY, port=options.port, dtype=options.dtype)
    try:
        stack.clean()
        stack.up()
        samples = measure(stack, options.samples)
    except StepFailed as failure:
        say(f"error: {failure}")
        return 1
    except KeyboardInterrupt:
        say("stopped")
        return 130
    finally:
        stack.clean()
    report = {
        "dtype": options.dtype,
        "rows": rows(samples),
        "samples": list(map(asdict, samples)),
    }
    show(report["rows"])
    write_result(options.out, report)
    return 0


def measure(stack: Stack, num_samples: int) -> list[Sample]:
    """Create contexts, crash and restart engine and sidecar, then measure the three ways in turn."""
    client = GatewayClient(stack.url, next(iter(API_KEYS)))
    seed = time.time_ns() // 1_000_000 % 900_000_000
    contexts = {}
    for number in range(num_samples + 1):  # number 0 warms the engine up after its restart and is not counted
        for size in SIZES:
            with Step(f"context {number} of {num_samples}, about {size} tokens"):
                created = client.stream("/v1/context", body(plain_text(size, seed=seed), ttl=3600))
            wait_sealed(client, created.session_id)
            contexts[number, size] = created.session_id
            seed += 1
    for part in ("engine", "sidecar"):
        stack.kill(part)
    for part in ("sidecar", "engine"):
        stack.start(part)
    samples = []
    for (number, size), session_id in contexts.items():
        with Step(f"measuring {number} of {num_samples}, about {size} tokens"):
            fresh = body(plain_text(size, seed=seed))
            seed += 1
            bodies = dict.fromkeys(WAYS[:2], fresh) | {"restored": body(_NEXT_TURN, session_id=session_id)}
            measured = [Sample.of(way, size, client.stream("/v1/completions", asked)) for way, asked in bodies.items()]
            samples += measured if number else []
    return samples


def body(prompt: str, **more: Any) -> dict[str, Any]:
    """Return a completion body: greedy, four tokens, of which only the first is timed."""
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}


def rows(samples: list[Sample]) -> list[dict[str, Any]]:
    """Return one row per length and way: medians, and the ratio to cold."""
    result = []
    for size in SIZES:
        median_ms = {way: statistics.median(s.ttft_ms for s in _of(samples, way, size)) for way in WAYS}
        for way in WAYS:
            chosen = _of(samples, way, size)
            ratio = median_ms[way] / median_ms["cold"]
            bar = BARS.get(size) if way == "restored" else None
            result.append(
                {
                    "size": size,
                    "way": way,
                    "computed_tokens": statistics.median_low(s.computed_tokens for s in chosen),
                    "cached_tokens": statistics.median_low(s.cached_tokens for s in chosen),
                    "sources": sorted({s.source for s in chosen}),
                    "ttft_ms_median": round(median_ms[way], 1),
                    "ttft_ms_min": min(s.ttft_ms for s in chosen),
                    "ttft_ms_max": max(s.ttft_ms for s in chosen),
                    "restore_ms_median": _median(s.restore_ms for s in chosen),
                    "ratio_to_cold": round(ratio, 4),
                    "bar": bar,
                    "met": None if bar is None else ratio <= bar and all(s.source == "disk" for s in chosen),
                }
            )
    return result


def show(report_rows: list[dict[str, Any]]) -> None:
    """Print the table and whether each bar was met."""
    heads = ["tokens", "way", "computed", "cached", "source", "TTFT ms", "min", "max", "of cold", "bar"]
    cells = []
    for row in report_rows:
        verdict = "" if row["bar"] is None else f"{'pass' if row['met'] else 'FAIL'} (<= {row['bar']:.0%}, from disk)"
        figures = [row["computed_tokens"], row["cached_tokens"], ",".join(row["sources"]), row["ttft_ms_median"]]
        spread = [row["ttft_ms_min"], row["ttft_ms_max"], f"{row['ratio_to_cold']:.1%}", verdict]
        cells.append([str(cell) for cell in (row["size"], row["way"], *figures, *spread)])
    print(render(heads, cells))


def _of(samples: list[Sample], way: str, size: int) -> list[Sample]:
    return [sample for sample in samples if sample.way == way and sample.size == size]


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 2) if known else None


if __name__ == "__main__":
    sys.exit(main())
