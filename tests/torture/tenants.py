"""Three tenants after each other's contexts: more than 10 000 calls through both fronts, none may tell anything."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from deploy.local.progress import say
from tests.kit.fronts import FRONTS
from tests.kit.tenant_attacks import attack_each_other
from tests.kit.tenant_world import running_tenants
from tests.torture.report import Options, Report

CALLS_A_TURN = 12
"""By front: 12 000 calls at the default size."""
_SHOWN = 20


async def run(options: Options) -> Report:
    """Attack through the HTTP front, then through Envoy."""
    report = Report("tenants")
    heads, rows = ["front", "calls", "hits", "differences", "calls/s"], []
    for front in FRONTS:
        say(f"  tenants through {front} …")
        with tempfile.TemporaryDirectory(prefix="tenants-") as directory:
            async with running_tenants(Path(directory), front=front) as world:
                began_s = time.monotonic()
                tally = await attack_each_other(
                    world,
                    num_calls=CALLS_A_TURN * options.turns,
                    seed=options.random(f"tenants/{front}").getrandbits(32),
                )
                rate = tally.num_calls / (time.monotonic() - began_s)
        found = (tally.num_calls, len(tally.hits), len(tally.differences))
        rows.append([front, *map(str, found), f"{rate:.0f}"])
        for name, amount in zip(("calls", "hits", "differences"), found, strict=True):
            report.count(name, amount)
        report.failures += [f"hit: {hit}" for hit in tally.hits[:_SHOWN]]
        report.failures += [f"difference: {one}" for one in tally.differences[:_SHOWN]]
    report.tables["tenants"] = (heads, rows)
    return report
