"""An S3 server that is slow, fails, cuts off or lies when told, with a real one behind it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import aiohttp
from aiohttp import web

from tests.kit.ports import free_port

FAULTS = ("slow", "errors", "cut", "wrong bytes")
BLOCKS = "/blocks/"


class LyingStore:
    """A proxy before an S3 server: hands everything on, but what `fault` says of the objects whose paths it names."""

    def __init__(self, server: str) -> None:
        """`server`: where the real one is, `http://host:port`."""
        self.server = server
        self.port = free_port()
        self.fault = ""
        """One of `FAULTS`, or `held` until `go`; empty: none."""
        self.go = asyncio.Event()
        self.named = BLOCKS

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Serve on `port` of loopback for the length of the block."""
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield self
        finally:
            await runner.cleanup()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        is_hit = bool(self.fault) and self.named in request.path
        if is_hit and self.fault == "slow":
            await asyncio.sleep(60)
        if is_hit and self.fault == "held":
            await self.go.wait()
        if is_hit and self.fault == "errors":
            return web.Response(status=503)
        async with (
            aiohttp.ClientSession(auto_decompress=False) as client,
            client.request(
                request.method,
                f"{self.server}{request.raw_path}",
                data=io.BytesIO(await request.read()),
                headers=request.headers,
            ) as answer,
        ):
            data, headers = await answer.read(), answer.headers.copy()
        headers.pop("Transfer-Encoding", None)
        headers["Content-Length"] = headers.get("Content-Length", str(len(data)))
        if is_hit and request.method == "GET" and self.fault == "wrong bytes":
            data = data[:-1] + bytes([data[-1] ^ 1])
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        if is_hit and request.method == "GET" and self.fault == "cut":
            await response.write(data[: len(data) // 2])
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(data)
        await response.write_eof()
        return response
