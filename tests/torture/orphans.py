"""Stored bytes after crashes: every point of sidecar and manager, with the seal before the commit and after it.

Each round plays clients on two sidecars, a manager and Valkey until one sidecar and the manager have died at their
points, waits for one collector pass, and counts every file and byte against what live sessions name.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from pathlib import Path

from deploy.local.progress import say
from tests.kit.faults.bytes_rounds import plan_rounds, run_round
from tests.kit.faults.bytes_world import BytesWorld
from tests.torture.report import Options, Report


async def run(options: Options) -> Report:
    """Play every point once in both orders: about 50 rounds of 5 s."""
    report = Report("orphans")
    table: list[list[str]] = []
    report.tables["stored bytes after each round"] = (
        ["order", "sidecar", "dies at", "manager dies at", "sessions", "manifests", "bytes", "wrong"],
        table,
    )
    for order, seal_first in (("seal, commit", True), ("commit, seal", False)):
        with tempfile.TemporaryDirectory(prefix="orphans-") as directory:
            world = BytesWorld(Path(directory), seal_first=seal_first, cluster=True)
            try:
                await world.start()
                await _play_all(world, order, options, report, table)
            finally:
                await world.close()
    return report


async def _play_all(world: BytesWorld, order: str, options: Options, report: Report, table: list[list[str]]) -> None:
    rounds = plan_rounds(f"{options.seed} {order}")
    for number, one in enumerate(rounds, start=1):
        began_s = time.monotonic()
        try:
            count = await run_round(world, one, seed=f"{options.seed} {order} {number}")
        except Exception:  # noqa: BLE001  # what was counted before is told all the same
            report.failures.append(f"{order}, {one} broke off: {traceback.format_exc()}")
            return
        took_s = time.monotonic() - began_s
        points = f"{one.sidecar_point}, {one.manager_point}"
        say(f"orphans: {order}, {number} of {len(rounds)}: {points}: {len(count.wrong)} wrong, {took_s:.1f} s")
        report.count("rounds")
        report.count("crashes", 2)
        report.rows["longest round, s"] = max(round(took_s, 1), float(report.rows.get("longest round, s", 0)))
        figures = [str(figure) for figure in (count.num_sessions, count.num_manifests, count.num_bytes)]
        table.append([order, one.pod, one.sidecar_point, one.manager_point, *figures, str(len(count.wrong))])
        report.failures += [f"{order}, {one}: {wrong}" for wrong in count.wrong]
