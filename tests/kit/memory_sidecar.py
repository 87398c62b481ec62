"""A kv-sidecar in memory, for tests: it keeps the contract suite that the real one keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from contextcache.clock import Clock, SystemClock
from contextcache.errors import CacheRefNotFound, CacheRefPending, SidecarUnavailable
from contextcache.model import (
    CacheRef,
    ForkedKV,
    KeptGroup,
    Manifest,
    Placement,
    Promise,
    SaveOutcome,
    SessionId,
    TenantId,
)
from contextcache.names import KEPT_PREFIX
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.recent import Beginnings


class MemorySidecar:
    """Manifests by cache_ref; `down` makes every call fail as an unreachable sidecar does."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.down = False
        self.closed = False
        self.fingerprints: list[str] = []
        self._clock = clock or SystemClock()
        self.beginnings = Beginnings(self._clock)
        self.pulls: list[tuple[TenantId, tuple[CacheRef, ...], str]] = []
        self._kept: dict[CacheRef, tuple[Manifest, str]] = {}
        self.saving: set[tuple[TenantId, CacheRef]] = set()
        """What is on its way: neither sealed nor missing."""
        self._failed: dict[tuple[TenantId, CacheRef], str] = {}

    def keep(self, manifest: Manifest, *, tier: str = "host") -> None:
        """Hold a sealed manifest."""
        self._kept[manifest.cache_ref] = (manifest, tier)

    async def get_manifest(self, tenant: TenantId, cache_ref: CacheRef) -> tuple[Manifest, str]:
        """Return a sealed manifest and its tier. Raises CacheRefNotFound, also for another tenant's."""
        self._check_up()
        if (tenant, cache_ref) in self.saving:
            raise CacheRefPending("it is being saved")
        found = self._kept.get(cache_ref)
        if found is None or found[0].tenant != tenant:
            raise CacheRefNotFound("no KV has this cache_ref")
        return found

    def fail(self, tenant: TenantId, cache_ref: CacheRef, reason: str) -> None:
        """Remember why there is no KV under a name."""
        self._failed[tenant, cache_ref] = reason

    async def wait_sealed(
        self, tenant: TenantId, cache_ref: CacheRef, *, timeout_ms: int, placements: Sequence[str] = ()
    ) -> SaveOutcome:
        """Return whether it is held, or why not. Never waits. Accepts every placement: there is one tier."""
        del timeout_ms
        self._check_up()
        found = self._kept.get(cache_ref)
        if found is not None and found[0].tenant == tenant:
            placed = tuple(Placement("accepted", "", found[0].size_bytes, found[1]) for _ in placements)
            return SaveOutcome(is_sealed=True, placements=placed)
        return SaveOutcome(is_sealed=False, reason=self._failed.get((tenant, cache_ref), ""))

    async def retain_context(
        self, tenant: TenantId, cache_refs: Sequence[CacheRef], *, retain_ms: int, pinned: bool
    ) -> Promise:
        """Promise the first of these that is held. Nothing is ever evicted here."""
        self._check_up()
        held = [ref for ref in cache_refs if ref in self._kept and self._kept[ref][0].tenant == tenant]
        return Promise(self._clock.now_ms() + retain_ms, pinned) if held else Promise(reason="not_saved")

    async def touch_context(self, tenant: TenantId, session_id: SessionId, expires_at_ms: int) -> int:
        """Move the expiry of the session's manifests; return how many. None expires by itself here."""
        self._check_up()
        found = [
            (ref, manifest, tier)
            for ref, (manifest, tier) in self._kept.items()
            if (manifest.tenant, manifest.session_id) == (tenant, session_id)
        ]
        for ref, manifest, tier in found:
            self._kept[ref] = (replace(manifest, expires_at_ms=expires_at_ms), tier)
        return len(found)

    async def fork_context(
        self,
        tenant: TenantId,
        sources: Sequence[CacheRef],
        *,
        session_id: SessionId,
        cache_ref: CacheRef,
        expires_at_ms: int,
    ) -> ForkedKV | None:
        """Hold the first source's manifest under another name too. Bytes are one's until it goes, then the other's."""
        self._check_up()
        for ref in sources:
            found = self._kept.get(ref)
            if found is not None and found[0].tenant == tenant:
                manifest = replace(
                    found[0],
                    cache_ref=cache_ref,
                    session_id=session_id,
                    expires_at_ms=expires_at_ms,
                    tail_ref=found[0].tail_ref or ref,
                )
                self._kept[cache_ref] = (manifest, found[1])
                return ForkedKV(manifest.size_bytes, found[1])
        return None

    async def delete_context(
        self, tenant: TenantId, *, session_id: SessionId = "", cache_refs: Sequence[CacheRef] = ()
    ) -> int:
        """Remove the tenant's manifests of the session and under the refs; return their bytes."""
        self._check_up()
        going = [
            manifest
            for manifest, _ in self._kept.values()
            if manifest.tenant == tenant and (manifest.session_id == session_id or manifest.cache_ref in cache_refs)
        ]
        for manifest in going:
            del self._kept[manifest.cache_ref]
        held = {_tails_of(manifest) for manifest, _ in self._kept.values()}
        freed = {_tails_of(manifest): manifest.size_bytes for manifest in going}
        return sum(size_bytes for tails, size_bytes in freed.items() if tails not in held)

    async def pull_context(self, tenant: TenantId, cache_refs: Sequence[CacheRef], *, peer: str) -> str:
        """Note what was asked for. Returns `present` when the first ref is here, else `started`."""
        self._check_up()
        self.pulls.append((tenant, tuple(cache_refs), peer))
        return "present" if cache_refs[0] in self._kept else "started"

    async def list_kept(self, tenant: TenantId, group: SessionId = "") -> list[KeptGroup]:
        """Return what is held of the tenant's plain requests, a group each."""
        self._check_up()
        held = [manifest for manifest, _ in self._kept.values() if manifest.tenant == tenant]
        names = dict.fromkeys(manifest.session_id for manifest in held if manifest.session_id.startswith(KEPT_PREFIX))
        return [
            _group_of(name, [manifest for manifest in held if manifest.session_id == name])
            for name in names
            if group in ("", name)
        ]

    async def stats(self, *, beginnings_after: int = 0) -> pb.StatsResponse:
        """Return how many contexts there are, the tiers, the fingerprints and the beginnings it was given."""
        self._check_up()
        beginnings, end = self.beginnings.since(beginnings_after)
        tiers = [pb.TierStats(tier=tier) for tier in (pb.TIER_HOST, pb.TIER_DISK)]
        return pb.StatsResponse(
            num_contexts=len(self._kept),
            tiers=tiers,
            fingerprints=self.fingerprints,
            beginnings=beginnings,
            beginnings_age_ms=beginnings.values(),
            beginnings_end=end,
        )

    async def close(self) -> None:
        """Note that nobody calls any more."""
        self.closed = True

    def _check_up(self) -> None:
        if self.down:
            raise SidecarUnavailable("the sidecar is down")


def _group_of(name: SessionId, manifests: Sequence[Manifest]) -> KeptGroup:
    return KeptGroup(
        group=name,
        num_tokens=max(len(manifest.token_ids) for manifest in manifests),
        size_bytes=sum(manifest.size_bytes for manifest in manifests),
        expires_at_ms=max(manifest.expires_at_ms for manifest in manifests),
        used_at_ms=0,
        num_manifests=len(manifests),
    )


def _tails_of(manifest: Manifest) -> CacheRef:
    """Return what all forks of one context have in common."""
    return manifest.tail_ref or manifest.cache_ref
