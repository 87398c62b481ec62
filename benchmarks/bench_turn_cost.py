"""What one turn's begin and commit cost, of a long conversation beside a short one: Redis, manager, API server.

Real Valkey, a real manager process, gRPC, and the pod's side of it in this process. The turns of the two conversations
are interleaved; each adds a prompt and an answer of 32 tokens, as an append does, so both bring equally much that is
new. Figures are medians a turn: Redis's own time (`INFO commandstats`, EVALSHA), CPU of the manager process and of
this one (`schedstat`, all threads), and the wall clock. `ids` is what the pod pays on top to have the whole transcript
as one tuple for its engine, which no protocol takes away.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import redis

from benchmarks.front.process_figures import cpu_seconds
from benchmarks.processes import Processes
from benchmarks.result import parser_of, write_result
from context_manager.client import ContextManagerClient
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit
from contextcache.names import new_cache_ref
from deploy.local.table import render
from vllm_plugin.turn.prompt.transcript import Transcript

SIZES = {"1k": 1024, "128k": 131_072}
SEGMENT_TOKENS = 512
TURN_TOKENS = 32
WARM_UP_ROUNDS = 20
TENANT, LEASE_MS = "demo", 60_000
BAR = 2.0
"""The long conversation's begin and commit against the short one's."""
COSTS = ("redis_us", "manager_cpu_us", "pod_cpu_us", "wall_us", "ids_us")
BARRED = COSTS[:-1]
PODS = {"here before": 64 << 20, "new here": 0}
"""Memory for transcripts of the pod that plays the turns; without any, each turn is like the first after a move."""

Turns = dict[str, list[dict[str, float]]]


def main() -> int:
    """Measure, print the table, write the JSON; exit 1 when a ratio is over the bar."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=200, help="turns of each conversation")
    options = parser.parse_args()
    rows = asyncio.run(_measured(options.rounds))
    report = {"rounds": options.rounds, "bar": BAR, "rows": rows}
    write_result(options.out, report)
    print(_table(rows))
    return 0 if all(row["met"] for row in rows) else 1


async def _measured(rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="bench-turn-cost-") as directory, Processes(Path(directory)) as processes:
        processes.start_valkey()
        processes.start_manager()
        async with AsyncExitStack() as stack:
            rows = []
            for what, transcript_bytes_max in PODS.items():
                address = processes.address("manager")
                pod = ContextManagerClient(address, timeout_s=10, transcript_bytes_max=transcript_bytes_max)
                stack.push_async_callback(pod.close)
                rows += _rows(what, await Bench(processes).run(pod, rounds))
            return rows


class Bench:
    """Plays turns and reads what they cost."""

    def __init__(self, processes: Processes) -> None:
        self._redis = redis.Redis(port=processes.port("valkey"))
        self._manager_pid = processes.pid("manager")

    async def run(self, pod: Any, rounds: int) -> Turns:
        """Play the turns of one conversation of each size through `pod`; return their costs by size."""
        generations = dict.fromkeys(SIZES, 1)
        ids = {name: f"ctx_{secrets.token_hex(16)}" for name in SIZES}
        for name, num_tokens in SIZES.items():
            await _create(pod, ids[name], num_tokens)
        turns: Turns = {name: [] for name in SIZES}
        for number in range(-WARM_UP_ROUNDS, rounds):
            for name in SIZES if number % 2 else reversed(SIZES):
                cost = await self._turn(pod, ids[name], generations[name])
                generations[name] += 1
                if number >= 0:
                    turns[name].append(cost)
        return turns

    async def _turn(self, pod: Any, session_id: str, generation: int) -> dict[str, float]:
        lease_id = secrets.token_hex(16)
        before = self._read()
        session, segments = await pod.begin_turn(TENANT, session_id, lease_id=lease_id, lease_ttl_ms=LEASE_MS)
        assert session.generation == generation
        added = (_segment(SegmentKind.PROMPT, TURN_TOKENS), _segment(SegmentKind.ANSWER, TURN_TOKENS))
        commit = TurnCommit(TENANT, session_id, lease_id, generation, len(segments), added, new_cache_ref(), "pod-1")
        await pod.commit_turn(commit)
        after = self._read()
        start_ns = time.thread_time_ns()
        token_ids = Transcript(segments).token_ids
        ids_us = (time.thread_time_ns() - start_ns) / 1000
        assert len(token_ids) == session.num_tokens
        return {cost: after[cost] - before[cost] for cost in after} | {"ids_us": ids_us}

    def _read(self) -> dict[str, float]:
        return {
            "redis_us": float(self._redis.info("commandstats").get("cmdstat_evalsha", {}).get("usec", 0)),
            "manager_cpu_us": cpu_seconds(self._manager_pid) * 1e6,
            "pod_cpu_us": time.process_time_ns() / 1000,
            "wall_us": time.perf_counter_ns() / 1000,
        }


async def _create(pod: Any, session_id: str, num_tokens: int) -> None:
    await pod.reserve(NewSession(TENANT, session_id, "smol"), lease_id="create", lease_ttl_ms=LEASE_MS)
    kinds = (SegmentKind.PROMPT, SegmentKind.ANSWER)
    segments = tuple(_segment(kinds[number % 2], SEGMENT_TOKENS) for number in range(num_tokens // SEGMENT_TOKENS))
    await pod.register_session_cache(TurnCommit(TENANT, session_id, "create", 0, 0, segments, new_cache_ref(), "pod-1"))


def _segment(kind: SegmentKind, num_tokens: int) -> Segment:
    ids = tuple(1000 + secrets.randbelow(127_000) for _ in range(num_tokens))
    return Segment(kind, ids, text="word" * num_tokens)


def _rows(what: str, turns: Turns) -> list[dict[str, Any]]:
    return [_row(what, cost, *([turn[cost] for turn in turns[name]] for name in SIZES)) for cost in COSTS]


def _row(what: str, cost: str, short: Sequence[float], long: Sequence[float]) -> dict[str, Any]:
    medians = [statistics.median(short), statistics.median(long)]
    ratio = statistics.median(b / a for a, b in zip(short, long, strict=True) if a)
    return {
        "what": what,
        "cost": cost,
        "medians": [round(median, 1) for median in medians],
        "ratio": round(ratio, 2),
        "met": not _barred(what, cost) or ratio <= BAR,
    }


def _barred(what: str, cost: str) -> bool:
    return what == "here before" and cost in BARRED


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ["turn", "cost", *SIZES, "ratio", f"bar {BAR:g}x"]
    cells = [
        [row["what"], row["cost"], *map(str, row["medians"]), f"{row['ratio']:.2f}", _verdict(row)] for row in rows
    ]
    return render(heads, cells)


def _verdict(row: Mapping[str, Any]) -> str:
    if not _barred(row["what"], row["cost"]):
        return "-"
    return "pass" if row["met"] else "FAIL"


if __name__ == "__main__":
    sys.exit(main())
