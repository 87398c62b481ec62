"""The ports of the injector: HTTPS for the API server, plain HTTP for probes; connections bounded, handshakes too."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry

from contextcache.kubernetes.client import KubernetesApi
from contextcache.process.metrics import health_page, metrics_server
from contextcache.wire.connections import HttpsListener
from pod_injector.certificate import Certificate
from pod_injector.events import Announcer
from pod_injector.metrics import InjectorMetrics
from pod_injector.parts import read_parts
from pod_injector.settings import InjectorSettings
from pod_injector.webhook import Webhook

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
    """Serve until `stop` is set, then drain. Raises OSError or ValueError when a port or a file cannot be had.

    With `settings.events` and no API server to ask, that is a ValueError too.
    """
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
        tasks = [asyncio.create_task(certificate.watch(settings.reload_interval_s), name="certificate watch")]
        if settings.events:
            api = KubernetesApi.by_surroundings()
            stack.push_async_callback(api.close)
            webhook.announcer = Announcer(api, metrics)
            tasks.append(asyncio.create_task(webhook.announcer.run(), name="events"))
        try:
            log.info("injector started", extra={"port": https, "probe_port": probes})
            if on_started is not None:
                on_started(Ports(https, probes))
            await stop.wait()
            webhook.draining = True
            log.info("injector draining")
            await asyncio.sleep(settings.drain_delay_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
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

    def end_idle() -> bool:
        idle = next((handler for handler in handlers.connections if handler not in webhook.answering), None)
        if idle is not None and idle.transport is not None:
            # No last words: they could take as long as a handshake.
            idle.transport.abort()
        return idle is not None

    try:
        with _listener(settings) as listener:
            listening = HttpsListener(
                listener,
                handlers,
                lambda: certificate.context,
                handshake_timeout_s=settings.handshake_timeout_s,
                connections_max=settings.max_connections,
                # The API server asks again by itself, and gives up after some seconds.
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


@asynccontextmanager
async def _probes(webhook: Webhook, settings: InjectorSettings) -> AsyncIterator[int]:
    pages = {"/healthz": health_page(lambda: True), "/readyz": health_page(lambda: not webhook.draining)}
    async with metrics_server(
        settings.metrics_host, settings.metrics_port, registry=webhook.metrics.registry, pages=pages
    ) as port:
        yield port


def _listener(settings: InjectorSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.create_server((settings.host, settings.port), family=family, backlog=_LISTEN_BACKLOG)
    listener.setblocking(False)
    return listener
