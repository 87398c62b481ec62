"""Whether the time of a 404 tells an id that never was from one that was deleted and from another tenant's.

Real gateway, manager and Valkey, each a process (the pod is a stub, which no such call reaches), through the HTTP
front and through a real Envoy. One client, one call at a time, the three kinds of id in random order
within each round, ids from pools of equal size, so that whatever drifts drifts for all three. For each pair of kinds:
the difference of the medians, and the share of pairs of calls in which the first kind took longer (Mann-Whitney's U as
a probability: 0.5 when nothing can be told) with its p-value. The control is a kind against itself: even rounds
against odd ones.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from benchmarks.front.envoy_bootstrap import with_plugin
from benchmarks.front.stub_engine import MODEL
from benchmarks.processes import POD, Processes
from benchmarks.result import parser_of, write_result
from context_manager.client import ContextManagerClient
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit
from contextcache.names import new_cache_ref, new_session_id
from deploy.local.progress import say
from deploy.local.table import render

FRONTS = ("http", "envoy")
KINDS = ("absent", "deleted", "foreign")
NUM_IDS = 50
WARM_UP_ROUNDS = 50
CALLS: Mapping[str, tuple[str, str, bool]] = {
    "read": ("GET", "/v1/context/{id}", False),
    "delete": ("DELETE", "/v1/context/{id}", False),
    "turn": ("POST", "/v1/completions", True),
    "turn in chat": ("POST", "/v1/chat/completions", True),
}
BAR_SHARE = 0.05
"""A pair passes when its share is within this of 0.5, or its medians are within BAR_US: below a network's own noise."""
BAR_US = 50.0
ME, OTHER = "red", "green"

Times = dict[str, list[float]]


def main() -> int:
    """Measure, print the table, write the JSON; exit 1 when a pair is over the bar."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="calls of each kind, method and front")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = [row for front in FRONTS for row in asyncio.run(_measured(front, options.rounds, options.seed))]
    report = {"rounds": options.rounds, "bar": {"share": BAR_SHARE, "us": BAR_US}, "rows": rows}
    write_result(options.out, report)
    print(_table(rows))
    return 0 if all(row["met"] for row in rows) else 1


async def _measured(front: str, rounds: int, seed: int) -> list[dict[str, Any]]:
    rng = Random(f"{seed}/{front}")  # spreads calls, guards nothing
    with tempfile.TemporaryDirectory(prefix="bench-not-found-") as directory, Processes(Path(directory)) as processes:
        for start in (processes.start_stub, processes.start_valkey, processes.start_manager):
            start()
        processes.start_gateway({key_of(tenant): tenant for tenant in (ME, OTHER)})
        if front == "envoy":
            listeners = {"gateway": "gateway", "ext_proc": "ext_proc", "pod": "stub"}
            addresses = {what: processes.address(name) for what, name in listeners.items()}
            processes.start_envoy("envoy", partial(with_plugin, **addresses))
        url = processes.url("envoy" if front == "envoy" else "gateway")
        ids = await _ids(processes.address("manager"))
        async with aiohttp.ClientSession(base_url=url, timeout=aiohttp.ClientTimeout(total=30)) as http:
            rows = []
            for call in CALLS:
                say(f"{front}: {call} …")
                rows += _rows(front, call, await _timed(http, call, ids, rounds, rng))
            return rows


async def _ids(manager: str) -> dict[str, list[str]]:
    client = ContextManagerClient(manager)
    try:
        found = {"absent": [new_session_id() for _ in range(NUM_IDS)]}
        found["foreign"] = [await _created(client, OTHER) for _ in range(NUM_IDS)]
        found["deleted"] = [await _created(client, ME) for _ in range(NUM_IDS)]
        for session_id in found["deleted"]:
            await client.unregister_session_cache(ME, session_id)
        return found
    finally:
        await client.close()


async def _created(client: ContextManagerClient, tenant: str) -> str:
    new = NewSession(tenant, new_session_id(), MODEL)
    await client.reserve(new, lease_id="create", lease_ttl_ms=5000)
    segment = Segment(SegmentKind.PROMPT, (1, 2, 3), text="hello")
    await client.register_session_cache(
        TurnCommit(tenant, new.session_id, "create", 0, 0, (segment,), new_cache_ref(), POD)
    )
    return new.session_id


def key_of(tenant: str) -> str:
    """Return a tenant's API key."""
    return f"key-of-{tenant}"


async def _timed(
    http: aiohttp.ClientSession, call: str, ids: Mapping[str, Sequence[str]], rounds: int, rng: Random
) -> dict[str, list[float]]:
    """Return microseconds by kind."""
    times: Times = {kind: [] for kind in KINDS}
    for number in range(-WARM_UP_ROUNDS, rounds):
        for kind in rng.sample(KINDS, k=len(KINDS)):
            taken_us = await _one(http, call, rng.choice(ids[kind]))
            if number >= 0:
                times[kind].append(taken_us)
    return times


async def _one(http: aiohttp.ClientSession, call: str, session_id: str) -> float:
    method, path, has_body = CALLS[call]
    body = {"model": MODEL, "prompt": "x", "session_id": session_id} if has_body else None
    data = None if body is None else json.dumps(body).encode()
    before_ns = time.perf_counter_ns()
    async with http.request(method, path.replace("{id}", session_id), data=data, headers=_headers()) as answer:
        await answer.read()
        taken_us = (time.perf_counter_ns() - before_ns) / 1000
    assert answer.status == 404
    return taken_us


def _headers() -> dict[str, str]:
    return {"authorization": f"Bearer {key_of(ME)}", "content-type": "application/json"}


def _rows(front: str, call: str, times: Times) -> list[dict[str, Any]]:
    pairs = [("absent", "deleted"), ("absent", "foreign"), ("deleted", "foreign")]
    rows = [_row(front, call, first, second, times[first], times[second]) for first, second in pairs]
    again = times["absent"]
    return [*rows, _row(front, call, "absent", "absent (control)", again[::2], again[1::2])]


def _row(  # a row of the table
    front: str, call: str, first: str, second: str, firsts: list[float], seconds: list[float]
) -> dict[str, Any]:
    share, p_value = mann_whitney(firsts, seconds)
    medians = statistics.median(firsts), statistics.median(seconds)
    difference_us = medians[0] - medians[1]
    return {
        "front": front,
        "call": call,
        "pair": f"{first} / {second}",
        "median_us": [round(median, 1) for median in medians],
        "difference_us": round(difference_us, 1),
        "share": round(share, 4),
        "p": round(p_value, 4),
        "met": abs(share - 0.5) <= BAR_SHARE or abs(difference_us) <= BAR_US,
    }


def mann_whitney(firsts: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return how often one of `firsts` is the larger of a pair, and the two-sided p-value (normal approximation)."""
    pooled = sorted([(value, 0) for value in firsts] + [(value, 1) for value in seconds])
    n, m = len(firsts), len(seconds)
    rank_sum = sum(rank for rank, (_, which) in enumerate(pooled, start=1) if which == 0)
    u = rank_sum - n * (n + 1) / 2
    deviation = math.sqrt(n * m * (n + m + 1) / 12)
    return u / (n * m), math.erfc(abs(u - n * m / 2) / deviation / math.sqrt(2))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ["front", "call", "pair", "medians µs", "difference µs", "first longer", "p", "bar"]
    cells = [
        [
            *(row["front"], row["call"], row["pair"], " / ".join(map(str, row["median_us"]))),
            *(f"{row['difference_us']:+}", f"{row['share']:.1%}", f"{row['p']:.3f}", "pass" if row["met"] else "FAIL"),
        ]
        for row in rows
    ]
    return render(heads, cells)


if __name__ == "__main__":
    sys.exit(main())
