"""Puts a gateway together: the only place that picks adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp
from prometheus_client import CollectorRegistry

from context_manager.client import ContextManagerClient
from contextcache.clock import Clock, SystemClock
from contextcache.settings import read_secret
from gateway.auth import KeyFile, SingleTenant
from gateway.carrier import Carrier, carrier_session
from gateway.control_app import ReadyState, control_app
from gateway.endpoints import StaticEndpoints
from gateway.exchange import BodyBudget
from gateway.fairness import TenantRates
from gateway.flows import Gateway, GatewayRules
from gateway.holders import Holders
from gateway.http_front import FrontLimits, HttpFront
from gateway.metrics import Metrics
from gateway.ports import Authenticator, Endpoint, KVSidecar, SessionDirectory
from gateway.probe import HttpProbe
from gateway.routing import LoadLimits
from gateway.settings import GatewaySettings
from kv_sidecar.client import KVSidecarClient


@dataclass(frozen=True, slots=True)
class GatewayApp:
    """A running gateway without its listener."""

    front: HttpFront
    gateway: Gateway
    """For another front on the same core, with all below."""
    endpoints: StaticEndpoints
    budget: BodyBudget
    limits: FrontLimits
    metrics: Metrics
    ready_state: ReadyState


@asynccontextmanager
async def gateway_app(settings: GatewaySettings, *, registry: CollectorRegistry) -> AsyncIterator[GatewayApp]:
    """Run a gateway over the real context manager and sidecars; everything it opened is closed at the end.

    Raises OSError or ValueError when a file it needs is missing or broken. The other parts need not be there yet.
    """
    async with AsyncExitStack() as stack:
        directory = ContextManagerClient(settings.manager, timeout_s=settings.manager_timeout_s)
        stack.push_async_callback(directory.close)
        sidecars: dict[str, KVSidecar] = {}
        for endpoint in settings.endpoints:
            if endpoint.sidecar:
                sidecar = KVSidecarClient(endpoint.sidecar, timeout_s=settings.delete_timeout_s)
                stack.push_async_callback(sidecar.close)
                sidecars[endpoint.name] = sidecar
        app = await stack.enter_async_context(
            assembled(settings, directory=directory, sidecars=sidecars, registry=registry, clock=SystemClock())
        )
        yield app


@asynccontextmanager
async def assembled(
    settings: GatewaySettings,
    *,
    directory: SessionDirectory,
    sidecars: Mapping[str, KVSidecar],
    registry: CollectorRegistry,
    clock: Clock,
) -> AsyncIterator[GatewayApp]:
    """Run a gateway over the given directory and sidecars, probing its endpoints over HTTP."""
    metrics = Metrics(registry)
    async with AsyncExitStack() as stack:
        probing = await stack.enter_async_context(aiohttp.ClientSession())
        carrying = await stack.enter_async_context(
            carrier_session(connect_timeout_s=settings.connect_timeout_s, idle_timeout_s=settings.idle_timeout_s)
        )
        endpoints = StaticEndpoints(
            [Endpoint(found.name, found.url, found.sidecar) for found in settings.endpoints],
            HttpProbe(probing, timeout_s=settings.probe_timeout_s),
            metrics=metrics,
            interval_s=settings.probe_interval_s,
        )
        stack.push_async_callback(_cancelled, asyncio.create_task(endpoints.run(), name="endpoint probes"))
        gateway = Gateway(
            authenticator=_authenticator(settings, clock, metrics),
            directory=directory,
            endpoints=endpoints,
            holders=Holders(
                sidecars,
                endpoints,
                clock=clock,
                metrics=metrics,
                read_timeout_s=settings.sidecar_timeout_s,
                delete_timeout_s=settings.delete_timeout_s,
                pull_timeout_s=settings.pull_timeout_s,
            ),
            clock=clock,
            rules=_rules(settings),
            rates=TenantRates(clock=clock, rate_per_s=settings.tenant_rate_per_s, burst=settings.tenant_burst),
            metrics=metrics,
        )
        ready_state = ReadyState(gateway, endpoints)
        budget = BodyBudget(settings.max_buffered_bytes)
        limits = FrontLimits(
            max_body_bytes=settings.max_body_bytes,
            max_in_flight=settings.max_in_flight,
            body_timeout_s=settings.body_timeout_s,
        )
        front = HttpFront(
            gateway=gateway,
            endpoints=endpoints,
            carrier=Carrier(carrying, total_timeout_s=settings.total_timeout_s, metrics=metrics),
            control=control_app(gateway, ready_state, metrics),
            budget=budget,
            limits=limits,
            metrics=metrics,
        )
        yield GatewayApp(front, gateway, endpoints, budget, limits, metrics, ready_state)


def _rules(settings: GatewaySettings) -> GatewayRules:
    # With a key file the client's key is ours and ends here; without one it may be for the engine.
    removed = frozenset({"authorization"}) if settings.api_keys_file else frozenset[str]()
    return GatewayRules(
        secret=read_secret(settings.secret_file),
        identity_ttl_ms=round(settings.identity_ttl_s * 1000),
        engine_paths=frozenset(settings.engine_paths),
        limits=LoadLimits(
            saturated_waiting=settings.saturated_waiting,
            saturated_kv_usage=settings.saturated_kv_usage,
            shed_waiting=settings.shed_waiting,
        ),
        removed_headers=removed,
    )


def _authenticator(settings: GatewaySettings, clock: Clock, metrics: Metrics) -> Authenticator:
    if settings.api_keys_file is None:
        return SingleTenant()
    return KeyFile(settings.api_keys_file, clock=clock, metrics=metrics)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
