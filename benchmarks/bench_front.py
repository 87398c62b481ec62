"""What each front costs: a request, a byte, a chunk, an idle stream, beside going straight to the pod and beside peers.

One run over a stub pod that costs next to nothing, every way measured in turn within each round: direct, Envoy alone,
Envoy with the plugin (a stateless request; a turn named by a header, so that the plugin needs no body; a turn named in
the body), the HTTP front (stateless, and a turn), and the peers vllm-router and litellm, from PyPI in an environment
of their own. Gateway, context manager and Valkey are real; keys are checked and sessions looked up as in production.
`--real` measures throughput beside real vLLM instead, and adds it to the same results.

Everything shares the machine's cores, load generator and stub included: their CPU is in the report (`load_share`,
`stub_us`), and requests/s are what is left. CPU per request is the steadier figure. Not measured: TLS, HTTP/2 from
the client, more than one gateway or Envoy worker, a network.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.front import peers
from benchmarks.front.bars import real_bars, stub_bars
from benchmarks.front.measure import DIRECT, NUM_CHUNKS, NUM_IDLE, PACE_MS, Load, Plan, load_generator, measure, rows
from benchmarks.front.parts import running_parts
from benchmarks.front.real import measure_real
from benchmarks.front.report import tables
from benchmarks.processes import envoy_binary
from benchmarks.result import machine, parser_of, write_result
from deploy.local.progress import exit_code
from deploy.local.run_stamp import run_stamp

ROOT = Path(__file__).resolve().parents[1]
STACK_DIRECTORY = ROOT / ".build" / "bench-front-stack"
FULL = Plan(rounds=5, seconds=1.0, connections=(1, 16, 64), budget_s=480.0)
QUICK = Plan(rounds=1, seconds=0.6, connections=(1, 16, 64), budget_s=120.0)
REAL_ROUNDS = 8
REAL_ROUNDS_QUICK = 2


@exit_code
def main() -> int:
    """Measure, print tables, write the JSON; the exit status is 1 only when it could not be measured."""
    options = _options()
    signal.signal(signal.SIGTERM, _interrupted)
    report: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    with load_generator() as load:
        report |= _real(load, options) if options.real else _stub(load, options)
    real = {row["way"]: row["of_direct"] for row in report.get("real", {}).get("rows", []) if row["way"] != DIRECT}
    report["bars"] = stub_bars(report.get("rows", [])) + real_bars(real)
    write_result(options.out, report)
    print(json.dumps(report) if options.json else tables(report))
    return 0


def _options() -> argparse.Namespace:
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--quick", action="store_true", help="one short round: two minutes, to see that it works")
    parser.add_argument("--real", action="store_true", help="throughput beside real vLLM, about six minutes")
    parser.add_argument("--no-peers", action="store_true", help="without vllm-router and litellm")
    parser.add_argument("--rounds", type=int, help=f"instead of {FULL.rounds} ({REAL_ROUNDS} with --real)")
    parser.add_argument("--port", type=int, default=8200, help="Envoy's port in the stack of --real")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of tables")
    return parser.parse_args()


def _stub(load: Load, options: argparse.Namespace) -> dict[str, Any]:
    plan = QUICK if options.quick else FULL
    if options.rounds:
        plan = Plan(options.rounds, plan.seconds, plan.connections, plan.budget_s)
    with_peers = not options.no_peers and peers.install()
    with (
        tempfile.TemporaryDirectory(prefix="bench-front-") as directory,
        running_parts(Path(directory), with_peers=with_peers) as parts,
    ):
        measured = measure(parts, load, plan)
        ways = parts.ways
    return {
        **run_stamp(),
        "machine": machine() | {"envoy": _envoy_version(), "peers": peers.PINS if with_peers else {}},
        "rounds": measured.rounds,
        "seconds": plan.seconds,
        "stream": {"chunks": NUM_CHUNKS, "pace_ms": PACE_MS},
        "num_idle": NUM_IDLE,
        "background": measured.background,
        "rows": rows(measured, ways),
        "idle": measured.idle,
    }


def _real(load: Load, options: argparse.Namespace) -> dict[str, Any]:
    rounds = options.rounds or (REAL_ROUNDS_QUICK if options.quick else REAL_ROUNDS)
    real = measure_real(STACK_DIRECTORY, load, port=options.port, rounds=rounds)
    return {"machine": machine() | {"envoy": _envoy_version()}, "real": {**run_stamp(), **real}}


def _envoy_version() -> str:
    said = subprocess.run([str(envoy_binary()), "--version"], capture_output=True, text=True, timeout=10, check=True)
    return said.stdout.strip().rpartition(" ")[2].split("/")[1]


def _interrupted(number: int, frame: object) -> NoReturn:
    """End as on Ctrl-C, so that everything started is ended."""
    del number, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
