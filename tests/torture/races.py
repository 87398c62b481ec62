"""Minutes of racing turns, kills and stops, as tests/faults/test_races.py has them for seconds.

`--minutes` is how long; without it three, in rounds of 30 s, each with a seed of its own and processes of its own.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

from deploy.local.progress import say
from tests.kit.faults.races_run import Races
from tests.kit.faults.races_world import World
from tests.torture.report import Options, Report

ROUND_S = 30
CLIENTS = (2, 4, 8, 16)
_MINUTES = 3.0


def run(options: Options) -> Report:
    """Race in rounds; a failure names the seed of its round."""
    report = Report("races")
    counts: Counter[str] = Counter()
    longest_s = 0.0
    rounds = max(1, round((options.minutes or _MINUTES) * 60 / ROUND_S))
    for number in range(rounds):
        seed = options.seed + number
        with tempfile.TemporaryDirectory(prefix="races-") as directory:
            world = World(Path(directory), with_gateways=True)
            try:
                world.start()
                outcome = asyncio.run(Races(world, seed=seed, clients=CLIENTS, seconds=ROUND_S).run())
            finally:
                world.stop()
        counts += Counter({f"turns told {told}": count for told, count in outcome.told.items()})
        counts += Counter({fault.partition("-")[0] + " " + fault.split()[-1]: 0 for fault in outcome.faults})
        for fault, count in outcome.faults.items():
            counts[f"{fault.partition('-')[0]} {fault.split()[-1]}"] += count
        counts["generations explained"] += outcome.generations
        longest_s = max(longest_s, *outcome.free_after_s, 0.0)
        report.failures += [f"seed {seed}: {failure}" for failure in outcome.failures]
        failed = outcome.failures or "no"
        say(f"  round {number + 1} of {rounds}: {outcome.told['committed']} turns committed, {failed} failures")
    report.rows |= {"rounds": rounds, **dict(sorted(counts.items())), "lost turns": len(report.failures)}
    report.rows["longest until free, s"] = round(longest_s, 1)
    return report
