"""`python -m gateway`: serve the HTTP front until SIGTERM. `python -m gateway hash-key`: hash a key from stdin."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from typing_extensions import override

from contextcache.logs import set_up_logs
from contextcache.process import run_until_signalled, wants_help
from gateway.app import gateway_app
from gateway.auth import hash_key
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


async def serve(
    settings: GatewaySettings, stop: asyncio.Event, *, on_started: Callable[[int], None] | None = None
) -> None:
    """Serve until `stop` is set, then drain. `on_started` is told the port. Raises OSError when it is taken."""
    listener = _listener(settings.host, settings.port)
    port: int = listener.getsockname()[1]
    async with gateway_app(settings, registry=CollectorRegistry()) as app:
        server = _Server(
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
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
        log.info("gateway started", extra={"host": settings.host, "port": port})
        if on_started is not None:
            on_started(port)
        stopping = asyncio.create_task(stop.wait(), name="stop signal")
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            app.ready_state.draining = True
            log.info("gateway draining")
            if stop.is_set():
                await asyncio.sleep(settings.drain_delay_s)
        finally:
            stopping.cancel()
            server.should_exit = True
            await serving
    log.info("gateway stopped")


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
