"""Puts a gateway together from its settings: the only place that chooses the parts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from context_manager.client import ContextManagerClient
from contextcache.clock import SystemClock
from contextcache.process.settings import read_secret
from contextcache.wire.tracing import tracer_of
from gateway.flows import Gateway
from gateway.http.app import HttpFront
from gateway.http.carrier import Carrier, carrier_session
from gateway.metrics import Metrics
from gateway.parts import Parts
from gateway.pods.endpoints import Source, WatchedEndpoints
from gateway.pods.kubernetes import KubernetesEndpoints, SliceRules
from gateway.pods.probe import HttpProbe
from gateway.pods.sidecars import Holders
from gateway.pods.state import Endpoint, LoadLimits
from gateway.pods.static import endpoint_file, endpoint_of
from gateway.settings import GatewaySettings
from gateway.tenants.keys import KeyFile, SingleTenant
from gateway.tenants.limits import FrontLimits, TenantLimits
from kv_sidecar.client import KVSidecarClient

log = logging.getLogger(__name__)

_FIRST_LIST_S = 10.0
"""Seconds that a starting gateway waits for the first list of pods. After that it listens, not ready."""


@asynccontextmanager
async def gateway_app(settings: GatewaySettings, *, registry: CollectorRegistry) -> AsyncIterator[HttpFront]:
    """Run a gateway without its listeners: the HTTP front, with the gateway and its parts for the other front.

    Raises OSError or ValueError for a file that is missing or broken. The other processes need not run yet.
    """
    async with AsyncExitStack() as stack:
        parts = await _parts(settings, stack, Metrics(registry))
        carrying = await stack.enter_async_context(
            carrier_session(connect_timeout_s=settings.connect_timeout_s, idle_timeout_s=settings.idle_timeout_s)
        )
        carrier = Carrier(parts, carrying)
        yield HttpFront(Gateway(parts), carrier=carrier)


async def _parts(settings: GatewaySettings, stack: AsyncExitStack, metrics: Metrics) -> Parts:
    clock = SystemClock()
    tracer = tracer_of(settings, part="gateway", on_lost=metrics.process.lost_spans.inc)
    stack.push_async_callback(asyncio.to_thread, tracer.close)
    tls = metrics.process.open_tls(settings.tls)
    keys: KeyFile | SingleTenant = SingleTenant()
    if settings.api_keys_file is not None:
        keys = KeyFile(settings.api_keys_file, metrics=metrics)
        _run(stack, keys.run(), "key file")
    listed, source = await _listed_endpoints(settings, stack, metrics)
    probing = await stack.enter_async_context(aiohttp.ClientSession())
    endpoints = WatchedEndpoints(
        listed,
        HttpProbe(probing, timeout_s=settings.probe_timeout_s, tls=tls),
        metrics=metrics,
        interval_s=settings.probe_interval_s,
        source=source,
        limits=_load_limits(settings),
    )
    _run(stack, endpoints.run(), "endpoint probes")
    manager = ContextManagerClient(settings.manager, timeout_s=settings.manager_timeout_s, tls=tls)
    stack.push_async_callback(manager.close)
    holders = Holders(
        endpoints,
        manager,
        lambda address: KVSidecarClient(address, timeout_s=settings.delete_timeout_s, tls=tls),
        clock=clock,
        metrics=metrics,
        settings=settings,
    )
    stack.push_async_callback(holders.close)
    _run(stack, holders.run(), "sidecar probes")
    return Parts(
        settings=settings,
        secret=read_secret(settings.secret_file),
        clock=clock,
        metrics=metrics,
        tracer=tracer,
        tls=tls,
        keys=keys,
        tenants=TenantLimits(
            clock=clock,
            rate_per_s=settings.tenant_rate_per_s,
            burst=settings.tenant_burst,
            requests_max=settings.tenant_in_flight_max,
            bytes_max=settings.tenant_buffered_bytes_max,
            total_requests_max=settings.max_in_flight,
            total_bytes_max=settings.max_buffered_bytes,
            on_refused=lambda limit: metrics.tenant_refusals.labels(limit).inc(),
        ),
        limits=FrontLimits(settings.max_body_bytes, settings.body_timeout_s, settings.idle_timeout_s),
        endpoints=endpoints,
        holders=holders,
        manager=manager,
    )


async def _listed_endpoints(
    settings: GatewaySettings, stack: AsyncExitStack, metrics: Metrics
) -> tuple[Sequence[Endpoint], Source | None]:
    """Return the listed pods, and the source of changes if the list can change."""
    if settings.kubernetes_service_selector:
        discovered = await _discovered_endpoints(settings, stack, metrics)
        return discovered.changed() or (), discovered.changed
    if settings.endpoints_file is not None:
        file = endpoint_file(settings.endpoints_file, metrics)
        return file.value, lambda: file.value if file.look() else None
    return tuple(map(endpoint_of, settings.endpoints)), None


async def _discovered_endpoints(
    settings: GatewaySettings, stack: AsyncExitStack, metrics: Metrics
) -> KubernetesEndpoints:
    # The library takes 25 MiB, so only gateways with discovery import it.
    from contextcache.kubernetes.client import KubernetesApi

    api = KubernetesApi.by_surroundings()
    stack.push_async_callback(api.close)
    discovered = KubernetesEndpoints(
        api,
        namespace=settings.kubernetes_namespace or api.namespace,
        selector=settings.kubernetes_service_selector,
        rules=SliceRules(
            settings.kubernetes_port_name,
            settings.kubernetes_sidecar_port_name,
            settings.kubernetes_turn_port_name,
            settings.kubernetes_scheme,
        ),
        metrics=metrics,
        clock=SystemClock(),
    )
    _run(stack, discovered.run(), "discovery")
    if not await discovered.until_tried(_FIRST_LIST_S):
        log.warning("gateway starts without pods: no list from the Kubernetes API yet")
    return discovered


def _load_limits(settings: GatewaySettings) -> LoadLimits:
    return LoadLimits(settings.saturated_waiting, settings.saturated_kv_usage, settings.shed_waiting)


def _run(stack: AsyncExitStack, loop: Coroutine[Any, Any, None], name: str) -> None:
    """Run a loop in a task until the stack closes."""
    stack.push_async_callback(_cancelled, asyncio.create_task(loop, name=name))


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
