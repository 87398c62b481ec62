"""Contexts that are there, changed or forked: other terms, back to an earlier turn, a second one that begins alike.

No pod is asked, and no engine.

The manager's word is the change; what sidecars hold follows it, best effort: one that cannot be reached has KV that
ends at its own time, which costs a recompute at the worst.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from contextcache.errors import (
    ContextCacheError,
    ContextExists,
    ContextExpired,
    ContextNotFound,
    SidecarUnavailable,
    StoreUnavailable,
)
from contextcache.model import (
    BRANCH_LEASE_ID,
    CacheSessionMetadata,
    ForkedKV,
    NewSession,
    SessionId,
    TenantId,
    TtlPolicy,
    TurnCommit,
    Usage,
)
from contextcache.names import SESSION_ID_PATTERN, new_cache_ref, new_session_id, shard_of
from contextcache.terms import Terms, session_id_of
from gateway.kept import KeptConversation, KeptPage, page_of
from gateway.pods.sidecars import Holders, KVState, sealed_state
from gateway.ports import SessionDirectory

log = logging.getLogger(__name__)

FORKED_GENERATION = 1
"""A fork's own, before its first turn."""
_LEASE_MS = 10_000
"""Lease of a fork on its way: its row dies after so long when this process ends in the middle."""
_BRANCH_LEASE_MS = 60_000
"""Lease of a branch until its turn begins: as long as the identity is believed that takes the turn to a pod."""


@dataclass(frozen=True, slots=True)
class NewFork:
    """What a client says of a fork; what it does not say is as of the context forked from."""

    generation: int | None = None
    """Of the context forked from; None: the newest."""
    session_id: SessionId | None = None
    """None: one is minted."""
    terms: Terms = field(default_factory=Terms)
    key: str = ""
    """Name of the API key that made it, for usage."""


class Contexts:
    """Changes contexts for their tenants.

    Every method raises ContextNotFound, ContextExpired, StoreUnavailable; none for a sidecar.
    """

    def __init__(self, directory: SessionDirectory, holders: Holders, secret: bytes) -> None:
        self._directory = directory
        self._holders = holders
        self._secret = secret

    async def patch(
        self, tenant: TenantId, session_id: SessionId, terms: Terms
    ) -> tuple[CacheSessionMetadata, KVState]:
        """Change what is said; a ttl starts the life again from now. A turn that is running goes on.

        Raises TtlOutOfRange, InvalidRequest, ContextBusy while the context is being created.
        """
        check_id(session_id)
        try:
            session = await self._directory.touch(tenant, session_id, terms)
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

    async def fork(
        self, tenant: TenantId, session_id: SessionId, fork: NewFork
    ) -> tuple[CacheSessionMetadata, KVState]:
        """Make a context that begins as another one does, over the same KV: none is copied, nor is the other changed.

        Reserved, then its KV named, then committed: a crash leaves a row that dies with its lease, and names that no
        row knows. Without the holder's sidecar the fork begins cold. A delete of the other at the same time comes
        before it, and there is nothing to fork, or after it, and takes nothing from it.
        Raises GenerationGone, ContextExists, TtlOutOfRange, ContextQuotaExceeded, ContextBusy while the other is being
        created, InvalidRequest.
        """
        check_id(session_id)
        try:
            source = await self._directory.get_session_metadata(tenant, session_id)
            child, kv = await self._forked(source, fork)
        except ContextNotFound as exc:
            raise not_found() from exc
        if kv is not None and kv.size_bytes:  # else there is none, or the sidecar is older than these words of it
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
        """Return a new context that begins as this one did at `generation`; None: this one is at `generation`.

        The branch is there for one turn. It is removed by `drop_branch`, or when its lease ends, unless that turn has
        begun, and stays once that turn has committed.

        A request that may come again finds the branch it made, and where it was answered before, None: the answer is
        with the context it asked for, also when that has ended.
        `key`: name of the API key that it is counted under. `check` is shown what is branched from, before it is.
        Raises as `fork`, and what `check` raises.
        """
        check_id(session_id)
        # Under the same key something else may be asked, of another response.
        again = f"{repeat_key}\0{session_id}\0{generation}" if repeat_key else ""
        minted = partial(_keyed_id, tenant, again, self._secret) if again else _random_id
        branch_id = _id_beside(tenant, session_id, minted)
        try:
            source = await self._directory.get_session_metadata(tenant, session_id)
            if source.generation == generation or await self._is_answered(tenant, session_id, repeat_key):
                return None
            check(source)
            await self._forked(source, NewFork(generation, branch_id, key=key), is_branch=True)
        except (ContextNotFound, ContextExpired) as exc:
            if await self._is_answered(tenant, session_id, repeat_key):
                return None
            if await self._is_answered(tenant, branch_id, repeat_key):
                return branch_id
            if isinstance(exc, ContextExpired):
                raise
            raise not_found() from exc
        except ContextExists:
            if not repeat_key:
                raise
        return branch_id

    async def drop_branch(self, tenant: TenantId, branch_id: SessionId) -> None:
        """Remove a branch before its turn has begun; harmless for any other context. Raises nothing."""
        with suppress(ContextCacheError):
            branch = await self._directory.get_session_metadata(tenant, branch_id)
            await self._directory.abort_turn(tenant, branch_id, lease_id=BRANCH_LEASE_ID)
            try:
                await self._directory.get_session_metadata(tenant, branch_id)
            except ContextNotFound:
                await self._holders.delete(branch)

    async def _is_answered(self, tenant: TenantId, session_id: SessionId, repeat_key: str) -> bool:
        return bool(repeat_key) and (
            await self._directory.find_answer(tenant, session_id, repeat_key=repeat_key) is not None
        )

    async def _forked(
        self, source: CacheSessionMetadata, fork: NewFork, *, is_branch: bool = False
    ) -> tuple[CacheSessionMetadata, ForkedKV | None]:
        terms, cache_ref = fork.terms, new_cache_ref()
        lease_id = BRANCH_LEASE_ID if is_branch else secrets.token_hex(16)
        lease_ttl_ms = _BRANCH_LEASE_MS if is_branch else _LEASE_MS
        new = NewSession(
            tenant=source.tenant,
            session_id=fork.session_id or _id_beside(source.tenant, source.session_id, _random_id),
            model_id=source.model_id,
            mode=source.mode,
            ttl_s=source.ttl_s if terms.ttl_s is None else terms.ttl_s,
            ttl_policy=terms.ttl_policy or source.ttl_policy,
            metadata=source.metadata if terms.metadata is None else terms.metadata,
        )
        reserved = await self._directory.reserve(new, lease_id=lease_id, lease_ttl_ms=lease_ttl_ms)
        if reserved.generation:
            return reserved, None  # a branch that this request made before
        kv = await self._holders.fork(source, reserved, cache_ref)
        commit = TurnCommit(
            tenant=source.tenant,
            session_id=reserved.session_id,
            lease_id=lease_id,
            expected_generation=0,
            keep_segments=0,
            segments=(),
            cache_ref=cache_ref if kv is not None else "",
            # Its first turn goes there without KV too: the engine may have it.
            holder=source.holder,
            usage=Usage(fork.key, {"contexts": 1}),
        )
        try:
            return await self._committed(source.session_id, fork.generation, commit), kv
        except ContextCacheError as exc:
            with suppress(ContextCacheError):
                await self._directory.abort_turn(source.tenant, reserved.session_id, lease_id=lease_id)
            if kv is not None and exc.http_status < 500:  # else it may have been committed, and its row names the KV
                await self._holders.delete(replace(reserved, cache_ref=cache_ref, holders=(source.holder,)))
            raise

    async def _committed(
        self, source_id: SessionId, generation: int | None, commit: TurnCommit
    ) -> CacheSessionMetadata:
        """Commit; once more when no answer came, because the first may have been made durable all the same."""
        try:
            return await self._directory.fork(source_id, generation=generation, commit=commit)
        except StoreUnavailable:
            return await self._directory.fork(source_id, generation=generation, commit=commit)


class KeptConversations:
    """What is kept of requests without a context. No store is asked."""

    def __init__(self, holders: Holders) -> None:
        self._holders = holders

    async def page(self, tenant: TenantId, *, limit: int, after: SessionId = "") -> KeptPage:
        """Return one page of it, what was used last first. Raises InvalidRequest (after)."""
        found, unreachable = await self._holders.kept(tenant)
        return page_of(found, unreachable, limit=limit, after=after)

    async def read(self, tenant: TenantId, group: SessionId) -> tuple[KeptConversation, Sequence[str]]:
        """Return what is kept of one conversation, and the pods that did not say.

        Raises ContextNotFound where all say that they have none, SidecarUnavailable where not all say.
        """
        found, unreachable = await self._holders.kept(tenant, group)
        page = page_of(found, unreachable, limit=1)
        if not page.conversations:
            raise (
                SidecarUnavailable("not every pod reported its kept conversations", retry_after_s=1)
                if unreachable
                else not_found()
            )
        return page.conversations[0], unreachable

    async def delete(self, tenant: TenantId, group: SessionId) -> Sequence[str]:
        """Delete what is kept of one conversation, everywhere; return the pods that could not be reached.

        Raises ContextNotFound where all say that they have none.
        """
        found, silent = await self._holders.kept(tenant, group)
        unreachable = await self._holders.delete_kept(tenant, group)
        if not any(found.values()) and not silent and not unreachable:
            raise not_found()
        return unreachable


def _id_beside(tenant: TenantId, source_id: SessionId, minted: Callable[[int], SessionId]) -> SessionId:
    """Return the first id in the shard of a source, where a fork shares its segments: some 64 are minted for that."""
    shard = shard_of(tenant, source_id)
    return next(one for one in map(minted, count()) if shard_of(tenant, one) == shard)


def _random_id(_number: int) -> SessionId:
    return new_session_id()


def _keyed_id(tenant: TenantId, again: str, secret: bytes, number: int) -> SessionId:
    return session_id_of(tenant, f"{again}\0{number}", secret)


def check_id(session_id: SessionId) -> None:
    """Raise ContextNotFound for what no context can be called."""
    if not SESSION_ID_PATTERN.fullmatch(session_id):
        raise not_found()


def not_found() -> ContextNotFound:
    """Return one text for absent, deleted and foreign ids: the answers must not differ in a byte."""
    return ContextNotFound("no context has this session_id", param="session_id")
