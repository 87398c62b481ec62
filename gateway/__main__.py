"""`python -m gateway`: serve both fronts until SIGTERM. `python -m gateway hash-key`: hash a key from stdin."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

import uvicorn
from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from typing_extensions import override

from contextcache.logs import set_up_logs
from contextcache.process import run_until_signalled, wants_help
from gateway.app import GatewayApp, gateway_app
from gateway.auth import hash_key
from gateway.envoy_front import EnvoyFront
from gateway.ext_proc_server import ExtProcServer
from gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

PURPOSE = (
    "gateway: routes requests to vLLM pods and answers for contexts.\n"
    "`python -m gateway hash-key` prints what the API-key file holds of the key on stdin."
)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: `run_until_signalled` has them."""

    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a gateway listens."""

    http: int
    ext_proc: int | None
    """None: no external processor was asked for."""


async def serve(
    settings: GatewaySettings, stop: asyncio.Event, *, on_started: Callable[[Ports], None] | None = None
) -> None:
    """Serve until `stop` is set, then drain: say so, wait for proxies to notice, finish what runs, on both fronts.

    `on_started` is told the ports. Raises OSError when one is taken.
    """
    with closing(_listener(settings.host, settings.port)) as listener:
        async with gateway_app(settings, registry=CollectorRegistry()) as app:
            http = _http_server(app, settings)
            ext_proc = _ext_proc_server(app, settings) if settings.ext_proc_listen else None
            ports = Ports(listener.getsockname()[1], None if ext_proc is None else ext_proc.port)
            with suppress(TimeoutError):
                # A pod is not ready before it was asked: who serves earlier refuses what others would have served.
                await asyncio.wait_for(app.endpoints.looked.wait(), 2 * settings.probe_timeout_s)
            if ext_proc is not None:
                await ext_proc.start()
            serving = asyncio.create_task(http.serve(sockets=[listener]), name="http server")
            fields = {"host": settings.host, "port": ports.http, "ext_proc_port": ports.ext_proc}
            log.info("gateway started", extra=fields)
            if on_started is not None:
                on_started(ports)
            stopping = asyncio.create_task(stop.wait(), name="stop signal")
            try:
                await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
                app.ready_state.draining = True
                if ext_proc is not None:
                    await ext_proc.drain()
                log.info("gateway draining")
                if stop.is_set():
                    await asyncio.sleep(settings.drain_delay_s)
            finally:
                stopping.cancel()
                http.should_exit = True
                if ext_proc is not None:
                    await ext_proc.stop(settings.drain_timeout_s)
                await serving
    log.info("gateway stopped")


def _http_server(app: GatewayApp, settings: GatewaySettings) -> _Server:
    return _Server(
        uvicorn.Config(
            app.front,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
        )
    )


def _ext_proc_server(app: GatewayApp, settings: GatewaySettings) -> ExtProcServer:
    front = EnvoyFront(
        gateway=app.gateway,
        endpoints=app.endpoints,
        budget=app.budget,
        limits=app.limits,
        metrics=app.metrics,
        picker=settings.ext_proc_picker,
        timeout_s=settings.ext_proc_timeout_s,
        tracer=app.tracer,
    )
    return ExtProcServer(
        front,
        listen=settings.ext_proc_listen,
        max_body_bytes=settings.max_body_bytes,
        is_ready=lambda: any(state.ready for state in app.endpoints.states()),
    )


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as exc:
        listener.close()
        raise OSError(exc.errno, f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    listener.setblocking(False)
    return listener


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        # A plain event loop does the same, slower.
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def main() -> None:
    """Run as a program: exit 2 for settings that cannot be right, 1 when the port or a file cannot be had."""
    if sys.argv[1:] == ["hash-key"]:
        print(hash_key(sys.stdin.read()))
        return
    if wants_help(GatewaySettings, PURPOSE):
        return
    try:
        settings = GatewaySettings()
    except ValidationError as exc:
        for error in exc.errors():
            print(f"GATEWAY_{'_'.join(map(str, error['loc'])).upper()}: {error['msg']}", file=sys.stderr)
        sys.exit(2)
    set_up_logs(settings.log_level)
    try:
        run_until_signalled(lambda stop: serve(settings, stop), loop_factory=_loop_factory())
    except (OSError, ValueError) as exc:
        log.error("gateway cannot start", extra={"error": str(exc)})  # noqa: TRY400 - the reason, not the stack
        sys.exit(1)


if __name__ == "__main__":
    main()
