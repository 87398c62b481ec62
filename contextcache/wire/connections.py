"""Bounds on the connections of our own ports, which nobody uses up by merely holding some. asyncio only.

`HttpsListener` accepts TLS. asyncio's own server bounds how long a handshake takes, not how many are open: each costs a
descriptor and some 50 to 256 KiB, and nobody needs a certificate to begin one. Here who is over the bound waits in the
kernel's queue, until a handshake ends or the oldest has had its `patience_s`, and goes: honest clients need
milliseconds, silent ones keep nobody out. The gateway's front counts handshakes only, the webhook its idle connections
too. `ConnectionLimit` is for plain ports.
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
"""For the last words of a TLS connection."""
_ACCEPT_RETRY_S = 0.5
"""After an accept that failed, out of descriptors mostly, or while every connection is busy."""


class HttpsListener:
    """What uvicorn knows as a server: it can be closed. Its owner closes the socket."""

    def __init__(  # noqa: PLR0913  # three bounds, and how to keep them
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
        """Accept from now on; `listener` listens and does not block. For the running event loop.

        `context` is asked for each connection.
        `connections_max` bounds handshakes and `num_open()`, the connections behind them, together; `end_idle()` ends
        one of those, or says that all are busy.
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
        """Handshakes by when they began (monotonic), the oldest first."""
        self._ended = asyncio.Event()
        self._accepting = asyncio.create_task(self._accept_all(), name="tls listener")

    @property
    def num_half_open(self) -> int:
        """Connections that have not shaken hands."""
        return len(self._half_open)

    def close(self) -> None:
        """Accept no more; handshakes that are not done are broken off."""
        for task in (self._accepting, *self._half_open):
            task.cancel()

    async def wait_closed(self) -> None:
        """Return once nothing of this is left."""
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
            task.add_done_callback(self._handshake_ended)
            # Here, because a task that is cancelled before it begins closes nothing itself.
            task.add_done_callback(partial(_close_unless_done, connection))

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
        # The time is asyncio's own: a cancelled handshake and one that took too long both close the connection.
        await asyncio.get_running_loop().connect_accepted_socket(
            self._make_protocol,
            connection,
            ssl=self._context(),
            ssl_handshake_timeout=self._handshake_timeout_s,
            ssl_shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
        )

    def _handshake_ended(self, task: asyncio.Task[None]) -> None:
        del self._half_open[task]
        self._ended.set()


def _close_unless_done(connection: socket.socket, task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        fault = task.exception()
        if fault is None:
            return
        if not isinstance(fault, OSError):  # ssl.SSLError is one
            log.error("connection failed", exc_info=fault)
    connection.close()


class ConnectionLimit:
    """At most so many open connections; a new one takes the place of the oldest that has asked for nothing yet.

    So who opens connections and says nothing, or reads nothing, keeps no probe out. For one event loop.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._open: dict[asyncio.WriteTransport, None] = {}
        """The oldest first."""
        self._silent: dict[asyncio.WriteTransport, None] = {}
        """Those of them that have asked for nothing."""

    def admit(self, transport: asyncio.WriteTransport) -> None:
        """Count a new connection, in place of another one when there are as many as there may be."""
        if len(self._open) >= self._max_connections:
            self.end(next(iter(self._silent or self._open)))
        self._open[transport] = self._silent[transport] = None

    def note_asked(self, transport: asyncio.WriteTransport) -> None:
        """Prefer those that are silent to a connection that has sent a whole request, when one has to go."""
        self._silent.pop(transport, None)

    def end(self, transport: asyncio.WriteTransport) -> None:
        """Abort a connection, which frees its place; harmless when repeated."""
        self._open.pop(transport, None)
        self._silent.pop(transport, None)
        transport.abort()
