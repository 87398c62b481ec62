"""`python -m kv_sidecar`: serve KV blocks beside one vLLM pod until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, nullcontext

from prometheus_client import CollectorRegistry

from contextcache.clock import SystemClock
from contextcache.process.metrics import health_page, metrics_server
from contextcache.process.run import run_part, settings_or_exit, wants_help
from contextcache.wire.servers import GrpcServer
from contextcache.wire.tracing import tracer_of
from kv_sidecar.server import serve
from kv_sidecar.settings import SidecarSettings
from kv_sidecar.sidecar import Sidecar
from kv_sidecar.tiers.arena import remove_stale_socket

log = logging.getLogger(__name__)

DRAIN_S = 5.0
"""Time for running calls after SIGTERM. The chart adds it to the pod's grace period."""


async def run(settings: SidecarSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then drain. Raises OSError when an address or the data directory is taken."""
    registry = CollectorRegistry()
    sidecar = Sidecar(settings, clock=SystemClock(), registry=registry)
    tracer = tracer_of(settings, part="sidecar", on_lost=sidecar.metrics.process.lost_spans.inc)
    await sidecar.open()
    sidecar.start_collecting()
    for shortage in settings.shortages():
        log.warning(shortage)
    try:
        if settings.unix_socket is not None:
            remove_stale_socket(settings.unix_socket)
        server = serve(sidecar, settings.addresses(), tracer=tracer)
        if settings.unix_socket is not None:
            # Connecting needs the right to write: the engine may be another user of the sidecar's group.
            settings.unix_socket.chmod(0o660)
        async with _metrics_served(settings, registry, server):
            await server.start()
            fields = {"addresses": settings.addresses(), "num_contexts": len(sidecar.catalog.manifests)}
            log.info("sidecar started", extra=fields)
            await stop.wait()
            log.info("sidecar draining")
            await sidecar.drain()
            # While it serves: peers pull from here, and the engine may still be saving.
            await sidecar.hand_over()
            await server.stop(DRAIN_S)
            await sidecar.flush()
    finally:
        await sidecar.close()
        await asyncio.to_thread(tracer.close)


def _metrics_served(
    settings: SidecarSettings, registry: CollectorRegistry, server: GrpcServer
) -> AbstractAsyncContextManager[object]:
    if not settings.metrics_port:
        return nullcontext()
    pages = {"/healthz": health_page(lambda: server.is_serving)}
    return metrics_server(settings.metrics_host, settings.metrics_port, registry=registry, pages=pages)


def main() -> None:
    """Run as a program: exit 2 for settings that cannot be right, 1 when an address or a file cannot be had."""
    if wants_help(SidecarSettings, "kv-sidecar: stores, verifies, shares and expires KV blocks beside one vLLM pod."):
        return
    settings = settings_or_exit(SidecarSettings)
    run_part("sidecar", lambda stop: run(settings, stop), log_level=settings.log_level)


if __name__ == "__main__":
    main()
