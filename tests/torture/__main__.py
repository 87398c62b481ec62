"""`python -m tests.torture`: longer runs of what `make test` shows in small, seeded, bounded, against real parts.

A run is a module here with `def run(options: Options) -> Report` (or `async def`). They run one after the other; seed,
progress and one table each are printed, the figures go into a JSON file.

Exit status 1 when a run has failures or breaks off, 2 for a name that there is not.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import secrets
import sys
import time
import traceback
from pathlib import Path

from deploy.local.progress import say
from deploy.local.run_stamp import as_lines, run_stamp
from deploy.local.table import render
from tests.torture.report import Options, Report

RUNS = ("conversations", "tenants", "races", "orphans", "matrix")
"""What runs without `--only`, in this order, under 25 minutes in all."""
ON_REQUEST = ("soak", "takeovers", "pauses", "connectors")
JSON_FILE = Path(".build/torture.json")


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; return the exit status."""
    options = _parser().parse_args(arguments)
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    chosen = Options(seed=seed, turns=options.turns, minutes=options.minutes, cases=options.cases)
    names = options.only or list(RUNS)
    say(f"torture: seed {seed}, {', '.join(names)}")
    reports = [_run(name, chosen) for name in names]
    _write(options.json, seed, reports)
    failed = [report.name for report in reports if report.failures]
    say(f"seed {seed}: " + (f"FAILED: {', '.join(failed)}" if failed else "no failures") + f" (JSON: {options.json})")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat a run; without one, a new seed is drawn and printed")
    parser.add_argument("--turns", type=int, default=500, help="how much to do, where a run counts turns or calls")
    parser.add_argument("--minutes", type=float, help="how long, where a run goes on for a time")
    parser.add_argument(
        "--only", action="append", choices=(*RUNS, *ON_REQUEST), help="one run; may be given more than once"
    )
    parser.add_argument("--cases", default="", help="a regular expression: these cases of the matrix alone")
    parser.add_argument("--json", type=Path, default=JSON_FILE, help="where the figures go")
    return parser


def _run(name: str, options: Options) -> Report:
    say(f"{name} …")
    began_s = time.monotonic()
    try:
        report = importlib.import_module(f"tests.torture.{name}").run(options)
        if inspect.isawaitable(report):
            report = asyncio.run(_awaited(report))
    except Exception:  # noqa: BLE001  # a run that breaks off is a failure, and the others still run
        report = Report(name, failures=[traceback.format_exc()])
    report.rows["seconds"] = round(time.monotonic() - began_s)
    _show(report, options.seed)
    return report


async def _awaited(report):
    return await report


def _show(report: Report, seed: int) -> None:
    rows = [[what, str(value)] for what, value in report.rows.items()] + [["failures", str(len(report.failures))]]
    print(f"\n{report.name} (seed {seed})\n{render([report.name, 'seen'], rows)}")
    for title, (heads, cells) in report.tables.items():
        print(f"\n{title}\n{render(heads, cells)}")
    for failure in report.failures:
        print(f"\nFAILED {report.name}: {failure}")
    sys.stdout.flush()


def _write(file: Path, seed: int, reports: list[Report]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(as_lines({**run_stamp(), "seed": seed, "runs": [report.as_json() for report in reports]}))


if __name__ == "__main__":
    sys.exit(main())
