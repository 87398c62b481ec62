"""What others wait while one tenant sends twenty bodies built to be slow to read, 32 MiB each, all at once.

A real gateway process, a real manager and, for one of the two fronts, a real Envoy with the settings that are shipped;
the tenant is a process of its own (`--send`), so that whoever measures is not busy with its bytes. One client asks
without a key, one with another tenant's, one call at a time. Before the twenty, one of each shape comes alone: the
gateway's memory may not grow by twice its size, nor by twice all of theirs when they come at once.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.front.envoy_bootstrap import with_plugin
from benchmarks.processes import ROOT, Processes
from benchmarks.result import parser_of, write_result
from contextcache.claim import CONTAINERS_MAX, DEPTH_MAX, OTHER_VALUES_MAX, STRINGS_MAX, VALUES_MAX
from deploy.local.ports import LOOPBACK
from deploy.local.progress import say
from deploy.local.table import render

FRONTS = ("http", "envoy")
NUM_BODIES = 20
NUM_ATTACKS = 5
"""One after the other: a 99th percentile wants some hundred answers."""
SIZE_BYTES = (32 << 20) - 256
"""Just under what a gateway takes."""
BAR_P99_S = 0.5
ME, OTHER = "key-of-the-tenant", "key-of-another"
_START = b'{"session_id":"ctx_a","model":"stub-model",'
_SHAPES = (
    (b'"prompt":[', b"[],", b"[]]}"),
    (b'"prompt":[', b'{"a":0},', b"{}]}"),
    (b'"x":', b"[", b""),
    (b'"x":[', b"[" * 200 + b"]" * 200 + b",", b"0]}"),
    (b'"prompt":"', rb"\"", b'"}'),
    (b'"x":', b"9", b"}"),
    (b'"prompt":[', b"1,", b"1]}"),
    (b"", b'"session_id":"ctx_a",', b'"b":0}'),
    (b'"\\ud800":"', rb"\ud800", b'"}'),
)
"""What comes before, again and again, and behind."""
_ACCEPTED = (
    (b'"x":{', b'"a":0,', b'"b":0}}', STRINGS_MAX - 16),
    (b'"x":[', b"{},", b"{}]}", CONTAINERS_MAX - 16),
    (b'"x":[', b"1,", b"1]}", OTHER_VALUES_MAX - 16),
    (b'"prompt":[', b"123456,", b"1]}", VALUES_MAX - 16),
    (b'"x":[', b"[" * (DEPTH_MAX - 4) + b"]" * (DEPTH_MAX - 4) + b",", b"0]}", CONTAINERS_MAX // DEPTH_MAX - 16),
)
"""The same of bodies just below the limits, which are read and sent on, and how often."""


def main() -> int:
    """Measure, print the table, write the JSON; exit 1 when a bar is not met."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--mib", type=int, default=32, help="of each body, less a little")
    parser.add_argument("--send", type=int, metavar="PORT", help="be the tenant: send the bodies there, once")
    parser.add_argument("--alone", action="store_true", help="with --send: one of each shape, one after the other")
    options = parser.parse_args()
    size_bytes = (options.mib << 20) - 256
    if options.send:
        _send_all(options.send, size_bytes, at_once=1 if options.alone else NUM_BODIES)
        return 0
    rows = [asyncio.run(_measured(front, size_bytes)) for front in FRONTS]
    write_result(options.out, {"bodies": NUM_BODIES, "size_bytes": size_bytes, "rows": rows})
    head = ("front", "keyless", "keyed p99 s", "keyed max s", "hostile", "one: MiB", "all: MiB", "met")
    keys = ("front", "keyless", "p99_s", "max_s", "hostile", "grown_by_one_mib", "grown_mib", "met")
    print(render(head, [[str(row[key]) for key in keys] for row in rows]))
    return 0 if all(row["met"] for row in rows) else 1


async def _measured(front: str, size_bytes: int) -> dict[str, Any]:
    say(f"{front} …")
    with tempfile.TemporaryDirectory(prefix="bench-hostile-") as directory, Processes(Path(directory)) as processes:
        for start in (processes.start_stub, processes.start_valkey, processes.start_manager):
            start()
        processes.start_gateway({ME: "me", OTHER: "other"})
        if front == "envoy":
            listeners = {"gateway": "gateway", "ext_proc": "ext_proc", "pod": "stub"}
            addresses = {what: processes.address(name) for what, name in listeners.items()}
            processes.start_envoy("envoy", partial(with_plugin, **addresses))
        return await _attacked(processes, front, size_bytes)


async def _attacked(processes: Processes, front: str, size_bytes: int) -> dict[str, Any]:
    """Let the tenant send its bodies, and ask all the while; return a row."""
    port, gateway = processes.port("envoy" if front == "envoy" else "gateway"), processes.pid("gateway")
    await _sent(port, size_bytes, "--alone")  # what is allocated once, at the first body, is nobody's body
    before = _memory_mark(gateway)
    await _sent(port, size_bytes, "--alone")
    by_one_bytes = _memory_bytes(gateway, "VmHWM") - before
    before = _memory_mark(gateway)
    keyless, keyed = Asker(port, None), Asker(port, OTHER)
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(asker.ask()) for asker in (keyless, keyed)]
        told = [await _sent(port, size_bytes) for _ in range(NUM_ATTACKS)]
        for task in asking:
            task.cancel()
    grown_bytes, p99_s = _memory_bytes(gateway, "VmHWM") - before, _quantile(keyed.seconds, 0.99)
    is_held = by_one_bytes < 2 * size_bytes and grown_bytes < 2 * NUM_BODIES * size_bytes
    return {
        "front": front,
        "keyless": dict(keyless.statuses),
        "keyed": dict(keyed.statuses),
        "hostile": dict(sum((Counter(found["statuses"]) for found in told), Counter())),
        "hostile_s": round(sum(found["seconds"] for found in told), 2),
        "p50_s": round(_quantile(keyed.seconds, 0.5), 4),
        "p99_s": round(p99_s, 4),
        "max_s": round(max(keyed.seconds), 4),
        "keyless_p99_s": round(_quantile(keyless.seconds, 0.99), 4),
        "grown_by_one_mib": by_one_bytes >> 20,
        "grown_mib": grown_bytes >> 20,
        "met": is_held and set(keyless.statuses) == {401} and p99_s < BAR_P99_S,
    }


async def _sent(port: int, size_bytes: int, *more: str) -> dict[str, Any]:
    """Be the tenant, in a process of its own, to the end; return what it was answered."""
    command = ("-m", "benchmarks.bench_hostile_bodies", "--send", str(port), "--mib", str((size_bytes >> 20) + 1))
    tenant = await asyncio.create_subprocess_exec(
        sys.executable, *command, *more, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await tenant.communicate()
    told: dict[str, Any] = json.loads(output)
    return told


def _memory_mark(pid: int) -> int:
    """Return the bytes a process has now, and let its peak count from here."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _memory_bytes(pid, "VmRSS")


class Asker:
    """One client, one call at a time."""

    def __init__(self, port: int, key: str | None) -> None:
        self._url = f"http://{LOOPBACK}:{port}/v1/completions"
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self.statuses: Counter[int] = Counter()
        self.seconds: list[float] = []

    async def ask(self) -> None:
        """Ask until cancelled."""
        # A connection a request: one that is kept may be ended as idle when the machine stands still.
        connector, timeout = aiohttp.TCPConnector(force_close=True), aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers) as session:
            while True:
                before_s = time.perf_counter()
                async with session.post(self._url, data=b'{"model":"stub-model","prompt":"x"}') as answer:
                    await answer.read()
                self.statuses[answer.status] += 1
                self.seconds.append(time.perf_counter() - before_s)
                await asyncio.sleep(0.01)


def _send_all(port: int, size_bytes: int, *, at_once: int) -> None:
    """Send the bodies and print what they were answered: all at once, or one of each shape."""
    bodies = []
    for before, piece, behind in _SHAPES:
        num_pieces = (size_bytes - len(_START) - len(before) - len(behind)) // len(piece)
        bodies.append(_START + before + piece * num_pieces + behind)
    bodies += [
        b'{"model":"stub-model",' + before + piece * count + behind for before, piece, behind, count in _ACCEPTED
    ]
    before_s = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        numbers = range(max(at_once, len(bodies)))
        statuses = Counter(pool.map(lambda number: _send(port, bodies[number % len(bodies)]), numbers))
    print(json.dumps({"statuses": statuses, "seconds": time.perf_counter() - before_s}))


def _send(port: int, body: bytes) -> int:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=120)
    try:
        headers = {"authorization": f"Bearer {ME}", "content-type": "application/json"}
        connection.request("POST", "/v1/completions", body=body, headers=headers)
        answer = connection.getresponse()
        answer.read()
    except OSError:
        return 0  # refused in the middle of a body
    else:
        return answer.status
    finally:
        connection.close()


def _memory_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


if __name__ == "__main__":
    sys.exit(main())
