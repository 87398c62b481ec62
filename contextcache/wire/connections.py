"""Bounds on incoming connections, so that idle ones cannot use up a port. asyncio only.

`HttpsListener` accepts TLS. asyncio's own server bounds the duration of a handshake, not their number, and a client
needs no certificate to begin one. Each costs a descriptor and 50 to 256 KiB. Over the bound, new connections wait in
the kernel's queue until a handshake ends, or until the oldest is older than `patience_s` and is closed. Honest clients
need milliseconds, so silent ones keep none of them out. The gateway counts handshakes only, the webhook its idle
connections too. `ConnectionLimit` is for plain ports.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

log = logging.getLogger(__name__)

HALF_OPEN_MAX = 1024
PATIENCE_S = 1.0
_SHUTDOWN_TIMEOUT_S = 5.0
"""Time for the closing messages of a TLS connection."""
_ACCEPT_RETRY_S = 0.5
"""Pause after a failed accept, mostly for lack of descriptors, or while every connection is busy."""


class HttpsListener:
    """A server as uvicorn sees it: it can be closed. Its owner closes the socket."""

    def __init__(  # noqa: PLR0913  # three bounds, and the ways to keep them
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        context: Callable[[], ssl.SSLContext],
        *,
        handshake_timeout_s: float,
        connections_max: int = HALF_OPEN_MAX,
        patience_s: float = PATIENCE_S,
        num_open: Callable[[], int] = lambda: 0,
        end_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """Accept from now on, in the running event loop. `listener` must listen and not block.

        `context` is called for each connection. `connections_max` bounds handshakes and `num_open()`, the connections
        after them, together. `end_idle()` closes one of those, or returns False if all are busy.
        """
        self._listener = listener
        self._make_protocol = make_protocol
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        self._connections_max = connections_max
        self._patience_s = patience_s
        self._num_open = num_open
        self._end_idle = end_idle
        self._half_open: dict[asyncio.Task[None], float] = {}
        """Handshakes by the time of their begin (monotonic), oldest first."""
        self._ended = asyncio.Event()
        self._accepting = asyncio.create_task(self._accept_all(), name="tls listener")

    @property
    def num_half_open(self) -> int:
        """Number of unfinished handshakes."""
        return len(self._half_open)

    def close(self) -> None:
        """Stop accepting, and break off unfinished handshakes."""
        for task in (self._accepting, *self._half_open):
            task.cancel()

    async def wait_closed(self) -> None:
        """Return once all tasks have ended."""
        await asyncio.wait({self._accepting, *self._half_open})

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as exc:
                log.warning("connection not accepted", extra={"error": str(exc)})
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            try:
                await self._until_room()
            except asyncio.CancelledError:
                connection.close()
                raise
            task = asyncio.create_task(self._shake_hands(connection), name="tls handshake")
            self._half_open[task] = time.monotonic()
            # In a callback, because a task that is cancelled before it begins closes nothing itself.
            task.add_done_callback(partial(self._handshake_ended, connection))

    async def _until_room(self) -> None:
        while len(self._half_open) + self._num_open() >= self._connections_max:
            if not self._half_open:
                if self._end_idle():
                    return
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            oldest, began_s = next(iter(self._half_open.items()))
            left_s = began_s + self._patience_s - time.monotonic()
            if left_s <= 0:
                oldest.cancel()
                await asyncio.wait({oldest})
                continue
            self._ended.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._ended.wait()

    async def _shake_hands(self, connection: socket.socket) -> None:
        # asyncio's own timeout: a cancelled handshake and a late one both close the connection.
        await asyncio.get_running_loop().connect_accepted_socket(
            self._make_protocol,
            connection,
            ssl=self._context(),
            ssl_handshake_timeout=self._handshake_timeout_s,
            ssl_shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
        )

    def _handshake_ended(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        del self._half_open[task]
        self._ended.set()
        fault = None if task.cancelled() else task.exception()
        if fault is not None and not isinstance(fault, OSError):  # ssl.SSLError is one
            log.error("connection failed", exc_info=fault)
        if fault is not None or task.cancelled():
            connection.close()


class ConnectionLimit:
    """A bound on open connections. A new one replaces the oldest that has sent no request, so probes always get in.

    For one event loop.
    """

    def __init__(self, max_connections: int, *, replaces_asked: bool = True) -> None:
        """`replaces_asked`: if all have sent a request, the oldest of them is replaced, else the new one is aborted."""
        self._max_connections = max_connections
        self._replaces_asked = replaces_asked
        self._open: dict[asyncio.WriteTransport, None] = {}
        """All connections, oldest first."""
        self._silent: dict[asyncio.WriteTransport, None] = {}
        """Connections without a request, oldest first."""

    def admit(self, transport: asyncio.WriteTransport) -> None:
        """Count a new connection. At the limit it replaces another one, or is aborted."""
        if len(self._open) >= self._max_connections:
            if not (self._silent or self._replaces_asked):
                transport.abort()
                return
            self.end(next(iter(self._silent or self._open)))
        self._open[transport] = self._silent[transport] = None

    def note_asked(self, transport: asyncio.WriteTransport) -> None:
        """Note a whole request: silent connections are replaced before this one."""
        self._silent.pop(transport, None)

    def end(self, transport: asyncio.WriteTransport) -> None:
        """Abort a connection, which frees its place. Idempotent."""
        self._open.pop(transport, None)
        self._silent.pop(transport, None)
        transport.abort()
