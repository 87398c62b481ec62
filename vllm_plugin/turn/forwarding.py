"""vLLM behind HTTP, as the ASGI application that the middleware wraps. Bytes pass unread in both directions.

A client that leaves has its connection to vLLM closed, which ends its request in the engine. An answer that breaks off
has no last message, so the server closes the client's connection too: a cut answer never looks whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from copy import copy
from types import TracebackType
from typing import Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from contextcache.errors import ContextCacheError, EngineFailed, InvalidRequest, NoReadyEndpoint
from contextcache.wire.tls import WatchedTls, tls_arguments
from vllm_plugin.turn.engine import Message, Receive, Scope, Send, next_piece, send_error

log = logging.getLogger(__name__)

_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
_NOT_TO_ENGINE = _HOP_BY_HOP | {b"host", b"expect"}
_NOT_TO_CLIENT = _HOP_BY_HOP | {b"date", b"server"}
_CONNECT_S = 5.0
"""Deadline for a connection to vLLM, which is in the same pod."""
_KEEP_ALIVE_S = 2.0
"""Seconds that an idle connection stays open. vLLM closes it after 5 s, and no request may meet the closing."""
_PIECE_BYTES = 64 << 10
"""Size up to which a whole body is sent together with its head."""


class Forwarder:
    """One engine. Use it as a context manager in the event loop that serves."""

    def __init__(self, engine_url: str, *, silence_s: float, tls: WatchedTls | None = None) -> None:
        """`silence_s`: seconds without a byte from vLLM before a request fails. `tls`: for an https URL."""
        self._url = engine_url.rstrip("/")
        self._tls = tls
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=silence_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )

    def at(self, engine_url: str) -> Forwarder:
        """Return another pod's engine. It shares the connections, and ends with this object."""
        other = copy(self)
        other._url = engine_url.rstrip("/")  # noqa: SLF001  # of this class
        return other

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one HTTP request and its answer. Raises nothing of its own."""
        upload, until_gone = _Upload(receive), asyncio.timeout(None)
        try:
            async with until_gone:
                leaving = asyncio.create_task(upload.expire_when_gone(until_gone))
                try:
                    await self._exchange(scope, upload, send)
                finally:
                    leaving.cancel()
                    await asyncio.gather(leaving, return_exceptions=True)
        except TimeoutError:
            if not until_gone.expired():
                raise

    async def _exchange(self, scope: Scope, upload: _Upload, send: Send) -> None:
        try:
            answer = await self._session.request(
                scope["method"],
                self._target(scope),
                headers=_headers(scope),
                data=await upload.data(),
                allow_redirects=False,
                **tls_arguments(self._url, self._tls),
            )
        except ContextCacheError as exc:
            await send_error(send, exc)
        except (aiohttp.ClientError, OSError) as exc:
            await send_error(send, upload.fault or _fault(exc))
        else:
            try:
                await _deliver(answer, send)
            finally:
                answer.close()  # closes the connection of an answer that is not at its end

    def _target(self, scope: Scope) -> URL:
        path, query = scope.get("raw_path") or scope["path"].encode(), scope["query_string"]
        if not path.startswith(b"/"):
            raise InvalidRequest("the request's target must be a path")
        return URL(self._url + _text(path + (b"?" + query if query else b"")), encoded=True)


class _Upload:
    """The body of one request, and the client's leaving after it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._sent = asyncio.Event()
        """All pieces have been handed to the connection: `receive` reports only the client's leaving from now on."""
        self.fault: ContextCacheError | None = None
        """Why the body has no end."""

    async def data(self) -> bytes | AsyncIterator[bytes] | None:
        """Return a small body as bytes, another in pieces, None for no body. Raises InvalidRequest."""
        first = await next_piece(self._receive)
        body: bytes = first.get("body", b"")
        if first.get("more_body", False) or len(body) > _PIECE_BYTES:
            return self._pieces(first)
        self._sent.set()
        return body or None

    async def _pieces(self, message: Message) -> AsyncIterator[bytes]:
        while True:
            body = memoryview(message.get("body", b""))
            for start in range(0, len(body), _PIECE_BYTES):
                yield bytes(body[start : start + _PIECE_BYTES])
            if not message.get("more_body", False):
                self._sent.set()
                return
            try:
                message = await next_piece(self._receive)
            except ContextCacheError as exc:
                self.fault = exc
                raise

    async def expire_when_gone(self, until_gone: asyncio.Timeout) -> None:
        await self._sent.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        until_gone.reschedule(asyncio.get_running_loop().time())


async def _deliver(answer: aiohttp.ClientResponse, send: Send) -> None:
    headers = list(_kept(answer.raw_headers, _NOT_TO_CLIENT))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    while True:
        try:
            chunk = await answer.content.readany()
        except (aiohttp.ClientError, OSError) as exc:
            log.warning("answer of the engine broke off", extra={"reason": type(exc).__name__})
            return
        await send({"type": "http.response.body", "body": chunk, "more_body": bool(chunk)})
        if not chunk:
            return


def _headers(scope: Scope) -> CIMultiDict[str]:
    return CIMultiDict((_text(name), _text(value)) for name, value in _kept(scope["headers"], _NOT_TO_ENGINE))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")  # aiohttp writes UTF-8


def _fault(exc: Exception) -> ContextCacheError:
    if isinstance(exc, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        # Not logged: gateways probe each second while an engine starts.
        return NoReadyEndpoint("the engine of this pod is not there", retry_after_s=1)
    log.warning("engine did not answer", extra={"reason": type(exc).__name__})
    return EngineFailed("the engine ended without an answer")


def _kept(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return ((name.lower(), value) for name, value in headers if name.lower() not in dropped)
