"""`python -m context_manager`: one manager process. Only this module reads settings."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from context_manager.limits import TtlBounds
from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from context_manager.preconditions import StoreWatch
from context_manager.redis_address import redis_tls
from context_manager.redis_connection import RedisConnection, ReplicaWait
from context_manager.server import manager_server
from context_manager.settings import ManagerSettings
from context_manager.sweeper import SessionSweeper, count_forever
from contextcache.process.metrics import health_page, metrics_server
from contextcache.process.run import run_part, settings_or_exit, wants_help
from contextcache.wire.tracing import tracer_of

log = logging.getLogger(__name__)

PURPOSE = "context-manager: sessions, transcripts and turns of context-cache, in Redis or Valkey."


async def serve(
    settings: ManagerSettings, stop: asyncio.Event, *, on_started: Callable[[int], None] | None = None
) -> None:
    """Serve until `stop` is set, then drain. `on_started` receives the port; Redis need not be there yet."""
    registry = CollectorRegistry()
    metrics = ManagerMetrics(registry)
    async with AsyncExitStack() as stack:
        tracer = tracer_of(settings, part="manager", on_lost=metrics.process.lost_spans.inc)
        stack.push_async_callback(asyncio.to_thread, tracer.close)
        tls = metrics.process.open_tls(settings.tls)
        redis = RedisConnection(
            settings.redis_url.get_secret_value(),
            timeout_s=settings.redis_timeout_s,
            max_connections=settings.redis_max_connections,
            tls=redis_tls(settings, on_failure=metrics.process.reload_failures.inc),
            wait=_replica_wait(settings),
            on_error=lambda name: metrics.redis_errors.labels(name).inc(),
        )
        stack.push_async_callback(redis.close)
        manager = ContextCacheManager(
            redis,
            metrics=metrics,
            ttl_bounds=TtlBounds(settings.min_ttl_s, settings.max_ttl_s),
            tombstone_s=settings.tombstone_s,
            tenant_contexts_max=settings.tenant_contexts_max,
            tenant_bytes_max=settings.tenant_bytes_max,
        )
        server = manager_server(
            manager,
            listen=settings.listen,
            max_concurrent_rpcs=settings.max_concurrent_rpcs,
            tracer=tracer,
            tls=tls,
            on_ended=metrics.process.count_request,
        )
        if settings.metrics_port:
            pages = {"/healthz": health_page(lambda: server.is_serving)}
            listening = metrics_server(settings.metrics_host, settings.metrics_port, registry=registry, pages=pages)
            await stack.enter_async_context(listening)
        watch = StoreWatch(
            redis.info,
            metrics=metrics,
            tenant_bytes_max=settings.tenant_bytes_max,
            wait_replicas=settings.redis_wait_replicas,
        )
        sweeper = SessionSweeper(manager, metrics=metrics, interval_s=settings.sweep_interval_s)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        for work in (watch.watch_forever(), sweeper.sweep_forever(), count_forever(manager, metrics=metrics)):
            stack.callback(tasks.create_task(work).cancel)
        await server.start()
        stack.push_async_callback(server.stop, settings.drain_s)
        log.info("manager started", extra={"listen": settings.listen, "port": server.ports[0]})
        if on_started is not None:
            on_started(server.ports[0])
        await stop.wait()
        log.info("manager stopping")


def _replica_wait(settings: ManagerSettings) -> ReplicaWait | None:
    if not settings.redis_wait_replicas:
        return None
    return ReplicaWait(settings.redis_wait_replicas, math.ceil(settings.redis_wait_timeout_s * 1000))


def main() -> None:
    """Run as a program: exit 2 for settings that cannot be right, 1 when an address or a file cannot be had."""
    if wants_help(ManagerSettings, PURPOSE):
        return
    settings = settings_or_exit(ManagerSettings)
    run_part("manager", lambda stop: serve(settings, stop), log_level=settings.log_level)


if __name__ == "__main__":
    main()
