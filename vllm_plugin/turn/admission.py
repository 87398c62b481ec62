"""Admission of requests to a pod: refuse a tenant above its limit in flight, and creates above its KV quota.

A sidecar that is silent, or has no quotas, refuses no request: a client never pays for a fault of the cache.

Large bodies reach the engine one at a time, a tenant's never before another tenant's that waits. vLLM reads and checks
a body in one step of its event loop: for as long as that takes, every other request of the pod waits, and the probe
too. Rules: the next large body is handed over when the last one has been read and the loop had as long for others. Of
each tenant one body waits in that queue. A body that is read within REST_FROM_S costs no rest.

The engine's loop is asked _ASKED_TIMES in a row after each large body: the slowest answer waited for the body to be
read, and the fastest tells how busy the loop is with other work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
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
_ASKED_TIMES = 3
"""The first answer may overtake the last bytes of a body, which are on another connection."""
_READ_S = 30.0
"""Deadline for the engine to read a body."""


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
    """Hands over the large bodies of one turn process."""

    ask_engine: Callable[[], Awaitable[object]]
    """Asks the engine's event loop for a short answer."""
    clock_s: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _engine: asyncio.Lock = field(default_factory=asyncio.Lock)
    _of_tenant: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """Locks by tenant, while a body of the tenant waits."""
    _free_at_s: float = 0.0
    _reading: asyncio.Task[None] | None = None
    """Holds the engine until it has read the last large body."""

    @contextmanager
    def receive(self, tenant: str, receive: Receive) -> Iterator[Receive]:
        """Give the block a `receive` that holds the last piece of a large body until its turn.

        An application that has sent that piece to the engine calls it again.
        """
        size_bytes, is_whole, sent = 0, False, asyncio.Event()

        async def handed() -> Message:
            nonlocal size_bytes, is_whole
            if is_whole:
                sent.set()
            message = await receive()
            size_bytes += len(message.get("body", b""))
            is_whole = message["type"] == "http.request" and not message.get("more_body", False)
            if size_bytes >= QUEUED_BYTES and is_whole:
                async with self._of_tenant.setdefault(tenant, asyncio.Lock()):
                    await self._engine.acquire()
                    try:
                        if (rest_s := self._free_at_s - self.clock_s()) > 0:
                            await self.sleep(rest_s)
                    except BaseException:
                        self._engine.release()
                        raise
                    self._reading = asyncio.create_task(self._hold_until_read(sent))
            return message

        try:
            yield handed
        finally:
            sent.set()

    async def _hold_until_read(self, sent: asyncio.Event) -> None:
        took_s: list[float] = [0.0]
        with suppress(TimeoutError):
            async with asyncio.timeout(_READ_S):
                await sent.wait()
                took_s = [await self._asked_s() for _ in range(_ASKED_TIMES)]
        read_s = max(took_s) - min(took_s)
        self._free_at_s = self.clock_s() + read_s if read_s >= REST_FROM_S else 0.0
        self._engine.release()

    async def _asked_s(self) -> float:
        asked_s = self.clock_s()
        await self.ask_engine()
        return self.clock_s() - asked_s
