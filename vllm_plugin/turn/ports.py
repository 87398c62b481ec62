"""What the turn story needs from the context manager and the kv-sidecar; their clients satisfy these shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from contextcache.model import (
    CacheRef,
    CacheSessionMetadata,
    KeptAnswer,
    NewSession,
    Repeatable,
    SaveOutcome,
    Segment,
    SessionId,
    TenantId,
    TurnCommit,
    Usage,
)
from vllm_plugin.turn.usage import LoadedKV


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


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """How much KV a tenant has on this pod's disk."""

    size_bytes: int
    limit_bytes: int
    """The most it may have; 0: no limit."""


class TenantQuotas(Protocol):
    """Who knows how much a tenant has. Every failure is a ContextCacheError; every call has a deadline."""

    async def tenant_usage(self, tenant: TenantId) -> TenantUsage:
        """Return what the tenant has and may have."""
        ...


class KVSidecar(Protocol):
    """The kv-sidecar of this pod. Every failure is a ContextCacheError; every call has a deadline."""

    async def wait_sealed(self, tenant: TenantId, cache_ref: CacheRef, *, timeout_ms: int) -> SaveOutcome:
        """Return whether the KV became durable within the time, and if it never will, why."""
        ...

    async def load_report(self, request_id: str, *, timeout_ms: int) -> LoadedKV | None:
        """Return what the connector did for a request; None when no report came within the time."""
        ...

    async def read_ahead(self, tenant: TenantId, cache_refs: tuple[CacheRef, ...]) -> None:
        """Have KV brought into memory that the engine is about to ask for."""
        ...

    async def touch_context(self, tenant: TenantId, session_id: SessionId, expires_at_ms: int) -> int:
        """Move the expiry of a session's KV."""
        ...

    async def delete_context(
        self, tenant: TenantId, *, session_id: SessionId = "", cache_refs: tuple[CacheRef, ...] = ()
    ) -> int:
        """Delete KV; return the bytes freed."""
        ...

    async def close(self) -> None:
        """End the connection."""
        ...


class TokenAddressed(Protocol):
    """What a store that knows KV by salt and tokens alone (LMCache) has to be told beside a KVSidecar's calls.

    Every failure is a ContextCacheError; every call has a deadline.
    """

    async def start(self) -> None:
        """Begin what has to be done without being asked, in the running loop. Idempotent."""
        ...

    def salt(self, session: CacheSessionMetadata) -> str:
        """Return the engine's `cache_salt` for a context, the same at every turn."""
        ...

    def order(self, session: CacheSessionMetadata, save: CacheRef | None, token_ids: Sequence[int]) -> dict[str, Any]:
        """Hear what the engine is about to be asked; return what it gets as `kv_transfer_params`.

        `save`: the name of what it will save, until `keep` or a delete names it; None: nothing is committed.
        """
        ...

    def loaded(self, told: Mapping[str, Any]) -> LoadedKV | None:
        """Return what was loaded, from the `kv_transfer_params` that came back; None: they do not say."""
        ...

    async def prefetch(self, session: CacheSessionMetadata, token_ids: Sequence[int]) -> None:
        """Have KV brought near that the engine is about to ask for."""
        ...

    async def keep(self, session: CacheSessionMetadata, save: CacheRef, token_ids: Sequence[int]) -> None:
        """Keep what a commit made of the context until it ends."""
        ...
