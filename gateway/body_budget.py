"""Bytes of request bodies that one gateway process holds, over all requests and for each tenant. Pure."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from contextcache.admission import TenantsInHand
from contextcache.errors import BodyTooLarge, NoReadyEndpoint
from contextcache.model import TenantId


class BodyBudget:
    """What may be held at one time; both fronts take from the same one."""

    def __init__(self, limit_bytes: int, *, tenants: TenantsInHand | None = None) -> None:
        """`tenants`: what each of them may hold; None: no more than all together."""
        self._limit_bytes = limit_bytes
        self._tenants = TenantsInHand() if tenants is None else tenants
        self.held_bytes = 0

    def hold(self, tenant: TenantId, *, limit_bytes: int) -> HeldBody:
        """Return a body of at most `limit_bytes` that is held for the length of a `with` block."""
        return HeldBody(self, tenant, limit_bytes)

    def take(self, tenant: TenantId, size_bytes: int) -> None:
        """Count bytes as held. Raises NoReadyEndpoint or TooManyInFlight, and counts nothing then."""
        if self.held_bytes + size_bytes > self._limit_bytes:
            raise NoReadyEndpoint("the gateway holds as many request bodies as it may", retry_after_s=1)
        self._tenants.take_bytes(tenant, size_bytes)
        self.held_bytes += size_bytes

    def give_back(self, tenant: TenantId, size_bytes: int) -> None:
        """Count bytes as free again."""
        self._tenants.give_back_bytes(tenant, size_bytes)
        self.held_bytes -= size_bytes


class HeldBody:
    """Pieces of one body, counted against the budget for the length of a `with` block."""

    def __init__(self, budget: BodyBudget, tenant: TenantId, limit_bytes: int) -> None:
        self._budget = budget
        self._tenant = tenant
        self._limit_bytes = limit_bytes
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._budget.give_back(self._tenant, self._size_bytes)
        self._size_bytes = 0
        self._pieces.clear()

    def expect(self, size_bytes: int) -> None:
        """Refuse a body that says beforehand that it will be too large. Raises BodyTooLarge."""
        if size_bytes > self._limit_bytes:
            raise body_too_large(self._limit_bytes)

    def add(self, piece: bytes) -> None:
        """Hold another piece. Raises BodyTooLarge, NoReadyEndpoint, TooManyInFlight."""
        self.expect(self._size_bytes + len(piece))
        self._budget.take(self._tenant, len(piece))
        self._size_bytes += len(piece)
        self._pieces.append(piece)

    def whole(self) -> bytes:
        """Return the body."""
        if len(self._pieces) != 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0]


def body_too_large(limit_bytes: int) -> BodyTooLarge:
    """Return the error of a body over the limit."""
    return BodyTooLarge(f"the request body is over the limit of {limit_bytes} bytes")
