"""`python -m tests.suite`: the quick parts (`make test`); `all`: every part; `slice`: the one whose turn it is.

Exit status 1 when a part failed. Every choice follows from one seed, the day's unless SEED is given.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from deploy.local.table import render
from tests.kit.seed import SEED, VARIABLE
from tests.suite.parts import PARTS, Part, Tier
from tests.suite.run import Lane, Outcome, run_part, tell
from tests.suite.state import FILE, State, git, tree_id

SLICE_S = 240.0
"""What a slice may take, set-up of its stacks included."""
SLICE_MIN_S = 60.0
"""With less than this there is none: no stack would be up."""


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; return the exit status."""
    options = _parser().parse_args(arguments)
    # A shell ignores it for what it runs in the background, and so would all that is started here: parts end by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.what == "list":
        print(render(["part", "tier", "what it proves"], [[part.name, part.tier, part.proves] for part in PARTS]))
        return 0
    chosen = [part for part in PARTS if part.name in options.part]
    if options.what == "all":
        return _run_all(chosen or list(PARTS), again=options.again)
    if options.what == "slice":
        return _run_slice(chosen or [slice_of(git("rev-parse", "HEAD"))], within_s=min(options.within_s, SLICE_S))
    chosen = chosen or [part for part in PARTS if part.tier is Tier.QUICK]
    outcomes = _run_quick(chosen, covered={"unit"} if options.coverage else set(), keep_going=options.keep_going)
    if options.told:
        options.told.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
        return 1 if any(outcome.status == "failed" for outcome in outcomes) else 0
    return _told(outcomes, seed=SEED)


def _run_quick(chosen: list[Part], *, covered: set[str], keep_going: bool) -> list[Outcome]:
    """Run parts in their order; where there are others, those that wait most of their time beside all but the first."""
    beside = [part for part in chosen if part.beside]
    here = [part for part in chosen if not part.beside]
    if not here:
        here, beside = beside, []
    lane: Lane | None = None
    outcomes: list[Outcome] = []
    for part in here:
        outcomes.append(run_part(part, seed=SEED, coverage=part.name in covered))
        if outcomes[-1].status == "failed" and not keep_going:
            break
        if beside and lane is None:
            lane = Lane(beside, seed=SEED, keep_going=keep_going)
    if lane is not None:
        if outcomes[-1].status == "failed" and not keep_going:
            lane.stop()
        outcomes += lane.outcomes()
    reached = {outcome.name for outcome in outcomes}
    return outcomes + [Outcome(part.name, "not run") for part in here + beside if part.name not in reached]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.suite", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("quick", "all", "slice", "list"), default="quick")
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--part", action="append", default=[], choices=names, help="only this; may be given more than once"
    )
    parser.add_argument("--within-s", type=float, default=SLICE_S, help="slice: at most so long (%(default)g)")
    parser.add_argument("--told", type=Path, help="write there what became of it, as JSON, and sum up nothing")
    parser.add_argument("--coverage", action="store_true", help="quick: print what unit and contract tests run of us")
    parser.add_argument("--keep-going", action="store_true", help="quick: the other parts too when one has failed")
    parser.add_argument("--again", action="store_true", help="all: what has passed as well")
    return parser


def slice_of(commit: str) -> Part:
    """Return the thorough part whose turn it is: commits choose evenly."""
    thorough = [part for part in PARTS if part.tier is Tier.THOROUGH]
    return thorough[int(commit[:12], 16) % len(thorough)]


def _run_slice(chosen: list[Part], *, within_s: float) -> int:
    if within_s < SLICE_MIN_S:
        print(f"== {', '.join(part.name for part in chosen)}: no time is left for a slice", flush=True)
        return 0
    return _told([run_part(part, seed=SEED, within_s=within_s) for part in chosen], seed=SEED)


def _run_all(chosen: list[Part], *, again: bool) -> int:
    state = State(FILE, tree_id())
    goes_on = state.seed is not None and not again and VARIABLE not in os.environ
    seed = state.seed if goes_on and state.seed is not None else SEED
    state.begin(seed, git("rev-parse", "HEAD"))
    outcomes = []
    for part in chosen:
        if not again and part.name in state.passed:
            print(
                f"== {part.name}: passed already with these files and seed {seed} (AGAIN=1 runs it again)", flush=True
            )
            continue
        outcomes.append(run_part(part, seed=seed))
        if outcomes[-1].status == "passed":
            state.note(part.name, outcomes[-1].wall_s)
    return _told(outcomes, seed=seed)


def _told(outcomes: list[Outcome], *, seed: int) -> int:
    tell(outcomes, seed=seed)
    return 1 if any(one.status == "failed" for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
