"""An Envoy and its attendant as two processes, as in a pod, before a stub pod and a stub plugin."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from deploy.local.envoy import envoy_command
from gateway.envoy.settings import EnvoySettings
from tests.kit.envoy_process import envoy_settings
from tests.kit.ports import free_port
from tests.kit.stub_engine import StubEngine
from tests.kit.stub_processor import StubProcessor
from tests.kit.until import until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90


@dataclass
class Attended:
    """An attendant, its Envoy, and what is behind that."""

    attendant: asyncio.subprocess.Process
    envoy: asyncio.subprocess.Process
    pod: StubEngine
    http: aiohttp.ClientSession
    url: str
    admin_url: str
    metrics_url: str

    async def ended(self) -> int:
        """Return how the attendant ended."""
        return await asyncio.wait_for(self.attendant.wait(), DEADLINE_S)

    async def is_ready(self) -> bool:
        try:
            async with self.http.get(f"{self.metrics_url}/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def is_draining(self) -> bool:
        return not await self.is_ready()

    async def is_closed(self) -> bool:
        """Return whether nobody listens any more."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        except ConnectionError:
            return True
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        return False

    async def until_healthy(self, cluster: str) -> None:
        """Wait until Envoy takes a cluster's one member for healthy."""

        async def is_healthy() -> bool:
            async with self.http.get(f"{self.admin_url}/stats?filter=^cluster.{cluster}.membership_healthy$") as answer:
                return (await answer.text()).strip().endswith(": 1")

        await until(is_healthy, what=f"{cluster} is healthy")

    def post(self, body: bytes, *, session: aiohttp.ClientSession | None = None):
        return (session or self.http).post(f"{self.url}/v1/completions", data=body)


def environment(settings: EnvoySettings) -> dict[str, str]:
    """Return settings as the variables that say them."""
    told = settings.model_dump(mode="json")
    told["gateways"] = [f"{gateway['http']},{gateway['ext_proc']}" for gateway in told["gateways"]]
    return {
        f"ENVOY_{name.upper()}": value if isinstance(value, str) else json.dumps(value) for name, value in told.items()
    }


@asynccontextmanager
async def attended_envoy(
    tmp_path: Path, free_ports: list[int], *, gateway: tuple[int, int] | None = None, pod_port: int = 0, **more: Any
) -> AsyncIterator[Attended]:
    """Run both until the block ends; `free_ports`: Envoy's, its admin's and that of its probes.

    `gateway`: ports of a gateway in the stub plugin's place, its HTTP front's and its processor's; `pod_port`: the
    pod's, where somebody else has to know it before.
    """
    listen, admin, metrics = free_ports
    async with AsyncExitStack() as stack:
        pod, plugin = StubEngine(port=pod_port or free_port()), StubProcessor()
        for part in (pod, plugin):
            await part.start()
            stack.push_async_callback(part.stop)
        folder = tmp_path / "envoy"
        settings = envoy_settings(
            pods=[pod.port],
            gateways=[gateway or (pod.port, plugin.port)],
            listen_port=listen,
            admin_port=admin,
            metrics_listen=f"127.0.0.1:{metrics}",
            access_log=str(tmp_path / "access.jsonl"),
            config_dir=str(folder),
            **more,
        )
        env = {**os.environ, **environment(settings)}
        output = stack.enter_context((tmp_path / "attendant.log").open("wb"))

        async def started(*command: str) -> asyncio.subprocess.Process:
            process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=env, stdout=output, stderr=output)
            stack.push_async_callback(_killed, process)
            return process

        bootstrap = await started(sys.executable, "-m", "gateway.envoy", "bootstrap")
        assert await bootstrap.wait() == 0, (tmp_path / "attendant.log").read_text()
        envoy = await started(*envoy_command(folder / "envoy.json", concurrency=1))
        attendant = await started(sys.executable, "-m", "gateway.envoy", "attend")
        http = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S), auto_decompress=False)
        )
        found = Attended(
            attendant, envoy, pod, http, *(f"http://127.0.0.1:{port}" for port in (listen, admin, metrics))
        )
        await until(found.is_ready, what="Envoy is ready")
        await until(lambda: _catches_signals(attendant.pid), what="the attendant attends")
        yield found


def _catches_signals(pid: int) -> bool:
    """Return whether a process has a handler for SIGTERM: before that it would end at once."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


async def _killed(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
