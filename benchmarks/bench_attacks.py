"""One tenant attacks with one API key while another tenant works: statuses and latencies of the other tenant.

The stack is the local one with shipped settings, and Valkey has the chart's memory limit. Each of six attacks runs for
a minute against each front. The other tenant alternates turns of a context with stateless requests, one at a time.
The attacker is a process of low priority, because a real one has a machine of its own.

Bars: the other tenant gets no 429 and no 5xx; its 99th percentile is at most three times the idle one plus 0.5 s;
Envoy, the gateway and Valkey grow by no more than their documented bounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.attacks.attacker import ATTACKS
from benchmarks.engines import running
from benchmarks.result import parser_of, write_result
from deploy.local.model import MODEL_NAME
from deploy.local.plain_text import plain_text
from deploy.local.ports import LOOPBACK
from deploy.local.processes import session_members
from deploy.local.progress import StepFailed, say
from deploy.local.stack import Stack
from deploy.local.state import API_KEYS, read_state
from deploy.local.table import render

ROOT = Path(__file__).resolve().parents[1]
FRONTS = ("http", "envoy")
KEY = next(iter(API_KEYS))
WARM_S, IDLE_S = 5.0, 20.0
PAUSE_S = 0.1
P99_FACTOR, P99_PLUS_S = 3.0, 0.5
VALKEY_BYTES = 512 << 20
"""The chart's `valkey.maxMemory`."""
WATCHED = ("envoy", "gateway", "manager")
GROWN_MIB_MAX = {"envoy": 2048, "gateway": 1024, "redis": 128}
"""`ENVOY_MAX_HEAP_BYTES`, `GATEWAY_MAX_BUFFERED_BYTES` and `MANAGER_TENANT_BYTES_MAX` as shipped."""
_HEADS = (
    "front",
    "attack",
    "answers",
    "refused",
    "p50 s",
    "p99 s",
    "at most",
    "envoy MiB",
    "gateway MiB",
    "redis MiB",
    "met",
)


@dataclass(slots=True)
class Seen:
    """Answers that the other tenant got."""

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    @property
    def refused(self) -> int:
        """Answers other than 200, lost connections included."""
        return self.statuses.total() - self.statuses["200"]

    def quantile_s(self, share: float) -> float:
        """Return a quantile of the latencies, in seconds."""
        return sorted(self.seconds)[min(int(len(self.seconds) * share), len(self.seconds) - 1)]


def main() -> int:
    """Measure, print the table, write the JSON; with --check exit 1 when a bar is missed."""
    parser = parser_of(__file__, __doc__, has_stack=True, has_bars=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each attack")
    parser.add_argument("--only", action="append", choices=list(ATTACKS), help="attacks to run; default: all")
    parser.add_argument("--front", action="append", choices=FRONTS, help="fronts to attack; default: both")
    options = parser.parse_args()
    stack = Stack(ROOT / ".build" / "bench-stack", port=options.port)
    rows: list[dict[str, Any]] = []
    try:
        for front in options.front or FRONTS:
            for attack in options.only or ATTACKS:
                with running(stack):  # every attack meets a new stack
                    rows.append(asyncio.run(_attacked(stack, front, attack, options.seconds)))
                    show(rows[-1:])
    except StepFailed as failure:
        say(f"error: {failure}")
        return 1
    show(rows)
    write_result(options.out, {"seconds": options.seconds, "rows": rows})
    return 1 if options.check and not all(row["met"] for row in rows) else 0


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as a table."""
    keys = ("front", "attack", "answers", "refused", "p50_s", "p99_s", "p99_max_s")
    shown = [
        [
            *(str(row[key]) for key in keys),
            *(_grown(row, name) for name in ("envoy", "gateway", "redis")),
            str(row["met"]),
        ]
        for row in rows
    ]
    print(render(_HEADS, shown))


def _grown(row: dict[str, Any], name: str) -> str:
    before, most = row["memory_mib"][name]
    return f"{before} -> {most}"


async def _attacked(stack: Stack, front: str, attack: str, seconds: float) -> dict[str, Any]:
    """Measure the idle latencies, then attack; return a row."""
    url = stack.url if front == "envoy" else stack.front_url
    port = int(url.rpartition(":")[2])
    redis_port = int(stack.status()[0].url.rpartition(":")[2].partition("/")[0])
    _redis(redis_port, f"CONFIG SET maxmemory {VALKEY_BYTES}")
    memory = Memory(stack, redis_port)
    before = memory.now_mib()
    async with aiohttp.ClientSession(
        url, headers={"authorization": f"Bearer {KEY}"}, timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        idle = Seen()
        session_id = await _context(session)
        await _work(session, session_id, Seen(), time.monotonic() + WARM_S)
        await _work(session, session_id, idle, time.monotonic() + IDLE_S)
        say(f"{front}, {attack}: idle p99 {idle.quantile_s(0.99):.2f} s")
        command = (sys.executable, "-m", "benchmarks.attacks.attacker", attack, str(port), str(seconds))
        attacker = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, preexec_fn=lambda: os.nice(10)
        )
        attacked = Seen()
        watching = asyncio.create_task(memory.watch())
        await _work(session, session_id, attacked, time.monotonic() + seconds)
        output, _ = await attacker.communicate()
        watching.cancel()
    idle_s, most_s = idle.quantile_s(0.99), P99_FACTOR * idle.quantile_s(0.99) + P99_PLUS_S
    is_bounded = all(memory.most_mib[name] - before[name] <= bound for name, bound in GROWN_MIB_MAX.items())
    return {
        "front": front,
        "attack": attack,
        "idle_p99_s": round(idle_s, 3),
        "answers": attacked.statuses.total(),
        "refused": attacked.refused,
        "statuses": dict(attacked.statuses),
        "attacker": json.loads(output or b"{}"),
        "p50_s": round(attacked.quantile_s(0.5), 3),
        "p99_s": round(attacked.quantile_s(0.99), 3),
        "p99_max_s": round(most_s, 3),
        "memory_mib": {name: [before[name], memory.most_mib[name]] for name in before},
        "met": attacked.refused == 0 and attacked.quantile_s(0.99) <= most_s and is_bounded,
    }


async def _context(session: aiohttp.ClientSession) -> str:
    body = {"model": MODEL_NAME, "prompt": plain_text(300, seed=1), "max_tokens": 1}
    async with session.post("/v1/context", json=body) as answer:
        made = await answer.json()
        if answer.status != 200:
            raise StepFailed(f"the context could not be created: {made}")
        return str(made["session_id"])


async def _work(session: aiohttp.ClientSession, session_id: str, seen: Seen, until_s: float) -> None:
    """Alternate turns and stateless requests, one at a time, until a time of the monotonic clock."""
    stateless: dict[str, Any] = {"model": MODEL_NAME, "prompt": "A short question:", "max_tokens": 4}
    turn = stateless | {"session_id": session_id}
    while time.monotonic() < until_s:
        for body in (turn, stateless):
            before_s = time.perf_counter()
            try:
                async with session.post("/v1/completions", json=body) as answer:
                    await answer.read()
                    status = str(answer.status)
            except (aiohttp.ClientError, TimeoutError) as exc:
                status = type(exc).__name__
            seen.statuses[status] += 1
            seen.seconds.append(time.perf_counter() - before_s)
            await asyncio.sleep(PAUSE_S)


class Memory:
    """Resident memory of the watched parts, and the bytes that Valkey uses, in MiB."""

    def __init__(self, stack: Stack, redis_port: int) -> None:
        self._pids = {name: session_members(read_state(stack.paths)[name].name) for name in WATCHED}
        self._redis_port = redis_port
        self.most_mib = self.now_mib()

    def now_mib(self) -> dict[str, int]:
        """Return what each part uses now."""
        found = {name: sum(map(_resident_bytes, pids)) >> 20 for name, pids in self._pids.items()}
        used = next(
            line for line in _redis(self._redis_port, "INFO memory").splitlines() if line.startswith("used_memory:")
        )
        return found | {"redis": int(used.partition(":")[2]) >> 20}

    async def watch(self) -> None:
        """Note the most of each part, twice a second, until cancelled."""
        while True:
            now = await asyncio.to_thread(self.now_mib)
            self.most_mib = {name: max(value, now[name]) for name, value in self.most_mib.items()}
            await asyncio.sleep(0.5)


def _resident_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:")), 0)


def _redis(port: int, command: str) -> str:
    """Send one inline command and return the reply."""
    with socket.create_connection((LOOPBACK, port), timeout=30) as connection:
        connection.sendall(f"{command}\r\nPING\r\n".encode())
        reply = b""
        while not reply.endswith(b"+PONG\r\n"):
            reply += connection.recv(1 << 16)
    return reply.decode()


if __name__ == "__main__":
    sys.exit(main())
