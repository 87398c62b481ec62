"""A thousand SSE streams open at one time through one gateway: all come whole; what each costs is printed."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.kit.envoy_names import PLUGIN, PODS
from tests.kit.envoy_process import envoy_settings, running_envoy
from tests.kit.fronts import StreamingEngine
from tests.kit.gateway_parts import KEY
from tests.kit.gateway_process import GatewayProcess
from tests.kit.gateway_server import settings_for
from tests.kit.process_memory import memory_bytes
from tests.kit.until import until

NUM_STREAMS = 1000
NUM_AT_ONCE = 100
"""Opened together, so that no queue of connections overflows."""
DEADLINE_S = 120
KIB_A_STREAM_MAX = 400
"""Several times what is seen: a leak or a buffer for each stream would be more."""


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Both ends of everything are here."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@asynccontextmanager
async def port_of(front: str, gateway: GatewayProcess, engine: StreamingEngine) -> AsyncIterator[int]:
    """Return the port of the gateway's own front, or of an Envoy whose plugin it is."""
    if front == "http":
        yield gateway.http_port
        return
    settings = envoy_settings(
        pods=[engine.port], gateways=[(gateway.http_port, gateway.ext_proc_port)], max_body_bytes=1 << 20
    )
    async with running_envoy(settings) as envoy:
        await envoy.until_healthy(PODS, 1)
        await envoy.until_healthy(PLUGIN, 1)
        yield envoy.port


class OpenStream:
    """One client that has seen the beginning of its answer."""

    @classmethod
    async def opened(cls, port: int) -> OpenStream:
        self = cls()
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        status = await self._reader.readuntil(b"\r\n\r\n")
        assert status.startswith(b"HTTP/1.1 200"), status
        self._beginning = await self._reader.readuntil(StreamingEngine.FIRST)
        return self

    async def rest(self) -> bytes:
        """Return the answer's end and close the connection."""
        raw = await self._reader.readuntil(b"\r\n0\r\n\r\n")
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)
        return raw


@pytest.mark.timeout(300)
@pytest.mark.thorough
@pytest.mark.parametrize("front", ["envoy", "http"])
async def test_a_thousand_open_streams_all_come_whole(front: str, tmp_path: Path, manager, record_property) -> None:
    """Seen failing with `GATEWAY_MAX_IN_FLIGHT=900` (503), and with descriptors for 500 streams (broken off)."""
    engine = StreamingEngine()
    await engine.start()
    gateway = GatewayProcess(tmp_path, settings_for(tmp_path, {"pod-a": engine}, manager_port=manager.port))
    try:
        await gateway.start()
        async with asyncio.timeout(DEADLINE_S), port_of(front, gateway, engine) as port:
            before = memory_bytes(gateway.process.pid, "RssAnon")
            streams: list[OpenStream] = []
            for _ in range(0, NUM_STREAMS, NUM_AT_ONCE):
                streams += await asyncio.gather(*(OpenStream.opened(port) for _ in range(NUM_AT_ONCE)))
            if front == "http":
                await until(
                    lambda: in_flight(gateway), is_so=lambda number: number >= NUM_STREAMS, what="all are in flight"
                )
            grown = memory_bytes(gateway.process.pid, "RssAnon") - before
            engine.go_on.set()
            rests = await asyncio.gather(*(stream.rest() for stream in streams))
    finally:
        await gateway.stop()
        await engine.stop()
    kib = grown / NUM_STREAMS / 1024
    record_property("gateway_kib_a_stream", round(kib, 1))
    print(f"{NUM_STREAMS} open streams through {front}: {kib:.1f} KiB of the gateway's memory a stream")

    assert {rest.count(b"data: [DONE]\n\n") for rest in rests} == {1}
    assert len(rests) == len(engine.turns) == NUM_STREAMS
    assert kib < KIB_A_STREAM_MAX


async def in_flight(gateway: GatewayProcess) -> float:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{gateway.http_port}/metrics") as answer,
    ):
        lines = (await answer.text()).splitlines()
    name = 'contextcache_gateway_requests_in_flight{endpoint="pod-a"} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))
