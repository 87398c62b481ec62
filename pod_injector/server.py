"""The injector's ports: HTTPS for the API server, plain HTTP for probes and metrics.

`POST /mutate` has bounds on bytes, time, concurrent reviews and connections. Its TLS context is made again when the
certificate's files change. It has no CA, unlike `contextcache.wire.tls`: the API server shows no certificate of ours,
and no other client connects.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry

from contextcache.errors import InvalidRequest
from contextcache.process.metrics import health_page, metrics_server
from contextcache.process.reloaded import Reloaded, read_bounded
from contextcache.wire.connections import HttpsListener
from contextcache.wire.tls import shake_hands
from pod_injector.metrics import InjectorMetrics
from pod_injector.parts import PatchParts, read_parts
from pod_injector.review import Verdict, review
from pod_injector.settings import InjectorSettings

log = logging.getLogger(__name__)

_LISTEN_BACKLOG = 128
"""Connections that wait in the kernel: more than the API server opens for one rollout."""
HANDSHAKE_TIMEOUT_S = 5.0
"""Maximum duration of a TLS handshake: the API server's own deadline for a review."""
_IDLE_TIMEOUT_S = 75.0
"""Time for which a connection without a request stays open. The API server reuses connections between pods."""
_NO_PASSWORD = ""
"""Password of the key. With None, OpenSSL would ask for one on the terminal and wait."""


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


@dataclass(slots=True)
class Webhook:
    """Answers a bounded number of reviews at a time, each before its deadline."""

    parts: PatchParts
    metrics: InjectorMetrics
    settings: InjectorSettings
    answering: set[asyncio.Protocol] = field(default_factory=set, init=False)
    """Connections of the reviews in progress."""

    async def mutate(self, request: web.BaseRequest) -> web.Response:
        """Answer one review. Any other body gets a status that the API server counts as a failed webhook."""
        if len(self.answering) >= self.settings.max_requests:
            return self._refused(503, "too many reviews in progress")
        self.answering.add(request.protocol)
        try:
            with self.metrics.review_seconds.time():
                async with asyncio.timeout(self.settings.request_timeout_s):
                    body = await request.read()
            # In a thread: a pod of megabytes takes seconds, and probes need an answer meanwhile.
            verdict = await asyncio.to_thread(_verdict_on, body, self.parts)
        except TimeoutError:
            return self._refused(408, "the review did not arrive before its deadline")
        except web.HTTPRequestEntityTooLarge:
            return self._refused(413, f"the review is larger than {self.settings.max_body_bytes} bytes")
        except InvalidRequest as exc:
            return self._refused(400, exc.message)
        finally:
            self.answering.discard(request.protocol)
        self.metrics.reviews.labels(verdict.outcome).inc()
        log.info("pod reviewed", extra={"uid": verdict.uid, "outcome": verdict.outcome, "warning": verdict.warning})
        return web.json_response(verdict.response())

    def _refused(self, status: int, message: str) -> web.Response:
        self.metrics.refused_requests.labels(str(status)).inc()
        log.warning("review refused", extra={"status": status, "reason": message})
        return web.json_response({"error": message}, status=status)


def _verdict_on(body: bytes, parts: PatchParts) -> Verdict:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest("the body is not JSON") from exc
    if not isinstance(parsed, dict):
        raise InvalidRequest("the body is not a JSON object")
    return review(parsed, parts)


def open_certificate(cert_file: Path, key_file: Path, metrics: InjectorMetrics) -> Reloaded[ssl.SSLContext]:
    """Return the context for incoming connections. Raises OSError or ValueError unless the files fit each other."""

    def read() -> ssl.SSLContext:
        for file in (cert_file, key_file):
            read_bounded(file)  # OpenSSL does not name a missing file
        server, client = _context(ssl.PROTOCOL_TLS_SERVER), _context(ssl.PROTOCOL_TLS_CLIENT)
        server.load_cert_chain(cert_file, key_file, password=_NO_PASSWORD)
        # A client that trusts only this certificate sees whether it is valid, and its expiry.
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        client.load_verify_locations(cert_file)
        metrics.certificate_expiry.set(shake_hands(client, server, server_name=None))
        return server

    return Reloaded(
        cert_file, key_file, read=read, name="certificate", on_failure=metrics.certificate_reload_failures.inc
    )


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


@asynccontextmanager
async def _https(
    webhook: Webhook, certificate: Reloaded[ssl.SSLContext], handshake_timeout_s: float
) -> AsyncIterator[int]:
    """Serve reviews and yield the port. On leaving, wait for reviews in progress."""
    settings = webhook.settings
    app = web.Application(client_max_size=settings.max_body_bytes)
    app.router.add_post("/mutate", webhook.mutate)
    runner = web.AppRunner(
        app,
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
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        with socket.create_server((settings.host, settings.port), family=family, backlog=_LISTEN_BACKLOG) as listener:
            listener.setblocking(False)
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
