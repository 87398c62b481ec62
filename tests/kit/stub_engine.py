"""A tiny real HTTP server in a vLLM pod's place: answers with what it received, streams SSE when told to.

Hand-written on asyncio streams rather than on a framework, so that it shows the bytes that really arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from dataclasses import dataclass, field

from contextcache.claim import FORBIDDEN_KEYS
from tests.kit.ports import free_port

PROBED = ("/health", "/v1/models", "/metrics")
"""What a gateway asks by itself."""


@dataclass
class Received:
    """One request as it came off the socket."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value for found, value in self.headers if found == name]

    def json(self):
        """Return the body as vLLM takes it: of keys that repeat the last one, and these are not there when null."""
        found = json.loads(self.body)
        for key in FORBIDDEN_KEYS:
            if isinstance(found, dict) and found.get(key, ...) is None:
                del found[key]
        return found


@dataclass
class StubEngine:
    """Serves on a free loopback port between `start` and `stop`.

    A completion with `"stream": true` sends one SSE event for each `release()`; `finish()` ends it cleanly.
    """

    models: list[str] = field(default_factory=lambda: ["stub-model"])
    healthy: bool = True
    host: str = "127.0.0.1"
    port: int = field(default_factory=free_port)
    """Its own, so that it can go and come back."""
    tls: ssl.SSLContext | None = None
    """Serve HTTPS with it."""
    peers: list[dict] = field(default_factory=list)
    """Certificates of those who connected, as `ssl` says them."""
    received: list[Received] = field(default_factory=list)
    disconnects: int = 0
    load: dict[str, float] = field(default_factory=dict)
    """What `/metrics` says, by vLLM's names; empty: 404."""
    runs_turns: bool = True
    """Answer `/health` with the header of the turn middleware."""
    limits_tenants: bool = False
    """Answer `/health` as a turn process that limits tenants."""
    break_next: str = ""
    """`headers`: close before answering; `body`: close in the middle of the next answer."""
    stall: bool = False
    """Answer nothing at all, but notice a disconnect."""

    def __post_init__(self):
        self._server = None
        self._connections: set[asyncio.Task] = set()
        self._tokens: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.arrived = asyncio.Event()
        self.noticed_disconnect = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.host}:{self.port}"

    @property
    def turns(self) -> list[Received]:
        return [found for found in self.received if found.target.partition("?")[0].rstrip("/") not in PROBED]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, self.host, self.port, ssl=self.tls, backlog=2048)

    async def stop(self) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def release(self, text: str = "token") -> None:
        self._tokens.put_nowait(f'data: {{"text": "{text}"}}\n\n'.encode())

    def finish(self) -> None:
        self._tokens.put_nowait(None)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._connections.add(task)
        if self.tls is not None:
            self.peers.append(writer.get_extra_info("peercert"))
        try:
            while await self._one_request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _one_request(self, reader, writer) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        request = Received(method, target, headers, await _body(dict(headers), reader))
        self.received.append(request)
        if target == "/health":
            header = b"x-context-in-flight: \r\n" if self.runs_turns else b""
            header += b"x-context-limits: 1\r\n" if self.limits_tenants else b""
            return await self._send(writer, 200 if self.healthy else 503, b"", header)
        if target == "/v1/models":
            return await self._send(writer, 200, json.dumps({"data": [{"id": name} for name in self.models]}).encode())
        if target.startswith("/metrics"):
            lines = (f'{name}{{engine="0",model_name="stub-model"}} {value}\n' for name, value in self.load.items())
            return await self._send(writer, 200 if self.load else 404, "".join(lines).encode())
        self.arrived.set()
        return await self._answer(request, reader, writer)

    async def _answer(self, request, reader, writer) -> bool:
        broken, self.break_next = self.break_next, ""
        if broken == "headers":
            return False
        if self.stall:
            await self._until_gone(reader)
            return False
        if b'"stream": true' in request.body or broken == "body":
            return await self._stream(reader, writer, broken=bool(broken))
        echo = {"method": request.method, "target": request.target, "size": len(request.body)}
        return await self._send(writer, 200, json.dumps(echo).encode())

    async def _stream(self, reader, writer, *, broken: bool) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n")
        writer.write(b"x-context-mode: append\r\nconnection: keep-alive\r\nkeep-alive: timeout=5\r\n\r\n")
        gone = asyncio.ensure_future(self._until_gone(reader))
        try:
            while True:
                token = asyncio.ensure_future(self._tokens.get())
                await asyncio.wait((token, gone), return_when=asyncio.FIRST_COMPLETED)
                if not token.done():
                    token.cancel()
                    return False
                chunk = token.result()
                if chunk is None:
                    writer.write(b"" if broken else b"0\r\n\r\n")
                    await writer.drain()
                    return not broken
                writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                await writer.drain()
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _until_gone(self, reader) -> None:
        """Wait for the end of the connection; nobody sends a second request while one is open."""
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        self.disconnects += 1
        self.noticed_disconnect.set()

    async def _send(self, writer, status: int, body: bytes, header: bytes = b"") -> bool:
        writer.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n%b" % (status, header))
        writer.write(b"server: stub\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        return True


async def _body(headers: dict[str, str], reader: asyncio.StreamReader) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    pieces = []
    while size := int(await reader.readline(), 16):
        pieces.append(await reader.readexactly(size))
        await reader.readline()
    await reader.readline()
    return b"".join(pieces)
