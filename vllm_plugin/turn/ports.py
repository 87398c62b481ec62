"""Interface of turns to the store of this pod's KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from contextcache.identity import KVTransfer
from contextcache.model import CacheRef, CacheSessionMetadata, LoadedKV, SaveOutcome, TenantId


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
        """End the question of `expect_load`."""
        ...

    async def read_ahead(self, session: CacheSessionMetadata, token_ids: Sequence[int]) -> None:
        """Bring KV into memory that the engine is about to ask for."""
        ...

    async def wait_sealed(
        self, tenant: TenantId, cache_ref: CacheRef, *, timeout_ms: int, placements: Sequence[str] = ()
    ) -> SaveOutcome:
        """Return whether the KV became durable within the time, and if it never will, why.

        `placements`: carried out once it is durable, by a store that can.
        """
        ...

    async def committed(
        self, before: CacheSessionMetadata, after: CacheSessionMetadata, ids: Sequence[Sequence[int]]
    ) -> None:
        """Keep the KV of a commit until the context expires, and delete KV that the context no longer names.

        `before`, `after`: the session before and after the commit. `ids`: token ids of the prompt and of the answer.
        """
        ...

    async def interrupt(self, tenant: TenantId, save: CacheRef) -> None:
        """Keep KV that a turn saved, or is about to save, for a retry: the turn ended early. A store may delete it."""
        ...

    async def drop(self, tenant: TenantId, save: CacheRef) -> None:
        """Delete KV that a turn saved, or is about to save, without a commit."""
        ...

    async def close(self) -> None:
        """End the connection."""
        ...
