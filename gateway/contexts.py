"""Contexts that are there, changed: other terms, or back to an earlier turn. No pod is asked, and no engine.

The manager's word is the change; what sidecars hold follows it, best effort: one that cannot be reached has KV that
ends at its own time, which costs a recompute at the worst.
"""

from __future__ import annotations

import logging

from contextcache.errors import ContextNotFound
from contextcache.model import SESSION_ID_PATTERN, CacheSessionMetadata, SessionId, TenantId, TtlPolicy
from contextcache.terms import Terms
from gateway.pods.sidecars import Holders, KVState
from gateway.ports import SessionDirectory

log = logging.getLogger(__name__)


class Contexts:
    """Changes contexts for their tenants.

    Every method raises ContextNotFound, ContextExpired, StoreUnavailable; none for a sidecar.
    """

    def __init__(self, directory: SessionDirectory, holders: Holders) -> None:
        self._directory = directory
        self._holders = holders

    async def patch(
        self, tenant: TenantId, session_id: SessionId, terms: Terms
    ) -> tuple[CacheSessionMetadata, KVState]:
        """Change what is said; a ttl starts the life again from now. A turn that is running goes on.

        Raises TtlOutOfRange, InvalidRequest, ContextBusy while the context is being created.
        """
        check_id(session_id)
        try:
            session = await self._directory.touch(
                tenant, session_id, ttl_s=terms.ttl_s, ttl_policy=terms.ttl_policy, metadata=terms.metadata
            )
        except ContextNotFound as exc:
            raise not_found() from exc
        if terms.ttl_s is not None:
            await self._holders.touch(session)
        log.info("context patched", extra={"session_id": session_id, "tenant": tenant})
        return session, await self._holders.kv_state(session)

    async def rewind(
        self, tenant: TenantId, session_id: SessionId, *, generation: int, expected_generation: int | None
    ) -> tuple[CacheSessionMetadata, KVState]:
        """Take a context back to what it was at `generation`; the next turn goes on from there.

        Its KV stays: what is stored of a longer conversation serves the beginning of it. Raises ContextBusy while a
        turn runs, GenerationMismatch, GenerationGone for what was replaced since, InvalidRequest.
        """
        check_id(session_id)
        try:
            session = await self._directory.rewind(
                tenant, session_id, generation=generation, expected_generation=expected_generation
            )
        except ContextNotFound as exc:
            raise not_found() from exc
        if session.ttl_policy is TtlPolicy.SLIDING:
            await self._holders.touch(session)
        return session, await self._holders.kv_state(session)


def check_id(session_id: SessionId) -> None:
    """Raise ContextNotFound for what no context can be called."""
    if not SESSION_ID_PATTERN.fullmatch(session_id):
        raise not_found()


def not_found() -> ContextNotFound:
    """Return one text for absent, deleted and foreign ids: the answers must not differ in a byte."""
    return ContextNotFound("no context has this session_id", param="session_id")
