"""HTTP server of gateway and turn process: uvicorn with more limits, HTTP/1.0, and TLS with files that may change.

uvicorn bounds neither time nor size of a request's head, and a client needs no key to send one. Rules:

- A connection has HEAD_TIMEOUT_S to send the whole head of its next request. uvicorn itself closes a connection sooner
  that is silent after an answer. The rest of a refused body counts as this wait, so its reading ends.
- Head and trailers together have at most HEAD_SIZE_BYTES_MAX.
- A client that closes the connection ends all of its requests.
- With a bound on connections, a new one replaces the oldest that has sent no request. If all have sent one, the new
  connection is closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from contextcache.wire.connections import ConnectionLimit, HttpsListener
from contextcache.wire.tls import HANDSHAKE_TIMEOUT_S, WatchedTls, carries_name

HEAD_TIMEOUT_S = 30.0
"""Seconds. A head is a few packets, so even a slow client needs less."""
HEAD_SIZE_BYTES_MAX = 64 << 10
"""64 KiB. Envoy's own bound is 60 KiB."""
_HEADER_OVERHEAD_BYTES = 32
"""Cost of a header beside its letters, as HTTP/2 counts it. It bounds the number of headers."""


_App: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
"""ASGI application."""
_Protocol: Any = object
"""Stands for uvicorn's protocol, which a class has as its next base."""


class HttpServer(uvicorn.Server):
    """One listener. Its owner stops it by `should_exit`."""

    def __init__(
        self,
        front: _App,
        *,
        drain_timeout_s: float,
        tls: WatchedTls | None,
        require_clients: bool,
        connections_max: int | None = None,
    ) -> None:
        """`require_clients`: with `tls`, serve only clients whose certificate has the deployment's name.

        `connections_max`: None for no bound.
        """
        client_name = tls.server_name if tls is not None and require_clients else None
        limit = None if connections_max is None else ConnectionLimit(connections_max, replaces_asked=False)
        http: Any = partial(BoundedHttp, client_name=client_name, limit=limit)
        config = uvicorn.Config(
            front,
            http=http,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
        )
        config.load()
        self._context = None if tls is None else partial(tls.server_context, require_clients=require_clients)
        super().__init__(config)

    async def finish_requests(self, *, within_s: float) -> None:
        """Return once no request runs, after `within_s` seconds at most. New requests are served meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.server_state.tasks:
                    await asyncio.wait(set(self.server_state.tasks))

    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `run_part`."""
        yield

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`, which do not block."""
        if self._context is None:
            await super().startup(sockets)
            return
        await super().startup([])
        servers: list[Any] = self.servers
        # uvicorn would allow a minute for a handshake, and any number of them at once.
        servers.extend(
            HttpsListener(listener, self._protocol, self._context, handshake_timeout_s=HANDSHAKE_TIMEOUT_S)
            for listener in sockets or []
        )

    def _protocol(self) -> asyncio.Protocol:
        make: Callable[[uvicorn.Config, Any, Any], asyncio.Protocol] = self.config.http_protocol_class
        return make(self.config, self.server_state, self.lifespan.state)


class HttpBounds(_Protocol):  # type: ignore[misc]  # Any
    """The rules above, before one of uvicorn's two protocols among the bases of a class.

    h11 itself bounds a head, reads no request before the last is answered, and writes HTTP/1.0. For httptools, which
    alone calls the methods from `on_message_begin` on, this class does so.
    """

    def __init__(
        self, *arguments: Any, client_name: str | None = None, limit: ConnectionLimit | None = None, **others: Any
    ) -> None:
        """`client_name`: serve only clients whose certificate has the name, because a CA may sign for others too."""
        super().__init__(*arguments, **others)
        self._limit = limit
        self._client_name = client_name
        self._is_named = client_name is None
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        """Bytes of this request's head that the parser has reported."""
        self._unreported_bytes = 0
        """Bytes that the parser keeps until their line ends."""
        self._answered: Any = None
        """The request that has a task. A connection has at most one."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for a head. Abort the connection of a client without the name."""
        super().connection_made(transport)
        self._wait_for_head()
        if self._limit is not None:
            self._limit.admit(transport)
        if self._client_name is not None:
            self._is_named = carries_name(transport.get_extra_info("peercert"), self._client_name)
        if not self._is_named:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse bytes. They do not move the deadline of a head."""
        if not self._is_named:
            return
        self._wait_for_head()
        self._unreported_bytes += len(data)
        super().data_received(data)
        if hasattr(self, "parser") and self._unreported_bytes > HEAD_SIZE_BYTES_MAX and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")
        if not self._is_between_requests():
            self._stop_waiting()
            if self._limit is not None:
                self._limit.note_asked(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all requests of the connection."""
        self._stop_waiting()
        if self._limit is not None:
            self._limit.end(self.transport)
        super().connection_lost(exc)
        # uvicorn 0.54 tells only the newest request. The answered one must stop too, and the pod behind it.
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        # Later bytes do not move the deadline.
        if self._deadline is None and self._is_between_requests():
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def on_message_begin(self) -> None:
        """Begin to count a head."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a part of the target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or a trailer."""
        self._count(len(name) + len(value) + _HEADER_OVERHEAD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request."""
        self._unreported_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body, which no bound of a head concerns."""
        self._unreported_bytes = 0
        super().on_body(body)

    def _count(self, size_bytes: int) -> None:
        self._unreported_bytes = 0
        self._head_bytes += size_bytes
        if self._head_bytes > HEAD_SIZE_BYTES_MAX:
            raise ValueError("the request's head is too large")

    def _start_asgi_task(self, cycle: Any, app: _App) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, _until_closed(cycle, app) if cycle.scope["http_version"] == "1.0" else app)


class BoundedHttp(HttpBounds, AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # httptools if installed, else h11
    """The protocol of HttpServer's connections."""


def bound_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens and does not block. Raises OSError with the address when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets with an explicit TCP protocol.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as exc:
        listener.close()
        raise OSError(exc.errno, f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    listener.setblocking(False)
    return listener


def _until_closed(cycle: Any, app: _App) -> _App:
    """Return `app` with answers that HTTP/1.0 can read: without a size they end with the connection.

    uvicorn (0.54, protocols/http/httptools_impl.py, `RequestResponseCycle.send`) would send chunks.
    """

    async def answered(scope: Any, receive: Any, send: Any) -> None:
        is_sized = True

        async def sent(message: Any) -> None:
            nonlocal is_sized
            if message["type"] == "http.response.start":
                is_sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if is_sized else False
            elif not is_sized:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sent)

    return answered
