"""Carries requests to pods and their answers to clients without parsing either.

aiohttp costs a tenth of httpx's CPU per request. Each chunk of an answer is sent on when it arrives. The request body
is held whole, up to the limit. Forbidden keys may be at its end, and a body over the limit must not reach a pod.
Another pod gets the body if one refuses the connection.
"""

from __future__ import annotations

import asyncio
import io
import logging
import socket
from collections.abc import Iterator

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from contextcache.errors import ContextCacheError, EngineFailed
from contextcache.wire.tls import tls_arguments
from contextcache.wire.tracing import trace_headers
from gateway.flows import REQUEST_ID_HEADER, Forward
from gateway.fronts import ClientGone
from gateway.http.exchange import Exchange
from gateway.parts import Parts

log = logging.getLogger(__name__)

_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"}
    | {"transfer-encoding", "upgrade"}
)
_NOT_TO_POD = _HOP_BY_HOP | {"host", "content-length", "expect", REQUEST_ID_HEADER}
"""Headers that the connection to the pod gets anew, or lacks."""
_NOT_TO_CLIENT = frozenset({b"date", b"server", REQUEST_ID_HEADER.encode()}) | {name.encode() for name in _HOP_BY_HOP}
"""Headers that the connection to the client gets anew, or lacks."""
_WHOLE_BYTES_MAX = 1 << 20
"""Largest body that aiohttp gets as bytes and writes at once. It writes a file object in pieces."""
_KEEP_ALIVE_S = 2.0
"""Seconds that an idle connection stays open. vLLM closes it after 5 s, and no request may meet the closing."""

SILENT_S = 10
"""Seconds of silence before the first TCP keepalive probe."""
ASK_AGAIN_S = 3
"""Seconds between keepalive probes."""
QUESTIONS_MAX = 3
"""Unanswered keepalive probes that end the connection."""
UNCONFIRMED_MS = 15_000
"""Longest time that sent bytes may stay unacknowledged."""


class ConnectFailed(ContextCacheError):
    """The pod refused the connection. Nothing was sent, so another pod can be tried."""


class ConnectTimedOut(ConnectFailed):
    """The pod did not accept the connection in time. It vanished, or the pod or this gateway is busy."""


class Broken(ContextCacheError):
    """The pod's answer broke off after its start. The client's connection must break too."""


def carrier_session(*, connect_timeout_s: float, idle_timeout_s: float) -> aiohttp.ClientSession:
    """Return the connections to the pods, which the caller closes. The front bounds the requests in flight."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, socket_factory=_open_pod_socket),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=idle_timeout_s),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


class Carrier:
    """Sends requests to pods and their answers to clients."""

    def __init__(self, parts: Parts, session: aiohttp.ClientSession) -> None:
        """`session`: the connections to the pods."""
        self._session = session
        self._tls = parts.tls
        self._total_timeout_s = parts.settings.total_timeout_s
        self._metrics = parts.metrics

    async def carry(self, forward: Forward, body: bytes, exchange: Exchange) -> None:
        """Carry one request and its answer. Close the pod's connection at once when the client closes its own.

        Raises ConnectFailed, ConnectTimedOut, EngineFailed (before the answer's start), Broken, ClientGone.
        """
        gone = False
        try:
            async with asyncio.timeout(self._total_timeout_s) as deadline:

                async def cancel_when_gone() -> None:
                    nonlocal gone
                    while (await exchange.receive())["type"] != "http.disconnect":
                        pass
                    gone = True
                    deadline.reschedule(asyncio.get_running_loop().time())

                watcher = asyncio.create_task(cancel_when_gone())
                try:
                    await self._carry(forward, body, exchange)
                finally:
                    watcher.cancel()
                    await asyncio.gather(watcher, return_exceptions=True)
        except TimeoutError as exc:
            if gone:
                self._metrics.broken_exchanges.labels("client_gone").inc()
                raise ClientGone from exc
            raise self._broken(exchange, f"the engine did not finish within {self._total_timeout_s:g} s") from exc

    async def _carry(self, forward: Forward, body: bytes, exchange: Exchange) -> None:
        data = forward.body if forward.body is not None else body
        try:
            async with self._session.request(
                exchange.method,
                URL(forward.url + exchange.target, encoded=True),
                headers=_headers_to_pod(forward, exchange),
                # None for a GET without a body. A POST declares that its body is empty.
                data=_payload(data) if data or exchange.method not in {"GET", "HEAD"} else None,
                allow_redirects=False,
                **tls_arguments(forward.url, self._tls),
            ) as answer:
                # After an early exit aiohttp closes the connection, so the pod notices.
                await self._answer(answer, exchange)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            self._metrics.broken_exchanges.labels("connect").inc()
            late = isinstance(exc, aiohttp.ConnectionTimeoutError)
            raise (ConnectTimedOut if late else ConnectFailed)(f"no connection to {forward.endpoint.name}") from exc
        except (aiohttp.ClientError, aiohttp.ServerTimeoutError, ConnectionError) as exc:
            raise self._broken(exchange, "the engine closed the connection before its answer ended") from exc

    async def _answer(self, answer: aiohttp.ClientResponse, exchange: Exchange) -> None:
        await exchange.start(answer.status, _headers_to_client(answer))
        async for chunk in answer.content.iter_any():
            await exchange.send({"type": "http.response.body", "body": chunk, "more_body": True})
        await exchange.send({"type": "http.response.body", "body": b""})

    def _broken(self, exchange: Exchange, message: str) -> ContextCacheError:
        started = exchange.status is not None
        self._metrics.broken_exchanges.labels("after_headers" if started else "before_headers").inc()
        return Broken(message) if started else EngineFailed(message)


def _headers_to_pod(forward: Forward, exchange: Exchange) -> CIMultiDict[str]:
    dropped = _NOT_TO_POD | forward.remove_headers | _named_in_connection(exchange.headers.get("connection", ""))
    headers = CIMultiDict((name, value) for name, value in exchange.raw_headers if name not in dropped)
    headers[REQUEST_ID_HEADER] = exchange.request_id
    headers.update(forward.set_headers)
    headers.update(forward.routing_headers)
    headers.update(trace_headers())
    return headers


def _headers_to_client(answer: aiohttp.ClientResponse) -> Iterator[tuple[bytes, bytes]]:
    named = {name.encode() for name in _named_in_connection(answer.headers.get("connection", ""))}
    for name, value in answer.raw_headers:
        lower = name.lower()
        if lower not in _NOT_TO_CLIENT and lower not in named:
            yield lower, value


def _named_in_connection(value: str) -> frozenset[str]:
    return frozenset(name.strip().lower() for name in value.split(",") if name.strip())


def _payload(data: bytes) -> bytes | io.BytesIO:
    return data if len(data) <= _WHOLE_BYTES_MAX else io.BytesIO(data)


def _open_pod_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return an unconnected socket that detects a node that vanished.

    The kernel of a busy pod answers the probes, so a long answer is not cut off. Envoy has the same times:
    gateway/envoy/envoy.yaml.j2.
    """
    family, kind, _, _, _ = address
    # asyncio turns Nagle's algorithm off only for sockets with an explicit TCP protocol.
    opened = socket.socket(family, kind, socket.IPPROTO_TCP)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_AGAIN_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, QUESTIONS_MAX)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNCONFIRMED_MS)
    return opened
