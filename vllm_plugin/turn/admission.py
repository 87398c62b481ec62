"""Admission of requests to a pod: refuse a tenant above its limit in flight, and creates above its KV quota.

A sidecar that is silent, or has no quotas, refuses no request: a client never pays for a fault of the cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, ContextQuotaExceeded
from contextcache.model import TenantId
from contextcache.requests import TakeBytes, TenantsInHand

if TYPE_CHECKING:
    from vllm_plugin.turn.metrics import TurnMetrics
    from vllm_plugin.turn.ports import TenantQuotas
    from vllm_plugin.turn.settings import TurnSettings

log = logging.getLogger(__name__)

QUOTA = "quota"
"""Beside the limits of `contextcache.requests`: why a turn was refused."""
_CREATE_SHARE = 0.95
"""Of a quota that creates may fill; the rest is for the turns of the contexts that are there. A save that does not fit
is refused whole, so that a tenant comes near its quota and hardly ever up to it."""
_UNASKED_MS = 10_000
"""How long a sidecar is left alone that was silent or has no quotas: creates cost nothing then."""


class TurnAdmission:
    """Counts requests and bodies by tenant, and asks the sidecar before a create. One per API server process."""

    def __init__(
        self, settings: TurnSettings, *, quotas: TenantQuotas | None, clock: Clock, metrics: TurnMetrics | None = None
    ) -> None:
        """`quotas`: who knows how much KV a tenant has; None: nobody."""
        self._metrics = metrics
        self._in_hand = TenantsInHand(
            requests_max=settings.tenant_turns_max, bytes_max=settings.tenant_bytes_max, on_refused=self._count
        )
        self._quotas = quotas
        self._deadline_s = settings.quota_deadline_ms / 1000
        self._clock = clock
        self._unasked_until_ms = 0

    def request(self, tag: str) -> AbstractContextManager[None]:
        """Count one request for the length of a `with` block, with or without a context.

        `tag`: the tenant's (`identity.tenant_tag`). Entering raises TooManyInFlight.
        """
        return self._in_hand.request(tag)

    def in_flight(self) -> Mapping[str, int]:
        """Return the requests in flight by tenant's tag."""
        return self._in_hand.requests_of_all()

    def body(self, tenant: TenantId) -> AbstractContextManager[TakeBytes]:
        """Return what counts the bytes of one body for the length of a `with` block."""
        return self._in_hand.body(tenant)

    async def check_quota(self, tenant: TenantId) -> None:
        """Refuse a create for which there is no room. Raises ContextQuotaExceeded.

        The sidecar counts what is stored, so creates at one time may all be admitted; it refuses their saves then.
        """
        now_ms = self._clock.now_ms()
        # A clock set back must not keep the sidecar unasked for longer.
        if self._quotas is None or 0 < self._unasked_until_ms - now_ms <= _UNASKED_MS:
            return
        try:
            async with asyncio.timeout(self._deadline_s):
                usage = await self._quotas.tenant_usage(tenant)
        except (ContextCacheError, TimeoutError) as exc:
            self._unasked_until_ms = now_ms + _UNASKED_MS
            log.warning("quota unknown, create admitted", extra={"tenant": tenant, "reason": type(exc).__name__})
            return
        if not usage.limit_bytes:
            self._unasked_until_ms = now_ms + _UNASKED_MS
        elif usage.size_bytes >= usage.limit_bytes * _CREATE_SHARE:
            self._count(QUOTA)
            raise ContextQuotaExceeded(
                "this tenant's contexts have reached their limit of bytes in this pod: delete some"
            )

    def _count(self, limit: str) -> None:
        if self._metrics is not None:
            self._metrics.refusals.labels(limit=limit).inc()
