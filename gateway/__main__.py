"""`python -m gateway` serves both fronts until SIGTERM. `python -m gateway hash-key` hashes a key from stdin."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, closing, nullcontext, suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from contextcache.process.metrics import ProbePage, health_page, metrics_server
from contextcache.process.run import fast_loop, run_part, settings_or_exit, until_stopped, wants_help
from contextcache.wire.http_server import HttpServer, bound_listener
from gateway.app import gateway_app
from gateway.envoy.front import EnvoyFront
from gateway.envoy.server import ExtProcServer
from gateway.http.app import HttpFront
from gateway.settings import GatewaySettings
from gateway.tenants.keys import hash_key

log = logging.getLogger(__name__)

PURPOSE = (
    "gateway: routes requests to vLLM pods and answers for contexts.\n`python -m gateway hash-key` "
    "reads an API key from stdin and prints its hash for the API-key file."
)


@dataclass(frozen=True, slots=True)
class Ports:
    """Bound ports of a gateway."""

    http: int
    ext_proc: int | None
    """None: the settings name no external processor."""


async def serve(
    settings: GatewaySettings, stop: asyncio.Event, *, on_started: Callable[[Ports], None] | None = None
) -> None:
    """Serve until `stop` is set, then drain both fronts: report it, wait for proxies to notice, finish what runs.

    Calls `on_started` with the ports. Raises OSError if a port is taken.
    """
    with closing(bound_listener(settings.host, settings.port)) as listener:
        async with (
            gateway_app(settings, registry=CollectorRegistry()) as front,
            _metrics_served(front, settings),
        ):
            parts = front.gateway.parts
            http = HttpServer(
                front,
                drain_timeout_s=settings.drain_timeout_s,
                tls=parts.tls,
                require_clients=settings.tls_clients == "required",
            )
            ext_proc = None
            if settings.ext_proc_listen:
                ext_proc = ExtProcServer(
                    EnvoyFront(front.gateway),
                    listen=settings.ext_proc_listen,
                    max_body_bytes=settings.max_body_bytes,
                    is_ready=lambda: any(state.ready for state in parts.endpoints.states()),
                    tls=parts.tls,
                )
            ports = Ports(listener.getsockname()[1], None if ext_proc is None else ext_proc.ports[0])
            with suppress(TimeoutError):
                # No pod is ready before its first probe. A gateway that listens earlier refuses requests that another
                # replica would serve.
                await asyncio.wait_for(parts.endpoints.looked.wait(), 2 * settings.probe_timeout_s)
            if ext_proc is not None:
                await ext_proc.start()
            serving = asyncio.create_task(http.serve(sockets=[listener]), name="http server")
            fields = {"host": settings.host, "port": ports.http, "ext_proc_port": ports.ext_proc}
            log.info("gateway started", extra=fields)
            if on_started is not None:
                on_started(ports)
            try:
                await until_stopped(serving, stop)
                front.ready_state.draining = True
                if ext_proc is not None:
                    await ext_proc.drain()
                log.info("gateway draining")
                if stop.is_set():
                    await asyncio.sleep(settings.drain_delay_s)
            finally:
                http.should_exit = True
                if ext_proc is not None:
                    await ext_proc.stop(settings.drain_timeout_s)
                await serving
    log.info("gateway stopped")


def _metrics_served(front: HttpFront, settings: GatewaySettings) -> AbstractAsyncContextManager[object]:
    if not settings.metrics_port:
        return nullcontext()
    ready_state, registry = front.ready_state, front.gateway.parts.metrics.registry

    async def readyz() -> ProbePage:
        found = await ready_state.describe()
        return ProbePage(json.dumps(found).encode(), 200 if found["ready"] else 503, "application/json")

    async def serving() -> ProbePage:
        # Updates the readiness gauge, which only a call of `describe` does.
        await ready_state.describe()
        return await health_page(lambda: not ready_state.draining)()

    pages = {"/healthz": health_page(lambda: True), "/readyz": readyz, "/serving": serving}
    return metrics_server(settings.metrics_host, settings.metrics_port, registry=registry, pages=pages)


def main() -> None:
    """Run as a program. Exits with 2 for invalid settings, with 1 for a port or a file that cannot be opened."""
    if sys.argv[1:] == ["hash-key"]:
        print(hash_key(sys.stdin.read()))
        return
    if wants_help(GatewaySettings, PURPOSE):
        return
    settings = settings_or_exit(GatewaySettings)
    run_part(
        "gateway",
        lambda stop: serve(settings, stop),
        log_level=settings.log_level,
        loop_factory=fast_loop(),
    )


if __name__ == "__main__":
    main()
