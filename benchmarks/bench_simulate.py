"""Placement on paper: the gateway's own routing over made-up pods, contexts and traffic, by `benchmarks/simulate`.

Each world has so many pods with 5 000 contexts each, most of them asleep, and traffic of agents, chat and shared
documents; the same seed shows the same again, CPU seconds aside. It is warmed up, then watched, and watched again while
something happens:

- zone: a third of the pods goes, with their disks; a store has what was in sessions, or there is none;
- restart: all pods, a tenth at a time, drain, stop and come back with their disks and nothing in memory.

What is measured elsewhere (benchmarks/simulate/rates.py) is taken from benchmarks/results; the rest says "assumed". CPU
seconds of a choice and of a probe are measured here. p50, p95: of the time to the first token; compute, seal: how busy
a pod's GPU is with prompts, and its disk with what is saved.
`--size full` takes 2 000 pods and 10 million contexts, some minutes and GiB each.
"""

from __future__ import annotations

import math
import resource
import time
from typing import Any

import numpy as np

from benchmarks.result import parser_of, write_result
from benchmarks.simulate.probing import probe_cpu_s
from benchmarks.simulate.rates import control_costs, measured_rates
from benchmarks.simulate.seen import told
from benchmarks.simulate.world import PROBE_S, World, quiet
from deploy.local.progress import Step
from deploy.local.table import figure, render

CONTEXTS_A_POD = 5000
SIZES = {"quick": (4, 16), "default": (4, 32, 200), "full": (4, 32, 200, 2000)}
"""Pods."""
LARGE = 1000
"""Pods from which only the first event is simulated."""
STRETCHES_S = ((100, 180.0), (LARGE, 90.0), (1 << 20, 60.0))
"""How long each stretch is, by up to how many pods."""
REQUESTS_PER_POD_S = 1.5
EVENTS = {"zone": True, "zone, no store": False, "restart": True}
"""What happens, and whether there is a store."""
BATCHES = 10
_TIERS = ("device", "host", "disk", "peer", "store", "recompute")
_HEADS = ("pods", "contexts", "when", "requests/s", "hit", *_TIERS, "skew", "p50", "p95", "compute", "seal")


def main() -> None:
    """Simulate, print the tables, write the JSON (`make plots` draws it)."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--size", choices=SIZES, default="default")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    quiet()
    rows = [row for num_pods in SIZES[options.size] for row in rows_of(num_pods, options.seed)]
    print(render(_HEADS, [_cells(row) for row in rows]))
    probe_s = probe_cpu_s()
    control = [control_row(row, probe_s) for row in rows if row["when"] == "steady"]
    print("\n" + render(list(control[0]), [[figure(value) for value in row.values()] for row in control]))
    rates = measured_rates().told()
    write_result(options.out, {"seed": options.seed, "rates": rates, "rows": rows, "control": control})


def rows_of(num_pods: int, seed: int, *, seconds: float = 0.0) -> list[dict[str, Any]]:
    """Return what one size of world showed: steady, and while each thing happens."""
    stretch_s = seconds or next(length_s for most, length_s in STRETCHES_S if num_pods <= most)
    rows: list[dict[str, Any]] = []
    for event, has_store in list(EVENTS.items())[: 1 if num_pods >= LARGE else None]:
        with Step(f"{num_pods} pods, {event}"):
            world = World(
                measured_rates(),
                num_pods=num_pods,
                num_contexts=num_pods * CONTEXTS_A_POD,
                requests_per_pod_s=REQUESTS_PER_POD_S,
                has_store=has_store,
                seed=seed,
            )
            world.run(stretch_s)
            steady = told(world.run(2 * stretch_s), world.pods, stretch_s)
            if not rows:
                rows.append(_row(world, "steady", steady, stretch_s))
            happen(world, event, stretch_s)
            rows.append(_row(world, event, told(world.run(3 * stretch_s), world.pods, stretch_s), stretch_s))
            world.close()
    return rows


def happen(world: World, event: str, stretch_s: float) -> None:
    """Have something happen in the next stretch."""
    if event != "restart":
        world.at(world.now_s, world.lose_zone)
        return
    size, each_s = -(-len(world.pods) // BATCHES), stretch_s / BATCHES
    for number in range(BATCHES):
        pods = world.pods[number * size : (number + 1) * size]
        if pods:
            world.at(world.now_s + number * each_s, lambda pods=pods: world.restart(pods, each_s / 2, each_s / 2))


def control_row(row: dict[str, Any], probe_s: float) -> dict[str, Any]:
    """Return what as many requests take of the control plane. A gateway is one loop, on one core."""
    costs, per_s = control_costs(), row["requests_per_s"]
    sessions_per_s = per_s * row["sessions"] / max(1, row["requests"])
    probing = row["pods"] * probe_s / PROBE_S
    return {
        "pods": row["pods"],
        "requests/s": per_s,
        "choice, µs": row["choice_us"],
        "choice p99, µs": row["choice_us_p99"],
        "core that a gateway probes with": round(probing, 3),
        "gateways": math.ceil(per_s * costs.gateway_s / (1 - probing)) if probing < 1 else None,
        "manager cores": round(sessions_per_s * costs.manager_s, 2),
        "Redis cores": round(sessions_per_s * costs.redis_s, 3),
    }


def _row(world: World, when: str, seen: dict[str, Any], stretch_s: float) -> dict[str, Any]:
    us = 1e6 * np.frombuffer(world.choice_s, dtype=np.float32)
    return {
        "pods": len(world.pods),
        "contexts": len(world.contexts),
        "when": when,
        "requests_per_s": round(seen["requests"] / stretch_s, 1),
        **seen,
        "choice_us": round(float(us.mean()), 1),
        "choice_us_p99": round(float(np.percentile(us, 99)), 1),
        "cpu_s": round(time.process_time()),
        "memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    restores = [f"{100 * row['restores'].get(tier, 0):.1f}%" for tier in _TIERS]
    first = [f"{row['first_token_ms'][q]} ms" for q in ("50", "95")]
    numbers = [str(row["pods"]), figure(row["contexts"]), row["when"], figure(row["requests_per_s"])]
    busy = [f"{100 * row['busy'][what]:.0f}%" for what in ("compute", "seal")]
    return [*numbers, f"{100 * row['hit_rate']:.1f}%", *restores, f"{row['served_skew']:.2f}", *first, *busy]


if __name__ == "__main__":
    main()
