"""The whole fault matrix over one real stack: files, links, parts and crash points, disks and clocks.

`make test` runs a few cases of each (tests/faults). Here all of them, in an order that the seed draws; what does not
fit into the time is counted as not run. Crash points join by their packages' lists.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

from deploy.local.progress import say
from tests.kit.faults import cases, files
from tests.kit.faults.disk import limit_file_size
from tests.kit.faults.whole_world import WholeWorld, whole_world
from tests.kit.faults.world import BOUND_S, Row
from tests.torture.report import Options, Report

DEFAULT_MINUTES = 12.0
"""Beside the other runs; `--only matrix --minutes 60` is enough for every case."""
IDLE_TIMEOUT_S = 8.0
"""So that a turn whose pod takes the connection and says nothing has its error within the bound too."""
CLOCKS_S = (3700, -3700, 30, -30)

Case = tuple[str, Callable[[WholeWorld], Row]]


def run(options: Options) -> Report:
    """Run the cases one after the other until they, or the time, have ended."""
    report = Report("matrix")
    rng = options.random("matrix")
    ends_at_s = time.monotonic() + 60 * (options.minutes or DEFAULT_MINUTES)
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="matrix-", ignore_cleanup_errors=True) as directory,
        whole_world(Path(directory), seed=options.seed, idle_timeout_s=IDLE_TIMEOUT_S) as world,
    ):
        # The engine's last: each of them starts it again.
        quick, slow = _all_cases(world)
        rng.shuffle(quick)
        rng.shuffle(slow)
        chosen = [(name, case) for name, case in [*quick, *slow] if re.search(options.cases, name)]
        for name, case in chosen:
            if time.monotonic() > ends_at_s:
                report.count("cases not run, out of time")
                continue
            rows.append(_one(world, name, case))
            row = rows[-1]
            say(f"  {row.beyond_s:6.2f} s {row.case}: {row.outcome} {'; '.join(row.faults)}")
    _fill(report, rows)
    return report


def _all_cases(world: WholeWorld) -> tuple[list[Case], list[Case]]:
    """Return what leaves the engine alone, and what starts it again."""
    quick: list[Case] = [
        (f"file {tier} {kind} {fault}", partial(cases.file_case, tier=tier, kind=kind, fault=fault))
        for tier, kind, fault in product(cases.TIERS, files.KINDS, files.FAULTS)
        if cases.is_possible(tier, kind, fault)
    ]
    for link, fault in product(world.stack.links.proxies, cases.LINK_FAULTS):
        quick.append((f"link {link} {fault}", partial(cases.link_case, link=link, fault=fault)))
        quick.append((f"mid-turn {link} {fault}", partial(cases.link_mid_turn_case, link=link, fault=fault)))
    for part in ("gateway", "manager", "sidecar", "redis"):
        quick += [
            (f"stop {part}", partial(cases.stop_case, part=part)),
            (f"kill {part}", partial(cases.kill_case, part=part)),
            (f"kill in mid-turn {part}", partial(cases.kill_mid_turn_case, part=part)),
        ]
    quick += _disks_and_clocks()
    slow: list[Case] = [
        ("kill in mid-turn API server", partial(_kill_one, what="API server")),
        ("kill in mid-turn engine core", partial(_kill_one, what="engine core")),
    ]
    for point in cases.POINTS:
        dying = slow if cases.part_of(point) == "engine" else quick
        dying.append((f"kill at {point}", partial(cases.point_case, point=point)))
        quick.append((f"stop at {point}", partial(cases.point_case, point=point, stop=True)))
    return quick, slow


def _disks_and_clocks() -> list[Case]:
    def full(world: WholeWorld) -> Row:
        assert world.disk is not None
        disk = world.disk
        return cases.full_disk_case(world, "full", lambda: disk.fill(leave_bytes=16 << 10), disk.free)

    def limited(world: WholeWorld) -> Row:
        pid = world.stack.pid("sidecar")
        return cases.full_disk_case(
            world, "limited", lambda: limit_file_size(pid, 4096), lambda: limit_file_size(pid, None)
        )

    def slow(world: WholeWorld) -> Row:
        order = partial(world.orders.slow_disk, "kv_sidecar", write_ms=500, fsync_ms=3000)
        return cases.slow_disk_case(world, order, world.orders.heal)

    def shifted(world: WholeWorld, module: str, shift_s: int) -> Row:
        return cases.clock_case(world, module, shift_s * 1000, world.orders.shift_clock)

    clocks: list[Case] = [
        (f"clock {module} {shift_s:+} s", partial(shifted, module=module, shift_s=shift_s))
        for module, shift_s in product(("kv_sidecar", "context_manager"), CLOCKS_S)
    ]
    return [("disk full", full), ("disk limited", limited), ("disk slow", slow), *clocks]


def _kill_one(world: WholeWorld, what: str) -> Row:
    kill = world.stack.kill_api_server if what == "API server" else world.stack.kill_engine_core
    return cases.kill_mid_turn_case(world, "engine", kill, name=what)


def _one(world: WholeWorld, name: str, case: Callable[[WholeWorld], Row]) -> Row:
    """Run a case; one that breaks off is a row too, and the stack is mended after it."""
    try:
        return case(world)
    except Exception as exc:  # noqa: BLE001  # the next case must have its turn
        return Row(name, "broke off", 0.0, faults=[f"{type(exc).__name__}: {str(exc)[:300]}"])
    finally:
        world.mend()


def _fill(report: Report, rows: list[Row]) -> None:
    report.rows["cases"] = len(rows)
    if not rows:
        report.failures.append("no case was run")
        return
    report.rows["crash points that nobody came by"] = sum(not row.was_passed for row in rows)
    slowest = max(rows, key=lambda row: row.beyond_s)
    report.rows["bound, s beyond the recompute"] = BOUND_S
    report.rows["slowest, s beyond the recompute"] = round(slowest.beyond_s, 2)
    report.rows["slowest case"] = slowest.case
    report.rows["over the bound"] = sum(row.beyond_s > BOUND_S for row in rows)
    report.rows["longest recovery, s"] = round(max(row.recovery_s for row in rows), 1)
    report.failures += [f"{row.case}: {fault}" for row in rows for fault in row.faults]
    lines = [
        [row.case, row.outcome, f"{row.beyond_s:.2f}", f"{row.recovery_s:.1f}", row.moved, "; ".join(row.faults)]
        for row in sorted(rows, key=lambda row: row.case)
    ]
    report.tables["cases"] = (["case", "outcome", "beyond s", "recovery s", "counters", "faults"], lines)
