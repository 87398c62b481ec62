"""What the context manager does with 1 000, 100 000 and 1 000 000 stored sessions: turns a second, p50, p99.

For each number a Valkey that writes its append-only file, a manager process over it with its own settings, and gRPC;
all run at the same time and are asked one after the other, turn by turn. A turn is what gateway and pod ask of a
manager: Locate, BeginTurn, CommitTurn, of sessions drawn at random. Alone, each call is timed; then many turns at once
say how many a second there are. The pod has no transcript of such a session: all of it is sent.

Some sessions are made by the manager, each with a transcript of four segments; the others are copies of what it stored,
under other names, listed and dated by the store's own rules (scripts/row.lua). Each turn puts the last two segments
anew, so that what is stored stays as large as it is. Beside turns: a create, a page of the list, and, with the managers
ended, what the manager's sweeper takes: for a pass when nothing is due, and for each session that is.

Client, managers and Valkeys share the machine, so turns a second are of all three. While turns are measured the
managers sweep as they always do. The append-only files are not rewritten meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import redis
from prometheus_client import CollectorRegistry

from benchmarks.fit import Bar, grown, table
from benchmarks.processes import Processes
from benchmarks.result import parser_of, write_result
from context_manager.client import ContextManagerClient
from context_manager.layout import member, script_arguments, script_rules, session_keys
from context_manager.limits import SessionKey
from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from context_manager.redis_connection import RedisConnection
from context_manager.sweeper import SessionSweeper
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit
from contextcache.names import new_cache_ref
from deploy.local.progress import Step, say
from deploy.local.table import figure

TENANT, MODEL, POD = "demo", "smol", "pod-1"
SIZES = (1000, 100_000, 1_000_000)
SEGMENT_TOKENS = 32
LEASE_MS, TTL_S, TOMBSTONE_S = 60_000, 86_400, 3600
MADE = 50
"""Sessions that the manager makes; the others are their copies."""
BATCH = 500
CROWD = 32
"""Turns at once."""
CREATE_EVERY = 5
"""Turns for each create and each page of the list."""
NUM_DUE = 2000
"""Sessions whose time has come, before each sweep that is timed."""
FLAT: Bar = (None, 0.05)
"""A thousand times the sessions cost 1.4 times as much at most."""
SORTED: Bar = (None, 0.2)
"""Of sweeps, which are steps in sorted sets: logarithmic, 16 members of a shard's set beside 16 000."""
CALLS = ("Locate", "BeginTurn", "CommitTurn", "turn", "create", "list")
_COPY = """
local row = read_row(a.row)
row.expires_at_ms = integer(now_ms + a.ttl_ms)
for i = 0, #KEYS / 4 - 1 do
  local keys = {KEYS[4 * i + 1], KEYS[4 * i + 2], KEYS[4 * i + 3], KEYS[4 * i + 4]}
  redis.call('COPY', a.row, keys[1])
  redis.call('HSET', keys[1], 'expires_at_ms', row.expires_at_ms)
  redis.call('COPY', a.transcript, keys[2])
  enter(keys, a.names[2 * i + 1], a.names[2 * i + 2], row, now_ms, tombstone_ms)
end
"""


def main() -> int:
    """Measure, print the table, write the JSON; with --check, exit 1 when a bar is missed."""
    parser = parser_of(__file__, __doc__, has_bars=True)
    parser.add_argument("--sessions", type=int, action="append", help=f"default: {SIZES}; 1 000 or more")
    parser.add_argument("--rounds", type=int, default=9, help="after one that is not counted")
    parser.add_argument("--turns", type=int, default=200, help="of each number of sessions, a round, alone")
    options = parser.parse_args()
    load, began_s, sizes = os.getloadavg(), time.monotonic(), sorted(set(options.sessions or SIZES))
    with tempfile.TemporaryDirectory(prefix="bench-manager-") as directory, Processes(Path(directory)) as processes:
        samples, facts = asyncio.run(_measured(processes, sizes, options.rounds, options.turns))
    rows = _rows(samples)
    report = {
        "rounds": options.rounds,
        "turns_per_round": options.turns,
        "turns_at_once": CROWD,
        "tokens_per_session": 4 * SEGMENT_TOKENS,
        "load": [load, os.getloadavg()],
        "took_s": round(time.monotonic() - began_s),
        "facts": facts,
        "rows": rows,
    }
    print(table(rows))
    for size, said in facts.items():
        print(f"{size} sessions: {', '.join(f'{name} {figure(value)}' for name, value in said.items())}")
    write_result(options.out, report)
    return 1 if options.check and any(row["met"] is False for row in rows) else 0


Samples = dict[str, dict[int, list[float]]]
"""By cost and by number of sessions, one figure a round."""


async def _measured(
    processes: Processes, sizes: Sequence[int], num_rounds: int, num_turns: int
) -> tuple[Samples, dict[int, dict[str, float]]]:
    samples: Samples = defaultdict(lambda: {size: [] for size in sizes})
    worlds = [World(processes, size) for size in sizes]
    for world in worlds:
        await world.fill()
    for number in range(num_rounds + 1):
        with Step(f"round {number}"):
            for size, figures in (await _round(worlds if number % 2 else worlds[::-1], num_turns)).items():
                for what, taken in figures.items() if number else ():
                    samples[what][size].append(taken)
    for world in worlds:
        await world.close()
    for number in range(num_rounds + 1):
        with Step(f"sweeps {number}"):
            for world in worlds if number % 2 else reversed(worlds):
                figures = await world.sweeps()
                for what, taken in figures.items() if number else ():
                    samples[what][world.size].append(taken)
    for world in worlds:
        samples["bytes a session"][world.size] = [world.facts["Redis bytes a session"]]
    return dict(samples), {world.size: world.facts for world in worlds}


async def _round(worlds: Sequence[World], num_turns: int) -> dict[int, dict[str, float]]:
    """Take everything but the sweeps, one turn of each world after the other; return figures by size."""
    taken: dict[int, dict[str, list[float]]] = {world.size: defaultdict(list) for world in worlds}
    for number in range(num_turns):
        for world in worlds:
            for call, ms in (await world.calls(number)).items():
                taken[world.size][call].append(ms)
    figures = {world.size: await world.crowd(2 * num_turns, taken[world.size]["turn of many"]) for world in worlds}
    for size, by_call in taken.items():
        for call, times_ms in by_call.items():
            figures[size] |= {f"{call}, p{q}": float(np.percentile(times_ms, q)) for q in (50, 99)}
    return figures


class World:
    """A Valkey with so many sessions, and its manager."""

    def __init__(self, processes: Processes, size: int) -> None:
        self.size, self.facts = size, dict[str, float]()
        self._processes, self._manager = processes, f"manager {size}"
        valkey = f"valkey {size}"
        processes.start_valkey(valkey)
        processes.start_manager(self._manager, valkey=valkey)
        self._redis = redis.Redis(port=processes.port(valkey), socket_timeout=60)
        self._redis.config_set("auto-aof-rewrite-percentage", 0)
        self._url = f"redis://{processes.address(valkey)}/0"
        self._gateway, self._pod = (ContextManagerClient(processes.address(self._manager)) for _ in range(2))
        self._copy = self._redis.register_script(script_rules() + _COPY)
        self._random = random.Random(size)
        self._next_id = size
        """Of sessions beyond those that are stored for good."""

    async def fill(self) -> None:
        """Store the sessions: the first by the manager, the others as copies of them."""
        empty = self._redis.info("memory")["used_memory"]
        with Step(f"{self.size} sessions"):
            began_s = time.perf_counter()
            for number in range(MADE):
                await self._create(number)
            self._add(range(MADE, self.size))
            self.facts["seconds to fill"] = time.perf_counter() - began_s
        self._check()
        used = self._redis.info("memory")["used_memory"] - empty
        self.facts["Redis bytes a session"] = used / self.size

    async def calls(self, number: int) -> dict[str, float]:
        """Take one turn, and now and then a create and a page of the list; return ms by call."""
        taken = await self._turn(self._random.randrange(self.size))
        if number % CREATE_EVERY == 0:
            self._next_id += 1
            taken["create"] = await self._timed(self._create(self._next_id))
            await self._gateway.unregister_session_cache(TENANT, _id(self._next_id))
            taken["list"] = await self._timed(self._gateway.list_sessions(TENANT, limit=20))
        return taken

    async def crowd(self, num_turns: int, times_ms: list[float]) -> dict[str, float]:
        """Take many turns at once; return how many a second there were."""
        numbers, began_s = self._random.sample(range(self.size), num_turns), time.perf_counter()
        await asyncio.gather(*(self._turns(numbers[start::CROWD], times_ms) for start in range(CROWD)))
        return {"turns a second": num_turns / (time.perf_counter() - began_s)}

    async def close(self) -> None:
        """End the manager and what calls it."""
        await self._gateway.close()
        await self._pod.close()
        self._processes.end(self._manager)

    async def sweeps(self) -> dict[str, float]:
        """Sweep once with nothing due and once with NUM_DUE sessions; return ms of the pass, and of each session."""
        connection = RedisConnection(self._url, timeout_s=60, max_connections=4)
        metrics = ManagerMetrics(CollectorRegistry())
        manager = ContextCacheManager(connection, metrics=metrics, tombstone_s=TOMBSTONE_S)
        sweeper = SessionSweeper(manager, metrics=metrics, interval_s=1)
        await sweeper.sweep_pass()
        idle_ms = await self._timed(sweeper.sweep_pass())
        self._next_id += NUM_DUE
        self._add(range(self._next_id - NUM_DUE, self._next_id), ttl_ms=-1000)
        began_s = time.perf_counter()
        num_swept = await sweeper.sweep_pass()
        took_ms = (time.perf_counter() - began_s) * 1000
        await connection.close()
        if num_swept != NUM_DUE:
            raise RuntimeError(f"{num_swept} sessions were swept, {NUM_DUE} were due")
        return {"sweep, nothing due": idle_ms, "sweep of a session": (took_ms - idle_ms) / NUM_DUE}

    async def _turns(self, numbers: Sequence[int], times_ms: list[float]) -> None:
        times_ms += [(await self._turn(number))["turn"] for number in numbers]

    async def _turn(self, number: int) -> dict[str, float]:
        session_id, lease_id = _id(number), secrets.token_hex(16)
        edges = [time.perf_counter()]
        await self._gateway.locate(TENANT, session_id)
        edges.append(time.perf_counter())
        session, segments = await self._pod.begin_turn(TENANT, session_id, lease_id=lease_id, lease_ttl_ms=LEASE_MS)
        edges.append(time.perf_counter())
        if len(segments) != 4:
            raise RuntimeError("a session does not hold what was stored")
        names = (new_cache_ref(), POD)
        await self._pod.commit_turn(TurnCommit(TENANT, session_id, lease_id, session.generation, 2, _pair(), *names))
        edges.append(time.perf_counter())
        times_ms = [*(np.diff(edges) * 1000), (edges[-1] - edges[0]) * 1000]
        return dict(zip(CALLS[:4], map(float, times_ms), strict=True))

    async def _create(self, number: int) -> None:
        new, lease_id = NewSession(TENANT, _id(number), MODEL, ttl_s=TTL_S), secrets.token_hex(16)
        await self._pod.reserve(new, lease_id=lease_id, lease_ttl_ms=LEASE_MS)
        commit = TurnCommit(TENANT, _id(number), lease_id, 0, 0, _pair() + _pair(), new_cache_ref(), POD)
        await self._pod.register_session_cache(commit)

    def _add(self, numbers: Sequence[int], *, ttl_ms: int = TTL_S * 1000) -> None:
        for start in range(0, len(numbers), BATCH):
            keys = [SessionKey(TENANT, _id(number)) for number in numbers[start : start + BATCH]]
            row, transcript, *_ = _keys(SessionKey(TENANT, _id(start // BATCH % MADE)))
            names = [name for key in keys for name in (member(key), key.session_id)]
            arguments = {"tombstone_ms": TOMBSTONE_S * 1000, "ttl_ms": ttl_ms, "names": names}
            arguments |= {"row": row, "transcript": transcript}
            self._copy(keys=[name for key in keys for name in _keys(key)], args=[script_arguments(arguments)])

    def _check(self) -> None:
        """Raise RuntimeError when a copy is not what the manager stored, or not where it would be."""
        made, copy = (_keys(SessionKey(TENANT, _id(number))) for number in (0, self.size - 1))
        for name, of in zip(made[:2], copy[:2], strict=True):
            ours, theirs = ([self._redis.type(key), self._redis.object("encoding", key)] for key in (name, of))
            if ours != theirs or not 0 <= self._redis.pttl(of) - self._redis.pttl(name) < 3_600_000:
                raise RuntimeError("a copy lies in Redis otherwise than what the manager stored")
        if self._redis.hkeys(made[0]) != self._redis.hkeys(copy[0]):
            raise RuntimeError("a copy's row has other fields")

    @staticmethod
    async def _timed(call: Awaitable[object]) -> float:
        began_s = time.perf_counter()
        await call
        return (time.perf_counter() - began_s) * 1000


def _keys(key: SessionKey) -> list[str]:
    """Return row, transcript, expiry set and tenant set of a session."""
    return session_keys(key, ledger="")[:4]


def _id(number: int) -> str:
    return f"ctx_{number:032x}"


def _pair() -> tuple[Segment, ...]:
    ids = tuple(1000 + secrets.randbelow(127_000) for _ in range(SEGMENT_TOKENS))
    return tuple(Segment(kind, ids, text="word" * SEGMENT_TOKENS) for kind in (SegmentKind.PROMPT, SegmentKind.ANSWER))


def _rows(samples: Samples) -> list[dict[str, Any]]:
    bars: dict[str, Bar] = {"turns a second": (-0.05, None), "sweep, nothing due": SORTED, "sweep of a session": SORTED}
    units = {"turns a second": "1/s", "bytes a session": "B"}
    reported = [what for what in samples if what.endswith("p99") and not what.startswith("turn")]
    return [
        grown(what, units.get(what, "ms"), of, None if what in reported else bars.get(what, FLAT))
        for what, of in samples.items()
    ]


if __name__ == "__main__":
    say("sessions in Redis, real managers …")
    sys.exit(main())
