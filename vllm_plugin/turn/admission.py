"""Admission of requests to a pod: refuse a tenant above its limit in flight, and creates above its KV quota.

A sidecar that is silent, or has no quotas, refuses no request: a client never pays for a fault of the cache.

Large bodies reach the engine one at a time, a tenant's never before another tenant's that waits. vLLM reads and checks
a body in one step of the event loop: for as long as that takes, every other request of the pod waits, and the probe
too. Rules: the next large body is handed over when the last one has been read and the loop had as long for others. Of
each tenant one body waits in that queue. A body that is read within REST_FROM_S costs no rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from contextcache.clock import Clock
from contextcache.errors import ContextCacheError, ContextQuotaExceeded
from contextcache.model import TenantId
from contextcache.requests import QUEUED_BYTES, TenantsInHand
from vllm_plugin.turn.engine import Message, Receive
from vllm_plugin.turn.metrics import TurnMetrics
from vllm_plugin.turn.settings import TurnSettings

if TYPE_CHECKING:
    from kv_sidecar.client import KVSidecarClient

log = logging.getLogger(__name__)

QUOTA = "quota"
"""Beside the limits of `contextcache.requests`: why a turn was refused."""
_CREATE_SHARE = 0.95
"""Share of a quota that creates may fill; the rest is for turns of existing contexts. A save that does not fit is
refused whole, so a tenant comes near its quota and hardly ever reaches it."""
_UNASKED_MS = 10_000
"""How long a sidecar is left alone that was silent or has no quotas: creates cost nothing then."""


REST_FROM_S = 0.02


class TurnAdmission(TenantsInHand):
    """Counts requests by tenant's tag and bodies by tenant, and asks the sidecar before a create. One per process."""

    def __init__(
        self, settings: TurnSettings, *, quotas: KVSidecarClient | None, clock: Clock, metrics: TurnMetrics
    ) -> None:
        """`quotas`: client of the sidecar that counts a tenant's KV; None: no quotas."""
        super().__init__(
            requests_max=settings.tenant_turns_max,
            bytes_max=settings.tenant_bytes_max,
            on_refused=lambda limit: metrics.refusals.labels(limit=limit).inc(),
        )
        self._quotas = quotas
        self._deadline_s = settings.rpc_deadline_ms / 10_000
        self._clock = clock
        self._unasked_until_ms = 0

    async def check_quota(self, tenant: TenantId) -> None:
        """Refuse a create for which there is no room. Raises ContextQuotaExceeded.

        The sidecar counts stored KV, so creates at one time may all be admitted. It then refuses their saves.
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
            self.refused(QUOTA)
            raise ContextQuotaExceeded(
                "this tenant's contexts have reached their limit of bytes in this pod: delete some"
            )


@dataclass
class BodyQueue:
    """Hands over the large bodies of one API server process."""

    clock_s: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _engine: asyncio.Lock = field(default_factory=asyncio.Lock)
    _of_tenant: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """Locks by tenant, while a body of the tenant waits."""
    _free_at_s: float = 0.0

    def receive(self, tenant: str, receive: Receive) -> Receive:
        """Return a `receive` that holds the last piece of a large body until its turn."""
        size_bytes = 0

        async def handed() -> Message:
            nonlocal size_bytes
            message = await receive()
            size_bytes += len(message.get("body", b""))
            if size_bytes >= QUEUED_BYTES and message["type"] == "http.request" and not message.get("more_body", False):
                async with self._of_tenant.setdefault(tenant, asyncio.Lock()):
                    await self._engine.acquire()
                    try:
                        if (rest_s := self._free_at_s - self.clock_s()) > 0:
                            await self.sleep(rest_s)
                    except BaseException:
                        self._engine.release()
                        raise
                    # The engine parses the body before the loop runs this callback.
                    asyncio.get_running_loop().call_soon(self._was_read, self.clock_s())
            return message

        return handed

    def _was_read(self, begun_s: float) -> None:
        ended_s = self.clock_s()
        took_s = ended_s - begun_s
        self._free_at_s = ended_s + took_s if took_s >= REST_FROM_S else 0.0
        self._engine.release()
