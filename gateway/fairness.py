"""How fast a tenant may ask: a bucket each, so that one tenant's flood is refused before it is everybody's queue. Pure.

The generic cell rate algorithm (ITU-T I.371): one time stamp a tenant. Per gateway process: with N replicas a tenant
may ask N times as fast.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from contextcache.clock import Clock
from contextcache.errors import TenantRateExceeded
from contextcache.model import TenantId

_MAX_TENANTS = 65_536
"""Tenants remembered; the one that asked longest ago is forgotten first, which only ever favours it."""


class TenantRates:
    """Requests each tenant may still make."""

    def __init__(self, *, clock: Clock, rate_per_s: float, burst: int) -> None:
        """`rate_per_s` 0: no limit. `burst`: requests a tenant that was idle may make at once, 1 or more."""
        self._clock = clock
        self._interval_ms = 1000 / rate_per_s if rate_per_s else 0.0
        self._tolerance_ms = self._interval_ms * (burst - 1)
        self._due_ms: OrderedDict[TenantId, float] = OrderedDict()
        """Time at which a tenant's bucket is full again."""

    def take(self, tenant: TenantId) -> None:
        """Count one request. Raises TenantRateExceeded, with the time after which one is welcome."""
        if not self._interval_ms:
            return
        now_ms = self._clock.now_ms()
        due_ms = max(self._due_ms.get(tenant, 0.0), now_ms)
        # A clock set back must not lock a tenant out for longer than its own bucket.
        due_ms = min(due_ms, now_ms + self._tolerance_ms + self._interval_ms)
        wait_ms = due_ms - self._tolerance_ms - now_ms
        if wait_ms > 0:
            self._due_ms[tenant] = due_ms
            raise TenantRateExceeded("too many requests from this tenant", retry_after_s=math.ceil(wait_ms / 1000))
        self._due_ms[tenant] = due_ms + self._interval_ms
        self._due_ms.move_to_end(tenant)
        while len(self._due_ms) > _MAX_TENANTS:
            self._due_ms.popitem(last=False)
