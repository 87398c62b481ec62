"""Three tenants on one deployment: real gateway, turn middleware, manager, Valkey and sidecar, and a toy engine.

The toy stands in for the connector too: it saves the KV of a turn under the order it was given, over real gRPC, and
looks up what it is told to load, so that whatever reaches an engine can be held against whose it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from context_manager.__main__ import serve as serve_manager
from context_manager.settings import ManagerSettings
from contextcache.clock import SystemClock
from contextcache.errors import CacheRefNotFound, ContextCacheError
from contextcache.identity import KV_TRANSFER_KEY, KVTransfer, verify_kv_transfer
from contextcache.model import Manifest
from gateway.settings import EndpointSettings, GatewaySettings
from kv_sidecar.client import KVSidecarClient
from kv_sidecar.server import serve as serve_sidecar
from tests.kit.engine_rank import EngineRank
from tests.kit.fake_vllm import EOS, FakeVllm, encode
from tests.kit.fronts import Front, running_front
from tests.kit.gateway_parts import SECRET, write_keys
from tests.kit.kv_blocks import FINGERPRINT, SidecarUnderTest
from tests.kit.stub_engine import StubEngine
from tests.kit.turn_pod import MODEL, TurnPod, running_turn_pod
from tests.kit.valkey import ValkeyServer

TENANTS = ("red", "green", "blue")
SYSTEM_PROMPT = "You are a helpful assistant. "
"""What all tenants' prompts begin with: several blocks of the sidecar."""


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}-0123456789"


def mark_of(tenant: str) -> str:
    """What only this tenant's texts hold, and no answer to another may."""
    return f"mark-of-{tenant}"


@dataclass
class Generated:
    """What the engine was asked in one completion."""

    prompt: str
    salt: str
    order: KVTransfer | None
    """None: a request without a context."""
    loaded: list[Manifest] = field(default_factory=list)


class SavingEngine(FakeVllm):
    """A toy vLLM whose connector is made up: real saves, real look-ups, no attention."""

    def __init__(self) -> None:
        super().__init__(answer=lambda ids: "".join(map(chr, ids[-24:])))
        self.generated: list[Generated] = []
        self.rank: EngineRank | None = None
        self.sidecar: KVSidecarClient | None = None

    async def _complete(self, scope: Any, request: dict[str, Any], send: Any) -> None:
        params = request.get("kv_transfer_params") or {}
        token = params.get(KV_TRANSFER_KEY)
        order = None if token is None else verify_kv_transfer(token, SECRET)
        prompt = request.get("prompt") or params.get("prompt_token_ids") or request.get("messages")
        ids = prompt if isinstance(prompt, list) and all(isinstance(one, int) for one in prompt) else None
        text = "".join(map(chr, ids)) if ids is not None else json.dumps(prompt)
        found = Generated(text, request.get("cache_salt") or "", order)
        self.generated.append(found)
        if order is not None and self.sidecar is not None:
            for ref in order.load:
                with contextlib.suppress(CacheRefNotFound):
                    found.loaded.append((await self.sidecar.get_manifest(order.tenant, ref))[0])
            if order.save is not None and ids is not None:
                await asyncio.to_thread(self._save, order, (*ids, *encode(self.answer(ids)), EOS))
        await super()._complete(scope, request, send)

    def _save(self, order: KVTransfer, token_ids: tuple[int, ...]) -> None:
        from kv_sidecar.saves import NewSave

        assert self.rank is not None
        assert order.save is not None
        new = NewSave(
            tenant=order.tenant,
            session_id=order.session_id,
            cache_ref=order.save,
            fingerprint=FINGERPRINT,
            rank=0,
            world_size=1,
            token_ids=token_ids,
            expires_at_ms=order.expires_at_ms,
            started_at_ms=SystemClock().now_ms(),
        )
        with contextlib.suppress(ContextCacheError):  # a delete was faster
            self.rank.send(new)


@dataclass
class TenantWorld:
    """What runs, within reach."""

    front: Front
    pod: TurnPod
    engine: SavingEngine
    sidecar: SidecarUnderTest
    sidecar_address: str
    manager_address: str
    decoy: StubEngine
    """A server no request may reach."""


@asynccontextmanager
async def running_tenants(
    directory: Path, *, front: str = "http", tenant_limit_bytes: int = 0
) -> AsyncIterator[TenantWorld]:
    """Serve until the block ends. `front`: `http`, or `envoy` for a real Envoy before the gateway.

    `tenant_limit_bytes`: what each tenant may have in the sidecar; 0: no limit.
    """
    async with AsyncExitStack() as stack:
        valkey = ValkeyServer(directory)
        await asyncio.to_thread(valkey.start)
        stack.callback(valkey.stop)
        manager_port = await stack.enter_async_context(_manager(valkey.url))
        kv = await stack.enter_async_context(
            SidecarUnderTest(
                directory / "kv",
                clock=SystemClock(),
                unix_socket=directory / "s.sock",
                tenant_limit_bytes=tenant_limit_bytes,
            )
        )
        server = serve_sidecar(kv.sidecar, ["127.0.0.1:0", f"unix://{directory}/s.sock"])
        await server.start()
        stack.push_async_callback(server.stop, 1)
        engine = await stack.enter_async_context(_engine(directory))
        reports = KVSidecarClient(f"unix://{directory}/s.sock", timeout_s=20)
        pod = await stack.enter_async_context(
            running_turn_pod(
                directory,
                manager_port=manager_port,
                engine=engine,
                sidecar=reports,
                quotas=reports,
                rpc_deadline_ms=150_000,
            )
        )
        decoy = StubEngine()
        await decoy.start()
        stack.push_async_callback(decoy.stop)
        settings = _gateway_settings(directory, pod, manager_port, server.ports[0])
        running = await stack.enter_async_context(running_front(front, settings, num_ready=1))
        yield TenantWorld(running, pod, engine, kv, f"127.0.0.1:{server.ports[0]}", f"127.0.0.1:{manager_port}", decoy)


@asynccontextmanager
async def _manager(url: str) -> AsyncIterator[int]:
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    settings = ManagerSettings(
        listen="127.0.0.1:0", redis_url=url, redis_timeout_s=20.0, sweep_interval_s=600.0, drain_s=1.0
    )
    process = asyncio.create_task(serve_manager(settings, stop, on_started=port.set_result))
    try:
        await asyncio.wait([process, port], return_when=asyncio.FIRST_COMPLETED)
        yield port.result()
    finally:
        stop.set()
        await process


@asynccontextmanager
async def _engine(directory: Path) -> AsyncIterator[SavingEngine]:
    engine = SavingEngine()
    engine.rank = await asyncio.to_thread(EngineRank, f"unix://{directory}/s.sock")
    engine.sidecar = KVSidecarClient(f"unix://{directory}/s.sock", timeout_s=20)
    try:
        yield engine
    finally:
        await engine.sidecar.close()
        await asyncio.to_thread(engine.rank.close)


def _gateway_settings(directory: Path, pod: TurnPod, manager_port: int, sidecar_port: int) -> GatewaySettings:
    (directory / "secret").write_bytes(SECRET)
    write_keys(directory / "keys.json", {key_of(tenant): tenant for tenant in TENANTS})
    pods = (EndpointSettings(name="pod-a", url=pod.url, sidecar=f"127.0.0.1:{sidecar_port}"),)
    return GatewaySettings(
        port=0,
        manager=f"127.0.0.1:{manager_port}",
        endpoints=pods,
        secret_file=directory / "secret",
        api_keys_file=directory / "keys.json",
        # Everything shares one process, which may stand still for seconds.
        manager_timeout_s=20,
        sidecar_timeout_s=20,
        delete_timeout_s=20,
        probe_timeout_s=15,
        connect_timeout_s=15,
    )


async def created(world: TenantWorld, tenant: str, **body: Any) -> str:
    """Create a context of a tenant and return its id."""
    asked = {"model": MODEL, "prompt": f"{SYSTEM_PROMPT}{mark_of(tenant)} ", "max_tokens": 4} | body
    headers = {"authorization": f"Bearer {key_of(tenant)}"}
    async with world.front.post("/v1/context", asked, headers=headers) as answer:
        found = await answer.json()
        assert answer.status == 200, found
        return str(found["session_id"])
