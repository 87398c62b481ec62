"""Puts a gateway together: the only place that picks adapters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp
from prometheus_client import CollectorRegistry

from context_manager.client import ContextManagerClient
from contextcache.clock import SystemClock
from contextcache.process.settings import read_secret
from contextcache.wire.tls import WatchedTls
from contextcache.wire.tracing import Tracer, tracer_of
from gateway.flows import Gateway, GatewayRules
from gateway.fronts import ReadyState
from gateway.http.app import HttpFront
from gateway.http.carrier import Carrier, carrier_session
from gateway.kept import Plain
from gateway.metrics import Metrics
from gateway.pods.endpoints import Source, WatchedEndpoints
from gateway.pods.kubernetes import KubernetesEndpoints, SliceRules
from gateway.pods.probe import HttpProbe
from gateway.pods.sidecars import Holders, SidecarWaits
from gateway.pods.state import Endpoint, LoadLimits
from gateway.pods.static import EndpointFile, endpoint_of
from gateway.ports import Authenticator
from gateway.settings import GatewaySettings
from gateway.tenants.keys import KEY_HEADERS, KeyFile, SingleTenant
from gateway.tenants.limits import FrontLimits, TenantLimits
from kv_sidecar.client import KVSidecarClient

log = logging.getLogger(__name__)

_PROBES_PER_SIDECAR_PROBE = 5
"""What a sidecar says of itself changes with its engine only."""
_FIRST_LIST_S = 10.0
"""How long a starting gateway waits to hear of pods before it listens, not ready."""


@dataclass(frozen=True, slots=True)
class GatewayApp:
    """A running gateway without its listener."""

    front: HttpFront
    gateway: Gateway
    """For another front on the same core, with all below."""
    endpoints: WatchedEndpoints
    tenants: TenantLimits
    limits: FrontLimits
    metrics: Metrics
    ready_state: ReadyState
    tracer: Tracer
    tls: WatchedTls | None
    """For its listeners too."""


@asynccontextmanager
async def gateway_app(settings: GatewaySettings, *, registry: CollectorRegistry) -> AsyncIterator[GatewayApp]:
    """Run a gateway over the real context manager and sidecars; everything it opened is closed at the end.

    Raises OSError or ValueError when a file it needs is missing or broken. The other parts need not be there yet.
    """
    metrics = Metrics(registry)
    tenants = _tenants(settings, metrics)
    limits = _limits(settings)
    async with AsyncExitStack() as stack:
        tracer = tracer_of(settings, part="gateway", on_lost=metrics.lost_spans.inc)
        stack.push_async_callback(asyncio.to_thread, tracer.close)
        tls = metrics.certificates.open_tls(settings.tls)
        carrying = await stack.enter_async_context(
            carrier_session(connect_timeout_s=settings.connect_timeout_s, idle_timeout_s=settings.idle_timeout_s)
        )
        endpoints = await _watched_endpoints(settings, stack, metrics, tls)
        gateway = await _gateway(settings, stack, endpoints, tenants, metrics, tls)
        ready_state = ReadyState(gateway, endpoints, metrics=metrics)
        front = HttpFront(
            gateway=gateway,
            endpoints=endpoints,
            carrier=Carrier(carrying, total_timeout_s=settings.total_timeout_s, metrics=metrics, tls=tls),
            ready_state=ready_state,
            tenants=tenants,
            limits=limits,
            metrics=metrics,
            tracer=tracer,
            cors_origins=settings.cors_origins,
            console=settings.console,
        )
        yield GatewayApp(front, gateway, endpoints, tenants, limits, metrics, ready_state, tracer, tls)


async def _gateway(
    settings: GatewaySettings,
    stack: AsyncExitStack,
    endpoints: WatchedEndpoints,
    tenants: TenantLimits,
    metrics: Metrics,
    tls: WatchedTls | None,
) -> Gateway:
    directory = ContextManagerClient(settings.manager, timeout_s=settings.manager_timeout_s, tls=tls)
    stack.push_async_callback(directory.close)
    clock = SystemClock()
    return Gateway(
        authenticator=_authenticator(settings, stack, metrics),
        directory=directory,
        endpoints=endpoints,
        holders=await _watched_sidecars(settings, stack, endpoints, directory, metrics, tls),
        clock=clock,
        rules=_rules(settings),
        tenants=tenants,
    )


def _limits(settings: GatewaySettings) -> FrontLimits:
    return FrontLimits(
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
    )


async def _watched_endpoints(
    settings: GatewaySettings, stack: AsyncExitStack, metrics: Metrics, tls: WatchedTls | None
) -> WatchedEndpoints:
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
    stack.push_async_callback(_cancelled, asyncio.create_task(endpoints.run(), name="endpoint probes"))
    return endpoints


async def _listed_endpoints(
    settings: GatewaySettings, stack: AsyncExitStack, metrics: Metrics
) -> tuple[Sequence[Endpoint], Source | None]:
    """Return the pods there are and, where they may change, what tells of it."""
    if settings.kubernetes_service_selector:
        discovered = await _discovered_endpoints(settings, stack, metrics)
        return discovered.changed() or (), discovered.changed
    if settings.endpoints_file is not None:
        file = EndpointFile(settings.endpoints_file, metrics=metrics)
        return file.endpoints, file.changed
    return tuple(map(endpoint_of, settings.endpoints)), None


async def _discovered_endpoints(
    settings: GatewaySettings, stack: AsyncExitStack, metrics: Metrics
) -> KubernetesEndpoints:
    # The library costs 25 MiB, which only those pay who use it.
    from contextcache.kubernetes.client import KubernetesApi

    api = KubernetesApi.by_surroundings()
    stack.push_async_callback(api.close)
    discovered = KubernetesEndpoints(
        api,
        namespace=settings.kubernetes_namespace or api.namespace,
        selector=settings.kubernetes_service_selector,
        rules=SliceRules(
            settings.kubernetes_port_name, settings.kubernetes_sidecar_port_name, settings.kubernetes_scheme
        ),
        resync_s=settings.kubernetes_resync_s,
        metrics=metrics,
        clock=SystemClock(),
    )
    stack.push_async_callback(_cancelled, asyncio.create_task(discovered.run(), name="discovery"))
    if not await discovered.until_tried(_FIRST_LIST_S):
        log.warning("gateway starts without pods: no list from the Kubernetes API yet")
    return discovered


async def _watched_sidecars(
    settings: GatewaySettings,
    stack: AsyncExitStack,
    endpoints: WatchedEndpoints,
    directory: ContextManagerClient,
    metrics: Metrics,
    tls: WatchedTls | None,
) -> Holders:
    def connect(address: str) -> KVSidecarClient:
        return KVSidecarClient(address, timeout_s=settings.delete_timeout_s, tls=tls)

    waits = SidecarWaits(
        read_s=settings.sidecar_timeout_s,
        delete_s=settings.delete_timeout_s,
        pull_s=settings.pull_timeout_s,
        poll_s=settings.probe_timeout_s,
        interval_s=_PROBES_PER_SIDECAR_PROBE * settings.probe_interval_s,
    )
    holders = Holders(endpoints, directory, connect, clock=SystemClock(), metrics=metrics, waits=waits)
    stack.push_async_callback(holders.close)
    stack.push_async_callback(_cancelled, asyncio.create_task(holders.run(), name="sidecar probes"))
    return holders


def _load_limits(settings: GatewaySettings) -> LoadLimits:
    return LoadLimits(settings.saturated_waiting, settings.saturated_kv_usage, settings.shed_waiting)


def _rules(settings: GatewaySettings) -> GatewayRules:
    # With a key file the client's key is ours and ends here; without one it may be for the engine.
    removed = KEY_HEADERS if settings.api_keys_file else frozenset[str]()
    return GatewayRules(
        secret=read_secret(settings.secret_file),
        identity_ttl_ms=round(settings.identity_ttl_s * 1000),
        engine_paths=frozenset(settings.engine_paths),
        removed_headers=removed,
        salts_stateless=settings.salt_stateless,
        plain_max=Plain(settings.plain_max),
        label_headers=settings.label_headers,
    )


def _authenticator(settings: GatewaySettings, stack: AsyncExitStack, metrics: Metrics) -> Authenticator:
    if settings.api_keys_file is None:
        return SingleTenant()
    keys = KeyFile(settings.api_keys_file, metrics=metrics)
    stack.push_async_callback(_cancelled, asyncio.create_task(keys.run(), name="key file"))
    return keys


def _tenants(settings: GatewaySettings, metrics: Metrics) -> TenantLimits:
    return TenantLimits(
        clock=SystemClock(),
        rate_per_s=settings.tenant_rate_per_s,
        burst=settings.tenant_burst,
        requests_max=settings.tenant_in_flight_max,
        bytes_max=settings.tenant_buffered_bytes_max,
        total_requests_max=settings.max_in_flight,
        total_bytes_max=settings.max_buffered_bytes,
        on_refused=lambda limit: metrics.tenant_refusals.labels(limit).inc(),
    )


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
