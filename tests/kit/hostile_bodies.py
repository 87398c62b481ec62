"""Request bodies built to be slow to read, and one tenant who sends twenty of them while others ask.

`python -m tests.kit.hostile_bodies PORT KEY NUM_BODIES` is that tenant, for 0 one body of each shape, one after the
other: a process of its own, so that whoever measures the others' answers is not busy with its bytes.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from gateway.envoy.settings import EnvoySettings
from tests.kit.envoy_names import PLUGIN, PODS
from tests.kit.envoy_process import envoy_settings, running_envoy
from tests.kit.gateway_parts import KEY, OTHER_KEY
from tests.kit.gateway_process import ROOT, GatewayProcess
from tests.kit.gateway_server import RunningManager, settings_for
from tests.kit.process_memory import memory_bytes
from tests.kit.stub_engine import StubEngine

PATH = "/v1/completions"
NUM_BODIES = 20
SIZE_BYTES = (32 << 20) - 256
"""Just under what a gateway takes."""
PLUGIN_TIMEOUT_S = EnvoySettings.model_fields["plugin_timeout_s"].default
_TICKS_A_S = os.sysconf("SC_CLK_TCK")
_PAUSE_S = 0.1
"""Between two requests of who asks: what they cost is little beside the bodies."""
_CLAIM = b'{"session_id":"ctx_a","model":"stub-model",'
_SHAPES: Mapping[str, tuple[bytes, bytes, bytes]] = {
    "wide": (b'"prompt":[', b"[],", b"[]]}"),
    "wide objects": (b'"prompt":[', b'{"a":0},', b"{}]}"),
    "wide elsewhere": (b'"x":[', b'"",', b"0]}"),
    "deep": (b'"x":', b"[", b""),
    "nested": (b'"x":[', b"[" * 200 + b"]" * 200 + b",", b"0]}"),
    "long string": (b'"prompt":"', b"a", b'"}'),
    "long escaped string": (b'"prompt":"', rb"\"", b'"}'),
    "long number": (b'"x":', b"9", b"}"),
    "many numbers": (b'"prompt":[', b"1,", b"1]}"),
    "many keys": (b"", b'"a":0,', b'"b":0}'),
    "many claims": (b"", b'"session_id":"ctx_a",', b'"b":0}'),
    "half characters": (b'"\\ud800":"', rb"\ud800", b'"}'),
    "not numbers": (b'"x":[', b"NaN,", b"0]}"),
}
SHAPES = tuple(_SHAPES)


def hostile_body(shape: str, size_bytes: int = SIZE_BYTES, *, start: bytes = _CLAIM) -> bytes:
    """Return a body of about `size_bytes` in one of SHAPES."""
    before, piece, after = _SHAPES[shape]
    return start + before + piece * ((size_bytes - len(start) - len(before) - len(after)) // len(piece)) + after


@dataclass
class Seen:
    """What everybody was answered while the bodies were read."""

    statuses: dict[str, Counter[int]] = field(default_factory=lambda: {"keyless": Counter(), "keyed": Counter()})
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"keyless": [], "keyed": []})
    hostile: Counter[int] = field(default_factory=Counter)
    hostile_s: float = 0.0
    """From the first body's first byte to the last one's answer."""
    loop_share: float = 0.0
    """Of the gateway's CPU time its event loop's, which is the same on any machine, busy or not."""
    grown_bytes: int = 0
    """The gateway's resident memory at its peak, less before."""
    reached_pod: list[str | None] = field(default_factory=list)
    """What the pod got: the label of each request."""


@dataclass
class World:
    """A gateway process, a manager, a pod, and perhaps a real Envoy before them."""

    port: int
    gateway: GatewayProcess
    engine: StubEngine
    http: aiohttp.ClientSession

    async def attack(self, *, num_bodies: int = NUM_BODIES) -> Seen:
        """Let the tenant send its bodies, and ask all the while: without a key, and with another tenant's.

        `num_bodies` 0: one of each shape, one after the other.
        """
        seen = Seen()
        before, cpu_before_s = memory_bytes(self.gateway.process.pid, "VmRSS"), self._cpu_s()
        # The peak is since the process began: what it was before counts for nothing unless it was more.
        Path(f"/proc/{self.gateway.process.pid}/clear_refs").write_text("5")
        attacker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.kit.hostile_bodies", str(self.port), KEY, str(num_bodies),
            cwd=ROOT, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        asking = [
            asyncio.create_task(self._ask(seen, "keyless", None)),
            asyncio.create_task(self._ask(seen, "keyed", OTHER_KEY)),
        ]
        output, _ = await attacker.communicate()
        loop_s, all_s = (after - before for after, before in zip(self._cpu_s(), cpu_before_s, strict=True))
        seen.loop_share = loop_s / all_s
        for task in asking:
            task.cancel()
        ended = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended
        told = json.loads(output)
        seen.hostile = Counter({int(status): count for status, count in told["statuses"].items()})
        seen.hostile_s = told["seconds"]
        seen.grown_bytes = memory_bytes(self.gateway.process.pid, "VmHWM") - before
        seen.reached_pod = [(found.header("x-asker") or [None])[0] for found in self.engine.turns]
        return seen

    def _cpu_s(self) -> tuple[float, float]:
        """Return the CPU time of the gateway's main thread, and of all."""
        pid = self.gateway.process.pid
        stats = (Path(f"/proc/{found}/stat").read_text() for found in (f"{pid}/task/{pid}", pid))
        loop_s, all_s = (sum(map(int, stat.rpartition(")")[2].split()[11:13])) / _TICKS_A_S for stat in stats)
        return loop_s, all_s

    async def _ask(self, seen: Seen, who: str, key: str | None) -> None:
        headers = {"content-type": "application/json", "x-asker": who}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        while True:
            before_s = time.perf_counter()
            url = f"http://127.0.0.1:{self.port}{PATH}"
            async with self.http.post(url, data=b'{"model":"stub-model","prompt":"x"}', headers=headers) as answer:
                await answer.read()
            seen.statuses[who][answer.status] += 1
            seen.seconds[who].append(time.perf_counter() - before_s)
            await asyncio.sleep(_PAUSE_S)


@asynccontextmanager
async def running_world(front: str) -> AsyncIterator[World]:
    """Run until the block ends; Envoy's patience with the plugin is the shipped one."""
    manager, engine = RunningManager(), StubEngine()
    await manager.start()
    await engine.start()
    with tempfile.TemporaryDirectory(prefix="hostile-") as directory:
        settings = settings_for(Path(directory), {"pod-a": engine}, manager_port=manager.port)
        gateway = GatewayProcess(Path(directory), settings)
        try:
            await gateway.start()
            # A connection a request: one that is kept may be ended as idle when the machine stands still.
            connector = aiohttp.TCPConnector(force_close=True)
            async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as http:
                if front == "http":
                    yield World(gateway.http_port, gateway, engine, http)
                    return
                addresses = [(gateway.http_port, gateway.ext_proc_port)]
                made = envoy_settings(pods=[engine.port], gateways=addresses, plugin_timeout_s=PLUGIN_TIMEOUT_S)
                async with running_envoy(made) as envoy:
                    await envoy.until_healthy(PODS, 1)
                    await envoy.until_healthy(PLUGIN, 1)
                    yield World(envoy.port, gateway, engine, http)
        finally:
            await gateway.stop()
            await engine.stop()
            await manager.stop()


def _send(port: int, key: str, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request("POST", PATH, body=body, headers=headers)
        answer = connection.getresponse()
        answer.read()
    except OSError:
        return 0  # refused in the middle of a body
    else:
        return answer.status
    finally:
        connection.close()


def main(port: int, key: str, num_bodies: int) -> None:
    """Send all the bodies at once, or each by itself, and print what they were answered."""
    bodies = [hostile_body(shape) for shape in SHAPES[: num_bodies or len(SHAPES)]]
    before_s = time.perf_counter()
    with ThreadPoolExecutor(num_bodies or 1) as pool:
        numbers = range(num_bodies or len(bodies))
        statuses = Counter(pool.map(lambda number: _send(port, key, bodies[number % len(bodies)]), numbers))
    print(json.dumps({"statuses": statuses, "seconds": time.perf_counter() - before_s}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
