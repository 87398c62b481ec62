"""The HTTP front's listener: uvicorn, with TLS whose files may change, and clients that are known by name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from typing_extensions import override

from contextcache.tls import HANDSHAKE_TIMEOUT_S, WatchedTls, carries_name
from gateway.http_front import HttpFront
from gateway.pipelining import told_of_the_end
from gateway.request_head import bounded_heads
from gateway.tls_listener import TlsListener


class HttpServer(uvicorn.Server):
    """One listener; its owner stops it by `should_exit`."""

    def __init__(
        self, front: HttpFront, *, drain_timeout_s: float, tls: WatchedTls | None, require_clients: bool
    ) -> None:
        """`require_clients`: with `tls`, only clients whose certificate carries the deployment's name are served."""
        config = uvicorn.Config(
            front,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
        )
        config.load()
        config.http_protocol_class = bounded_heads(told_of_the_end(config.http_protocol_class))
        self._context = None
        if tls is not None:
            self._context = tls.listening_context(require_clients=require_clients)
            if require_clients:
                config.http_protocol_class = _named_clients(config.http_protocol_class, tls.server_name)
        super().__init__(config)

    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: `run_part` has them."""
        yield

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`, which do not block."""
        if self._context is None:
            await super().startup(sockets)
            return
        await super().startup([])
        servers: list[Any] = self.servers
        # uvicorn would leave a client a minute for its handshake, and open as many as there are.
        servers.extend(
            TlsListener(listener, self._protocol, self._context, handshake_timeout_s=HANDSHAKE_TIMEOUT_S)
            for listener in sockets or []
        )

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol


def _named_clients(protocol: Any, name: str) -> type[asyncio.Protocol]:
    """Return `protocol` for clients with the name in their certificate: a CA may sign for others too."""

    class NamedClients(protocol):  # type: ignore[misc]  # whichever of uvicorn's two there is
        _is_named = False

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._is_named = carries_name(transport.get_extra_info("peercert"), name)
            if not self._is_named:
                transport.abort()

        def data_received(self, data: bytes) -> None:
            if self._is_named:
                super().data_received(data)

    return NamedClients
