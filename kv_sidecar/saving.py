"""How KV gets in: announce, take block files, seal, write the manifest last. The way out is catalog.py's.

A save that cannot end with a manifest is dropped at once, with everything it brought, and whoever waits for it learns.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from contextcache.clock import Clock
from contextcache.errors import (
    ContextCacheError,
    ContextDeleted,
    ContextExists,
    ContextExpired,
    InvalidRequest,
    SaveIncomplete,
    SidecarUnavailable,
    StorageFull,
)
from contextcache.model import CacheRef, Manifest, SessionId, TenantId
from contextcache.names import prompt_ref
from kv_sidecar.format.block_file import BlockMeta
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import all_keys, block_meta, num_files, rank_keys
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.saves import (
    HOLD_DEADLINE,
    SAVE_DEADLINE,
    CatalogLimits,
    FailedSave,
    FailedSaves,
    MoreTokens,
    NewSave,
    SaveInFlight,
    SavesInFlight,
    counted_reason,
)
from kv_sidecar.sealed.index import Announcements, RecentNames
from kv_sidecar.sealed.manifests import SealedManifests
from kv_sidecar.tiers.tiers import Tiers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedSave:
    """What a rank has to send."""

    missing_files: tuple[int, ...]
    """Positions of the files that are not here, and of every tail."""
    num_files: int


class Saving:
    """All saves in flight, and the names that may not be saved under any more."""

    def __init__(
        self,
        *,
        tiers: Tiers,
        manifests: SealedManifests,
        clock: Clock,
        limits: CatalogLimits,
        metrics: SidecarMetrics,
        free: Callable[[Sequence[BlockKey]], Awaitable[int]],
        spare: Callable[[Manifest, Sequence[BlockKey]], None],
    ) -> None:
        """`free` removes those of the given blocks that nobody wants, `spare` keeps them for a while."""
        self._tiers = tiers
        self._manifests = manifests
        self._clock = clock
        self._limits = limits
        self._metrics = metrics
        self._free = free
        self._spare = spare
        self._saves = SavesInFlight()
        self._seals = Announcements(max_waiters=limits.max_waiters)
        keep_ms, max_names = limits.tombstone_ms, limits.max_tombstones
        self._deleted: RecentNames[tuple[str, TenantId, str]] = RecentNames(keep_ms=keep_ms, max_names=max_names)
        """Tombstones: ("ref" or "session", tenant, name)."""
        self._failed = FailedSaves(keep_ms=keep_ms, max_names=max_names)

    def is_pinned(self, key: BlockKey) -> bool:
        """Return whether a save in flight counts on the block."""
        return self._saves.is_pinned(key)

    def prepare(self, new: NewSave, manifest: Manifest) -> PreparedSave:
        """Open the save of one rank; see `ContextCatalog.prepare_save`."""
        missing = tuple(
            index
            for index, key in enumerate(rank_keys(manifest, new.rank))
            if key.kind == "tail" or not self._tiers.blocks.checksum(key)
        )
        try:
            save = self._admit(new, manifest)
            if missing:
                self._tiers.blocks.check_tenant(new.tenant)
        except ContextCacheError as exc:
            self._refuse(new, exc)
            raise
        self._saves.prepare(save, new.rank)
        self._failed.discard(new.cache_ref)
        if not new.early:
            self._metrics.saves.inc()
        return PreparedSave(missing, num_files(manifest))

    def extended(self, more: MoreTokens) -> NewSave:
        """Return a rank's save with more tokens. Raises SaveIncomplete, ContextDeleted."""
        save = self._saves.get(more.cache_ref)
        if save is None or save.manifest.tenant != more.tenant:
            raise self._no_save(more.cache_ref)
        known = save.manifest
        if more.rank not in save.prepared or not 0 <= more.first_token <= len(known.token_ids):
            raise SaveIncomplete("the save lacks tokens before first_token")
        token_ids = known.token_ids[: more.first_token] + more.token_ids
        return NewSave(
            tenant=known.tenant,
            session_id=known.session_id,
            cache_ref=known.cache_ref,
            fingerprint=known.fingerprint,
            rank=more.rank,
            world_size=known.world_size,
            token_ids=token_ids,
            expires_at_ms=known.expires_at_ms,
            started_at_ms=save.started_at_ms,
            groups=tuple(replace(group, runs=((0, len(token_ids)),)) for group in known.groups),
            early=more.early,
        )

    def expected(self, cache_ref: CacheRef, rank: int, block_index: int) -> tuple[SaveInFlight, BlockMeta]:
        """Return what must come at this position. Raises SaveIncomplete, ContextDeleted, InvalidRequest."""
        save = self._saves.get(cache_ref)
        if save is None:
            raise self._no_save(cache_ref)
        if rank not in save.prepared or not 0 <= block_index < num_files(save.manifest):
            raise InvalidRequest("block_index is not part of the save", param="block_index")
        return save, block_meta(save.manifest, block_index, rank)

    async def take(self, save: SaveInFlight, expected: BlockMeta, take_in: Callable[[], Awaitable[int]]) -> int:
        """Run `take_in`; on failure, or when the save was dropped meanwhile, free what it brought."""
        try:
            size_bytes = await take_in()
        except ContextCacheError as exc:
            await self._fail(save, exc)
            raise
        except OSError as exc:
            error = SidecarUnavailable("the disk cannot be written")
            await self._fail(save, error)
            raise error from exc
        if save.dropped:
            await self._free([expected.key])
            raise ContextDeleted("the save was dropped")
        # What goes on is not dropped: a long context takes minutes on a slow disk.
        save.deadline_ms = self._deadline_ms()
        self._metrics.blocks_taken.inc()
        self._metrics.bytes_taken.inc(size_bytes)
        return size_bytes

    def is_last_rank(self, cache_ref: CacheRef, rank: int) -> SaveInFlight | None:
        """Mark a rank as sealed; return the save when all are, None when others are still to come.

        Raises SaveIncomplete, ContextDeleted.
        """
        save = self._saves.get(cache_ref)
        if save is None:
            raise self._no_save(cache_ref)
        stored = all(self._tiers.blocks.checksum(key) for key in rank_keys(save.manifest, rank))
        if rank not in save.prepared or save.early or not stored:
            raise SaveIncomplete("a block of this rank is missing")
        save.sealed.add(rank)
        return save if save.is_complete else None

    async def publish(self, save: SaveInFlight) -> None:
        """Write the manifest. Raises SaveIncomplete when a block has gone, ContextDeleted, StorageFull."""
        try:
            record = await self._manifests.publish(lambda: self._finished_manifest(save))
        except (StorageFull, OSError) as exc:
            save.publishing = False
            error = exc if isinstance(exc, StorageFull) else SidecarUnavailable("the disk cannot be written")
            await self._fail(save, error)
            raise error from exc
        finally:
            save.publishing = False
        self._saves.remove(save)
        if record is not None:
            self._metrics.seals.inc()
            log.info("context sealed", extra={"cache_ref": record.cache_ref, "num_tokens": record.num_tokens})
        self._seals.announce(save.manifest.cache_ref)

    def announce(self, cache_ref: CacheRef) -> None:
        """Wake the calls that wait for this KV."""
        self._seals.announce(cache_ref)

    async def changed(self, cache_ref: CacheRef, *, timeout_s: float) -> None:
        """Return when this KV is announced, or after `timeout_s`."""
        await self._seals.wait(cache_ref, timeout_s=timeout_s)

    async def wait(self, cache_ref: CacheRef, *, timeout_s: float) -> None:
        """Return when the save has ended, one way or the other, or after `timeout_s`."""
        if self._failed.get(cache_ref, self._clock.now_ms()) is None:
            await self._seals.wait(cache_ref, timeout_s=timeout_s)

    def failure(self, tenant: TenantId, cache_ref: CacheRef) -> str:
        """Return why there is no manifest under this name, to its own tenant; empty: not known."""
        failed = self._failed.get(cache_ref, self._clock.now_ms())
        return failed.reason if failed is not None and failed.tenant == tenant else ""

    def is_saving(self, tenant: TenantId, cache_ref: CacheRef) -> bool:
        """Return whether a save of this tenant's is in flight under the name."""
        save = self._saves.get(cache_ref)
        return save is not None and save.manifest.tenant == tenant

    def abandon(self, cache_ref: CacheRef) -> list[BlockKey]:
        """Drop a save whose bytes will not come; return the blocks it counted on. Harmless when there is none."""
        save = self._saves.get(cache_ref)
        keys = [] if save is None or save.publishing else self._drop(save, "pull_failed")
        if (failed := self._failed.get(cache_ref, self._clock.now_ms())) is not None:
            # The next pull may begin within the same ms, and is another attempt.
            self._failed.discard(cache_ref)
            self._note(replace(failed, started_at_ms=0))
        return keys

    def give_up(self, failed: FailedSave) -> list[BlockKey]:
        """Note that an engine's rank saves nothing; return the blocks that a save begun by others counted on.

        Nothing changes for a sealed context, or for another attempt under the same name.
        """
        failed.check()
        save = self._saves.get(failed.cache_ref)
        if self._manifests.index.get(failed.cache_ref) is not None:
            return []
        if save is None:
            self._metrics.refused.labels(counted_reason(failed.reason)).inc()
            self._note(failed)
            return []
        is_this = (save.manifest.tenant, save.started_at_ms) == (failed.tenant, failed.started_at_ms)
        if not is_this or save.publishing:
            return []
        self._metrics.refused.labels(counted_reason(failed.reason)).inc()
        return self._drop(save, failed.reason, is_final=True)

    def move_expiry(self, tenant: TenantId, session_id: SessionId, expires_at_ms: int) -> None:
        """Give the saves of a session another expiry."""
        for save in self._saves.of_session(tenant, session_id):
            save.manifest = replace(save.manifest, expires_at_ms=expires_at_ms)

    def drop_deleted(self, tenant: TenantId, session_id: SessionId, cache_refs: Sequence[CacheRef]) -> list[BlockKey]:
        """Refuse these names from now on and drop their saves; return the blocks those counted on."""
        now_ms = self._clock.now_ms()
        named = set(cache_refs)
        for cache_ref in cache_refs:
            self._deleted.add(("ref", tenant, cache_ref), now_ms)
        doomed = [
            save for save in self._saves if {save.manifest.cache_ref, prompt_ref(save.manifest.cache_ref)} & named
        ]
        if session_id:
            self._deleted.add(("session", tenant, session_id), now_ms)
            doomed += self._saves.of_session(tenant, session_id)
        return [
            key
            for save in doomed
            if save and save.manifest.tenant == tenant
            for key in self._drop(save, ContextDeleted.code, is_final=True)
        ]

    def check_not_deleted(
        self, tenant: TenantId, session_id: SessionId, cache_ref: CacheRef, *, started_at_ms: int
    ) -> None:
        """Raise ContextDeleted for a name that was deleted, or whose session was after `started_at_ms`."""
        now_ms = self._clock.now_ms()
        refs = (cache_ref, prompt_ref(cache_ref))
        deleted_at_ms = self._deleted.added_at_ms(("session", tenant, session_id), now_ms)
        if (deleted_at_ms is not None and started_at_ms <= deleted_at_ms) or any(
            self._deleted.added_at_ms(("ref", tenant, ref), now_ms) is not None for ref in refs
        ):
            raise ContextDeleted("the context was deleted")

    def drop_overdue(self) -> list[BlockKey]:
        """Drop the saves past their deadline; return the blocks they counted on."""
        now_ms = self._clock.now_ms()
        overdue = [save for save in self._saves if save.deadline_ms <= now_ms and not save.publishing]
        return [key for save in overdue for key in self._drop(save, SAVE_DEADLINE)]

    def _admit(self, new: NewSave, manifest: Manifest) -> SaveInFlight:
        """Return the save a rank belongs to, new or begun by another rank."""
        now_ms = self._clock.now_ms()
        self.check_not_deleted(new.tenant, new.session_id, new.cache_ref, started_at_ms=new.started_at_ms)
        if self._failed.is_over(new.cache_ref, new.started_at_ms, now_ms):
            raise ContextDeleted("another rank ended this save")
        if new.expires_at_ms <= now_ms:
            raise ContextExpired("the context has expired")
        if self._manifests.index.get(new.cache_ref) is not None:
            raise ContextExists("this cache_ref is already sealed")
        save = self._saves.get(new.cache_ref)
        if save is not None:
            self._agree(save, new, manifest)
            save.deadline_ms = self._deadline_ms()
            return save
        if len(self._saves) >= self._limits.max_saves:
            raise StorageFull("too many saves in flight")
        return SaveInFlight(manifest, self._deadline_ms(), started_at_ms=new.started_at_ms, early=new.early)

    def _deadline_ms(self) -> int:
        return self._clock.now_ms() + self._limits.save_deadline_ms

    def _agree(self, save: SaveInFlight, new: NewSave, manifest: Manifest) -> None:
        """Let a save that was announced early grow into what it is. Raises InvalidRequest when ranks disagree."""
        known = save.manifest
        manifest = replace(manifest, expires_at_ms=known.expires_at_ms)
        agrees = manifest == known
        if save.early or new.early:
            size = min(len(known.token_ids), len(manifest.token_ids))
            as_known = replace(manifest, token_ids=known.token_ids, groups=known.groups, files=known.files)
            agrees = as_known == known and known.token_ids[:size] == manifest.token_ids[:size]
        if not agrees:
            raise InvalidRequest("the ranks sent different data for this cache_ref", param="cache_ref")
        if save.early and (not new.early or len(manifest.token_ids) > len(known.token_ids)):
            self._saves.become(save, manifest)
            save.early = new.early

    def _no_save(self, cache_ref: CacheRef) -> ContextCacheError:
        if self._failed.get(cache_ref, self._clock.now_ms()) is not None:
            return ContextDeleted("the save was dropped")
        return SaveIncomplete("no save with this cache_ref is open")

    def _finished_manifest(self, save: SaveInFlight) -> Manifest | None:
        """Return the manifest with what it vouches for; None when another call has just written it."""
        if save.dropped:
            raise ContextDeleted("the save was dropped")
        if self._saves.get(save.manifest.cache_ref) is not save:
            return None
        manifest = self._vouched(save.manifest)
        save.publishing = True
        return manifest

    def _vouched(self, manifest: Manifest) -> Manifest:
        """Return a manifest with the sizes and checksums of its files. Raises SaveIncomplete when one is not here."""
        keys = all_keys(manifest)
        sizes = [self._tiers.blocks.stored_bytes(key) or 0 for key in keys]
        checksums = tuple(self._tiers.blocks.checksum(key) or "" for key in keys)
        if not all(sizes) or not all(checksums):
            raise SaveIncomplete("a block of this save is missing")
        return replace(manifest, size_bytes=sum(sizes), block_checksums=checksums)

    async def _fail(self, save: SaveInFlight, error: ContextCacheError) -> None:
        self._metrics.refused.labels(error.code).inc()
        if not save.publishing:
            await self._free(self._drop(save, error.code))

    def _refuse(self, new: NewSave, error: ContextCacheError) -> None:
        """Count a refusal, and let nobody wait for a save that will not come."""
        self._metrics.refused.labels(error.code).inc()
        if self._saves.get(new.cache_ref) is None and not new.early and not isinstance(error, ContextExists):
            self._note(FailedSave(new.tenant, new.cache_ref, error.code, new.started_at_ms))

    def _drop(self, save: SaveInFlight, reason: str, *, is_final: bool = False) -> list[BlockKey]:
        """End a save without a manifest; return the blocks it counted on. Harmless when repeated.

        What only went ahead of a save ends without a word, unless it `is_final`: nothing will come under that name.
        """
        if save.dropped:
            return []
        save.dropped = True
        keys = self._saves.remove(save)
        if reason == HOLD_DEADLINE or (save.early and reason == SAVE_DEADLINE):
            # The next save goes on where this one ended.
            self._spare(save.manifest, keys)
        if save.early and not is_final:
            return keys
        self._note(FailedSave(save.manifest.tenant, save.manifest.cache_ref, reason, save.started_at_ms))
        return keys

    def _note(self, failed: FailedSave) -> None:
        self._failed.add(failed, self._clock.now_ms())
        self._seals.announce(failed.cache_ref)
