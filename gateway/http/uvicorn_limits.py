"""The HTTP front's listener: uvicorn with more limits, HTTP/1.0, and TLS with files that may change.

uvicorn limits neither time nor size of a request's head, and a client needs no key to send one. Rules: a connection
between two requests has HEAD_TIMEOUT_S to send the whole head of the next one. (uvicorn closes a connection sooner that
is silent after an answer.) The rest of a refused request's body counts as waiting for the next head, so it is not read
for ever. Head and trailers are no larger than HEAD_SIZE_BYTES_MAX.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from contextcache.wire.connections import HttpsListener
from contextcache.wire.tls import HANDSHAKE_TIMEOUT_S, WatchedTls, carries_name

HEAD_TIMEOUT_S = 30.0
"""A head is a packet or a few; the slowest client that means well needs some seconds."""
HEAD_SIZE_BYTES_MAX = 64 << 10
"""Envoy's own bound is 60 KiB."""
_HEADER_OVERHEAD_BYTES = 32
"""What a header costs besides its letters, as HTTP/2 counts it."""


class HttpServer(uvicorn.Server):
    """One listener; its owner stops it by `should_exit`."""

    def __init__(
        self, front: ASGIApp, *, drain_timeout_s: float, tls: WatchedTls | None, require_clients: bool
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
        config.http_protocol_class = bounded(
            config.http_protocol_class, client_name=tls.server_name if tls is not None and require_clients else None
        )
        self._context = None if tls is None else partial(tls.server_context, require_clients=require_clients)
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
            HttpsListener(listener, self._protocol, self._context, handshake_timeout_s=HANDSHAKE_TIMEOUT_S)
            for listener in sockets or []
        )

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol


def bounded(protocol: Any, *, timeout_s: float = HEAD_TIMEOUT_S, client_name: str | None = None) -> Any:
    """Return `protocol`, whichever of uvicorn's two it is, within bounds; h11 brings the bound of size itself.

    `client_name`: only clients with it in their certificate are served: a CA may sign for others too.
    """
    if hasattr(protocol, "on_header"):
        protocol = _sized(_unchunked(_told_of_the_end(protocol)))
    protocol = _timed(protocol, timeout_s)
    return protocol if client_name is None else _named(protocol, client_name)


def _timed(protocol: Any, timeout_s: float) -> Any:
    class TimedHeads(protocol):  # type: ignore[misc]  # a class known at run time
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            self._wait_for_head()
            super().data_received(data)
            if not self._is_between_requests():
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _is_between_requests(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _wait_for_head(self) -> None:
            if self._deadline is None and self._is_between_requests():
                # The last moment is kept while bytes come: a byte now and then is no head.
                self._deadline = self.loop.call_later(timeout_s, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return TimedHeads


def _told_of_the_end(protocol: Any) -> Any:
    """Return uvicorn's httptools protocol, all of whose requests hear when their client goes.

    uvicorn (0.54, protocols/http/httptools_impl.py, `connection_lost`) tells the newest request of a connection alone:
    where a client has already sent the next one, the one being answered would go on, with the pod behind it, until it
    wrote to a connection that is closed. h11 reads no request before the last is answered.
    """

    class ToldOfTheEnd(protocol):  # type: ignore[misc]  # a class known at run time
        _answered: Any = None
        """The request that has a task: one at a time, and none is started on a closed connection."""

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self._answered = cycle
            super()._start_asgi_task(cycle, app)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._answered is not None and not self._answered.response_complete:
                self._answered.disconnected = True
                self._answered.message_event.set()

    return ToldOfTheEnd


def _unchunked(protocol: Any) -> Any:
    """Return uvicorn's httptools protocol with answers that HTTP/1.0 can read.

    uvicorn (0.54, protocols/http/httptools_impl.py, `RequestResponseCycle.send`) sends chunks to clients of HTTP/1.0
    too. For them an answer that announces no size ends with the connection. h11 does that itself.
    """

    class Unchunked(protocol):  # type: ignore[misc]  # a class known at run time
        def _start_asgi_task(self, cycle: Any, app: ASGIApp) -> None:
            super()._start_asgi_task(cycle, _until_closed(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    return Unchunked


def _until_closed(cycle: Any, app: ASGIApp) -> ASGIApp:
    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        is_sized = True

        async def sent(message: Message) -> None:
            nonlocal is_sized
            if message["type"] == "http.response.start":
                is_sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if is_sized else False
            elif not is_sized:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sent)

    return answered


def _sized(protocol: Any) -> Any:
    class SizedHeads(protocol):  # type: ignore[misc]  # a class known at run time
        _head_bytes = 0
        """Of this request: what the parser has told of."""
        _untold_bytes = 0
        """What the parser keeps, and tells when the line has ended."""

        def data_received(self, data: bytes) -> None:
            self._untold_bytes += len(data)
            super().data_received(data)
            if self._untold_bytes > HEAD_SIZE_BYTES_MAX and not self.transport.is_closing():
                self.send_400_response("The request's head is too large.")

        def on_message_begin(self) -> None:
            self._head_bytes = 0
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value) + _HEADER_OVERHEAD_BYTES)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._untold_bytes = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._untold_bytes = 0
            super().on_body(body)

        def _count(self, size_bytes: int) -> None:
            self._untold_bytes = 0
            self._head_bytes += size_bytes
            if self._head_bytes > HEAD_SIZE_BYTES_MAX:
                raise ValueError("the request's head is too large")

    return SizedHeads


def _named(protocol: Any, name: str) -> Any:
    class NamedClients(protocol):  # type: ignore[misc]  # a class known at run time
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
