"""Accepts the injector's HTTPS connections: so many at one time, handshakes included, and nobody is kept out by others.

asyncio's own TLS server counts nothing, and each handshake that somebody begins and leaves costs it 256 KiB.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

log = logging.getLogger(__name__)

_RETRY_S = 1.0
"""After an accept that failed: there are no more file descriptors, most likely."""


class HttpsListener:
    """Owns a listening socket and the connections of it that have not got as far as having a request handler.

    When there are as many as there may be, a new one takes the place of the oldest that still shakes hands, or else
    that of the oldest that is idle.
    """

    def __init__(
        self,
        listener: socket.socket,
        handlers: web.Server,
        *,
        is_busy: Callable[[RequestHandler], bool],
        context: ssl.SSLContext,
        max_connections: int,
        handshake_timeout_s: float,
    ) -> None:
        self._listener = listener
        self._handlers = handlers
        self._is_busy = is_busy
        self._context = context
        self._max_connections = max_connections
        self._handshake_timeout_s = handshake_timeout_s
        self._shaking: dict[asyncio.Task[None], None] = {}
        """The oldest first."""

    @property
    def port(self) -> int:
        """The one it has."""
        port: int = self._listener.getsockname()[1]
        return port

    async def run(self) -> None:
        """Accept until cancelled; then the socket is closed, and handshakes end."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as exc:
                    log.warning("a connection could not be accepted", extra={"error": str(exc)})
                    await asyncio.sleep(_RETRY_S)
                else:
                    self._admit(connection)
                    # As long as there is one more to accept the loop would get to nothing else.
                    await asyncio.sleep(0)
        finally:
            self._listener.close()
            for task in self._shaking:
                task.cancel()
            await asyncio.gather(*self._shaking, return_exceptions=True)

    def _admit(self, connection: socket.socket) -> None:
        if not self._make_room():
            connection.close()
            return
        task = asyncio.create_task(self._shake_hands(connection), name="TLS handshake")
        self._shaking[task] = None
        task.add_done_callback(lambda _: self._shaking.pop(task, None))
        # Here, because a task that is cancelled before it begins closes nothing itself.
        task.add_done_callback(lambda _: connection.close() if task.cancelled() else None)

    def _make_room(self) -> bool:
        """Return whether one more may come; False when all there may be are being answered."""
        connections = self._handlers.connections
        if len(self._shaking) + len(connections) < self._max_connections:
            return True
        if self._shaking:
            oldest = next(iter(self._shaking))
            del self._shaking[oldest]
            oldest.cancel()
            return True
        idle = next((handler for handler in connections if not self._is_busy(handler)), None)
        if idle is None:
            return False
        if idle.transport is not None:
            # No last words: they could take as long as a handshake.
            idle.transport.abort()
        return True

    async def _shake_hands(self, connection: socket.socket) -> None:
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._handlers,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_timeout_s,
                ssl_shutdown_timeout=self._handshake_timeout_s,
            )
