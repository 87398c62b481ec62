"""The ports of the injector: HTTPS for the API server, plain HTTP for probes; connections bounded, handshakes too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry
from typing_extensions import override

from contextcache.metrics_server import health_page, metrics_server
from injector.certificate import Certificate
from injector.metrics import InjectorMetrics
from injector.parts import read_parts
from injector.settings import InjectorSettings
from injector.webhook import Webhook

log = logging.getLogger(__name__)

_LISTEN_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Ports:
    """Where an injector listens."""

    https: int
    probes: int | None
    """None: no such port was asked for."""


async def serve(
    settings: InjectorSettings, stop: asyncio.Event, *, on_started: Callable[[Ports], None] | None = None
) -> None:
    """Serve until `stop` is set, then drain. Raises OSError or ValueError when a port or a file cannot be had."""
    metrics = InjectorMetrics(CollectorRegistry())
    certificate = Certificate(settings.cert_file, settings.key_file, metrics)
    webhook = Webhook(
        parts=read_parts(settings.parts_file),
        metrics=metrics,
        max_body_bytes=settings.max_body_bytes,
        max_requests=settings.max_requests,
        request_timeout_s=settings.request_timeout_s,
    )
    async with AsyncExitStack() as stack:
        https = await stack.enter_async_context(_https(webhook, certificate, settings))
        probes = await stack.enter_async_context(_probes(webhook, settings)) if settings.metrics_port else None
        watching = asyncio.create_task(certificate.watch(settings.reload_interval_s), name="certificate watch")
        try:
            log.info("injector started", extra={"port": https, "probe_port": probes})
            if on_started is not None:
                on_started(Ports(https, probes))
            await stop.wait()
            webhook.draining = True
            log.info("injector draining")
            await asyncio.sleep(settings.drain_delay_s)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    log.info("injector stopped")


@asynccontextmanager
async def _https(webhook: Webhook, certificate: Certificate, settings: InjectorSettings) -> AsyncIterator[int]:
    """Serve reviews and yield the port; on leaving, let running ones finish."""
    runner = web.AppRunner(
        webhook.app(),
        access_log=None,
        # Also closes connections that never send a request.
        keepalive_timeout=settings.idle_timeout_s,
        shutdown_timeout=settings.drain_timeout_s,
    )
    await runner.setup()
    handlers = runner.server
    assert handlers is not None

    def accept() -> asyncio.Protocol:
        return handlers() if len(handlers.connections) < settings.max_connections else _OneTooMany()

    try:
        server = await asyncio.get_running_loop().create_server(
            accept,
            settings.host,
            settings.port,
            backlog=_LISTEN_BACKLOG,
            ssl=certificate.context,
            ssl_handshake_timeout=settings.handshake_timeout_s,
            ssl_shutdown_timeout=settings.handshake_timeout_s,
        )
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _probes(webhook: Webhook, settings: InjectorSettings) -> AsyncIterator[int]:
    pages = {"/healthz": health_page(lambda: True), "/readyz": health_page(lambda: not webhook.draining)}
    async with metrics_server(
        settings.metrics_host, settings.metrics_port, registry=webhook.metrics.registry, pages=pages
    ) as port:
        yield port


class _OneTooMany(asyncio.Protocol):
    """A connection that is closed at once."""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
