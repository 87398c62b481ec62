"""The kv-sidecars as the gateway sees them: what KV a context has, and how to be rid of it. Knows no wire.

A sidecar is never needed for an answer: one that cannot be reached is reported as such, or collects by TTL.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from contextcache.clock import Clock
from contextcache.errors import CacheRefNotFound, ContextCacheError
from contextcache.model import CacheRef, CacheSessionMetadata, SessionState
from gateway.context_object import KVState
from gateway.metrics import Metrics
from gateway.ports import Endpoint, EndpointDirectory, KVSidecar

log = logging.getLogger(__name__)

_SEALING_MS = 30_000
"""Longest a save is waited for; a younger context without sealed KV is pending, an older one has none."""
_NO_TIER = "none"
"""What a sidecar that cannot say names as its tier."""


class Holders:
    """All sidecars by the name of their endpoint."""

    def __init__(
        self,
        sidecars: Mapping[str, KVSidecar],
        endpoints: EndpointDirectory,
        *,
        clock: Clock,
        metrics: Metrics,
        read_timeout_s: float = 0.5,
        delete_timeout_s: float = 5.0,
        pull_timeout_s: float = 0.2,
    ) -> None:
        self._sidecars = sidecars
        self._endpoints = endpoints
        self._pull_timeout_s = pull_timeout_s
        self._clock = clock
        self._metrics = metrics
        self._read_timeout_s = read_timeout_s
        self._delete_timeout_s = delete_timeout_s

    async def kv_state(self, session: CacheSessionMetadata) -> KVState:
        """Return what the holder's sidecar has of the newest generation. Never raises for a sidecar."""
        if not session.cache_ref:
            return KVState("pending" if session.state is SessionState.CREATING else "absent")
        sidecar = self._sidecars.get(session.holder)
        if sidecar is None:
            return KVState("unreachable", size_bytes=None)
        try:
            async with asyncio.timeout(self._read_timeout_s):
                return await self._sealed_state(sidecar, session)
        except (ContextCacheError, TimeoutError):
            return KVState("unreachable", size_bytes=None)

    async def start_pull(self, session: CacheSessionMetadata, *, to: Endpoint) -> None:
        """Tell the sidecar of the pod that runs the next turn to fetch the KV from the holder's. Never raises.

        Returns once the pull is accepted, so that the pod, asked a moment later, knows that bytes are coming.
        """
        holder = self._endpoints.endpoint(session.holder)
        sidecar = self._sidecars.get(to.name)
        if sidecar is None or holder is None or not holder.sidecar or not session.cache_refs:
            return
        try:
            async with asyncio.timeout(self._pull_timeout_s):
                outcome = await sidecar.pull_context(session.tenant, session.cache_refs, peer=holder.sidecar)
        except (ContextCacheError, TimeoutError):
            outcome = "unreachable"
        self._metrics.pulls.labels(outcome).inc()

    async def delete(self, session: CacheSessionMetadata) -> None:
        """Delete a context's KV at every sidecar: more than its holder may have seen its turns."""
        freed = await asyncio.gather(
            *(self._delete_at(name, sidecar, session) for name, sidecar in self._sidecars.items())
        )
        self._metrics.freed_bytes.inc(sum(freed))
        log.info("context deleted", extra={"session_id": session.session_id, "freed_bytes": sum(freed)})

    async def _sealed_state(self, sidecar: KVSidecar, session: CacheSessionMetadata) -> KVState:
        found = await _manifest_state(sidecar, session, session.cache_ref)
        if found is not None:
            return found
        # A turn just committed may still be sealing; until then the generation before it is what there is.
        previous = session.previous_cache_ref
        kept = await _manifest_state(sidecar, session, previous) if previous else None
        if kept is not None:
            return KVState("pending", kept.size_bytes, kept.tier)
        is_young = self._clock.now_ms() - session.created_at_ms < _SEALING_MS
        return KVState("pending" if is_young else "absent")

    async def _delete_at(self, name: str, sidecar: KVSidecar, session: CacheSessionMetadata) -> int:
        try:
            async with asyncio.timeout(self._delete_timeout_s):
                return await sidecar.delete_context(
                    session.tenant, session_id=session.session_id, cache_refs=session.cache_refs
                )
        except (ContextCacheError, TimeoutError) as exc:
            self._metrics.unreachable_deletes.labels(name).inc()
            log.warning(
                "KV not deleted, its TTL will",
                extra={"session_id": session.session_id, "endpoint": name, "error": type(exc).__name__},
            )
            return 0


async def _manifest_state(sidecar: KVSidecar, session: CacheSessionMetadata, cache_ref: CacheRef) -> KVState | None:
    try:
        manifest, tier = await sidecar.get_manifest(session.tenant, cache_ref)
    except CacheRefNotFound:
        return None
    return KVState("sealed", manifest.size_bytes, "" if tier == _NO_TIER else tier)
