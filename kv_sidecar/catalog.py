"""The story of saved KV: announce, take, seal, wait, open, load, touch, delete, collect. Read this first.

Rules:
1. Publish the pointer last, remove it first. Save: blocks and tail, then the manifest. Delete: manifest, then the
   blocks nobody else holds. A crash in between leaves files without a manifest, which the collector frees.
2. A block is kept while a manifest holds it or a save in flight counts on it.
3. Whatever is wrong with stored bytes is a miss, never an answer.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from contextcache.clock import Clock
from contextcache.errors import (
    CacheRefNotFound,
    ContextCacheError,
    ContextDeleted,
    ContextExists,
    ContextExpired,
    CorruptBlock,
    InvalidRequest,
    SaveIncomplete,
    StorageFull,
)
from contextcache.model import CacheRef, Manifest, SessionId, TenantId
from kv_sidecar.announcements import Announcements
from kv_sidecar.block_file import BlockMeta
from kv_sidecar.block_key import BlockKey
from kv_sidecar.fingerprint import require_fingerprint
from kv_sidecar.io_threads import IoThreads
from kv_sidecar.manifest import all_keys, block_meta, num_files, rank_keys
from kv_sidecar.manifest_index import ManifestRecord
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.recent_names import RecentNames
from kv_sidecar.saves import NewSave, SaveInFlight, SavesInFlight
from kv_sidecar.sealed_manifests import SealedManifests
from kv_sidecar.store import Buffer
from kv_sidecar.tiers import FetchedBlock, TierName, Tiers

log = logging.getLogger(__name__)

NOT_FOUND = "no KV under this cache_ref"
"""One message for absent, expired, deleted and another tenant's."""


@dataclass(frozen=True, slots=True)
class CatalogLimits:
    """Bounds of everything the catalog remembers."""

    block_tokens: int
    save_deadline_ms: int
    """A save that is not sealed after this time is dropped."""
    max_saves: int
    tombstone_ms: int
    """How long deleted refs and sessions are refused."""
    max_tombstones: int
    spare_ms: int
    """How long the good blocks of a context with a corrupt one are kept, for the save that follows its recompute."""
    max_waiters: int


@dataclass(frozen=True, slots=True)
class PreparedSave:
    """What a rank has to send."""

    block_ids: tuple[str, ...]
    missing_blocks: tuple[int, ...]
    tail_tokens: int


@dataclass(frozen=True, slots=True)
class Removed:
    """What a delete or a collector pass removed."""

    num_manifests: int
    freed_bytes: int
    """On disk."""


class ContextCatalog:
    """All contexts of one sidecar. Used from one event loop."""

    def __init__(
        self,
        *,
        tiers: Tiers,
        manifests: SealedManifests,
        threads: IoThreads,
        clock: Clock,
        limits: CatalogLimits,
        metrics: SidecarMetrics,
    ) -> None:
        self._tiers = tiers
        self._manifests = manifests
        self._threads = threads
        self._clock = clock
        self._limits = limits
        self._metrics = metrics
        self._saves = SavesInFlight()
        self._seals = Announcements(max_waiters=limits.max_waiters)
        self._deleted: RecentNames[tuple[str, TenantId, str]] = RecentNames(
            keep_ms=limits.tombstone_ms, max_names=limits.max_tombstones
        )
        """Tombstones: ("ref" or "session", tenant, name)."""
        self._dropped: RecentNames[CacheRef] = RecentNames(keep_ms=limits.tombstone_ms, max_names=limits.max_tombstones)
        """Saves that ended without a manifest: nobody needs to wait for them."""
        self._spared: RecentNames[BlockKey] = RecentNames(keep_ms=limits.spare_ms, max_names=limits.max_tombstones)
        """Good blocks of contexts that lost another one, kept for the save that follows the recompute."""

    @property
    def num_contexts(self) -> int:
        """Sealed manifests."""
        return len(self._manifests.index)

    async def start(self) -> None:
        """Rebuild the index of manifests from the files."""
        await self._manifests.rebuild(is_stored=self._tiers.is_stored)

    async def prepare_save(self, new: NewSave) -> PreparedSave:
        """Open the save of one rank and pin the blocks it counts on. Idempotent.

        Raises InvalidRequest (also when ranks disagree), ContextDeleted, ContextExpired, ContextExists, StorageFull.
        """
        new.check()
        manifest = await self._threads.run(new.manifest, block_tokens=self._limits.block_tokens)
        try:
            save = self._admit(new, manifest)
        except ContextCacheError as exc:
            self._note_refusal(new.cache_ref, exc)
            raise
        self._saves.prepare(save, new.rank)
        self._metrics.saves.inc()
        keys = rank_keys(manifest, new.rank)[: len(manifest.block_ids)]
        missing = tuple(index for index, key in enumerate(keys) if not self._tiers.is_stored(key))
        return PreparedSave(manifest.block_ids, missing, manifest.tail_tokens)

    async def take_file(self, cache_ref: CacheRef, rank: int, block_index: int, shared_name: str) -> int:
        """Take over a block file from the shared directory; return its bytes. It is gone whatever happens.

        Raises InvalidRequest, CorruptBlock, StorageFull, SaveIncomplete, ContextDeleted; the save is then over.
        """
        path = self._tiers.memory.incoming_path(shared_name)
        try:
            save, expected = self._expected(cache_ref, rank, block_index)
        except ContextCacheError:
            await self._threads.run(path.unlink, missing_ok=True)
            raise
        return await self._threads.finish(self._take(save, expected, lambda: self._tiers.take_file(path, expected)))

    async def take_block(self, cache_ref: CacheRef, rank: int, block_index: int, data: Buffer) -> int:
        """Take a whole block file that came in frames; return its bytes. Raises as `take_file`."""
        save, expected = self._expected(cache_ref, rank, block_index)
        return await self._threads.finish(self._take(save, expected, lambda: self._tiers.take_bytes(data, expected)))

    async def seal(self, cache_ref: CacheRef, rank: int) -> bool:
        """End a rank's save; write the manifest when it was the last. Idempotent.

        Raises SaveIncomplete when blocks are missing or nothing was prepared, ContextDeleted.
        """
        save = self._saves.get(cache_ref)
        if save is None:
            if self._manifests.index.get(cache_ref) is not None:
                return True
            raise self._no_save(cache_ref)
        stored = all(self._tiers.is_stored(key) for key in rank_keys(save.manifest, rank))
        if rank not in save.prepared or not stored:
            raise SaveIncomplete("blocks of this rank are missing")
        save.sealed.add(rank)
        if not save.is_complete:
            return False
        await self._threads.finish(self._publish(save))
        return True

    async def wait_sealed(self, tenant: TenantId, cache_ref: CacheRef, *, timeout_s: float) -> ManifestRecord | None:
        """Return the record once its manifest is durable; None after `timeout_s`, or when the save has failed."""
        now_ms = self._clock.now_ms()
        record = self._manifests.live(tenant, cache_ref, now_ms=now_ms)
        given_up = self._dropped.added_at_ms(cache_ref, now_ms) is not None
        if record is None and not given_up and await self._seals.wait(cache_ref, timeout_s=timeout_s):
            record = self._manifests.live(tenant, cache_ref, now_ms=self._clock.now_ms())
        return record

    async def open(self, tenant: TenantId, cache_ref: CacheRef) -> Manifest:
        """Return a sealed, unexpired manifest whose blocks are all there. Raises CacheRefNotFound."""
        record = self._manifests.live(tenant, cache_ref, now_ms=self._clock.now_ms())
        if record is not None:
            manifest = await self._manifests.read(record)
            if manifest is not None and all(self._tiers.is_stored(key) for key in record.keys):
                return manifest
            await self._threads.finish(self._lose(lambda: self._manifests.index.of_refs(tenant, [cache_ref])))
        self._metrics.misses.inc()
        raise CacheRefNotFound(NOT_FOUND)

    def tier_of(self, manifest: Manifest) -> TierName:
        """Return the tier that would serve most blocks of rank 0 now."""
        keys = rank_keys(manifest, 0)
        in_memory = sum(self._tiers.memory.size_bytes(key) is not None for key in keys)
        return "host" if 2 * in_memory > len(keys) else "disk"

    async def load(
        self, manifest: Manifest, fingerprint: str, rank: int, block_indices: Sequence[int], *, shared: bool
    ) -> AsyncGenerator[FetchedBlock, None]:
        """Yield verified blocks in order; they stay pinned until the generator is closed.

        Raises InvalidRequest, FingerprintMismatch, CacheRefNotFound, CorruptBlock; a corrupt block is quarantined and
        the manifests that hold it are removed.
        """
        require_fingerprint(fingerprint, manifest.fingerprint)
        files = num_files(manifest)
        if not 0 <= rank < manifest.world_size or not all(0 <= index < files for index in block_indices):
            raise InvalidRequest("there is no such block in this context", param="block_indices")
        if len(block_indices) > files:
            raise InvalidRequest("more blocks asked for than there are", param="block_indices")
        blocks = self._tiers.fetch(manifest, rank, block_indices, shared=shared)
        served = 0
        try:
            async for block in blocks:
                served += 1
                yield block
        except CorruptBlock:
            key = block_meta(manifest, block_indices[served], rank).key
            await self._threads.finish(self._lose_block(key))
            raise
        finally:
            await blocks.aclose()

    async def touch(self, tenant: TenantId, session_id: SessionId, expires_at_ms: int) -> int:
        """Move the expiry of a session's unexpired manifests, and of those on their way; return how many."""
        for save in self._saves.of_session(tenant, session_id):
            save.manifest = replace(save.manifest, expires_at_ms=expires_at_ms)
        now_ms = self._clock.now_ms()
        return await self._threads.finish(self._manifests.move_expiry(tenant, session_id, expires_at_ms, now_ms=now_ms))

    async def delete(self, tenant: TenantId, session_id: SessionId, cache_refs: Sequence[CacheRef]) -> Removed:
        """Remove manifests of a session ("" for none) and of `cache_refs`, then all blocks nobody else holds.

        Later saves under these names are refused. Idempotent.
        """
        return await self._threads.finish(self._delete(tenant, session_id, cache_refs))

    async def collect(self) -> Removed:
        """Free what is reachable from no live manifest and no save in flight."""
        return await self._threads.finish(self._collect())

    def _admit(self, new: NewSave, manifest: Manifest) -> SaveInFlight:
        """Return the save a rank belongs to, new or begun by another rank."""
        now_ms = self._clock.now_ms()
        if self._is_deleted(new, now_ms):
            raise ContextDeleted("the context was deleted")
        if new.expires_at_ms <= now_ms:
            raise ContextExpired("the context has expired")
        if self._manifests.index.get(new.cache_ref) is not None:
            raise ContextExists("this cache_ref is sealed")
        save = self._saves.get(new.cache_ref)
        if save is not None:
            if replace(manifest, expires_at_ms=save.manifest.expires_at_ms) != save.manifest:
                raise InvalidRequest("ranks disagree about this cache_ref", param="cache_ref")
            return save
        if len(self._saves) >= self._limits.max_saves:
            raise StorageFull("too many saves in flight")
        return SaveInFlight(manifest, now_ms + self._limits.save_deadline_ms)

    def _is_deleted(self, new: NewSave, now_ms: int) -> bool:
        if self._deleted.added_at_ms(("ref", new.tenant, new.cache_ref), now_ms) is not None:
            return True
        deleted_at_ms = self._deleted.added_at_ms(("session", new.tenant, new.session_id), now_ms)
        return deleted_at_ms is not None and new.started_at_ms <= deleted_at_ms

    def _expected(self, cache_ref: CacheRef, rank: int, block_index: int) -> tuple[SaveInFlight, BlockMeta]:
        save = self._saves.get(cache_ref)
        if save is None:
            raise self._no_save(cache_ref)
        if rank not in save.prepared or not 0 <= block_index < num_files(save.manifest):
            raise InvalidRequest("the save has no such block", param="block_index")
        return save, block_meta(save.manifest, block_index, rank)

    def _no_save(self, cache_ref: CacheRef) -> ContextCacheError:
        if self._dropped.added_at_ms(cache_ref, self._clock.now_ms()) is not None:
            return ContextDeleted("the save was dropped")
        return SaveIncomplete("there is no save under this cache_ref")

    async def _take(self, save: SaveInFlight, expected: BlockMeta, take_in: Callable[[], Awaitable[int]]) -> int:
        try:
            size_bytes = await take_in()
        except ContextCacheError as exc:
            self._note_refusal(save.manifest.cache_ref, exc)
            await self._tiers.free(self._drop(save), wanted=self._is_wanted)
            raise
        if save.dropped:
            await self._tiers.free([expected.key], wanted=self._is_wanted)
            raise ContextDeleted("the save was dropped")
        self._metrics.blocks_taken.inc()
        self._metrics.bytes_taken.inc(size_bytes)
        return size_bytes

    async def _publish(self, save: SaveInFlight) -> None:
        record = await self._manifests.publish(lambda: self._finished_manifest(save))
        self._saves.remove(save)
        if record is not None:
            self._metrics.seals.inc()
            log.info("context sealed", extra={"cache_ref": record.cache_ref, "num_tokens": record.num_tokens})
        self._seals.announce(save.manifest.cache_ref)

    def _finished_manifest(self, save: SaveInFlight) -> Manifest | None:
        """Return the manifest with its size; None when another call has just written it."""
        if save.dropped:
            raise ContextDeleted("the save was dropped")
        if self._saves.get(save.manifest.cache_ref) is not save:
            return None
        sizes = [self._tiers.stored_bytes(key) for key in all_keys(save.manifest)]
        if None in sizes:
            raise SaveIncomplete("a block this save counted on has gone")
        save.publishing = True
        return replace(save.manifest, size_bytes=sum(size or 0 for size in sizes))

    def _drop(self, save: SaveInFlight) -> list[BlockKey]:
        """End a save without a manifest; return the blocks it counted on. Its waiters learn at once."""
        save.dropped = True
        self._dropped.add(save.manifest.cache_ref, self._clock.now_ms())
        self._seals.announce(save.manifest.cache_ref)
        return self._saves.remove(save)

    def _note_refusal(self, cache_ref: CacheRef, error: ContextCacheError) -> None:
        self._metrics.refused.labels(error.code).inc()
        if not isinstance(error, ContextExists):
            self._dropped.add(cache_ref, self._clock.now_ms())
            self._seals.announce(cache_ref)

    async def _lose(self, select: Callable[[], list[ManifestRecord]]) -> None:
        """Remove manifests that can no longer be served, and spare their blocks for a while."""
        now_ms = self._clock.now_ms()
        for record in await self._manifests.remove(select):
            log.warning("context lost", extra={"cache_ref": record.cache_ref, "tenant": record.tenant})
            for key in record.keys:
                self._spared.add(key, now_ms)

    async def _lose_block(self, key: BlockKey) -> None:
        await self._tiers.put_aside(key)
        await self._lose(lambda: self._manifests.index.holders(key))

    async def _delete(self, tenant: TenantId, session_id: SessionId, cache_refs: Sequence[CacheRef]) -> Removed:
        now_ms = self._clock.now_ms()
        for cache_ref in cache_refs:
            self._deleted.add(("ref", tenant, cache_ref), now_ms)
        if session_id:
            self._deleted.add(("session", tenant, session_id), now_ms)
        doomed = [
            save
            for save in self._saves
            if save.manifest.tenant == tenant
            and (save.manifest.session_id == session_id or save.manifest.cache_ref in cache_refs)
        ]
        keys = [key for save in doomed for key in self._drop(save)]
        index = self._manifests.index
        records = await self._manifests.remove(
            lambda: list({*index.of_refs(tenant, cache_refs), *index.of_session(tenant, session_id)})
        )
        self._metrics.deletes.inc(len(records))
        return await self._free(records, keys)

    async def _collect(self) -> Removed:
        now_ms = self._clock.now_ms()
        overdue = [save for save in self._saves if save.deadline_ms <= now_ms and not save.publishing]
        keys = [key for save in overdue for key in self._drop(save)]
        records = await self._manifests.remove(lambda: self._manifests.index.expired(now_ms))
        self._metrics.collected.inc(len(records))
        self._spared.forget_old(now_ms)
        return await self._free(records, [*keys, *await self._threads.run(self._orphans)])

    def _orphans(self) -> list[BlockKey]:
        return [key for key in self._tiers.all_keys() if not self._is_wanted(key)]

    async def _free(self, records: Sequence[ManifestRecord], keys: Sequence[BlockKey]) -> Removed:
        """Free what removed manifests held and dropped saves counted on, unless somebody else wants it."""
        held = [key for record in records for key in record.keys]
        freed_bytes = await self._tiers.free([*held, *keys], wanted=self._is_wanted)
        return Removed(len(records), freed_bytes)

    def _is_wanted(self, key: BlockKey) -> bool:
        return self._manifests.index.is_held(key) or self._saves.is_pinned(key) or key in self._spared
