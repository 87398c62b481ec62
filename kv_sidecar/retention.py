"""Which KV leaves the disk when room is needed, and how long the KV of plain requests stays.

Room: between two marks, the contexts used longest ago leave, kept KV before any context. Kept KV makes room for no
context, and no save evicts the guarantee of another tenant.

Lease: the blocks of a load stay in memory and on disk until the engine ends the load, or until a deadline.

Kept KV is the KV of plain requests, in groups: a group is probably one conversation. Each answer leaves a longer
manifest of the same conversation, which replaces the manifests that it begins with. An edited conversation leaves
several manifests side by side, of which the latest stay. Evicted KV costs its conversation one computed turn.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from prometheus_client import Counter as Counted

from contextcache.errors import InvalidRequest, SidecarUnavailable, StorageFull
from contextcache.model import CacheRef, KeptGroup, KeptMiss, Manifest, SessionId, TenantId
from contextcache.names import KEPT_PREFIX, check_tenant
from kv_sidecar.blocks import Blocks, Shortage
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.promises import Promises
from kv_sidecar.refs import Refs
from kv_sidecar.runtime import Runtime
from kv_sidecar.sealed.manifests import ManifestRecord, Manifests
from kv_sidecar.sealed.prefixes import PrefixQuestion, beginning_of
from kv_sidecar.tiers.tiers import Tiers

log = logging.getLogger(__name__)

_LEASE_ID = re.compile(r"[0-9a-z]{16,64}", re.ASCII)
GROUPS_SHOWN = 1000
GROUP_MAX = 64
"""Manifests in a group; a further one replaces the manifest used longest ago."""
_SHARE_USED = 4
"""A manifest's file is rewritten once a quarter of the new life has passed: a hit then rarely costs an fsync."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Result of a delete or of a collector pass."""

    num_manifests: int
    freed_bytes: int
    """Bytes of block files on disk."""

    def __add__(self, other: Removed) -> Removed:
        """Return the sum of both."""
        return Removed(self.num_manifests + other.num_manifests, self.freed_bytes + other.freed_bytes)


@dataclass(eq=False)
class Retention:
    """Evicts contexts and keeps the KV of plain requests. Used from one event loop."""

    runtime: Runtime
    refs: Refs
    tiers: Tiers
    manifests: Manifests
    promises: Promises
    guarantee_bytes: int
    """Bytes of each tenant that saves of other tenants do not evict; 0: none."""
    _evicting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _used_at_ms: dict[tuple[TenantId, SessionId], int] = field(default_factory=dict)
    _misses: dict[tuple[TenantId, SessionId], KeptMiss] = field(default_factory=dict)
    """Both by group; the collector forgets groups without manifests."""

    async def make_room(self, tenant: TenantId, size_bytes: int, *, for_kept: bool) -> None:
        """Evict until a file of this tenant fits below the mark, or nothing may leave. Raises OSError.

        `for_kept`: only kept KV leaves. Raises StorageFull when that is too little.
        """
        await self.make_share(tenant, size_bytes, for_kept=for_kept)
        blocks = self.tiers.blocks
        await self._evict(
            tenant,
            lambda: blocks.shortage(size_bytes),
            lambda record: not for_kept or (record.is_expendable and not self._is_named(record)),
        )
        if for_kept and not blocks.shortage(size_bytes).is_over:
            raise StorageFull("contexts use all the room on this disk")

    async def make_share(self, tenant: TenantId, size_bytes: int, *, for_kept: bool) -> None:
        """Evict kept KV of a tenant until so many more bytes are within its limit, or none is left. Raises OSError.

        `for_kept`: KV that a load may ask for stays.
        """
        blocks = self.tiers.blocks
        if blocks.kept_bytes(tenant):
            await self._evict(
                tenant,
                lambda: blocks.tenant_shortage(tenant, size_bytes),
                lambda it: it.tenant == tenant and it.is_expendable and not (for_kept and self._is_named(it)),
            )

    async def _evict(
        self, tenant: TenantId, shortage: Callable[[], Shortage], is_candidate: Callable[[ManifestRecord], bool]
    ) -> None:
        """Evict kept KV first, then contexts. Of both kinds those that a load may need are last."""

        async def evict() -> None:
            async with self._evicting:
                if shortage().is_over:
                    return
                candidates = filter(is_candidate, self.manifests)
                order = sorted(candidates, key=lambda record: (not record.is_expendable, self._is_named(record)))
                victims = self._victims(shortage(), order, tenant)
                named = {record.cache_ref for record in victims if self._is_named(record)}

                def may_go(record: ManifestRecord) -> bool:
                    is_needed = self._is_named(record) and record.cache_ref not in named
                    return not is_needed and self.may_evict(record)

                records, freed_bytes = await self.sweep(victims, self.runtime.metrics.evicted, may_go)
                if records:
                    log.info("contexts evicted", extra={"num_contexts": len(records), "freed_bytes": freed_bytes})

        if not shortage().is_over:
            # A caller that gives up must not leave records of files that are gone.
            await self.runtime.threads.finish(evict())

    async def sweep(
        self,
        doomed: Iterable[ManifestRecord],
        counter: Counted,
        may_go: Callable[[ManifestRecord], bool] = lambda _: True,
    ) -> tuple[list[ManifestRecord], int]:
        """Remove manifests as `Manifests.sweep` does, and their blocks without a reference.

        Counts the manifests; returns them, and the bytes freed on disk.
        """
        records = await self.manifests.sweep(doomed, may_go)
        counter.inc(len(records))
        return records, await self.tiers.free(keys_of(records))

    def may_evict(self, record: ManifestRecord) -> bool:
        """Return whether a record may be removed to make room: no load has a lease on it, and it is not promised."""
        return not (self.promises.is_promised(record) or self.tiers.blocks.is_leased(record.keys))

    def _is_named(self, record: ManifestRecord) -> bool:
        return self.refs.is_named(record.tenant, record.cache_ref)

    def _victims(self, missing: Shortage, records: Sequence[ManifestRecord], tenant: TenantId) -> list[ManifestRecord]:
        """Return the first records whose files make up for the shortage."""
        blocks = self.tiers.blocks
        used, gone = Counter(blocks.bytes_by_tenant()), Counter[BlockKey]()
        victims: list[ManifestRecord] = []
        for record in records:
            if missing.is_over:
                break
            is_guaranteed = record.tenant != tenant and used[record.tenant] <= self.guarantee_bytes
            if is_guaranteed or not self.may_evict(record):
                continue
            victims.append(record)
            gone.update(record.keys)
            held = map(blocks.get, record.keys)
            free = [block for block in held if gone[block.key] == block.refs.manifest + block.refs.kept]
            freed = sum(block.stored_bytes or 0 for block in free)
            used[record.tenant] -= freed
            missing = Shortage(missing.size_bytes - freed, missing.num_files - len(free) - 1)  # and its manifest
        return victims

    def repeated(self, manifest: Manifest) -> ManifestRecord | None:
        """Return the kept KV that has exactly these tokens, and prolong it; None: there is none."""
        for cache_ref in self.manifests.prefixes.equals(beginning_of(manifest)):
            record = self.manifests.live(manifest.tenant, cache_ref)
            if record is not None and record.is_kept and not self.refs.get(manifest.tenant, cache_ref).is_replaced:
                self.use(cache_ref, manifest.expires_at_ms)
                return record
        return None

    def use(self, cache_ref: CacheRef, expires_at_ms: int) -> None:
        """Note a use of kept KV and the expiry that it gives; the KV of sessions does not change."""
        record = self.manifests.get(cache_ref)
        if record is None or not record.is_kept:
            return
        now_ms = self.runtime.clock.now_ms()
        self.manifests.use(cache_ref)
        self._used_at_ms[record.tenant, record.session_id] = now_ms
        if expires_at_ms - record.expires_at_ms > (expires_at_ms - now_ms) // _SHARE_USED:
            ref = self.refs.get(record.tenant, cache_ref)
            ref.used_until_ms = max(expires_at_ms, ref.used_until_ms)

    def note_match(self, question: PrefixQuestion, num_tokens: int) -> None:
        """Remember where a conversation diverged from its kept KV, if it did."""
        group = self.manifests.of_session(question.tenant, question.group)
        if group and num_tokens < min(group[-1].num_tokens, question.num_tokens):
            miss = KeptMiss(num_tokens, question.num_tokens, self.runtime.clock.now_ms())
            self._misses[question.tenant, question.group] = miss

    def groups(self, tenant: TenantId, group: SessionId = "") -> list[KeptGroup]:
        """Return a tenant's groups, or one of them, the latest used first, at most `GROUPS_SHOWN`.

        Raises InvalidRequest.
        """
        check_tenant(tenant)
        manifests, blocks = self.manifests, self.tiers.blocks
        names = [group] if group.startswith(KEPT_PREFIX) else [] if group else manifests.groups(tenant)
        names.sort(key=lambda name: self._used_at_ms.get((tenant, name), 0), reverse=True)
        found = ((name, manifests.of_session(tenant, name)) for name in names[:GROUPS_SHOWN])
        return [
            KeptGroup(
                group=name,
                num_tokens=max(record.num_tokens for record in records),
                size_bytes=sum(blocks.get(key).stored_bytes or 0 for key in set(keys_of(records))),
                expires_at_ms=max(record.expires_at_ms for record in records),
                used_at_ms=self._used_at_ms.get((tenant, name), 0),
                num_manifests=len(records),
                last_miss=self._misses.get((tenant, name)),
            )
            for name, records in found
            if records
        ]

    async def prolong_used(self) -> None:
        """Write the new expiry of the kept KV used since the last call; forget groups without manifests.

        A file that cannot be written now is tried again in the next call.
        """
        for notes in (self._used_at_ms, self._misses):
            for tenant, name in [key for key in notes if not self.manifests.of_session(*key)]:
                del notes[tenant, name]
        for ref in self.refs:
            record, until_ms = self.manifests.get(ref.cache_ref), ref.used_until_ms
            if record is not None and until_ms:
                ref.used_until_ms = 0
                try:
                    await self.manifests.move_expiry(partial(lambda it: [it], record), until_ms)
                except (StorageFull, SidecarUnavailable, OSError):
                    self.use(ref.cache_ref, until_ms)

    async def replace(self, manifest: Manifest) -> None:
        """Mark the kept KV that a newly sealed manifest stands for; remove the part that no load may need.

        `remove_replaced` removes the rest.
        """
        self._used_at_ms[manifest.tenant, manifest.session_id] = self.runtime.clock.now_ms()
        group = self.manifests.of_session(manifest.tenant, manifest.session_id)
        others = [record for record in group if record.cache_ref != manifest.cache_ref]
        begun = [record for record in others if record.at.begins(manifest)]
        rest = [record for record in others if record not in begun]
        surplus = rest[: max(len(rest) + 1 - GROUP_MAX, 0)]
        for record in (*begun, *surplus):
            self.refs.get(record.tenant, record.cache_ref).is_replaced = True
        await self._remove_unneeded([*begun, *surplus])

    async def remove_replaced(self) -> int:
        """Remove the replaced kept KV that no load may need by now; return how many. Looks at every ref."""
        found = [self.manifests.get(ref.cache_ref) for ref in self.refs if ref.is_replaced]
        return await self._remove_unneeded([record for record in found if record is not None])

    async def _remove_unneeded(self, records: Iterable[ManifestRecord]) -> int:
        def may_go(record: ManifestRecord) -> bool:
            return not self._is_named(record) and self.may_evict(record)

        removed, _ = await self.sweep(filter(may_go, records), self.runtime.metrics.replaced, may_go)
        for record in removed:
            self.manifests.on_change("replaced", record)
        return len(removed)


def keys_of(records: Iterable[ManifestRecord]) -> list[BlockKey]:
    """Return the keys of all files of these manifests."""
    return [key for record in records for key in record.keys]


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Lease that an engine asks for with a load."""

    lease_id: str
    """Unguessable, made by the engine."""
    life_ms: int
    """Time after which the lease expires."""
    room_wait_ms: int = 0
    """Longest wait for a slot of the load's first block."""

    def check(self) -> None:
        """Raise InvalidRequest for a field with an illegal value."""
        if not _LEASE_ID.fullmatch(self.lease_id):
            raise InvalidRequest("a lease id must have 16 to 64 letters and digits", param="lease_id")
        if self.life_ms < 1:
            raise InvalidRequest("a lease must have a duration above 0", param="lease_ms")


@dataclass(eq=False)
class Leases:
    """At most `max_leases`, each for at most `life_ms_max`."""

    blocks: Blocks
    runtime: Runtime
    max_leases: int
    life_ms_max: int
    _leases: dict[str, tuple[int, dict[BlockKey, None]]] = field(default_factory=dict)
    """Deadline in ms and blocks by id, in the order of the load: at its end the last block is the latest used."""

    def open(self, terms: LeaseTerms, keys: Iterable[BlockKey]) -> bool:
        """Put blocks under a lease; False when there are too many leases already.

        A known id gets these blocks too, and its time anew. Raises InvalidRequest.
        """
        terms.check()
        if terms.lease_id not in self._leases and len(self._leases) >= self.max_leases:
            self.runtime.metrics.leases.labels("refused").inc()
            return False
        _, held = self._leases.get(terms.lease_id, (0, {}))
        fresh = {key: None for key in keys if key not in held}
        deadline_ms = self.runtime.clock.now_ms() + min(terms.life_ms, self.life_ms_max)
        self._leases[terms.lease_id] = (deadline_ms, held | fresh)
        self.blocks.hold(fresh, "lease")
        return True

    def end(self, lease_id: str, how: Literal["ended", "expired"] = "ended") -> list[BlockKey]:
        """End a lease; return the blocks without a reference: the caller frees them. Idempotent."""
        if lease_id not in self._leases:
            return []
        self.runtime.metrics.leases.labels(how).inc()
        _, held = self._leases.pop(lease_id)
        return self.blocks.let_go(held, "lease")

    def expire(self) -> None:
        """End the leases past their deadline; the collector frees the blocks without a reference."""
        now_ms = self.runtime.clock.now_ms()
        for lease_id in [lease_id for lease_id, (deadline_ms, _) in self._leases.items() if deadline_ms <= now_ms]:
            self.end(lease_id, "expired")


async def collect_forever(
    collect: Callable[[], Awaitable[Removed]], *, interval_s: float, metrics: SidecarMetrics, is_timed: bool
) -> None:
    """Make a pass every `interval_s`, the first at once, for what the last process left.

    `is_timed`: a metric shows the time of the last complete pass.
    """
    while True:
        began_s = time.time()
        try:
            removed = await collect()
        except Exception:
            # The loop must live: what failed now is tried again in the next pass.
            metrics.collector_failures.inc()
            log.exception("collector pass failed")
        else:
            if is_timed:
                metrics.last_collect.set(began_s)
            if removed.num_manifests or removed.freed_bytes:
                fields = {"num_contexts": removed.num_manifests, "freed_bytes": removed.freed_bytes}
                log.info("collected", extra=fields)
        await asyncio.sleep(interval_s)
