"""A fork's KV: a manifest of its own over block files that are there. No byte of KV is read, written or copied.

The new manifest names another session, another expiry, and whose tails it has; its blocks and those tails then have one
holder more, and stay until the last one goes. Written under the lock that every manifest changes under, so a delete of
the context forked from comes before it, and there is nothing to fork, or after it, and leaves the files alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from contextcache.clock import Clock
from contextcache.errors import ContextExists, ContextExpired, InvalidRequest
from contextcache.model import CacheRef, Manifest, SessionId, TenantId
from contextcache.names import (
    check_cache_refs,
    check_session_id,
    check_tenant,
    prompt_ref,
)
from kv_sidecar.saving import Saving
from kv_sidecar.sealed.index import ManifestRecord
from kv_sidecar.sealed.manifests import SealedManifests

log = logging.getLogger(__name__)

MAX_SOURCES = 4
"""A session names two."""
SEAL_WAIT_S = 1.0
"""For KV that is being saved: a fork right behind a turn has all of it, or what was before."""


@dataclass(frozen=True, slots=True)
class NewFork:
    """What is asked for."""

    tenant: TenantId
    session_id: SessionId
    """Of the fork."""
    cache_ref: CacheRef
    """Name of its KV."""
    sources: tuple[CacheRef, ...]
    """Names of KV to take, the best first."""
    expires_at_ms: int

    def check(self) -> None:
        """Raise InvalidRequest for a field that cannot be."""
        check_tenant(self.tenant)
        check_session_id(self.session_id)
        if not 1 <= len(self.sources) <= MAX_SOURCES:
            raise InvalidRequest(f"a fork must have 1 to {MAX_SOURCES} sources", param="sources")
        check_cache_refs((self.cache_ref, *self.sources))


class Forks:
    """Makes forks. Used from one event loop."""

    def __init__(self, manifests: SealedManifests, saving: Saving, *, clock: Clock) -> None:
        self._manifests = manifests
        self._saving = saving
        self._clock = clock

    async def make(self, new: NewFork) -> ManifestRecord | None:
        """Return the fork's record once its manifest is durable; None when none of the sources is there. Idempotent.

        Raises InvalidRequest, ContextExpired, ContextExists, ContextDeleted when the fork was deleted meanwhile,
        StorageFull.
        """
        new.check()
        begun_ms = self._clock.now_ms()
        if new.expires_at_ms <= begun_ms:
            raise ContextExpired("the context has expired")
        source = await self._source(new.tenant, new.sources)
        if source is None:
            return None
        at_prompt = self._live(new.tenant, prompt_ref(source.cache_ref))
        if at_prompt is not None:  # what was saved at the end of its prompt goes along
            await self._publish(new, at_prompt, prompt_ref(new.cache_ref), begun_ms)
        record = await self._publish(new, source, new.cache_ref, begun_ms)
        if record is not None:
            log.info("context forked", extra={"cache_ref": new.cache_ref, "num_tokens": record.num_tokens})
        return record

    async def _source(self, tenant: TenantId, sources: Sequence[CacheRef]) -> ManifestRecord | None:
        for ref in sources:
            if self._saving.is_saving(tenant, ref):
                await self._saving.wait(ref, timeout_s=SEAL_WAIT_S)
            if (record := self._live(tenant, ref)) is not None:
                return record
        return None

    async def _publish(
        self, new: NewFork, source: ManifestRecord, cache_ref: CacheRef, begun_ms: int
    ) -> ManifestRecord | None:
        manifest = await self._manifests.read(source, again=True)

        def plan() -> Manifest | None:
            self._saving.check_not_deleted(new.tenant, new.session_id, cache_ref, started_at_ms=begun_ms)
            taken = self._manifests.index.get(cache_ref)
            if taken is not None and (taken.tenant, taken.session_id) != (new.tenant, new.session_id):
                raise ContextExists("this cache_ref is already sealed")
            known = self._manifests.index.get(source.cache_ref)
            if manifest is None or known is None or known.keys != source.keys:
                return None  # deleted, lost or saved anew since it was read
            # Its files are those of the other one, tails by name too: nothing is hashed again, where all wait for it.
            return replace(
                manifest,
                cache_ref=cache_ref,
                session_id=new.session_id,
                expires_at_ms=new.expires_at_ms,
                tail_ref=manifest.tail_ref or manifest.cache_ref,
            )

        return await self._manifests.publish(plan)

    def _live(self, tenant: TenantId, cache_ref: CacheRef) -> ManifestRecord | None:
        return self._manifests.live(tenant, cache_ref, now_ms=self._clock.now_ms())
