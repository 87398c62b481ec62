"""What the flows need from the world, as Protocols. Adapters are chosen in `app.py`, fakes in tests/kit.

Every call that leaves the process has a deadline of its own and fails with a ContextCacheError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from contextcache.model import (
    CacheSessionMetadata,
    ContextMode,
    KeptAnswer,
    ModelId,
    NewSession,
    SessionId,
    SessionPage,
    TenantId,
    TurnCommit,
    TurnReceipt,
    UsageFormat,
    UsageReport,
)
from contextcache.terms import Terms
from gateway.kept import Plain


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling, and what their key says."""

    tenant: TenantId
    context_mode: ContextMode | None = None
    """Of requests that name none themselves; None: the key says nothing."""
    plain: Plain = Plain.OFF
    """What is done for its requests without a context."""
    usage: UsageFormat | None = None
    """How usage counts for requests that do not say; None: the key says nothing."""
    key: str = ""
    """Name by which the key's usage is told; empty: there are no keys."""
    operator: bool = False
    """Whether it may look at the deployment, and at any tenant's usage."""


class SessionDirectory(Protocol):
    """The part of the context manager that a router uses. All but `is_serving` raise StoreUnavailable."""

    async def locate(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """Return the row in one round trip. Raises ContextNotFound, ContextExpired."""
        ...

    async def get_session_metadata(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """Return the row, its TTL checked. Raises ContextNotFound, ContextExpired."""
        ...

    async def get_with_turns(
        self, tenant: TenantId, session_id: SessionId
    ) -> tuple[CacheSessionMetadata, Sequence[TurnReceipt]]:
        """Return the row as `get_session_metadata`, and receipts of its last turns, the oldest first."""
        ...

    async def list_sessions(
        self, tenant: TenantId, *, limit: int, after: SessionId = "", model_id: ModelId = ""
    ) -> SessionPage:
        """Return one page of live sessions, newest first."""
        ...

    async def read_usage(
        self, tenant: TenantId, *, first_day: int | None = None, last_day: int | None = None
    ) -> UsageReport:
        """Return what was counted of a tenant. Raises InvalidRequest."""
        ...

    async def find_answer(self, tenant: TenantId, session_id: SessionId, *, repeat_key: str) -> KeptAnswer | None:
        """Return what is kept of a request that was committed."""
        ...

    async def note_holder(self, tenant: TenantId, session_id: SessionId, *, holder: str) -> None:
        """Add a pod to those that may have KV of the session. Raises ContextNotFound, ContextExpired."""
        ...

    async def touch(self, tenant: TenantId, session_id: SessionId, terms: Terms) -> CacheSessionMetadata:
        """Change the given terms; a ttl starts the life again from now.

        Raises ContextNotFound, ContextExpired, TtlOutOfRange, InvalidRequest, ContextBusy while it is being created.
        """
        ...

    async def rewind(
        self, tenant: TenantId, session_id: SessionId, *, generation: int, expected_generation: int | None = None
    ) -> CacheSessionMetadata:
        """Take a session back to an earlier generation, as a new one; one that stands there already stays as it is.

        Raises ContextNotFound, ContextExpired, ContextBusy, GenerationMismatch, GenerationGone, InvalidRequest.
        """
        ...

    async def reserve(self, new: NewSession, *, lease_id: str, lease_ttl_ms: int) -> CacheSessionMetadata:
        """Create a session that dies with the lease unless it is committed.

        Raises InvalidRequest, TtlOutOfRange, ContextExists, ContextQuotaExceeded.
        """
        ...

    async def fork(
        self, source_id: SessionId, *, generation: int | None = None, commit: TurnCommit
    ) -> CacheSessionMetadata:
        """Commit a reserved session with the transcript of another one of its tenant. May be repeated.

        Raises ContextNotFound, ContextExpired, ContextBusy, GenerationGone, LeaseLost, InvalidRequest.
        """
        ...

    async def abort_turn(self, tenant: TenantId, session_id: SessionId, *, lease_id: str) -> None:
        """Take a reservation back; silent when there is none."""
        ...

    async def unregister_session_cache(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """Remove the session for good and return the row as it was. Raises ContextNotFound, ContextExpired."""
        ...

    async def is_serving(self) -> bool:
        """Return whether calls would be answered. Never raises."""
        ...


class Authenticator(Protocol):
    """Whose key it is."""

    def caller_of(self, headers: Mapping[str, str]) -> Caller:
        """Return who sent a request with these headers, by their lower-case names. Raises Unauthorized."""
        ...

    def key_names(self) -> Mapping[TenantId, Sequence[str]]:
        """Return the tenants that have a key, in the order of their names, each with the names of its keys."""
        ...
