"""`python -m tests.suite`: the quick parts (`make test`); `all`: every part; `slice`: one shard of the thorough parts.

`list` prints the parts, `matrix` the thorough parts as a matrix of jobs for the workflows.

Exit status 1 when a part failed or used more CPU seconds than its budget. Every choice follows from one seed, the
day's unless SEED is given.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time

from deploy.local.table import render
from tests.kit.seed import SEED
from tests.suite.parts import PARTS, Tier
from tests.suite.run import LAST_TESTS_S, ROOT, Run, run_part, run_quick, tell

SLICE_S = 240.0
"""Longest time of a slice, with the set-up of its stacks."""
COVERAGE = ("--cov", "--cov-report=term:skip-covered")
SHARDS_A_JOB = 5
"""Shards of one job of the workflows: its installation takes as long as one of them."""
SHARDS = [(part, number) for number in range(max(part.shards for part in PARTS)) for part in PARTS
          if part.tier is Tier.THOROUGH and number < part.shards]  # fmt: skip
"""Each thorough test is in one of them; neighbours are of different parts."""


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen parts; return the exit status."""
    began_s, options = time.monotonic(), _parser().parse_args(arguments)
    # A shell ignores SIGINT in what it runs in the background; the parts end by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.what == "list":
        rows = [[part.name, part.tier, str(part.budget_cpu_s or "-"), str(part.shards), part.proves] for part in PARTS]
        print(render(["part", "tier", "CPU s", "shards", "what it proves"], rows))
        return 0
    if options.what == "matrix":
        print(json.dumps({"include": matrix(options.since)}))
        return 0
    chosen = [part for part in PARTS if part.name in options.part]
    run = Run(SEED, shard=options.shard, options=COVERAGE if options.coverage else ())
    if options.what == "slice":
        part, number = SHARDS[turn() % len(SHARDS)]
        within_s = min(options.within_s, SLICE_S)
        print(f"== {part.name}, shard {number} of {part.shards}: {part.proves} (seed {SEED})", flush=True)
        if within_s < 2 * LAST_TESTS_S:
            print(f"== out of time: {within_s:.0f} s are left, so that no test of this shard was reached", flush=True)
            return 0
        outcomes = [run_part(part, Run(SEED, shard=(number, part.shards), within_s=within_s))]
    elif options.what == "all":
        outcomes = [run_part(part, run) for part in chosen or PARTS]
    else:
        chosen = chosen or [part for part in PARTS if part.tier is Tier.QUICK]
        outcomes = run_quick(chosen, run, keep_going=options.keep_going)
    tell(outcomes, seed=SEED, began_s=began_s)
    return 1 if any(one.is_failure for one in outcomes) else 0


def matrix(since: str | None = None) -> list[dict[str, str]]:
    """Return one job for each few shards of a thorough part; `since`: parts that watch what changed since a commit."""
    changed = _git("diff", "--name-only", f"{since}...HEAD").split() if since else []
    return [
        {"part": part.name, "shard": f"{number}/{jobs}"}
        for part in PARTS
        if part.tier is Tier.THOROUGH and (since is None or any(file.startswith(part.watches) for file in changed))
        for jobs in [-(-part.shards // SHARDS_A_JOB)]
        for number in range(jobs)
    ]


def turn() -> int:
    """Return a number that grows by one with each commit and each day: shards take turns by it."""
    return int(_git("rev-list", "--count", "HEAD")) + int(time.time() // 86_400)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _shard(text: str) -> tuple[int, int]:
    number, count = map(int, text.split("/"))
    if not 0 <= number < count:
        raise ValueError(text)
    return number, count


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.suite", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("quick", "all", "slice", "list", "matrix"), default="quick")
    names = [part.name for part in PARTS]
    parser.add_argument("--part", action="append", default=[], choices=names, help="only this one; may be repeated")
    parser.add_argument("--shard", type=_shard, metavar="K/N", help="run shard K of N of each part, counted from 0")
    parser.add_argument("--within-s", type=float, default=SLICE_S, help="longest time of a slice (%(default)g s)")
    parser.add_argument("--since", metavar="COMMIT", help="matrix: parts that the changes since then concern")
    parser.add_argument("--coverage", action="store_true", help="print the covered lines of each module")
    parser.add_argument("--keep-going", action="store_true", help="run the other quick parts after a failure")
    return parser


if __name__ == "__main__":
    sys.exit(main())
