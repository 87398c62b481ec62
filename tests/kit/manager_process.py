"""`python -m context_manager` as a process that tests kill, stop and start again on the same port."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from context_manager.client import ContextManagerClient
from contextcache.process.crash_points import VARIABLE
from tests.kit.ports import free_port
from tests.kit.until import until

START_DEADLINE_S = 90.0


class ManagerProcess:
    """One manager over a Redis URL. Its settings are the product's own but for `environment`."""

    def __init__(self, directory: Path, url: str, *, environment: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.metrics_port = free_port()
        self.crash_file = directory / f"crash-{self.port}"
        """Holds the crash point that is armed, while it is."""
        self.log = directory / f"manager-{self.port}.log"
        self.address = f"127.0.0.1:{self.port}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MANAGER_")}
        self._environment = kept | {
            VARIABLE: str(self.crash_file),
            "MANAGER_LISTEN": self.address,
            "MANAGER_METRICS_PORT": str(self.metrics_port),
            "MANAGER_REDIS_URL": url,
            "MANAGER_SWEEP_INTERVAL_S": "0.5",
            "MANAGER_MIN_TTL_S": "1",
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it and wait until it serves."""
        assert self._process is None, "already started"
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "context_manager"], env=self._environment, stderr=output
            )
        client = ContextManagerClient(self.address)

        async def serves() -> bool:
            assert self.is_alive, self.log.read_text()
            return await client.is_serving()

        try:
            await until(serves, what=f"the manager serves; it writes to {self.log}", deadline_s=START_DEADLINE_S)
        finally:
            await client.close()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        assert self._process is not None
        self._process.send_signal(number)

    async def wait(self) -> int:
        """Wait until it has ended; return its status."""
        process, self._process = self._process, None
        assert process is not None
        return await asyncio.to_thread(process.wait, 60)

    async def stop(self) -> None:
        """End it; harmless when it is not running."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self.send(signal.SIGCONT)
            self.send(signal.SIGKILL)
        await self.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def metric(self, name: str, *, of: str = "") -> float:
        """Return the sum of a metric's samples, 0 when there is none. `of`: only those with this text in a label."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name and of in line]
        return sum(float(line.split()[-1]) for line in found)


@asynccontextmanager
async def running_manager_process(directory: Path, url: str, **environment: str) -> AsyncIterator[ManagerProcess]:
    """Serve until the block ends."""
    manager = ManagerProcess(directory, url, environment=environment)
    try:
        await manager.start()
        yield manager
    finally:
        await manager.stop()
