"""What a turn costs in a process of its own, beside the same turn in a middleware of the engine's server.

Two engines that cost next to nothing (`benchmarks/turn/fake_vllm.py`), one manager and one Valkey. Before one engine
stands the turn process of this tree. The other has the middleware of `--previous`, a worktree of a commit that had it.
Each request goes to both, one right after the other; who is first alternates. No sidecar answers, so a create and a
turn of an existing context wait for none.

- plain: a request without a context. It goes to the engine itself, or through the middleware;
- Envoy: the same through Envoy and gateway of each tree. Two rows more compare it with the engine itself;
- create, turn: 200 ids, not streamed; long: a create with 131 072 ids;
- first: the first token of a streamed turn; gap: the 99th percentile between two tokens of 50 streams at once;
- CPU a token of these 50 streams, and the memory of the turn process after all.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.estimates import cell, interval, percentile
from benchmarks.front.process_figures import CpuSample, resident_bytes
from benchmarks.processes import Processes, envoy_binary
from benchmarks.result import RESULTS, write_result
from benchmarks.turn import fake_vllm
from benchmarks.turn.fake_vllm import MODEL
from contextcache.clock import SystemClock
from contextcache.identity import IDENTITY_HEADER, Identity, sign_identity
from deploy.local.ports import LOOPBACK
from deploy.local.readiness import HttpReady
from deploy.local.table import render

ROOT = Path(__file__).resolve().parents[1]
MIDDLEWARE = "vllm_plugin.turn.middleware.TurnMiddleware"
TENANT = "bench"
SHORT_IDS, LONG_IDS = 200, 131_072
STREAMS, STREAM_TOKENS = 50, 100
BARS = {"plain": 0.0, "Envoy": 0.0, "create": 1.5, "turn": 1.5, "long": None, "first": 1.5, "gap p99": 2.0}
"""Most milliseconds that the process may add. plain, Envoy: the interval must not lie above zero."""
_KEY = "sk-" + secrets.token_hex(32)
MEMORY_BAR_BYTES = 150_000_000
CPU_BAR_US = 25.0
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Way:
    """One of the two ways to an engine."""

    name: str
    url: str
    """For requests of contexts."""
    plain_url: str
    envoy_url: str
    pids: Mapping[str, list[int]]


def main() -> int:
    """Measure, print the tables, write the JSON; exit 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--previous", type=Path, required=True, help="a worktree with the middleware")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_turn_process.json", help="where the JSON goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-turn-process-") as directory:
        report = _run(Path(directory), options.previous.resolve(), options.rounds)
    write_result(options.out, report)
    print(_table(report))
    return 0 if all(row["met"] is not False for row in report["rows"]) else 1


def _run(directory: Path, previous: Path, rounds: int) -> dict[str, Any]:
    with Processes(directory) as processes:
        processes.start_valkey()
        processes.start_manager()
        secret = directory / "secret"
        secret.write_text(secrets.token_hex(32))
        env = {"TURN_MANAGER": processes.address("manager"), "TURN_SECRET_FILE": str(secret)}
        env |= {"TURN_RPC_DEADLINE_MS": "1000", "TURN_SIDECAR": "127.0.0.1:9"}
        for name, middleware in (("engine", ""), ("middleware", MIDDLEWARE)):
            port = processes.free_port(name)
            # By its file, so that no package of this tree hides one of the other.
            command = [sys.executable, fake_vllm.__file__, "--port", str(port)]
            tree = {"PYTHONPATH": str(previous)} if middleware else {}
            command += ["--middleware", middleware] if middleware else []
            processes.start(name, command, HttpReady(f"{processes.url(name)}/health"), env=env | tree)
        turn_port = processes.free_port("turn")
        env |= {"TURN_LISTEN_PORT": str(turn_port), "TURN_ENGINE_URL": processes.url("engine")}
        command = [sys.executable, "-m", "vllm_plugin.turn"]
        processes.start("turn", command, HttpReady(f"{processes.url('turn')}/health"), env=env)
        pod = {"name": "pod-0", "url": processes.url("engine"), "turn_url": processes.url("turn")}
        envoys = (
            _start_envoy(processes, "today", ROOT, pod, ENVOY_ENGINES=json.dumps([processes.address("engine")])),
            _start_envoy(processes, "previous", previous, {"name": "pod-0", "url": processes.url("middleware")}),
        )
        pids = (processes.pids(["engine", "turn"]), processes.pids(["middleware"]))
        ways = (
            Way("process", processes.url("turn"), processes.url("engine"), envoys[0], pids[0]),
            Way("middleware", processes.url("middleware"), processes.url("middleware"), envoys[1], pids[1]),
        )
        bench = Bench(ways, secret.read_bytes().strip())
        asyncio.run(bench.run(rounds))
        return bench.report() | {"memory_bytes": sum(map(resident_bytes, processes.pids(["turn"])["turn"]))}


def _start_envoy(processes: Processes, name: str, tree: Path, pod: dict[str, str], **env: str) -> str:
    """Start gateway and Envoy of a tree before a pod, as the local stack does; return Envoy's URL."""
    files = processes.directory / name
    files.mkdir()
    keys = processes.write_keys("keys.json", {_KEY: TENANT})
    port, ext_proc = processes.free_port(f"gateway {name}"), processes.free_port(f"ext_proc {name}")
    shared = {"PYTHONPATH": str(tree)}
    settings = {
        "GATEWAY_PORT": str(port),
        "GATEWAY_EXT_PROC_LISTEN": f"{LOOPBACK}:{ext_proc}",
        "GATEWAY_MANAGER": processes.address("manager"),
        "GATEWAY_ENDPOINTS": json.dumps([pod]),
        "GATEWAY_SECRET_FILE": str(processes.directory / "secret"),
        "GATEWAY_API_KEYS_FILE": str(keys),
    }
    command = [sys.executable, "-m", "gateway"]
    ready = HttpReady(f"http://{LOOPBACK}:{port}/readyz")
    processes.start(f"gateway-{name}", command, ready, env=shared | settings, cwd=tree)
    listen, admin = processes.free_port(f"envoy {name}"), processes.free_port(f"admin {name}")
    made = {
        "ENVOY_LISTEN_PORT": str(listen),
        "ENVOY_ADMIN_PORT": str(admin),
        "ENVOY_GATEWAYS": json.dumps([f"{LOOPBACK}:{port},{LOOPBACK}:{ext_proc}"]),
        "ENVOY_PODS": json.dumps([pod.get("turn_url", pod["url"]).removeprefix("http://")]),
        "ENVOY_API_KEYS_FILE": str(keys),
        "ENVOY_CONFIG_DIR": str(files),
    }
    command = [sys.executable, "-m", "gateway.envoy", "bootstrap"]
    subprocess.run(command, env=os.environ | shared | made | env, cwd=tree, check=True, timeout=60)
    command = [str(envoy_binary()), "--config-path", str(files / "envoy.json"), "--concurrency", "1"]
    command += ["--use-dynamic-base-id", "--log-level", "warning"]
    processes.start(f"envoy-{name}", command, HttpReady(f"http://{LOOPBACK}:{admin}/ready"))
    return processes.url(f"envoy {name}")


class Bench:
    """Asks both ways the same, in turn."""

    def __init__(self, ways: tuple[Way, Way], secret: bytes) -> None:
        self.ways, self.secret = ways, secret
        self.times_ms: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.cpu_us: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    async def run(self, rounds: int) -> None:
        """Measure all."""
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2), timeout=timeout
        ) as self.http:
            for number in range(-2, rounds):
                for way in self.ways if number % 2 else reversed(self.ways):
                    await self._round(way, counts=number >= 0)
            for number in range(-1, max(rounds // 6, 3)):
                for way in self.ways if number % 2 else reversed(self.ways):
                    await self._streams(way, counts=number >= 0)

    async def _round(self, way: Way, *, counts: bool) -> None:
        plain = {"model": MODEL, "prompt": _ids(SHORT_IDS), "max_tokens": 1}
        took = {"plain": await self._whole(f"{way.plain_url}/v1/completions", plain, {})}
        key = {"Authorization": f"Bearer {_KEY}"}
        took["Envoy"] = await self._whole(f"{way.envoy_url}/v1/completions", plain, key)
        took["create"] = await self._whole(f"{way.url}/v1/context", plain, self._signed(None))
        named = self.session_id
        turn = {**plain, "session_id": named}
        took["turn"] = await self._whole(f"{way.url}/v1/completions", turn, self._signed(named))
        took["first"] = await self._first(way, {**turn, "stream": True, "max_tokens": 2}, named)
        long = {**plain, "prompt": _ids(LONG_IDS)}
        took["long"] = await self._whole(f"{way.url}/v1/context", long, self._signed(None))
        if counts:
            for what, value in took.items():
                self.times_ms[what][way.name].append(value)

    async def _streams(self, way: Way, *, counts: bool) -> None:
        """Take 50 streams at once, each the first turn of a context."""
        body = {"model": MODEL, "prompt": _ids(SHORT_IDS), "stream": True, "max_tokens": STREAM_TOKENS}
        cpu = CpuSample.of(way.pids)
        gaps = await asyncio.gather(*(self._gaps(way, body) for _ in range(STREAMS)))
        if counts:
            for part, used_s in cpu.since().items():
                self.cpu_us[way.name][part].append(used_s * 1e6 / (STREAMS * STREAM_TOKENS))
            self.times_ms["gap p99"][way.name].append(percentile([gap for one in gaps for gap in one], 99) or 0.0)

    async def _gaps(self, way: Way, body: dict[str, Any]) -> list[float]:
        async with self.http.post(f"{way.url}/v1/context", json=body, headers=self._signed(None)) as answer:
            seen = [time.perf_counter() async for _ in answer.content]
            assert answer.status == 200, answer.status
        return [(after - before) * 1000 for before, after in itertools.pairwise(seen[::2])]

    async def _whole(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> float:
        data = json.dumps(body).encode()
        began_s = time.perf_counter()
        async with self.http.post(url, data=data, headers={"Content-Type": "application/json", **headers}) as answer:
            told = await answer.json()
        took_ms = (time.perf_counter() - began_s) * 1000
        assert answer.status == 200, told
        self.session_id = told.get("session_id") or ""
        return took_ms

    async def _first(self, way: Way, body: dict[str, Any], named: str) -> float:
        began_s = time.perf_counter()
        async with self.http.post(f"{way.url}/v1/completions", json=body, headers=self._signed(named)) as answer:
            await answer.content.readline()
            took_ms = (time.perf_counter() - began_s) * 1000
            await answer.read()
            assert answer.status == 200, answer.status
        return took_ms

    def _signed(self, session_id: str | None) -> dict[str, str]:
        expires_at_ms = SystemClock().now_ms() + 60_000
        identity = Identity(TENANT, f"bench-{next(_NUMBERS)}", expires_at_ms=expires_at_ms, session_id=session_id)
        return {IDENTITY_HEADER: sign_identity(identity, self.secret)}

    def report(self) -> dict[str, Any]:
        """Return the figures."""
        process, middleware = (way.name for way in self.ways)
        rows = []
        for what, bar in BARS.items():
            new, old = self.times_ms[what][process], self.times_ms[what][middleware]
            added = [one - other for one, other in zip(new, old, strict=True)]
            edges, middle = interval(added, digits=2), percentile(added, digits=2)
            assert edges is not None
            assert middle is not None
            met = None if bar is None else (edges[0] <= 0 if what in ("plain", "Envoy") else middle <= bar)
            medians = {"process_ms": percentile(new, digits=2), "middleware_ms": percentile(old, digits=2)}
            rows.append({"what": what, "n": len(new), **medians, "added_ms": middle, "added_95": edges})
            rows[-1] |= {"bar": bar, "met": met}
        for way in self.ways:
            # No bar: Envoy and its look at the gateway cost what they cost without a turn process, too.
            through, direct = self.times_ms["Envoy"][way.name], self.times_ms["plain"][way.name]
            added = [one - other for one, other in zip(through, direct, strict=True)]
            figures = {"added_ms": percentile(added, digits=2), "added_95": interval(added, digits=2)}
            what = f"Envoy beside the {'engine' if way is self.ways[0] else 'middleware'} itself"
            rows.append({"what": what, "n": len(added), "process_ms": percentile(through, digits=2)})
            rows[-1] |= {"middleware_ms": percentile(direct, digits=2), **figures, "bar": None, "met": None}
        cpu = {way: {part: percentile(used) for part, used in parts.items()} for way, parts in self.cpu_us.items()}
        return {"rows": rows, "cpu_us_per_token": cpu, "cpu_bar_us": CPU_BAR_US, "memory_bar_bytes": MEMORY_BAR_BYTES}


def _ids(count: int) -> list[int]:
    """Return ids with a beginning that no other prompt has."""
    return [*secrets.token_bytes(8), *itertools.repeat(97, count - 8)]


def _table(report: Mapping[str, Any]) -> str:
    heads = ["what", "n", "process ms", "middleware ms", "added ms", "95 %", "at most", "met"]
    keys = ("what", "n", "process_ms", "middleware_ms", "added_ms", "added_95", "bar", "met")
    cells = [[cell(row[key], ".2f") for key in keys] for row in report["rows"]]
    cpu, memory = report["cpu_us_per_token"], report["memory_bytes"] / 1e6
    return f"{render(heads, cells)}\nCPU us a token: {cpu}; memory of the turn process: {memory:.0f} MB"


if __name__ == "__main__":
    sys.exit(main())
