"""Parts of one gateway process that its flows and both fronts share. `app.py` makes them once; tests make their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from contextcache.clock import Clock
from gateway.metrics import Metrics
from gateway.pods.endpoints import WatchedEndpoints
from gateway.pods.sidecars import Holders
from gateway.settings import GatewaySettings
from gateway.tenants.keys import KeyFile, SingleTenant
from gateway.tenants.limits import FrontLimits, TenantLimits

if TYPE_CHECKING:
    from context_manager.client import ContextManagerClient
    from contextcache.wire.tls import WatchedTls
    from contextcache.wire.tracing import Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that a front needs beside the request."""

    settings: GatewaySettings
    secret: bytes
    """Key that signs identities. The pods have the same one."""
    clock: Clock
    metrics: Metrics
    tracer: Tracer
    tls: WatchedTls | None
    """Certificates of calls to other parts and of the listeners; None: TLS is off."""
    keys: KeyFile | SingleTenant
    tenants: TenantLimits
    limits: FrontLimits
    endpoints: WatchedEndpoints
    holders: Holders
    manager: ContextManagerClient
    """Client of the context manager. Each call has a deadline and raises StoreUnavailable after it."""
