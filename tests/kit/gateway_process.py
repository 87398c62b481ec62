"""`python -m gateway` as processes that tests kill, stop and start again on the same ports."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from gateway.settings import GatewaySettings
from tests.kit.ports import free_port
from tests.kit.until import until

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 90


class GatewayProcess:
    """One replica: both fronts, on ports of its own that survive it."""

    def __init__(
        self,
        directory: Path,
        settings: GatewaySettings,
        *,
        drain_delay_s: float = 0.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Take pods, manager and files from `settings`; the ports are free ones. `environment` is laid over it all."""
        self.http_port = free_port()
        self.ext_proc_port = free_port()
        self.metrics_port = free_port()
        self._log = directory / f"gateway-{self.http_port}.log"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
        pods = (pod.model_dump_json() for pod in settings.endpoints)
        self._environment = kept | {
            "GATEWAY_PORT": str(self.http_port),
            "GATEWAY_METRICS_PORT": str(self.metrics_port),
            "GATEWAY_EXT_PROC_LISTEN": f"127.0.0.1:{self.ext_proc_port}",
            "GATEWAY_MANAGER": settings.manager,
            "GATEWAY_ENDPOINTS": f"[{','.join(pods)}]",
            "GATEWAY_SECRET_FILE": str(settings.secret_file),
            "GATEWAY_ENGINE_PATHS": json.dumps(settings.engine_paths),
            "GATEWAY_API_KEYS_FILE": str(settings.api_keys_file),
            "GATEWAY_PROBE_INTERVAL_S": "0.2",
            # The pods and the manager are parts of the test's own process, which may stand still for seconds.
            "GATEWAY_PROBE_TIMEOUT_S": "15",
            "GATEWAY_MANAGER_TIMEOUT_S": "15",
            "GATEWAY_DRAIN_DELAY_S": str(drain_delay_s),
            "GATEWAY_LOG_LEVEL": "WARNING",
            **(environment or {}),
        }
        self._process: asyncio.subprocess.Process | None = None

    @property
    def log(self) -> str:
        """What it has written."""
        return self._log.read_text()

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    async def start(self) -> None:
        """Start it and wait until it has a ready pod."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway", env=self._environment, cwd=ROOT, stderr=log
            )
        async with aiohttp.ClientSession() as http:

            async def is_ready() -> bool:
                assert self.process.returncode is None, self._log.read_text()[-4000:]
                return await self._is_ready(http)

            await until(is_ready, what="the gateway is ready", deadline_s=START_DEADLINE_S)

    async def kill(self) -> None:
        """End it like a crash."""
        self.process.kill()
        await self.process.wait()

    async def restart(self) -> None:
        """End it as an orchestrator does, and start it again."""
        self.process.terminate()
        async with asyncio.timeout(START_DEADLINE_S):
            returned = await self.process.wait()
        assert returned == 0, self._log.read_text()[-4000:]
        await self.start()

    def pause(self) -> None:
        """Let it hold its connections and answer nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    async def stop(self) -> None:
        """End it whatever it does; harmless when it is not running."""
        if self._process is not None and self._process.returncode is None:
            await self.kill()

    async def _is_ready(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with http.get(
                f"http://127.0.0.1:{self.http_port}/readyz", timeout=aiohttp.ClientTimeout(total=1)
            ) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
