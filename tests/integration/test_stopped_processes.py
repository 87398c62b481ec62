"""Each process stopped (SIGSTOP): every call, with a small, a large and a chunked body, is answered all the same."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from context_manager.client import ContextManagerClient
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit
from gateway.envoy.settings import EnvoySettings
from gateway.settings import EndpointSettings
from tests.kit.envoy_names import GATEWAY_HTTP, PLUGIN, PODS
from tests.kit.envoy_process import RunningEnvoy, envoy_settings, running_envoy
from tests.kit.fronts import Client, StreamingEngine, code_of, running_front
from tests.kit.gateway_parts import REF
from tests.kit.gateway_process import GatewayProcess
from tests.kit.gateway_server import settings_for
from tests.kit.manager_process import running_manager_process
from tests.kit.ports import free_port
from tests.kit.sidecar_process import SidecarProcess
from tests.kit.until import until

ANSWERED_WITHIN_S = 10.0
"""The promise."""
LARGE_BYTES = 9_000_000
SHIPPED = {name: EnvoySettings.model_fields[name].default for name in ("plugin_timeout_s", "connect_timeout_s")}
TURN = {"x-session-id": "ctx_0"}
BODILESS = [
    ("GET", "/v1/context/ctx_0"),
    ("GET", "/v1/context"),
    ("GET", "/v1/usage"),
    ("GET", "/v1/deployment"),
    ("GET", "/v1/models"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/openapi.json"),
    ("GET", "/console"),
    ("DELETE", "/v1/context/ctx_1"),
    ("DELETE", "/v1/context/ctx_2"),
]
WITH_BODY = [
    ("POST", "/v1/context", {}),
    ("POST", "/v1/completions", {}),
    ("POST", "/v1/completions", TURN),
    ("POST", "/v1/chat/completions", {}),
    ("POST", "/v1/messages", {}),
    ("POST", "/v1/responses", {}),
    ("POST", "/v1/embeddings", {}),
    ("PATCH", "/v1/context/ctx_0", {}),
    ("POST", "/v1/context/ctx_0/fork", {}),
    ("POST", "/v1/context/ctx_0/rewind", {}),
]


@dataclass
class Deployment:
    """Valkey, manager, sidecar and gateway as processes, a stub engine, and Envoy before them."""

    client: Client
    envoy: RunningEnvoy
    pids: dict[str, int]

    @asynccontextmanager
    async def stopped(self, part: str) -> AsyncIterator[None]:
        os.kill(self.pids[part], signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pids[part], signal.SIGCONT)

    async def late(self) -> list[str]:
        """Make every call at once; return those that were not answered in time."""
        asked = [self._answered(method, path) for method, path in BODILESS]
        for method, path, headers in WITH_BODY:
            bodies = (small, large, chunked)
            asked += [self._answered(method, path, made=made, headers=headers) for made in bodies]
        return [late for late in await asyncio.gather(*asked) if late]

    async def _answered(self, method: str, path: str, *, made: Callable | None = None, headers=None) -> str:
        try:
            async with (
                asyncio.timeout(ANSWERED_WITHIN_S),
                self.client.request(
                    method,
                    path,
                    data=made() if made else None,
                    headers={"content-type": "application/json", **(headers or {})},
                ) as answer,
            ):
                await answer.read()
        except TimeoutError:
            return f"{method} {path} {made.__name__ if made else ''}"
        return ""


def small():
    return io.BytesIO(b'{"prompt":"x"}')


def large():
    return io.BytesIO(b'{"prompt":"%b"}' % (b"x" * LARGE_BYTES))


async def chunked():
    yield b'{"prompt":'
    yield b'"x"}'


@pytest.fixture
async def deployment(tmp_path, engine, valkey):
    async with AsyncExitStack() as stack:
        manager = await stack.enter_async_context(running_manager_process(tmp_path, valkey.url))
        await _add_contexts(manager.address)
        port = free_port()
        sidecar = SidecarProcess(tmp_path, listen=f"127.0.0.1:{port}")
        await asyncio.to_thread(sidecar.start)
        stack.callback(sidecar.kill)
        settings = settings_for(tmp_path, {"pod-a": engine}, manager_port=manager.port)
        engine.runs_turns = True
        pod = EndpointSettings(name="pod-a", url=engine.url, sidecar=f"127.0.0.1:{port}")
        shipped = {
            f"GATEWAY_{name.upper()}": str(type(settings).model_fields[name].default)
            for name in ("probe_timeout_s", "probe_interval_s", "manager_timeout_s")
        }
        gateway = GatewayProcess(tmp_path, settings.model_copy(update={"endpoints": (pod,)}), environment=shipped)
        stack.push_async_callback(gateway.stop)
        await gateway.start()
        envoy = await stack.enter_async_context(
            running_envoy(
                envoy_settings(pods=[engine.port], gateways=[(gateway.http_port, gateway.ext_proc_port)], **SHIPPED)
            )
        )
        for cluster in (PODS, PLUGIN, GATEWAY_HTTP):
            await envoy.until_healthy(cluster, 1)
        client = await stack.enter_async_context(Client.opened(envoy.port))
        pids = {
            "gateway": gateway.process.pid,
            "manager": manager.pid,
            "valkey": valkey.pid,
            "sidecar": sidecar.pid,
        }
        yield Deployment(client, envoy, pids)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "part", ["gateway", *(pytest.param(part, marks=pytest.mark.thorough) for part in ("manager", "valkey", "sidecar"))]
)
async def test_every_call_is_answered_while_a_process_is_stopped(deployment, part):
    """Seen failing before for the gateway: control calls took 30 s, large and chunked bodies more than 120 s."""
    assert await deployment.late() == []
    async with deployment.stopped(part):
        first = await deployment.late()
        later = await deployment.late()
    await until(deployment.late, is_so=lambda late: not late, what="all is answered again")

    assert (first, later) == ([], [])


async def test_a_front_that_is_not_ready_is_asked_while_there_is_no_other_and_its_answers_go_on(tmp_path, manager):
    engine = StreamingEngine()
    await engine.start()
    body = b'{"stream": true, "prompt": "%b"}' % (b"x" * (2 << 20))
    settings = settings_for(tmp_path, {"pod-a": engine}, manager_port=manager.port)
    try:
        async with (
            running_front("envoy", settings, num_ready=1) as front,
            front.post("/v1/completions", body) as answer,
        ):
            first = await answer.content.readuntil(b"\n\n")
            await manager.stop()
            await front.envoy.until_stat(f"cluster.{GATEWAY_HTTP}.membership_degraded", 1)
            await front.envoy.until_counted(f"cluster.{GATEWAY_HTTP}.health_check.success", 3)
            async with front.get("/v1/context/ctx_0") as control:
                assert await code_of(control) == (503, "store_unavailable")
            engine.go_on.set()
            rest = await answer.content.read()
    finally:
        await engine.stop()

    assert (first, rest) == (StreamingEngine.FIRST, StreamingEngine.REST)


async def _add_contexts(address: str) -> None:
    client = ContextManagerClient(address, timeout_s=30)
    try:
        for number in range(3):
            new = NewSession("demo", f"ctx_{number}", "stub-model", ttl_s=600)
            await client.reserve(new, lease_id="l", lease_ttl_ms=60_000)
            segment = Segment(SegmentKind.PROMPT, (1, 2, 3), text="hello")
            await client.commit_turn(TurnCommit("demo", f"ctx_{number}", "l", 0, 0, (segment,), REF, "pod-a"))
    finally:
        await client.close()
