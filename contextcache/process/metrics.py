"""Port for probes and Prometheus, without TLS, and the metrics that each process has.

Kubelets have no certificate, and the port serves nothing secret. Each connection serves one GET, in the event loop of
the process's work: a blocked loop answers no probe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from contextcache.process.settings import TlsFiles
from contextcache.wire.connections import ConnectionLimit
from contextcache.wire.tls import WatchedTls, open_tls

log = logging.getLogger(__name__)

_CONNECTIONS_MAX = 64
_HEAD_BYTES_MAX = 8 << 10
_REQUEST_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets: calls of Redis take 1 ms, long answers of an engine minutes."""
_DEADLINE_S = 10.0
"""Time from the connection to the last byte of the answer; probes and scrapes have shorter timeouts."""


@dataclass(frozen=True, slots=True)
class ProbePage:
    """Answer of one path."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


PageSource = Callable[[], Awaitable[ProbePage]]


@asynccontextmanager
async def metrics_server(
    host: str, port: int, *, registry: CollectorRegistry, pages: Mapping[str, PageSource]
) -> AsyncIterator[int]:
    """Serve `/metrics` and `pages` (by path) during the block; yields the port. Port 0 takes a free one.

    Raises OSError when the port is taken.
    """

    async def metrics() -> ProbePage:
        return ProbePage(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)

    connections = _Connections({"/metrics": metrics, **pages})
    try:
        server = await asyncio.start_server(connections.accept, host, port, limit=_HEAD_BYTES_MAX)
    except OSError as exc:
        raise OSError(exc.errno, f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await connections.close()
        await server.wait_closed()


def health_page(is_healthy: Callable[[], bool]) -> PageSource:
    """Return a page with status 200 while `is_healthy`, else 503."""

    async def health() -> ProbePage:
        return ProbePage(b"ok\n") if is_healthy() else ProbePage(b"not serving\n", status=503)

    return health


class _Connections:
    def __init__(self, pages: Mapping[str, PageSource]) -> None:
        self._pages = pages
        self._limit = ConnectionLimit(_CONNECTIONS_MAX)
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._limit.admit(writer.transport)
        task = asyncio.create_task(self._serve(reader, writer), name="metrics request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # In a callback, because a task that is cancelled before it begins ends nothing itself.
        task.add_done_callback(lambda _: self._limit.end(writer.transport))

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_DEADLINE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                self._limit.note_asked(writer.transport)
                writer.write(_message(await self._answer(head), with_body=not head.startswith(b"HEAD ")))
                await writer.drain()
                writer.close()
                await writer.wait_closed()

    async def _answer(self, head: bytes) -> ProbePage:
        method, _, rest = head.decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        answer = self._pages.get(path)
        if method not in ("GET", "HEAD"):
            return ProbePage(b"only GET is possible here\n", status=405)
        if answer is None:
            return ProbePage(b"no such path\n", status=404)
        try:
            return await answer()
        except Exception:
            log.exception("metrics page failed", extra={"path": path})
            return ProbePage(b"a fault of ours\n", status=500)


def _message(page: ProbePage, *, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}\r\ncontent-type: {page.content_type}\r\n"
        f"content-length: {len(page.body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + (page.body if with_body else b"")


def add_build_info(prefix: str, registry: CollectorRegistry) -> None:
    """Add the version of the process to its metrics; series of creation times, which no query of ours reads, go."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the library annotates it not
    built = Gauge(f"{prefix}_build_info", "Always 1. The label is the version.", ["version"], registry=registry)
    built.labels(version("context-cache-server")).set(1)


class ProcessMetrics:
    """Metrics that each process has: its version, its requests, its certificate, its lost spans.

    Without TLS the gauge of the certificate has no sample, so that no alert reads 0 as a date.
    """

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        add_build_info(prefix, registry)
        self._request_duration = Histogram(
            f"{prefix}_request_duration_seconds",
            "Seconds from the head of a request to the end of its answer, by route and code. HTTP: kind or path, and "
            "status. gRPC: method, and the name of the status. Envoy's requests: until Envoy needs the gateway no "
            "longer, with code `routed` if a pod answers. Kind `completion`: refused before the gateway knew whether "
            "it was a turn. Kind `refused`: refused before its kind was known.",
            ["route", "code"],
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        self.lost_spans = Counter(
            f"{prefix}_lost_spans_total", "Trace spans that did not reach the collector.", registry=registry
        )
        self._expiry = Gauge(
            f"{prefix}_certificate_expiry_timestamp_seconds",
            "Unix time in seconds at which the TLS certificate in use expires.",
            ["certificate"],
            registry=registry,
        )
        self.reload_failures = Counter(
            f"{prefix}_certificate_reload_failures_total",
            "Failed reloads of changed TLS certificate files. The last good certificate stays in use.",
            registry=registry,
        )

    def count_request(self, route: str, code: str, duration_s: float) -> None:
        """Count one answered request. Routes and codes are closed sets."""
        self._request_duration.labels(route, code).observe(duration_s)

    def open_tls(self, files: TlsFiles | None) -> WatchedTls | None:
        """Return the followed files of the process's certificate; None: TLS is off. Raises as WatchedTls."""
        tls = open_tls(files, on_failure=self.reload_failures.inc)
        if tls is not None:
            # Read at each scrape, so that the files are followed without connections too.
            self._expiry.labels("parts").set_function(lambda: tls.current().expires_at_s)
        return tls
