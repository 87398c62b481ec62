"""`python -m vllm_plugin.turn` as a process that tests stop and kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from contextcache.process.crash_points import VARIABLE
from tests.kit.gateway_parts import SECRET
from tests.kit.until import until

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 90


class TurnProcess:
    """One turn process, on a free port, in front of an engine."""

    def __init__(self, directory: Path, engine_url: str, **environment: str) -> None:
        """`environment` is laid over the product's own settings."""
        self.log_file = directory / "turn.log"
        self.crash_file = directory / "crash-turn"
        """Holds the crash point that is armed, while it is."""
        secret = directory / "turn-secret"
        secret.write_bytes(SECRET)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TURN_")}
        self._environment = kept | {
            VARIABLE: str(self.crash_file),
            "TURN_ENGINE_URL": engine_url,
            "TURN_LISTEN_PORT": "0",
            "TURN_MANAGER": "127.0.0.1:1",
            "TURN_SIDECAR": "127.0.0.1:1",
            "TURN_SECRET_FILE": str(secret),
            **environment,
        }
        self.port = 0
        """Set once it serves."""
        self.process: asyncio.subprocess.Process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def events(self) -> list[dict]:
        """Its whole log lines."""
        text = self.log_file.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith("{")]

    def event(self, name: str) -> dict | None:
        """Return the first log line with this event."""
        return next((line for line in self.events if line["event"] == name), None)

    async def start(self) -> None:
        """Start it and wait until it serves."""
        with self.log_file.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "vllm_plugin.turn", env=self._environment, cwd=ROOT, stderr=log
            )

        def started() -> dict | None:
            assert self.process.returncode is None, self.log_file.read_text()[-4000:]
            return self.event("turn started")

        self.port = (await until(started, what="the turn process serves", deadline_s=START_DEADLINE_S))["port"]

    def terminate(self) -> None:
        """Ask it to end, as an orchestrator does."""
        self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Return its exit status once it has ended."""
        async with asyncio.timeout(START_DEADLINE_S):
            return await self.process.wait()

    async def stop(self) -> None:
        """End it whatever it does."""
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def running_turn_process(directory: Path, engine_url: str, **environment: str) -> AsyncIterator[TurnProcess]:
    """Serve until the block ends."""
    turn = TurnProcess(directory, engine_url, **environment)
    await turn.start()
    try:
        yield turn
    finally:
        await turn.stop()
