"""Accepts TLS connections on one socket, with a bound on those that have not shaken hands yet. asyncio only.

asyncio's own server bounds how long a handshake takes, not how many are open: each costs a descriptor and some 50 KiB,
and nobody needs a certificate to begin one. Here who is over the bound waits in the kernel's queue, until a handshake
ends or the oldest has had its `patience_s`, and goes: honest clients need milliseconds, silent ones keep nobody out.
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
"""After an accept that failed: out of descriptors, mostly."""


class TlsListener:
    """What uvicorn knows as a server: it can be closed. Its owner closes the socket."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        *,
        handshake_timeout_s: float,
        half_open_max: int = HALF_OPEN_MAX,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Accept from now on; `listener` listens and does not block. For the running event loop."""
        self._listener = listener
        self._make_protocol = make_protocol
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        self._half_open_max = half_open_max
        self._patience_s = patience_s
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
            await self._until_room()
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as exc:
                log.warning("connection not accepted", extra={"error": str(exc)})
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            task = asyncio.create_task(self._shake_hands(connection), name="tls handshake")
            self._half_open[task] = time.monotonic()
            task.add_done_callback(self._handshake_ended)
            # Here, because a task that is cancelled before it begins closes nothing itself.
            task.add_done_callback(partial(_close_unless_done, connection))

    async def _until_room(self) -> None:
        while len(self._half_open) >= self._half_open_max:
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
            ssl=self._context,
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
