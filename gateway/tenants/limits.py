"""Limits of each tenant, and of all together: requests per second, requests and bytes in flight. Pure.

Both fronts share the limits of one process, so N replicas allow a tenant N times as much. A request over a limit is
refused and not counted.
"""

from __future__ import annotations

import asyncio
import io
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from typing_extensions import override

from contextcache.clock import Clock
from contextcache.errors import BodyTooLarge, NoReadyEndpoint, TenantRateExceeded, UploadTooSlow
from contextcache.model import TenantId
from contextcache.requests import TenantsInHand

T = TypeVar("T")

_MAX_TENANTS = 65_536
"""Maximum number of tenants with a stored rate. The longest idle tenant is forgotten, which can only favour it."""
BYTES_PER_S_MIN = 32 << 10
"""Slowest upload that is served: a quarter of a megabit per second."""


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """Limits of one front."""

    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 60.0
    """Seconds of an upload, see Upload."""
    idle_timeout_s: float = 600.0
    """Longest silence of an answer that the Envoy front passes on. The HTTP front sets it on its connections."""

    def check_size(self, size_bytes: int) -> None:
        """Raise BodyTooLarge for a received or announced size over the limit."""
        if size_bytes > self.max_body_bytes:
            raise BodyTooLarge(f"the request body is over the limit of {self.max_body_bytes} bytes")


class TenantLimits(TenantsInHand):
    """Limits in flight, and a rate limit that refuses one tenant's flood before it fills the queue of all.

    Generic cell rate algorithm (ITU-T I.371): one time stamp per tenant.
    """

    def __init__(  # noqa: PLR0913  # every limit, by name
        self,
        *,
        clock: Clock,
        rate_per_s: float = 0.0,
        burst: int = 1,
        requests_max: int = 0,
        bytes_max: int = 0,
        total_requests_max: int = 2048,
        total_bytes_max: int = 1 << 30,
        on_refused: Callable[[str], None] | None = None,
    ) -> None:
        """Set the limits of each tenant (0: no limit), and with `total_…` those of all tenants together.

        `burst`: requests that an idle tenant may send at once, 1 or more.
        """
        # Without a limit per tenant bytes are counted too: `take_bytes` bounds the tenant's part of the total.
        bytes_max = min(bytes_max or total_bytes_max, total_bytes_max)
        super().__init__(
            requests_max=requests_max,
            bytes_max=bytes_max,
            total_requests_max=total_requests_max,
            on_refused=on_refused,
        )
        self._clock = clock
        self.rate_per_s, self.burst = rate_per_s, burst
        self._interval_ms = 1000 / rate_per_s if rate_per_s else 0.0
        self._tolerance_ms = self._interval_ms * (burst - 1)
        self._due_ms: OrderedDict[TenantId, float] = OrderedDict()
        """Time at which a tenant has its whole burst again."""
        self._total_bytes_max = total_bytes_max
        self.held_bytes = 0

    def ask(self, tenant: TenantId) -> None:
        """Count one request. Raises TenantRateExceeded with the seconds until the next one is allowed."""
        if not self._interval_ms:
            return
        now_ms = self._clock.now_ms()
        due_ms = max(self._due_ms.get(tenant, 0.0), now_ms)
        # After a clock was set back, a tenant waits at most as long as for its burst.
        due_ms = min(due_ms, now_ms + self._tolerance_ms + self._interval_ms)
        wait_ms = due_ms - self._tolerance_ms - now_ms
        if wait_ms > 0:
            self._due_ms[tenant] = due_ms
            raise TenantRateExceeded(
                "this tenant has reached its limit of requests per second", retry_after_s=math.ceil(wait_ms / 1000)
            )
        self._due_ms[tenant] = due_ms + self._interval_ms
        self._due_ms.move_to_end(tenant)
        while len(self._due_ms) > _MAX_TENANTS:
            self._due_ms.popitem(last=False)

    @override
    def take_bytes(self, tenant: TenantId, size_bytes: int) -> None:
        """Count bytes of a body as held. Raises TooManyInFlight or NoReadyEndpoint, and counts nothing then.

        A tenant may hold at most as many bytes as it leaves free: one tenant half of all bytes, two a third each. So a
        tenant that holds nothing finds as much room as the largest tenant has, and the largest tenant is refused first
        (dynamic thresholds, Choudhury and Hahne 1998).
        """
        _, in_hand_bytes = self.held_by(tenant)
        if in_hand_bytes + size_bytes > self._total_bytes_max - self.held_bytes:
            if in_hand_bytes:
                raise self._refused_bytes(
                    "this tenant's request bodies in flight have reached its fair share of the gateway's memory"
                )
            raise NoReadyEndpoint("the gateway has reached its limit of request bodies in memory", retry_after_s=1)
        super().take_bytes(tenant, size_bytes)
        self.held_bytes += size_bytes

    @override
    def give_back_bytes(self, tenant: TenantId, size_bytes: int) -> None:
        """Return counted bytes."""
        super().give_back_bytes(tenant, size_bytes)
        self.held_bytes -= size_bytes


class Upload:
    """One upload, with bounds on its size and its time. Needs a running loop.

    A slow body occupies memory that all tenants share. So a whole body has `body_timeout_s`, plus one second for each
    BYTES_PER_S_MIN received: 32 MiB over the slowest line take 18 minutes, and a trickle ends after one. A silence
    lasts at most `body_timeout_s` too.
    """

    def __init__(self, limits: FrontLimits) -> None:
        self._clock = asyncio.get_running_loop().time
        self._limits = limits
        self._ends_s = self._clock() + limits.body_timeout_s
        self._came_bytes = 0

    async def wait_for(self, piece: Awaitable[T], *, size_bytes: int = 0) -> T:
        """Return the next piece. Raises UploadTooSlow.

        `size_bytes`: size of a piece that the proxy in front collects, which extends its deadline.
        """
        ends_s = min(self._clock() + self._limits.body_timeout_s, self._ends_s) + size_bytes / BYTES_PER_S_MIN
        try:
            async with asyncio.timeout_at(ends_s):
                return await piece
        except TimeoutError as exc:
            raise UploadTooSlow("the request body did not arrive before the upload deadline") from exc

    def came(self, size_bytes: int) -> None:
        """Count received bytes. Raises BodyTooLarge."""
        self._came_bytes += size_bytes
        self._limits.check_size(self._came_bytes)
        self._ends_s += size_bytes / BYTES_PER_S_MIN


class HeldBody(Upload, AbstractContextManager["HeldBody"]):
    """Pieces of one body, counted as in flight during a `with` block."""

    def __init__(self, tenants: TenantLimits, tenant: TenantId, limits: FrontLimits) -> None:
        super().__init__(limits)
        self._tenants = tenants
        self._tenant = tenant
        self._body = io.BytesIO()
        self._held_bytes = 0
        """Bytes counted: the reserved bytes, or the received bytes if they are more."""

    @override
    def __exit__(self, *_exc: object) -> None:
        self._tenants.give_back_bytes(self._tenant, self._held_bytes)
        self._held_bytes = 0
        self._body = io.BytesIO()

    def reserve(self, size_bytes: int) -> None:
        """Count the bytes that a head announces, so that a body is refused before it is sent. Raises as `add`."""
        self._limits.check_size(size_bytes)
        self._take(size_bytes)

    def add(self, piece: bytes) -> None:
        """Hold another piece. Raises BodyTooLarge, NoReadyEndpoint, TooManyInFlight."""
        self.came(len(piece))
        self._take(self._body.tell() + len(piece) - self._held_bytes)
        if not self._body.tell():
            self._body = io.BytesIO(piece)  # shares the bytes: most bodies are one piece
            self._body.seek(len(piece))
        else:
            self._body.write(piece)

    def whole(self) -> bytes:
        """Return the body, without a copy."""
        return self._body.getvalue()

    def _take(self, size_bytes: int) -> None:
        if size_bytes > 0:
            self._tenants.take_bytes(self._tenant, size_bytes)
            self._held_bytes += size_bytes
