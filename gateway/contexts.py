"""Contexts that exist: read, list, change, fork and delete them. Asks no engine.

The context manager's row decides. Sidecars follow it best effort: KV that a sidecar does not extend or delete expires
at its own TTL, which costs a recompute at worst. Each method raises ContextNotFound, ContextExpired and
StoreUnavailable, and nothing for a sidecar.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from contextcache.errors import (
    ContextCacheError,
    ContextExists,
    ContextExpired,
    ContextNotFound,
    SidecarUnavailable,
    StoreUnavailable,
)
from contextcache.hints import Hints
from contextcache.model import (
    BRANCH_LEASE_ID,
    MAX_LIST_LIMIT,
    NO_SAVE,
    CacheSessionMetadata,
    ForkedKV,
    ModelId,
    NewSession,
    SessionId,
    SessionPage,
    TenantId,
    TtlPolicy,
    TurnCommit,
    TurnReceipt,
    Usage,
    UsageReport,
)
from contextcache.names import NO_CONTEXT, SESSION_ID_PATTERN, new_cache_ref, new_session_id, shard_of
from contextcache.requests import TenantsInHand
from contextcache.terms import Terms, session_id_of
from gateway.kept import KeptConversation, KeptPage, page_of
from gateway.parts import Parts
from gateway.pods.sidecars import Holders, KVState, sealed_state

log = logging.getLogger(__name__)

FORKED_GENERATION = 1
"""Generation of a fork before its first turn."""
_LEASE_MS = 10_000
"""Lease of a fork until its commit. If this process dies in between, the row expires with the lease."""
_BRANCH_LEASE_MS = 60_000
"""Lease of a branch until its turn begins: the life of the identity that takes the turn to a pod."""
_USAGE_READS_MAX = 4
"""Concurrent reads of one tenant's usage. A month is two thousand reads of the store."""


@dataclass(frozen=True, slots=True)
class NewFork:
    """A client's request for a fork. Unset fields are those of the source."""

    generation: int | None = None
    """Generation of the source; None: the newest."""
    session_id: SessionId | None = None
    """Name of the fork; None: the gateway mints one."""
    terms: Terms = field(default_factory=Terms)
    key: str = ""
    """Name of the API key, for usage."""


class Contexts:
    """Calls on the contexts of a tenant."""

    def __init__(self, parts: Parts) -> None:
        self._manager, self._holders, self._secret = parts.manager, parts.holders, parts.secret
        self._clock = parts.clock
        self._usage_reads = TenantsInHand(requests_max=_USAGE_READS_MAX)

    async def read(
        self, tenant: TenantId, session_id: SessionId
    ) -> tuple[CacheSessionMetadata, KVState, Sequence[TurnReceipt]]:
        """Return a context, the state of its KV and the receipts of its last turns."""
        check_id(session_id)
        session, turns = await self._manager.get_with_turns(tenant, session_id)
        return session, await self._holders.kv_state(session), turns

    async def page(self, tenant: TenantId, *, limit: int, after: SessionId = "", model: ModelId = "") -> SessionPage:
        """Return one page of contexts, newest first. A page is short or empty if few match `model`.

        Raises InvalidRequest for an unknown `after`.
        """
        assert 1 <= limit <= MAX_LIST_LIMIT
        return await self._manager.list_sessions(tenant, limit=limit, after=after, model_id=model)

    async def usage(self, tenant: TenantId, *, first_day: int | None, last_day: int | None) -> UsageReport:
        """Return a tenant's usage between two days since 1970-01-01; None: today.

        Raises InvalidRequest, TooManyInFlight.
        """
        with self._usage_reads.request(tenant):
            return await self._manager.read_usage(tenant, first_day=first_day, last_day=last_day)

    async def delete(self, tenant: TenantId, session_id: SessionId) -> None:
        """Delete a context: first its row, so that nothing points at KV that is being deleted, then its KV."""
        check_id(session_id)
        await self._holders.delete(await self._manager.unregister_session_cache(tenant, session_id))

    async def patch(
        self, tenant: TenantId, session_id: SessionId, terms: Terms
    ) -> tuple[CacheSessionMetadata, KVState]:
        """Change the terms that are set. A new ttl counts from now. A running turn continues.

        Raises TtlOutOfRange, InvalidRequest, ContextBusy while the context is being created.
        """
        check_id(session_id)
        session = await self._manager.touch(tenant, session_id, terms)
        if terms.ttl_s is not None:
            await self._holders.touch(session)
        log.info("context patched", extra={"session_id": session_id, "tenant": tenant})
        return session, await self._holders.kv_state(session)

    async def carry_out(self, session: CacheSessionMetadata, hints: Hints) -> list[dict[str, Any]]:
        """Ask for the lifetime and the placements that the hints want for a context's KV; return their answers."""
        retain_ms = hints.retain_ms(session.expires_at_ms - self._clock.now_ms())
        saved = NO_SAVE
        if retain_ms:
            promise = await self._holders.retain(session, retain_ms=retain_ms, pinned=hints.pinned)
            saved = replace(saved, promise=promise)
        if hints.placements:
            saved = replace(saved, placements=await self._holders.place(session, hints.placements))
        return hints.answers(saved, retain_ms=retain_ms, expires_at_ms=session.expires_at_ms)

    async def rewind(
        self, tenant: TenantId, session_id: SessionId, *, generation: int, expected_generation: int | None
    ) -> tuple[CacheSessionMetadata, KVState]:
        """Set a context back to an earlier generation. The next turn continues from there.

        The KV stays: KV of a longer conversation serves its beginning too. Raises ContextBusy while a turn runs,
        GenerationMismatch, GenerationGone for a generation that was replaced since, InvalidRequest.
        """
        check_id(session_id)
        session = await self._manager.rewind(
            tenant, session_id, generation=generation, expected_generation=expected_generation
        )
        if session.ttl_policy is TtlPolicy.SLIDING:
            await self._holders.touch(session)
        return session, await self._holders.kv_state(session)

    async def fork(
        self, tenant: TenantId, session_id: SessionId, fork: NewFork
    ) -> tuple[CacheSessionMetadata, KVState]:
        """Make a context with the beginning of another one, over the same KV. Copies no KV and leaves the source as is.

        Reserves a row, names the KV, then commits. A crash leaves a row that expires with its lease, and names of KV
        that no row has. The fork starts without KV if the holder's sidecar fails. Safe against a concurrent delete of
        the source: either the fork fails with 404, or it keeps its own KV.
        Raises GenerationGone, ContextExists, TtlOutOfRange, ContextQuotaExceeded, InvalidRequest, and ContextBusy while
        the source is being created.
        """
        check_id(session_id)
        source = await self._manager.get_session_metadata(tenant, session_id)
        child, kv = await self._forked(source, fork)
        if kv is not None and kv.size_bytes:
            return child, sealed_state(kv.size_bytes, kv.tier)
        return child, await self._holders.kv_state(child)

    async def branch(
        self,
        tenant: TenantId,
        session_id: SessionId,
        generation: int,
        *,
        repeat_key: str = "",
        key: str = "",
        check: Callable[[CacheSessionMetadata], object] = lambda _source: None,
    ) -> SessionId | None:
        """Fork a context at `generation` for one turn; None: the context itself is at `generation`.

        The branch stays once its turn has committed. Before the turn begins, `drop_branch` removes it, or the end of
        its lease.

        `repeat_key`: a repeated request finds the branch that it made. None if the context itself has the answer, even
        an expired one. `key`: name of the API key, for usage. `check` is called with the source before the fork.
        Raises as `fork`, and the errors of `check`.
        """
        check_id(session_id)
        ids = iter(new_session_id, "")
        if repeat_key:
            # A client may use the same key for another response.
            again = f"{repeat_key}\0{session_id}\0{generation}"
            ids = (session_id_of(tenant, f"{again}\0{number}", self._secret) for number in count())
        branch_id = _id_beside(tenant, session_id, ids)
        try:
            source = await self._manager.get_session_metadata(tenant, session_id)
            if source.generation == generation or await self._is_answered(tenant, session_id, repeat_key):
                return None
            check(source)
            await self._forked(source, NewFork(generation, branch_id, key=key), is_branch=True)
        except (ContextNotFound, ContextExpired):
            if await self._is_answered(tenant, session_id, repeat_key):
                return None
            if not await self._is_answered(tenant, branch_id, repeat_key):
                raise
        except ContextExists:
            if not repeat_key:
                raise
        return branch_id

    async def drop_branch(self, tenant: TenantId, branch_id: SessionId) -> None:
        """Remove a branch before its turn begins. Does nothing to any other context. Raises nothing."""
        with suppress(ContextCacheError):
            branch = await self._manager.get_session_metadata(tenant, branch_id)
            await self._manager.abort_turn(tenant, branch_id, lease_id=BRANCH_LEASE_ID)
            try:
                await self._manager.get_session_metadata(tenant, branch_id)
            except ContextNotFound:
                await self._holders.delete(branch)

    async def _is_answered(self, tenant: TenantId, session_id: SessionId, repeat_key: str) -> bool:
        return bool(repeat_key) and (
            await self._manager.find_answer(tenant, session_id, repeat_key=repeat_key) is not None
        )

    async def _forked(
        self, source: CacheSessionMetadata, fork: NewFork, *, is_branch: bool = False
    ) -> tuple[CacheSessionMetadata, ForkedKV | None]:
        terms, cache_ref = fork.terms, new_cache_ref()
        lease_id = BRANCH_LEASE_ID if is_branch else secrets.token_hex(16)
        lease_ttl_ms = _BRANCH_LEASE_MS if is_branch else _LEASE_MS
        new = NewSession(
            tenant=source.tenant,
            session_id=fork.session_id or _id_beside(source.tenant, source.session_id, iter(new_session_id, "")),
            model_id=source.model_id,
            mode=source.mode,
            ttl_s=source.ttl_s if terms.ttl_s is None else terms.ttl_s,
            ttl_policy=terms.ttl_policy or source.ttl_policy,
            metadata=source.metadata if terms.metadata is None else terms.metadata,
        )
        reserved = await self._manager.reserve(new, lease_id=lease_id, lease_ttl_ms=lease_ttl_ms)
        if reserved.generation:
            return reserved, None  # an earlier try of this request made the branch
        kv = await self._holders.fork(source, reserved, cache_ref)
        commit = TurnCommit(
            tenant=source.tenant,
            session_id=reserved.session_id,
            lease_id=lease_id,
            expected_generation=0,
            keep_segments=0,
            segments=(),
            cache_ref=cache_ref if kv is not None else "",
            # The first turn is routed there even without KV: the engine may have it.
            holder=source.holder,
            usage=Usage(fork.key, {"contexts": 1}, source.model_id),
        )
        try:
            return await self._committed(source.session_id, fork.generation, commit), kv
        except ContextCacheError as exc:
            with suppress(ContextCacheError):
                await self._manager.abort_turn(source.tenant, reserved.session_id, lease_id=lease_id)
            if kv is not None and exc.http_status < 500:  # a 5xx may have committed: then its row names the KV
                await self._holders.delete(replace(reserved, cache_ref=cache_ref, holders=(source.holder,)))
            raise

    async def _committed(
        self, source_id: SessionId, generation: int | None, commit: TurnCommit
    ) -> CacheSessionMetadata:
        """Commit, twice if no answer came: the first commit may be durable all the same, and a commit is idempotent."""
        try:
            return await self._manager.fork(source_id, generation=generation, commit=commit)
        except StoreUnavailable:
            return await self._manager.fork(source_id, generation=generation, commit=commit)


class KeptConversations:
    """KV of requests without a context, as the sidecars list it. Asks no store."""

    def __init__(self, holders: Holders) -> None:
        self._holders = holders

    async def page(self, tenant: TenantId, *, limit: int, after: SessionId = "") -> KeptPage:
        """Return one page, last used first. Raises InvalidRequest for an unknown `after`."""
        found, unreachable = await self._holders.kept(tenant)
        return page_of(found, unreachable, limit=limit, after=after)

    async def read(self, tenant: TenantId, group: SessionId) -> tuple[KeptConversation, Sequence[str]]:
        """Return one conversation, and the pods that did not answer.

        Raises ContextNotFound if no pod has it, SidecarUnavailable if some did not answer and no other has it.
        """
        found, unreachable = await self._holders.kept(tenant, group)
        page = page_of(found, unreachable, limit=1)
        if page.conversations:
            return page.conversations[0], unreachable
        if unreachable:
            raise SidecarUnavailable("not every pod reported its kept conversations", retry_after_s=1)
        raise not_found()

    async def delete(self, tenant: TenantId, group: SessionId) -> Sequence[str]:
        """Delete one conversation on every pod; return the pods that could not be reached.

        Raises ContextNotFound if every pod answered and none has it.
        """
        found, silent = await self._holders.kept(tenant, group)
        unreachable = await self._holders.delete_kept(tenant, group)
        if not any(found.values()) and not silent and not unreachable:
            raise not_found()
        return unreachable


def _id_beside(tenant: TenantId, source_id: SessionId, ids: Iterator[SessionId]) -> SessionId:
    """Return the first id in the shard of the source, where a fork shares its segments: on average the 64th."""
    shard = shard_of(tenant, source_id)
    return next(one for one in ids if shard_of(tenant, one) == shard)


def check_id(session_id: SessionId) -> None:
    """Raise ContextNotFound for an id that no context can have."""
    if not SESSION_ID_PATTERN.fullmatch(session_id):
        raise not_found()


def not_found() -> ContextNotFound:
    """Return the manager's error: answers for malformed, absent, deleted and foreign ids are equal in every byte."""
    return ContextNotFound(NO_CONTEXT, param="session_id")
