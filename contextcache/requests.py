"""Rules for requests that gateway and pod share: requests in flight by tenant, large bodies, repeated headers. Pure.

*Shares*: a limit of all tenants together refuses only tenants that have their equal share of it. Requests of the
gateway, look-ups, loads and saves of the engine, pulls and saves of the sidecar are limited by this one rule.

*In flight*: requests and bytes of their bodies by tenant. A request over a limit is refused and not counted. A `with`
block returns its count on every exit: answered, failed or cancelled. Counts belong to one event loop, so N processes
allow a tenant N times its limit.

*Large bodies* are read in a thread, one at a time. A decoder holds the interpreter lock while it runs. So the next
large body waits as long as the last one took, and the event loop has at least that time for other requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import RLock
from typing import TypeVar

from contextcache.errors import NoReadyEndpoint, TooManyInFlight
from contextcache.model import TenantId

_RETRY_AFTER_S = 1
REQUESTS = "requests"
BYTES = "bytes"
SHARE = "share"
OVERLOAD_MAX = 2
"""Factor of the total limit up to which tenants below their share may go. Four tenants at once reach it."""
LARGE_BYTES = 1 << 20
"""Bytes of a body from which it is large. Smaller bodies take a few milliseconds at most."""

QUEUED_BYTES = 64 << 10
"""Bytes of a body from which the pod's turn process hands it to the engine in turn. vLLM reads and checks such a body
for some milliseconds or more, in which it answers no other request. Smaller bodies may reach vLLM directly."""

Read = TypeVar("Read")
TakeBytes = Callable[[int], None]
"""Counts more bytes of one body. Raises TooManyInFlight."""


def fair_share(limit: int, num_tenants: int) -> int:
    """Return each tenant's equal share of a limit that is reached; 1 at least.

    At the limit a tenant with its share is refused, and a tenant below it is not. So N tenants together never exceed
    `limit` times 1 + 1/2 + … + 1/N.
    """
    return max(1, limit // num_tenants)


class TenantShares(dict[TenantId, int]):
    """Positive amounts in use by tenant, of something that all tenants share. Any thread may change them."""

    def __init__(self, limit: int = 0, holders: Iterable[TenantId] = ()) -> None:
        """`limit` of all amounts together; 0: no limit. `holders`: tenants in use of one each."""
        super().__init__()
        self._limit = limit
        self._lock = RLock()
        self.total = 0
        for tenant in holders:
            self.add(tenant, 1)

    def add(self, tenant: TenantId, amount: int) -> None:
        """Count more, or less with a negative amount."""
        with self._lock:
            count = self.get(tenant, 0) + amount
            assert count >= 0, "more returned than taken"
            self.total += amount
            if count:
                self[tenant] = count
            else:
                self.pop(tenant, None)

    def has_share(self, tenant: TenantId) -> bool:
        """Return whether the limit is reached and a tenant has its equal share of it."""
        if not self._limit or self.total < self._limit:
            return False
        return self.get(tenant, 0) >= fair_share(self._limit, len(self) + (tenant not in self))

    @property
    def is_overloaded(self) -> bool:
        """Whether even a tenant without any gets nothing."""
        return 0 < OVERLOAD_MAX * self._limit <= self.total

    def takes(self, tenant: TenantId) -> bool:
        """Return whether a tenant may have one more."""
        return not (self.is_overloaded or self.has_share(tenant))

    def take(self, tenant: TenantId) -> bool:
        """Count one more if the tenant may have it; return whether it may."""
        with self._lock:
            if may_have := self.takes(tenant):
                self.add(tenant, 1)
        return may_have


class TenantsInHand:
    """Requests and bytes in flight by tenant. Tenants without any are not stored."""

    def __init__(
        self,
        *,
        requests_max: int = 0,
        bytes_max: int = 0,
        total_requests_max: int = 0,
        on_refused: Callable[[str], None] | None = None,
    ) -> None:
        """Limits of one tenant, and `total_requests_max` of all together. 0: no limit.

        `on_refused` receives the limit that was reached: REQUESTS, BYTES or SHARE.
        """
        self.limits = requests_max, bytes_max
        """Requests and bytes that a tenant may have in flight; 0: no limit."""
        self._total_requests_max = total_requests_max
        self._requests, self._bytes = TenantShares(total_requests_max), TenantShares()
        self.refused: Callable[[str], None] = on_refused or (lambda _limit: None)

    @contextmanager
    def request(self, tenant: TenantId, *, elsewhere: int = 0) -> Iterator[None]:
        """Count one request during a `with` block. Entering raises TooManyInFlight, NoReadyEndpoint.

        `elsewhere`: the tenant's requests in flight that other processes count.
        """
        limit = self.limits[0]
        self._check_total(tenant)
        if limit and self._requests.get(tenant, 0) + 1 + elsewhere > limit:
            raise self._too_many(REQUESTS, f"this tenant has reached its limit of {limit} requests in flight")
        self._requests.add(tenant, 1)
        try:
            yield
        finally:
            self._requests.add(tenant, -1)

    @contextmanager
    def body(self, tenant: TenantId) -> Iterator[TakeBytes]:
        """Count the bytes of one body during a `with` block."""
        taken_bytes = 0

        def take(size_bytes: int) -> None:
            nonlocal taken_bytes
            self.take_bytes(tenant, size_bytes)
            taken_bytes += size_bytes

        try:
            yield take
        finally:
            self.give_back_bytes(tenant, taken_bytes)

    def take_bytes(self, tenant: TenantId, size_bytes: int) -> None:
        """Count bytes. Raises TooManyInFlight, and counts nothing then."""
        limit = self.limits[1]
        if limit and self._bytes.get(tenant, 0) + size_bytes > limit:
            raise self._refused_bytes(f"this tenant's request bodies in flight have reached the limit of {limit} bytes")
        self._bytes.add(tenant, size_bytes)

    def give_back_bytes(self, tenant: TenantId, size_bytes: int) -> None:
        """Return counted bytes."""
        self._bytes.add(tenant, -size_bytes)

    def held_by(self, tenant: TenantId) -> tuple[int, int]:
        """Return the requests and bytes that a tenant has in flight."""
        return self._requests.get(tenant, 0), self._bytes.get(tenant, 0)

    def requests_of_all(self) -> Mapping[TenantId, int]:
        """Return the requests of each tenant in flight. The mapping follows later changes."""
        return self._requests

    def is_empty(self) -> bool:
        """Return whether nothing is in flight."""
        return not self._requests and not self._bytes

    def _refused_bytes(self, message: str) -> TooManyInFlight:
        return self._too_many(BYTES, message)

    def _too_many(self, limit: str, message: str) -> TooManyInFlight:
        self.refused(limit)
        return TooManyInFlight(message, retry_after_s=_RETRY_AFTER_S)

    def _check_total(self, tenant: TenantId) -> None:
        limit = self._total_requests_max
        if self._requests.has_share(tenant):
            raise self._too_many(
                SHARE, f"all {limit} requests that the gateway carries are in use, and this tenant has its fair share"
            )
        if self._requests.is_overloaded:
            raise NoReadyEndpoint(
                f"the gateway has reached its limit of {limit} requests in flight", retry_after_s=_RETRY_AFTER_S
            )


class LargeBodies:
    """Reads large bodies of one process in turn, in one thread that ends with its owner."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="large bodies")
        self._free_at_s = 0.0

    async def read(self, reading: Callable[[bytes], Read], body: bytes) -> Read:
        """Return the result of `reading` a body; it must not touch the event loop's state. Raises as `reading`."""
        if len(body) <= LARGE_BYTES:
            return reading(body)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read_in_turn, reading, body)

    def _read_in_turn(self, reading: Callable[[bytes], Read], body: bytes) -> Read:
        begun_s = time.monotonic()
        if begun_s < self._free_at_s:
            time.sleep(self._free_at_s - begun_s)
            begun_s = self._free_at_s
        try:
            return reading(body)
        finally:
            ended_s = time.monotonic()
            self._free_at_s = 2 * ended_s - begun_s


def joined_headers(raw: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Join repeated headers with commas, so that a second value never hides the first one, which the pod reads."""
    headers: dict[str, str] = {}
    for name, value in raw:
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
