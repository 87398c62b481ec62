"""`python -m deploy.envoy run`: the keeper and its Envoy, before a stub pod and a stub plugin."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml

from deploy.envoy.bootstrap import bootstrap
from deploy.local.processes import ProcessName, is_alive, name_of
from tests.kit.envoy_process import envoy_settings
from tests.kit.ports import free_port
from tests.kit.stub_engine import StubEngine
from tests.kit.stub_processor import StubProcessor
from tests.kit.until import until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90


@dataclass
class Kept:
    """A keeper, its Envoy, and what is behind that."""

    keeper: asyncio.subprocess.Process
    pod: StubEngine
    http: aiohttp.ClientSession
    url: str
    admin_url: str
    metrics_url: str

    envoy: ProcessName | None = None

    def find_envoy(self) -> None:
        (pid,) = Path(f"/proc/{self.keeper.pid}/task/{self.keeper.pid}/children").read_text().split()
        self.envoy = name_of(int(pid))

    async def envoy_is_gone(self) -> bool:
        return not is_alive(self.envoy)

    async def ended(self) -> int:
        return await asyncio.wait_for(self.keeper.wait(), DEADLINE_S)

    async def is_ready(self) -> bool:
        try:
            async with self.http.get(f"{self.admin_url}/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def is_draining(self) -> bool:
        return not await self.is_ready()

    async def is_closed(self) -> bool:
        """Return whether nobody listens any more."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        except ConnectionRefusedError:
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


@asynccontextmanager
async def kept_envoy(tmp_path, free_ports, *, gateway: tuple[int, int] | None = None, pod_port: int = 0, **more):
    """Run a keeper until the block ends; `free_ports`: Envoy's, its admin's and the relay's.

    `gateway`: ports of a gateway in the stub plugin's place, its HTTP front's and its processor's; `pod_port`: the
    pod's, where somebody else has to know it before.
    """
    listen, admin, metrics = free_ports
    async with AsyncExitStack() as stack:
        pod, plugin = StubEngine(port=pod_port or free_port()), StubProcessor()
        for part in (pod, plugin):
            await part.start()
            stack.push_async_callback(part.stop)
        settings = envoy_settings(
            pods=[pod.port],
            gateways=[gateway or (pod.port, plugin.port)],
            listen_port=listen,
            admin_port=admin,
            metrics_listen=f"127.0.0.1:{metrics}",
            access_log=str(tmp_path / "access.jsonl"),
            **more,
        )
        config = tmp_path / "envoy.yaml"
        config.write_text(yaml.safe_dump(bootstrap(settings)))
        command = [sys.executable, "-m", "deploy.envoy", "run", "--config", str(config)]
        with (tmp_path / "keeper.log").open("wb") as output:
            keeper = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=output, stderr=output)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S), auto_decompress=False)
        )
        kept = Kept(keeper, pod, http, *(f"http://127.0.0.1:{port}" for port in (listen, admin, metrics)))
        try:
            await until(kept.is_ready, what="Envoy is ready")
            kept.find_envoy()
            yield kept
        finally:
            if keeper.returncode is None:
                keeper.kill()
                await keeper.wait()
            if kept.envoy is not None and is_alive(kept.envoy):
                os.kill(kept.envoy.pid, signal.SIGKILL)
