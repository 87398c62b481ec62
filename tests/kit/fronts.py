"""The two fronts as a client sees them: the HTTP front itself, or a real Envoy before the same gateway."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from yarl import URL

from gateway.settings import GatewaySettings
from tests.kit.envoy_names import PLUGIN, PODS
from tests.kit.envoy_process import RunningEnvoy, envoy_settings, running_envoy
from tests.kit.gateway_parts import KEY
from tests.kit.gateway_server import DEADLINE_S, RunningGateway, running_gateway
from tests.kit.stub_engine import StubEngine
from tests.kit.until import until

FRONTS = ("http", "envoy")
only_http = pytest.mark.parametrize("front_kind", ["http"])
"""For what is decided below both fronts: `tests/unit/gateway` has the rule, and other tests here carry its like."""
envoy_too = pytest.mark.parametrize("front_kind", ["http", pytest.param("envoy", marks=pytest.mark.thorough)])
"""For the same, where Envoy has its turn in the longer run."""
only_envoy = pytest.mark.parametrize("front_kind", ["envoy"])


class Client:
    """A client of one port, with a key."""

    def __init__(self, port: int, http: aiohttp.ClientSession) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._http = http

    @classmethod
    @asynccontextmanager
    async def opened(cls, port: int) -> AsyncIterator[Client]:
        """Open a client of a port; its connections are closed at the end."""
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S * 6)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # below uvicorn's 5 s
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as http:
            yield cls(port, http)

    def request(self, method: str, path: str, *, data=None, headers=None):
        """Send a request whose path is not touched by the client."""
        sent = {"authorization": f"Bearer {KEY}", **(headers or {})}
        return self._http.request(method, URL(self.url + path, encoded=True), data=data, headers=sent)

    def post(self, path: str, body, *, headers=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request(
            "POST", path, data=io.BytesIO(data), headers={"content-type": "application/json", **(headers or {})}
        )

    def get(self, path: str, *, headers=None):
        return self.request("GET", path, headers=headers)

    def delete(self, path: str):
        return self.request("DELETE", path)

    async def raw(self, request: bytes) -> bytes:
        """Send bytes as they are and return the answer: its head, and as much of its body as the head announces."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        try:
            async with asyncio.timeout(DEADLINE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head.lower())
                return head + await reader.readexactly(int(length[1]) if length else 0)
        finally:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


class Front(Client):
    """What clients talk to, and the gateway behind it."""

    def __init__(self, port: int, gateway: RunningGateway, *, envoy: RunningEnvoy | None = None) -> None:
        """`envoy`: None for the HTTP front."""
        super().__init__(port, gateway.http)
        self.gateway = gateway
        self.envoy = envoy

    async def end_gateway(self) -> None:
        """End the gateway: what follows meets Envoy alone."""
        self.gateway.stop.set()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait({self.gateway.serving})


class StreamingEngine(StubEngine):
    """Streams as many answers as are asked for: their beginning at once, the rest when `go_on` is set."""

    FIRST = b'data: {"text": "first"}\n\n'
    REST = b'data: {"text": "second"}\n\ndata: [DONE]\n\n'

    def __post_init__(self):
        super().__post_init__()
        self.go_on = asyncio.Event()

    async def _stream(self, reader, writer, *, broken: bool) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%b\r\n" % (len(self.FIRST), self.FIRST))
        await self.go_on.wait()
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(self.REST), self.REST))
        await writer.drain()
        return True


@asynccontextmanager
async def running_front(
    kind: str, settings: GatewaySettings, *, num_ready: int, envoy_more: Mapping[str, Any] | None = None
) -> AsyncIterator[Front]:
    """Serve until the block ends. `envoy_more`: settings of Envoy's own."""
    if kind == "envoy":
        settings = settings.model_copy(update={"ext_proc_listen": "127.0.0.1:0"})
    async with running_gateway(settings, num_ready=num_ready) as gateway:
        if kind == "http":
            yield Front(gateway.port, gateway)
            return
        engines = [URL(endpoint.url).port for endpoint in settings.endpoints if endpoint.turn_url]
        pods = [URL(endpoint.turn_url or endpoint.url).port for endpoint in settings.endpoints]
        async with running_envoy(
            envoy_settings(
                pods=pods,
                engines=engines,
                gateways=[(gateway.port, gateway.ext_proc_port)],
                max_body_bytes=settings.max_body_bytes,
                engine_paths=settings.engine_paths,
                cors_origins=settings.cors_origins,
                api_keys_file=str(settings.api_keys_file),
                api_keys_filter_file="/nowhere",
                **(envoy_more or {}),
            )
        ) as envoy:
            await envoy.until_healthy(PODS, num_ready * (2 if engines else 1))
            await envoy.until_healthy(PLUGIN, 1)
            yield Front(envoy.port, gateway, envoy=envoy)


async def code_of(answer) -> tuple[int, str]:
    """Return status and code of an error, whose shape and request id are checked."""
    body = json.loads(await answer.read())

    assert body["detail"] == body["error"]["message"]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    return answer.status, body["error"]["code"]


async def until_answered(ask: Callable[[], AbstractAsyncContextManager[Any]], status: int) -> None:
    """Ask again and again until the answer has this status."""

    async def status_seen() -> int:
        async with ask() as answer:
            return answer.status

    await until(status_seen, is_so=lambda seen: seen == status, what=f"an answer of status {status}")
