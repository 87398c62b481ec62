"""What is fuzzed: a real gateway process over a real manager and Valkey, and a pod with the real turn middleware."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from context_manager.client import ContextManagerClient
from tests.fuzz.engine import StrictVllm
from tests.kit.gateway_process import ROOT, GatewayProcess
from tests.kit.gateway_server import settings_for
from tests.kit.ports import free_port
from tests.kit.turn_pod import running_turn_pod
from tests.kit.valkey import ValkeyServer

BODY_TIMEOUT_S = 2
"""What the gateway waits for the next piece of a body."""
_START_DEADLINE_S = 90
_GATEWAY = {
    "GATEWAY_BODY_TIMEOUT_S": str(BODY_TIMEOUT_S),
    "GATEWAY_MAX_BODY_BYTES": str(1 << 20),
    "GATEWAY_EXT_PROC_TIMEOUT_S": str(BODY_TIMEOUT_S),
}


@dataclass(frozen=True)
class FuzzStack:
    """Where the fuzzed ports are."""

    http_port: int
    ext_proc_port: int
    gateway: GatewayProcess

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"


@contextmanager
def fuzz_stack(directory: Path) -> Iterator[FuzzStack]:
    """Run the stack in a thread of its own, so that clients of any kind may block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fuzz stack")
    thread.start()
    stack = _running(directory)
    try:
        yield asyncio.run_coroutine_threadsafe(stack.__aenter__(), loop).result(_START_DEADLINE_S * 3)
    finally:
        asyncio.run_coroutine_threadsafe(stack.__aexit__(None, None, None), loop).result(_START_DEADLINE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_START_DEADLINE_S)
        loop.close()


@asynccontextmanager
async def _running(directory: Path) -> AsyncIterator[FuzzStack]:
    valkey = ValkeyServer(directory)
    valkey.start()
    try:
        async with (
            _running_manager(directory, valkey.url) as port,
            running_turn_pod(directory, manager_port=port, engine=StrictVllm(), rpc_deadline_ms=30_000) as pod,
        ):
            settings = settings_for(directory, {"pod-a": pod}, manager_port=port)
            gateway = GatewayProcess(directory, settings, environment=_GATEWAY)
            try:
                await gateway.start()
                yield FuzzStack(gateway.http_port, gateway.ext_proc_port, gateway)
            finally:
                await gateway.stop()
    finally:
        valkey.stop()


@asynccontextmanager
async def _running_manager(directory: Path, redis_url: str) -> AsyncIterator[int]:
    port = free_port()
    environment = os.environ | {
        "MANAGER_LISTEN": f"127.0.0.1:{port}",
        "MANAGER_REDIS_URL": redis_url,
        "MANAGER_REDIS_TIMEOUT_S": "15",
        "MANAGER_LOG_LEVEL": "WARNING",
    }
    with (directory / "manager.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "context_manager", env=environment, cwd=ROOT, stderr=log
        )
    client = ContextManagerClient(f"127.0.0.1:{port}", timeout_s=2)
    try:
        async with asyncio.timeout(_START_DEADLINE_S):
            while not await client.is_serving():
                assert process.returncode is None, (directory / "manager.log").read_text()
                await asyncio.sleep(0.05)
        yield port
    finally:
        await client.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
