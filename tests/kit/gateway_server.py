"""A gateway on a real socket, with a real context manager (over a real Valkey) behind real gRPC."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import asynccontextmanager

import aiohttp
from yarl import URL

from context_manager.manager import ContextCacheManager
from context_manager.server import manager_server
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit
from gateway.__main__ import Ports, serve
from gateway.settings import GatewaySettings
from tests.kit.gateway_parts import KEY, LISTED_CALL, OPERATOR_KEY, OTHER_KEY, REF, SECRET, write_keys
from tests.kit.ports import free_port
from tests.kit.session_store import in_valkey
from tests.kit.stub_engine import StubEngine
from tests.kit.until import until

DEADLINE_S = 30
_PATIENCE = dict.fromkeys(("manager_timeout_s", "connect_timeout_s", "probe_timeout_s", "sidecar_timeout_s"), 15.0)
"""A machine that stands still for seconds is not what most tests are about; who is says so."""


class RunningManager:
    """A manager that can be taken away and brought back on the same port."""

    def __init__(self, **options):
        """`options`: of ContextCacheManager."""
        self.manager = ContextCacheManager(**in_valkey(**options))
        self.port = free_port()

    async def start(self):
        self._server = manager_server(self.manager, listen=f"127.0.0.1:{self.port}", max_concurrent_rpcs=100)
        await self._server.start()

    async def stop(self):
        await self._server.stop(0)

    async def add(self, session_id: str, *, tenant="demo", holder="pod-a"):
        new = NewSession(tenant, session_id, "stub-model", ttl_s=600)
        await self.manager.reserve(new, lease_id="l", lease_ttl_ms=60_000)
        segment = Segment(SegmentKind.PROMPT, (1, 2, 3), text="hello")
        await self.manager.commit_turn(TurnCommit(tenant, session_id, "l", 0, 0, (segment,), REF, holder))


class RunningGateway:
    """The gateway's whole process body, in this one's event loop."""

    def __init__(
        self,
        ports: Ports,
        metrics_port: int,
        http: aiohttp.ClientSession,
        stop: asyncio.Event,
        serving: asyncio.Task[None],
    ):
        self.metrics_port = metrics_port
        self.port = ports.http
        self.ext_proc_port = ports.ext_proc
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = http
        self.stop = stop
        self.serving = serving
        self.auth = {"authorization": f"Bearer {KEY}"}

    def post(self, path: str, body, *, headers=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **self.auth, **(headers or {})}
        return self.http.post(URL(self.url + path, encoded=True), data=io.BytesIO(data), headers=sent)

    def get(self, path: str):
        return self.http.get(self.url + path, headers=self.auth)

    async def details(self) -> dict:
        """What its metrics port says of it."""
        async with self.http.get(f"http://127.0.0.1:{self.metrics_port}/readyz") as answer:
            return await answer.json()

    async def until_ready(self, num_ready: int) -> None:
        """Wait until exactly so many endpoints are ready."""

        def are_ready(details: dict) -> bool:
            return sum(state["ready"] for state in details["endpoints"].values()) == num_ready

        await until(self.details, is_so=are_ready, what=f"{num_ready} ready endpoints")

    async def metric(self, name: str, labels: str = "") -> float:
        """Return a sample, 0 when there is none."""
        async with self.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name}{labels} ")), 0.0)


def settings_for(
    tmp_path, engines: dict[str, StubEngine], *, manager_port: int = 1, turns=None, **more
) -> GatewaySettings:
    """Return settings for pods by name. `turns`: their turn processes; None: the turns run in the engines."""
    (tmp_path / "secret").write_bytes(SECRET)
    write_keys(tmp_path / "keys.json", {KEY: "demo", OTHER_KEY: "other", OPERATOR_KEY: "operator"})
    more = {"engine_paths": (LISTED_CALL,), **_PATIENCE, **more}
    return GatewaySettings(
        port=0,
        manager=f"127.0.0.1:{manager_port}",
        endpoints=[
            {"name": name, "url": engine.url, "turn_url": turns[name].url if turns else ""}
            for name, engine in engines.items()
        ],
        secret_file=tmp_path / "secret",
        api_keys_file=tmp_path / "keys.json",
        probe_interval_s=0.05,
        **more,
    )


@asynccontextmanager
async def running_gateway(settings: GatewaySettings, *, num_ready: int):
    """Serve until the block ends, then drain; a gateway that does not end is a failure."""
    settings = settings.model_copy(update={"metrics_port": settings.metrics_port or free_port()})
    stop = asyncio.Event()
    started: asyncio.Future[Ports] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(settings, stop, on_started=started.set_result))
    done, _ = await asyncio.wait((serving, started), return_when=asyncio.FIRST_COMPLETED)
    if serving in done:
        serving.result()
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    try:
        # Below uvicorn's 5 s, as the gateway's own to pods: a request is not sent into a connection that closes.
        connector = aiohttp.TCPConnector(keepalive_timeout=2)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as http:
            gateway = RunningGateway(started.result(), settings.metrics_port, http, stop, serving)
            await gateway.until_ready(num_ready)
            yield gateway
    finally:
        stop.set()
        await asyncio.wait_for(serving, DEADLINE_S * 2)
