"""`python -m kv_sidecar`: serve KV blocks beside one vLLM pod until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import stat
from pathlib import Path
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from contextcache.clock import SystemClock
from contextcache.logs import set_up_logs
from contextcache.process import run_until_signalled, wants_help
from kv_sidecar.server import serve
from kv_sidecar.settings import SidecarSettings
from kv_sidecar.sidecar import Sidecar

log = logging.getLogger(__name__)


async def run(settings: SidecarSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then drain. Raises OSError when an address or the data directory is taken."""
    registry = CollectorRegistry()
    sidecar = Sidecar(settings, clock=SystemClock(), registry=registry)
    await sidecar.open()
    sidecar.collector.start()
    try:
        if settings.unix_socket is not None:
            remove_stale_socket(settings.unix_socket)
        server = serve(sidecar, settings.addresses())
        metrics = _serve_metrics(settings, registry)
        await server.start()
        log.info(
            "sidecar serves", extra={"addresses": settings.addresses(), "num_contexts": sidecar.catalog.num_contexts}
        )
        await stop.wait()
        log.info("sidecar drains")
        await sidecar.pulls.close()
        await server.stop(settings.drain_s)
        if metrics is not None:
            http_server, thread = metrics
            await asyncio.to_thread(http_server.shutdown)
            await asyncio.to_thread(thread.join)
            http_server.server_close()
    finally:
        await sidecar.close()


def _serve_metrics(settings: SidecarSettings, registry: CollectorRegistry) -> tuple[WSGIServer, Thread] | None:
    if not settings.metrics_port:
        return None
    return start_http_server(settings.metrics_port, addr=settings.metrics_host, registry=registry)


def remove_stale_socket(path: Path) -> None:
    """Remove the socket a killed process left. The lock on the data directory says that it is not alive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        path.unlink()


def main() -> None:
    """Run the process."""
    if wants_help(SidecarSettings, "kv-sidecar: stores, verifies, shares and expires KV blocks beside one vLLM pod."):
        return
    settings = SidecarSettings()
    set_up_logs(settings.log_level)
    run_until_signalled(lambda stop: run(settings, stop))


if __name__ == "__main__":
    main()
