"""A pod on a real socket without an engine: the turn middleware over a toy vLLM, as uvicorn serves it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from context_manager.client import ContextManagerClient
from contextcache.clock import SystemClock
from contextcache.wire.tracing import NO_TRACER, Tracer
from kv_sidecar.client import KVSidecarClient
from tests.kit.fake_vllm import FakeVllm, _json
from tests.kit.gateway_parts import SECRET
from tests.kit.gateway_server import DEADLINE_S
from tests.kit.turn_bench import SidecarInProcess
from vllm_plugin.turn.metrics import TurnMetrics
from vllm_plugin.turn.middleware import TurnMiddleware
from vllm_plugin.turn.settings import TurnSettings
from vllm_plugin.turn.sidecar_kv import SidecarKV
from vllm_plugin.turn.story import TurnStory

MODEL = "toy-model"


@dataclass
class TurnPod:
    """What a gateway needs of a pod, and what a test looks at."""

    url: str
    """Root of its turn process."""
    port: int
    engine: FakeVllm
    engine_url: str
    """Root of the same engine, past the turns."""


@asynccontextmanager
async def running_turn_pod(
    directory: Path,
    *,
    manager_port: int,
    name: str = "pod-a",
    engine: FakeVllm | None = None,
    sidecar: KVSidecarClient | None = None,
    quotas: KVSidecarClient | None = None,
    tracer: Tracer = NO_TRACER,
    manager_timeout_s: float = 20,
    **settings_: Any,
) -> AsyncIterator[TurnPod]:
    """Serve until the block ends; without a `sidecar`, with one that saves nothing; without `quotas`, with none."""
    secret_file = directory / "pod-secret"
    secret_file.write_bytes(SECRET)
    # By default a broken answer ends at once, as most tests of a whole pod want it.
    settings = TurnSettings(secret_file=secret_file, endpoint_name=name, **({"resume_timeout_s": 0} | settings_))
    story = TurnStory(
        settings,
        ContextManagerClient(f"127.0.0.1:{manager_port}", timeout_s=manager_timeout_s),
        SidecarKV(
            SidecarInProcess() if sidecar is None else sidecar,
            secret=SECRET,
            report_deadline_ms=settings.report_deadline_ms,
        ),
        SystemClock(),
        TurnMetrics(CollectorRegistry()),
        lambda _standby: engine,
        tracer,
        quotas,
    )
    engine = FakeVllm() if engine is None else engine
    app = TurnMiddleware(_Engine(engine), story=story)

    try:
        async with served(app) as port, served(_Engine(engine)) as engine_port:
            yield TurnPod(f"http://127.0.0.1:{port}", port, engine, f"http://127.0.0.1:{engine_port}")
    finally:
        await story.close()


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[int]:
    """Serve an application on a free loopback port until the block ends."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, ws="none"))
        serving = asyncio.create_task(server._serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await asyncio.wait_for(serving, DEADLINE_S)


class _Engine:
    """What a gateway asks a pod beside the turns; the rest is the toy's."""

    def __init__(self, engine: FakeVllm) -> None:
        self._engine = engine

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            await _json(send, 200, {})
        elif scope["path"] == "/v1/models":
            await _json(send, 200, {"data": [{"id": MODEL}]})
        else:
            await self._engine(scope, receive, send)
