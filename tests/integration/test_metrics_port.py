"""The plain port for probes and Prometheus, before clients that hold connections and say or read nothing."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from contextcache.process.metrics import ProbePage, health_page, metrics_server

_PATIENCE_S = 60
_HELD = 2000


@asynccontextmanager
async def a_port(**pages):
    """Serve `pages` by their names."""
    paths = {f"/{name}": answer for name, answer in {"healthz": health_page(lambda: True), **pages}.items()}
    async with metrics_server("127.0.0.1", 0, registry=CollectorRegistry(), pages=paths) as port:
        yield port


async def status_of(port, path):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        async with asyncio.timeout(_PATIENCE_S):
            return (await reader.read())[9:12].decode()
    finally:
        await closed(writer)


async def closed(*writers):
    for writer in writers:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def test_probes_are_answered_while_thousands_of_connections_say_nothing():
    async with a_port() as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(_HELD)]
        answered = [await status_of(port, "/healthz") for _ in range(20)]
        await closed(*(writer for _, writer in held))

    assert answered == ["200"] * 20


async def test_probes_are_answered_while_others_wait_for_a_slow_page():
    never = asyncio.Event()

    async def slow():
        await never.wait()
        return ProbePage(b"")

    async with a_port(slow=slow) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        for _, writer in held:
            writer.write(b"GET /slow HTTP/1.1\r\n\r\n")
            await writer.drain()
        answered = await status_of(port, "/healthz")
        await closed(*(writer for _, writer in held))

    assert answered == "200"


async def test_a_port_closes_with_a_connection_that_has_just_come():
    async with asyncio.timeout(_PATIENCE_S):
        async with a_port() as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        await closed(writer)
