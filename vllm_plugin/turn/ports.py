"""Interfaces of the turn story to the context manager and to the store of KV. Their clients satisfy these shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from contextcache.identity import KVTransfer
from contextcache.model import (
    CacheRef,
    CacheSessionMetadata,
    KeptAnswer,
    LoadedKV,
    NewSession,
    Repeatable,
    SaveOutcome,
    Segment,
    SessionId,
    TenantId,
    TurnCommit,
    Usage,
)


class SessionDirectory(Protocol):
    """The context manager. Every failure is a ContextCacheError; every call has a deadline."""

    async def locate(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """Return the row in one round trip. Raises ContextNotFound, ContextExpired."""
        ...

    async def reserve(
        self, new: NewSession, *, lease_id: str, lease_ttl_ms: int, repeatable: Repeatable | None = None
    ) -> CacheSessionMetadata:
        """Create a session in state CREATING under a lease. Raises AlreadyAnswered for a repeated request."""
        ...

    async def register_session_cache(self, commit: TurnCommit) -> CacheSessionMetadata:
        """Commit the create. Idempotent for the same lease_id."""
        ...

    async def begin_turn(
        self,
        tenant: TenantId,
        session_id: SessionId,
        *,
        lease_id: str,
        lease_ttl_ms: int,
        read_only: bool = False,
        expected_generation: int | None = None,
        repeatable: Repeatable | None = None,
    ) -> tuple[CacheSessionMetadata, tuple[Segment, ...]]:
        """Take the lease and return the session and its transcript. Raises AlreadyAnswered for a repeated request."""
        ...

    async def find_answer(self, tenant: TenantId, session_id: SessionId, *, repeat_key: str) -> KeptAnswer | None:
        """Return what is kept of a request that was committed."""
        ...

    async def renew_lease(self, tenant: TenantId, session_id: SessionId, *, lease_id: str, lease_ttl_ms: int) -> None:
        """Extend a held lease."""
        ...

    async def commit_turn(self, commit: TurnCommit) -> CacheSessionMetadata:
        """Commit a turn. Idempotent for the same lease_id."""
        ...

    async def abort_turn(self, tenant: TenantId, session_id: SessionId, *, lease_id: str) -> None:
        """Release the lease; idempotent."""
        ...

    async def add_usage(self, tenant: TenantId, batch_id: str, usage: Sequence[Usage]) -> None:
        """Count what no commit counts; once for a batch_id."""
        ...

    async def close(self) -> None:
        """End the connection."""
        ...


class HeldBytes(Protocol):
    """KV of a tenant on this pod's disk."""

    @property
    def size_bytes(self) -> int:
        """Bytes in use."""
        ...

    @property
    def limit_bytes(self) -> int:
        """Maximum; 0: no limit."""
        ...


class TenantQuotas(Protocol):
    """Quotas of KV. Every failure is a ContextCacheError; every call has a deadline."""

    async def tenant_usage(self, tenant: TenantId) -> HeldBytes:
        """Return the bytes and the limit of a tenant."""
        ...


class KVStore(Protocol):
    """The store of this pod's KV: a kv-sidecar, or LMCache. Every failure is a ContextCacheError.

    Every call has a deadline.
    """

    async def start(self) -> None:
        """Begin work that no turn asks for, in the running loop. Idempotent."""
        ...

    def order(
        self, session: CacheSessionMetadata, order: KVTransfer, token_ids: Sequence[int]
    ) -> tuple[dict[str, Any], str]:
        """Return the engine's `kv_transfer_params` and `cache_salt` for a prompt."""
        ...

    def expect_load(self, request_id: str) -> None:
        """Ask for the load of a request before the engine has made it."""
        ...

    async def loaded(self, request_id: str, told: Mapping[str, Any], *, is_whole: bool) -> LoadedKV | None:
        """Return the KV that was loaded for a request; None: unknown. Raises nothing.

        `told`: `kv_transfer_params` of the engine's answer. `is_whole`: the answer has ended and reused tokens, so a
        report is on its way.
        """
        ...

    async def forget_load(self, request_id: str) -> None:
        """End what `expect_load` began."""
        ...

    async def read_ahead(self, session: CacheSessionMetadata, token_ids: Sequence[int]) -> None:
        """Bring KV into memory that the engine is about to ask for."""
        ...

    async def wait_sealed(self, tenant: TenantId, cache_ref: CacheRef, *, timeout_ms: int) -> SaveOutcome:
        """Return whether the KV became durable within the time, and if it never will, why."""
        ...

    async def committed(
        self, before: CacheSessionMetadata, after: CacheSessionMetadata, ids: Sequence[Sequence[int]]
    ) -> None:
        """Keep the KV of a commit until the context expires, and delete KV that the context no longer names.

        `before`, `after`: the session before and after the commit. `ids`: token ids of the prompt and of the answer.
        """
        ...

    async def drop(self, tenant: TenantId, save: CacheRef) -> None:
        """Delete KV that a turn saved, or is about to save, without a commit."""
        ...

    async def close(self) -> None:
        """End the connection."""
        ...
