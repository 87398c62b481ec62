"""`python -m vllm_plugin.turn`: run the turns of one pod in a process of its own, beside an unmodified vLLM.

At SIGTERM the process refuses new requests, finishes running answers and ends. vLLM hears SIGTERM at the same time, and
its `--shutdown-timeout` waits for these answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import closing

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from contextcache.claim import TURN_PATHS
from contextcache.process.run import fast_loop, run_part, settings_or_exit, until_stopped, wants_help
from contextcache.wire.http_server import HttpServer, bound_listener
from vllm_plugin.turn.app import compose_turns
from vllm_plugin.turn.engine import ASGIApp, Message, Receive, Scope, Send, send_whole
from vllm_plugin.turn.forwarding import Forwarder
from vllm_plugin.turn.metrics import TurnMetrics
from vllm_plugin.turn.middleware import TurnMiddleware
from vllm_plugin.turn.prompt.request import CONTEXT_PATH
from vllm_plugin.turn.settings import TurnSettings
from vllm_plugin.turn.waiting import GRACE_S

log = logging.getLogger(__name__)

PURPOSE = "turn: runs the turns of one vLLM pod. Clients reach it through a gateway."
CONNECTIONS_MAX = 4096
"""More than an engine answers at once. A connection takes some 20 KB."""
_ROUTES = TURN_PATHS | {CONTEXT_PATH, "/health"}
"""Routes that the metrics show by name."""
_CUT_S = 5.0
"""Time for requests that outlive the drain to end after they are cancelled."""


async def serve(
    settings: TurnSettings, stop: asyncio.Event, *, on_started: Callable[[int], None] | None = None
) -> None:
    """Serve until `stop` is set, then drain. Calls `on_started` with the port. Raises OSError, ValueError."""
    registry = CollectorRegistry()
    metrics = TurnMetrics(registry)
    tls = metrics.process.open_tls(settings.tls)
    with closing(bound_listener(settings.listen_host, settings.listen_port)) as listener:
        async with Forwarder(settings.engine_url, silence_s=settings.engine_timeout_s, tls=tls) as engine:
            story = compose_turns(settings, metrics, tls, lambda standby: engine.at(standby.url))
            turns = TurnMiddleware(engine, story=story)
            http = HttpServer(
                _with_own_pages(_timed(turns, metrics), registry),
                drain_timeout_s=_CUT_S,
                tls=tls,
                require_clients=False,
                connections_max=CONNECTIONS_MAX,
            )
            await story.kv.start()
            serving = asyncio.create_task(http.serve(sockets=[listener]), name="http server")
            port = listener.getsockname()[1]
            log.info("turn started", extra={"host": settings.listen_host, "port": port})
            if on_started is not None:
                on_started(port)
            try:
                await until_stopped(serving, stop)
                turns.draining.begin()
                log.info("turn draining")
                await http.finish_requests(within_s=settings.drain_timeout_s + GRACE_S)
            finally:
                http.should_exit = True
                await serving
                await story.close()
    log.info("turn stopped")


def _with_own_pages(turns: ASGIApp, registry: CollectorRegistry) -> ASGIApp:
    """Add this process's liveness and metrics. Other pages are vLLM's."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/healthz":
            await send_whole(send, 200, [("content-type", "text/plain")], b"ok\n")
        elif scope["path"] == "/metrics":
            await send_whole(send, 200, [("content-type", CONTENT_TYPE_LATEST)], generate_latest(registry))
        else:
            await turns(scope, receive, send)

    return answered


def _timed(turns: ASGIApp, metrics: TurnMetrics) -> ASGIApp:
    """Count each answered request. Clients choose paths, so those of the engine's other calls are one route."""

    async def timed(scope: Scope, receive: Receive, send: Send) -> None:
        started_s, code = time.monotonic(), ""

        async def noted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = str(message["status"])
            await send(message)

        try:
            await turns(scope, receive, noted)
        finally:
            if code:
                route = scope["path"] if scope["path"] in _ROUTES else "other"
                metrics.process.count_request(route, code, time.monotonic() - started_s)

    return timed


def main() -> None:
    """Run as a program. Exits with 2 for invalid settings, with 1 for a port or a file that cannot be opened."""
    if wants_help(TurnSettings, PURPOSE):
        return
    settings = settings_or_exit(TurnSettings)
    run_part("turn", lambda stop: serve(settings, stop), log_level=settings.log_level, loop_factory=fast_loop())


if __name__ == "__main__":
    main()
