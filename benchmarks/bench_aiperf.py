"""AIPerf's multi-turn conversations on four systems, each from AIPerf's own generator, client and report.

The systems are those of bench_trace, on chat completions, with the same model, threads and KV space. One of them works
at a time, and each is first in turn. A round is one run of AIPerf with a seed of its own, which all systems get.
AIPerf sends `X-Session-ID`, and our key keeps plain requests. All conversations of a run are open at once, and together
are over twice what an engine's KV holds.

AIPerf reports the times. Computed tokens are vLLM's own counter (`prompt_tokens_by_source`, `local_compute`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.bench_beside import NEEDED_BYTES, PINS, free_shared
from benchmarks.bench_trace import MEMORY_BYTES, STACK_DIRECTORY, engine_space, systems_of
from benchmarks.engines import running
from benchmarks.estimates import cell, paired_row, percentile
from benchmarks.processes import Processes
from benchmarks.result import parser_of, write_result
from deploy.local.environments import made
from deploy.local.model import MODEL_DIR, MODEL_NAME
from deploy.local.progress import Step, exit_code, run_logged
from deploy.local.stack import Stack
from deploy.local.state import KEEPING_KEY
from deploy.local.table import render

ROOT = Path(__file__).resolve().parents[1]
AIPERF = ("aiperf==0.13.0",)
AIPERF_BYTES = 3 << 30
TURNS, TURN_TOKENS, ANSWER_TOKENS = 6, 200, 16
THINK_MS = 3000
"""Mean time between an answer and the next turn."""
_TIMES = {"time_to_first_token": "ttft", "request_latency": "turn"}
_HEADS = (
    "system",
    "requests",
    "failures",
    "computed",
    "TTFT p50 ms",
    "p95 ms",
    "turn p50 ms",
    "p95 ms",
    "ours to it, p50",
    "p95",
)


@exit_code
def main() -> int:
    """Measure, print the table, write the JSON; exit 1 when a part failed."""
    parser = parser_of(__file__, __doc__, has_stack=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--kv-tokens", type=int, default=4_608, help="tokens that an engine's KV holds")
    options = parser.parse_args()
    os.environ.setdefault("SIDECAR_MEMORY_LIMIT_BYTES", str(MEMORY_BYTES))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    space = engine_space(options.kv_tokens)
    load, began_s = os.getloadavg(), time.monotonic()
    rounds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    try:
        aiperf = made("bench-aiperf", AIPERF, needed_bytes=AIPERF_BYTES) / "bin" / "aiperf"
        for name, pins in PINS.items():
            made(f"bench-{name}", pins, needed_bytes=NEEDED_BYTES)
        stack = Stack(STACK_DIRECTORY, port=options.port, dtype="float32", dev=True, engine_args=space, store="dir")
        with (
            tempfile.TemporaryDirectory(prefix="bench-aiperf-", dir=ROOT / ".build") as directory,
            Processes(Path(directory)) as processes,
            running(stack),
        ):
            names = [name for name, _ in systems_of(stack, processes, options.port, space)]
            urls = {"ours": (stack.url, stack.engine_urls[0])}
            urls |= {name: (processes.url(name), processes.url(name)) for name in names[1:]}
            for number in range(options.rounds):
                at = number % len(names)
                for name in names[at:] + names[:at]:
                    with Step(f"round {number + 1} of {options.rounds}, {name}"):
                        folder = Path(directory) / f"{number}-{name}"
                        rounds[name].append(_run(aiperf, folder, *urls[name], number, options.conversations))
    finally:
        free_shared()
    rows = rows_of(rounds)
    print(
        render(
            _HEADS,
            [[cell(value, ".2f" if name.startswith("ours") else ".0f") for name, value in row.items()] for row in rows],
        )
    )
    shape = {"rounds": options.rounds, "conversations": options.conversations, "turns": TURNS}
    shape |= {"turn_tokens": TURN_TOKENS, "answer_tokens": ANSWER_TOKENS, "kv_tokens": options.kv_tokens}
    taken = {"load": [load, os.getloadavg()], "took_s": round(time.monotonic() - began_s)}
    versions = {"aiperf": list(AIPERF)} | {name: list(pins) for name, pins in PINS.items()}
    write_result(options.out, {"dtype": "float32", **shape, **taken, "versions": versions, "rows": rows})
    return 0


def _run(aiperf: Path, folder: Path, url: str, engine_url: str, seed: int, conversations: int) -> dict[str, Any]:
    """Run AIPerf once, and return figures of its report with the tokens that the engine computed meanwhile."""
    before = _computed_tokens(engine_url)
    command = [str(aiperf), "profile", "--model", MODEL_NAME, "--url", url, "--endpoint-type", "chat", "--streaming"]
    command += ["--tokenizer", str(MODEL_DIR), "--session-header", "X-Session-ID", "--api-key", KEEPING_KEY]
    command += ["--conversation-num", str(conversations), "--concurrency", str(conversations)]
    command += ["--conversation-turn-mean", str(TURNS), "--conversation-turn-stddev", "0"]
    command += ["--conversation-turn-delay-mean", str(THINK_MS), "--conversation-turn-delay-stddev", str(THINK_MS // 4)]
    command += ["--isl", str(TURN_TOKENS), "--osl", str(ANSWER_TOKENS), "--random-seed", str(1000 + seed)]
    command += ["--extra-inputs", json.dumps({"temperature": 0, "ignore_eos": True}), "--use-server-token-count"]
    command += ["--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", str(folder)]
    command += ["--workers-max", "1", "--record-processor-service-count", "1"]
    run_logged(command, what=f"AIPerf on {url}", log=folder.with_suffix(".log"))
    told = json.loads((folder / "profile_export_aiperf.json").read_text())
    return figures(told) | {"computed_tokens": _computed_tokens(engine_url) - before}


def figures(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of AIPerf's report, by name."""
    failed = (report.get("error_request_count") or {"avg": 0})["avg"]
    found = {"requests": round(report["request_count"]["avg"]), "failures": round(failed)}
    return found | {f"{name}_{part}": report[key][part] for key, name in _TIMES.items() for part in ("p50", "p95")}


def rows_of(rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Return a row of sums and medians for each system, with the median of ratios of ours to it."""
    rows = []
    for name, taken in rounds.items():
        row: dict[str, Any] = {"system": name}
        row |= {what: round(sum(one[what] for one in taken)) for what in ("requests", "failures", "computed_tokens")}
        for name_of_time in _TIMES.values():
            for part, name_of_part in (("p50", "median"), ("p95", "p95")):
                row[f"{name_of_time}_ms_{name_of_part}"] = percentile([one[f"{name_of_time}_{part}"] for one in taken])
        for what in ("turn_p50", "turn_p95"):
            pairs = ([one[what] for one in rounds["ours"]], [one[what] for one in taken])
            row[f"ours_to_it_{what}"] = paired_row(*pairs, None, digits=2)["ratio"]
        rows.append(row)
    return rows


def _computed_tokens(engine_url: str) -> int:
    text = httpx.get(f"{engine_url}/metrics", timeout=60, trust_env=False).raise_for_status().text
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return round(
        sum(
            one.value
            for one in samples
            if one.name == "vllm:prompt_tokens_by_source_total" and one.labels["source"] == "local_compute"
        )
    )


if __name__ == "__main__":
    sys.exit(main())
