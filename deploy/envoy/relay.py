"""What the outside may see of Envoy's admin interface: its metrics and whether it takes requests. Nothing else of it.

The admin interface can stop Envoy and show its certificates, so it stays on loopback. This relay, in a thread of the
keeper, asks it three fixed questions; nothing of a request but its path is looked at, and nothing of it is passed on.

    GET /stats/prometheus   as admin answers it
    GET /ready              as admin answers it, and 503 from the first SIGTERM on
    GET /healthz            200 while admin answers anything at all

Bounds: `MAX_CONNECTIONS` at one time, where a new one takes the place of the oldest silent one; `DEADLINE_S` for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from contextcache.wire.connections import ConnectionLimit
from deploy.envoy.settings import split_address

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
DEADLINE_S = 10.0
_MAX_HEAD_BYTES = 16 << 10
_CHUNK_BYTES = 64 << 10
_STOP_S = 5.0
_RELAYED = {"/stats/prometheus": "/stats/prometheus", "/ready": "/ready", "/healthz": "/ready"}


def listening(address: str) -> socket.socket:
    """Return a socket that listens on `host:port`. Raises OSError."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)


class Relay:
    """Serves a listening socket until `stop`; `admin_file` holds Envoy's admin address once it has one."""

    def __init__(
        self, listener: socket.socket, admin_file: Path, *, drains: Callable[[], bool], deadline_s: float = DEADLINE_S
    ) -> None:
        self._listener = listener
        self._admin_file = admin_file
        self._drains = drains
        self._deadline_s = deadline_s
        self._limit = ConnectionLimit(MAX_CONNECTIONS)
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-relay", daemon=True)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Serve in a thread of its own for the block."""
        self._thread.start()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, sock=self._listener, limit=_MAX_HEAD_BYTES)
        await self._stopped.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._limit.admit(writer.transport)
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._exchange(reader, writer)
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as exc:
            log.debug("the relay broke off", extra={"error": str(exc)})
        finally:
            # What was not read by now never leaves.
            self._limit.end(writer.transport)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self._limit.note_asked(writer.transport)
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0]
        if path not in _RELAYED:
            _reply(writer, "404 Not Found")
        elif method != "GET":
            _reply(writer, "405 Method Not Allowed")
        elif path == "/ready" and self._drains():
            _reply(writer, "503 Service Unavailable")
        else:
            await self._ask(path, writer)
        await writer.drain()

    async def _ask(self, path: str, writer: asyncio.StreamWriter) -> None:
        """Pass on what admin answers, as it comes; 503 when it does not."""
        answered = False
        try:
            # Written by Envoy when it has the port.
            reader, admin = await asyncio.open_connection(*split_address(self._admin_file.read_text()))
            try:
                admin.write(f"GET {_RELAYED[path]} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n".encode())
                while found := await reader.read(_CHUNK_BYTES):
                    answered = True
                    if path == "/healthz":
                        _reply(writer, "200 OK")
                        return
                    writer.write(found)
                    await writer.drain()
            finally:
                admin.close()
        except (OSError, ValueError) as exc:
            log.debug("admin does not answer", extra={"error": str(exc)})
        if not answered:
            _reply(writer, "503 Service Unavailable")


def _reply(writer: asyncio.StreamWriter, status: str) -> None:
    text = f"{status}\n".encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + text)
