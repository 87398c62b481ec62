"""Rules for requests that gateway and pod share: requests in hand by tenant, large bodies, repeated headers. Pure.

*In hand*: requests and bytes of their bodies by tenant. More than the limit is refused, which changes nothing. A `with`
block gives back its count on every way out: answered, failed, cancelled. Counts are for one event loop: with N
processes a tenant may have N times as much. A limit of all tenants together refuses the tenants that have their equal
share of it, so one tenant's requests never cost another its own.

*Large bodies* are read beside the event loop, one at a time. A decoder holds the interpreter for as long as it runs, a
thread of its own or not. So the next large body waits for as long as the last one took, and the loop has at least that
time for other requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Self, TypeVar

from contextcache.errors import NoReadyEndpoint, TooManyInFlight
from contextcache.model import TenantId

_RETRY_AFTER_S = 1
REQUESTS = "requests"
BYTES = "bytes"
SHARE = "share"
_TOTAL_OVERLOAD = 2
"""Times the limit of all tenants together that those below their share may fill it: four tenants at once reach it."""
LARGE_BYTES = 1 << 20
"""Smaller bodies take a few milliseconds at the worst."""

Read = TypeVar("Read")


def fair_share(limit: int, num_tenants: int) -> int:
    """Return how much of a limit each of so many tenants may have when it is reached; 1 at least.

    At the limit a tenant with its share is refused, and a tenant below it is not. So N tenants never have more than
    `limit` times 1 + 1/2 + … + 1/N together.
    """
    return max(1, limit // num_tenants)


class TenantsInHand:
    """Requests and bytes by tenant; only tenants that have something in hand are remembered."""

    def __init__(
        self,
        *,
        requests_max: int = 0,
        bytes_max: int = 0,
        total_requests_max: int = 0,
        on_refused: Callable[[str], None] | None = None,
    ) -> None:
        """0: no limit; bytes are then not counted. `total_requests_max`: of all tenants together.

        `on_refused` is told which limit was met: REQUESTS, BYTES or SHARE.
        """
        self._requests = _Counts(requests_max, total_max=total_requests_max, is_counting=True)
        self._bytes = _Counts(bytes_max, is_counting=bool(bytes_max))
        self.refused = on_refused if on_refused is not None else _nobody

    def request(self, tenant: TenantId, *, elsewhere: int = 0) -> AbstractContextManager[None]:
        """Count one request for the length of a `with` block. Entering raises TooManyInFlight, NoReadyEndpoint.

        `elsewhere`: requests of the tenant in flight that are not counted here.
        """
        return self._counted_request(tenant, elsewhere)

    def body(self, tenant: TenantId) -> BodyInHand:
        """Return what counts the bytes of one body for the length of a `with` block."""
        return BodyInHand(self, tenant)

    def take_bytes(self, tenant: TenantId, size_bytes: int) -> None:
        """Count bytes. Raises TooManyInFlight, and counts nothing then."""
        if not self._bytes.take(tenant, size_bytes):
            raise self._refused_bytes(
                f"this tenant's request bodies in flight have reached the limit of {self._bytes.limit} bytes"
            )

    def give_back_bytes(self, tenant: TenantId, size_bytes: int) -> None:
        """Count bytes as free that were taken before."""
        self._bytes.give_back(tenant, size_bytes)

    @property
    def limits(self) -> tuple[int, int]:
        """Requests and bytes a tenant may have in hand; 0: as many as it likes."""
        return self._requests.limit, self._bytes.limit

    def held_by(self, tenant: TenantId) -> tuple[int, int]:
        """Return the requests and bytes a tenant has in hand, as far as they are counted."""
        return self._requests.of(tenant), self._bytes.of(tenant)

    def requests_of_all(self) -> Mapping[TenantId, int]:
        """Return the requests that each tenant has in hand, as far as they are counted."""
        return self._requests.of_all

    def is_empty(self) -> bool:
        """Return whether nothing is in hand."""
        return self._requests.is_empty() and self._bytes.is_empty()

    def _refused_bytes(self, message: str) -> TooManyInFlight:
        self.refused(BYTES)
        return TooManyInFlight(message, retry_after_s=_RETRY_AFTER_S)

    @contextmanager
    def _counted_request(self, tenant: TenantId, elsewhere: int) -> Iterator[None]:
        self._check_total(tenant)
        if not self._requests.take(tenant, 1, elsewhere=elsewhere):
            self.refused(REQUESTS)
            raise TooManyInFlight(
                f"this tenant has reached its limit of {self._requests.limit} requests in flight",
                retry_after_s=_RETRY_AFTER_S,
            )
        try:
            yield
        finally:
            self._requests.give_back(tenant, 1)

    def _check_total(self, tenant: TenantId) -> None:
        limit, taken = self._requests.total_max, self._requests.total
        if not limit or taken < limit:
            return
        if self._requests.of(tenant) >= fair_share(limit, self._requests.num_sharing(tenant)):
            self.refused(SHARE)
            raise TooManyInFlight(
                f"all {limit} requests that the gateway carries are in use, and this tenant has its fair share",
                retry_after_s=_RETRY_AFTER_S,
            )
        if taken >= _TOTAL_OVERLOAD * limit:
            raise NoReadyEndpoint(
                f"the gateway has reached its limit of {limit} requests in flight", retry_after_s=_RETRY_AFTER_S
            )


def _nobody(limit: str) -> None:
    del limit


class BodyInHand:
    """The bytes of one body, as they come."""

    def __init__(self, tenants: TenantsInHand, tenant: TenantId) -> None:
        self._tenants = tenants
        self._tenant = tenant
        self._size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._tenants.give_back_bytes(self._tenant, self._size_bytes)
        self._size_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Count more bytes. Raises TooManyInFlight."""
        self._tenants.take_bytes(self._tenant, size_bytes)
        self._size_bytes += size_bytes


class _Counts:
    """One kind of thing, by tenant."""

    def __init__(self, limit: int, *, is_counting: bool, total_max: int = 0) -> None:
        self.limit, self.total_max, self._is_counting = limit, total_max, is_counting
        self.total = 0
        self._taken: dict[TenantId, int] = {}
        self.of_all: Mapping[TenantId, int] = self._taken

    def take(self, tenant: TenantId, amount: int, *, elsewhere: int = 0) -> bool:
        if not self._is_counting or not amount:
            return True
        taken = self._taken.get(tenant, 0) + amount
        if self.limit and taken + elsewhere > self.limit:
            return False
        self._taken[tenant] = taken
        self.total += amount
        return True

    def give_back(self, tenant: TenantId, amount: int) -> None:
        if not self._is_counting or not amount:
            return
        self.total -= amount
        left = self._taken[tenant] - amount
        assert left >= 0, "more returned than taken"
        if left:
            self._taken[tenant] = left
        else:
            del self._taken[tenant]

    def of(self, tenant: TenantId) -> int:
        return self._taken.get(tenant, 0)

    def num_sharing(self, tenant: TenantId) -> int:
        """Return the tenants that have something, this one included."""
        return len(self._taken) + (tenant not in self._taken)

    def is_empty(self) -> bool:
        return not self._taken


class LargeBodies:
    """Reads those of one process; knows nothing of what is read in them."""

    def __init__(self) -> None:
        """Start nothing yet; the one thread ends with its owner."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="large bodies")
        self._free_at_s = 0.0

    async def read(self, reading: Callable[[bytes], Read], body: bytes, *, objects_max: int | None = None) -> Read:
        """Return what `reading`, which must not touch the loop's state, makes of a body. Raises what it raises.

        `objects_max`: one that may hold more is large, whatever its size; None: whatever it holds.
        """
        is_wide = objects_max is not None and body.count(b"{") > objects_max
        if len(body) <= LARGE_BYTES and not is_wide:
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
    """Join repeated headers, so that a second one can never hide the first, which is the one the pod reads."""
    headers: dict[str, str] = {}
    for name, value in raw:
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
