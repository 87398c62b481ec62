"""Mixed load with faults on, for minutes, the same processes throughout; then the slopes of what must stay flat.

The tiny float32 model on the whole local stack. When the load is over and everything is deleted, one sweep and one
collection leave nothing: no session in Redis, no stored byte, nothing in hand.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

from deploy.local.progress import say
from deploy.local.run_stamp import as_lines, run_stamp
from tests.kit.stack import Stack
from tests.kit.tiny_stack import TinyStack
from tests.torture.report import Options, Report
from tests.torture.soak_faults import LINKS, Faults
from tests.torture.soak_load import NUM_LIVE, Load
from tests.torture.soak_samples import ALL_KEYS, Samples

RESULT = Path("benchmarks/results/soak.json")
_MINUTES = 20.0
_EVERY_S = 10.0
_DRAINED_WITHIN_S = 180.0
"""Tombstones, leftovers and what a fault made unreachable go by their own times, set below."""
_ENV = {
    "MANAGER_SWEEP_INTERVAL_S": "2", "MANAGER_TOMBSTONE_S": "20", "MANAGER_MIN_TTL_S": "5",
    "SIDECAR_COLLECT_INTERVAL_S": "5", "SIDECAR_ORPHAN_AFTER_S": "30", "SIDECAR_MEMORY_LIMIT_BYTES": str(64 << 20),
    "SIDECAR_BOUNDS": '{"tombstone_ms": 20000, "spare_ms": 20000, "save_deadline_ms": 20000, "leftover_s": 30}',
}  # fmt: skip
"""Everything that is kept for a time is kept for a short one, so that ten minutes hold it many times over."""


async def run(options: Options) -> Report:
    """Run the load for `options.minutes`; the table has every series, failures those that grow."""
    minutes = options.minutes or _MINUTES
    report = Report("soak", rows={"minutes": minutes, "live contexts": NUM_LIVE})
    random = options.random("soak")
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        stack = TinyStack(Path(directory), proxied=LINKS, env=_ENV)
        await asyncio.to_thread(stack.__enter__)
        try:
            load = Load(stack.url, stack.front_url, random)
            samples = await _soaked(stack, load, Faults(stack, random), minutes, report)
            _judge(samples, load, report)
            await _drained(stack, load, report)
            parts = [part for part in stack.part_names if part != "redis" and not stack.is_untouched(part)]
            report.failures += [f"{part} is not the process that it was" for part in parts]
        finally:
            await asyncio.to_thread(stack.__exit__, None, None, None)
    _keep(report, options)
    return report


async def _soaked(stack: Stack, load: Load, faults: Faults, minutes: float, report: Report) -> Samples:
    samples, began_s = Samples(), time.monotonic()
    loading = asyncio.create_task(load.run(), name="soak load")
    failing = asyncio.create_task(faults.run(), name="soak faults")
    try:
        while (now_s := time.monotonic() - began_s) < minutes * 60:
            await asyncio.sleep(_EVERY_S - now_s % _EVERY_S)
            await asyncio.to_thread(samples.take, stack, time.monotonic() - began_s)
            if len(samples.times_s) % 6 == 0:
                say(f"soak: {now_s / 60:.0f} of {minutes:.0f} min, {_turns(load.seen)} turns")
            for task in (loading, failing):
                if task.done():
                    task.result()
    finally:
        load.stop.set()
        faults.stop.set()
        await asyncio.gather(loading, failing)
    report.rows |= {"turns": _turns(load.seen), "faults": sum(faults.seen.values())}
    report.tables["load and faults"] = (["what", "times"], [[w, str(n)] for w, n in _sorted(load.seen + faults.seen)])
    report.failures += load.failures[:20]
    return samples


def _judge(samples: Samples, load: Load, report: Report) -> None:
    cells = []
    for who, what, unit, slope, bound, grows in samples.rows():
        verdict = "GROWS" if grows else "flat"
        figures = [f"{figure:.1f}" for figure in (slope.level, slope.per_hour, slope.noise_per_hour, bound)]
        cells.append([who, what, unit, *figures, verdict])
        if grows:
            report.failures.append(f"{who}: {what} grows by {slope.per_hour:.1f} {unit} an hour (± {figures[2]})")
    report.tables["slopes"] = (["who", "what", "unit", "level", "slope/h", "±/h", "bound/h", "verdict"], cells)


async def _drained(stack: Stack, load: Load, report: Report) -> None:
    """Delete everything, and see that it goes."""
    await load.delete_all()
    began_s, last = time.monotonic(), Samples()
    left: dict[str, float] = {}
    while time.monotonic() - began_s < _DRAINED_WITHIN_S:
        await asyncio.to_thread(last.take, stack, time.monotonic())
        kept = (("disk", "bytes"), ("memory tier", "bytes"), ALL_KEYS[:2])
        held = (
            "contextcache_gateway_requests_in_flight",
            "contextcache_sidecar_contexts",
            "contextcache_manager_sessions",
        )
        names = {*kept, ("gateway", held[0]), ("sidecar", held[1]), ("manager", held[2])}
        left = {f"{who}: {what}": values[-1] for (who, what, _), values in last.series.items() if (who, what) in names}
        if not any(left.values()):
            break
        await asyncio.sleep(2)
    report.rows["empty after, s"] = round(time.monotonic() - began_s)
    report.failures += [f"left after everything was deleted: {what} {value:g}" for what, value in left.items() if value]


def _turns(seen: Counter[str]) -> int:
    return seen["turn: 200"] + seen["streamed turn: 200"]


def _sorted(seen: Counter[str]) -> list[tuple[str, int]]:
    return sorted(seen.items())


def _keep(report: Report, options: Options) -> None:
    RESULT.write_text(as_lines({**run_stamp(), "seed": options.seed, **report.as_json()}))
