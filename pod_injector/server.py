"""The injector's ports: HTTPS for the API server, plain HTTP for probes and metrics. Connections are bounded."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry

from contextcache.process.metrics import health_page, metrics_server
from contextcache.process.reloaded import Reloaded
from contextcache.wire.connections import HttpsListener
from pod_injector.certificate import open_certificate
from pod_injector.metrics import InjectorMetrics
from pod_injector.parts import read_parts
from pod_injector.settings import InjectorSettings
from pod_injector.webhook import Webhook

log = logging.getLogger(__name__)

_LISTEN_BACKLOG = 128
"""Connections that wait in the kernel: more than the API server opens for one rollout."""
HANDSHAKE_TIMEOUT_S = 5.0
"""Maximum duration of a TLS handshake: the API server's own deadline for a review."""
_IDLE_TIMEOUT_S = 75.0
"""Time for which a connection without a request stays open. The API server reuses connections between pods."""


async def serve(
    settings: InjectorSettings,
    stop: asyncio.Event,
    *,
    on_started: Callable[[int, int | None], object] | None = None,
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> None:
    """Serve until `stop` is set, then drain. Raises OSError or ValueError for a bad port, certificate or parts file.

    `on_started` gets the port of the webhook, and that of probes if there is one.
    """
    metrics = InjectorMetrics(CollectorRegistry())
    certificate = open_certificate(settings.cert_file, settings.key_file, metrics)
    webhook = Webhook(read_parts(settings.parts_file), metrics, settings)
    pages = {"/healthz": health_page(lambda: True), "/readyz": health_page(lambda: not stop.is_set())}
    async with AsyncExitStack() as stack:
        https = await stack.enter_async_context(_https(webhook, certificate, handshake_timeout_s))
        probes = None
        if settings.metrics_port:
            probes = await stack.enter_async_context(
                metrics_server(settings.metrics_host, settings.metrics_port, registry=metrics.registry, pages=pages)
            )
        watch = asyncio.create_task(certificate.follow(), name="certificate watch")
        try:
            log.info("injector started", extra={"port": https, "probe_port": probes})
            if on_started is not None:
                on_started(https, probes)
            await stop.wait()
            log.info("injector draining")
            await asyncio.sleep(settings.drain_delay_s)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
    log.info("injector stopped")


@asynccontextmanager
async def _https(
    webhook: Webhook, certificate: Reloaded[ssl.SSLContext], handshake_timeout_s: float
) -> AsyncIterator[int]:
    """Serve reviews and yield the port. On leaving, wait for reviews in progress."""
    settings = webhook.settings
    runner = web.AppRunner(
        webhook.app(),
        access_log=None,
        # Also closes connections that never send a request.
        keepalive_timeout=_IDLE_TIMEOUT_S,
        shutdown_timeout=settings.drain_timeout_s,
    )
    await runner.setup()
    handlers = runner.server
    assert handlers is not None

    def end_idle() -> bool:
        idle = next((handler for handler in handlers.connections if handler not in webhook.answering), None)
        if idle is not None and idle.transport is not None:
            # Without a TLS shutdown, which may take as long as a handshake.
            idle.transport.abort()
        return idle is not None

    try:
        with _listener(settings) as listener:
            listening = HttpsListener(
                listener,
                handlers,
                lambda: certificate.value,
                handshake_timeout_s=handshake_timeout_s,
                connections_max=settings.max_connections,
                # The API server retries by itself, and gives up after some seconds.
                patience_s=0,
                num_open=lambda: len(handlers.connections),
                end_idle=end_idle,
            )
            try:
                yield listener.getsockname()[1]
            finally:
                listening.close()
                await listening.wait_closed()
    finally:
        await runner.cleanup()


def _listener(settings: InjectorSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.create_server((settings.host, settings.port), family=family, backlog=_LISTEN_BACKLOG)
    listener.setblocking(False)
    return listener
