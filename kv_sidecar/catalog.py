"""The story of saved KV: announce, take, seal, wait, open, load, touch, delete, collect. Read this first.

Rules:
1. Publish the pointer last, remove it first. Save: blocks and tail, then the manifest. Delete: manifest, then the
   blocks nobody else holds. A crash in between leaves files without a manifest, which the collector frees.
2. A block is kept while a manifest or a lease holds it, or a save in flight counts on it.
3. Whatever is wrong with stored bytes is a miss, never an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal, TypeVar

from contextcache.errors import (
    CacheRefNotFound,
    CacheRefPending,
    ContextCacheError,
    InvalidRequest,
    SidecarUnavailable,
    StorageFull,
)
from contextcache.model import CacheRef, KeptGroup, Manifest, SessionId, TenantId
from contextcache.names import CACHE_REF_PATTERN, check_tenant, prompt_ref
from contextcache.process.crash_points import crash_point
from kv_sidecar.crash_points import AFTER_SEAL, BEFORE_SEAL
from kv_sidecar.forking import Forks, NewFork
from kv_sidecar.format.ids import BlockKey, require_fingerprint
from kv_sidecar.format.manifest import all_keys, block_key, num_files, rank_keys
from kv_sidecar.keeping import Keeping
from kv_sidecar.leases import Leases, LeaseTerms
from kv_sidecar.reclaim import Removed, Retention
from kv_sidecar.runtime import Runtime
from kv_sidecar.saves import CatalogLimits, FailedSave, MoreTokens, NewSave
from kv_sidecar.saving import PreparedSave, Saving
from kv_sidecar.sealed.index import ManifestRecord, RecentNames
from kv_sidecar.sealed.manifests import SealedManifests
from kv_sidecar.sealed.matching import PrefixMatches, PrefixQuestion
from kv_sidecar.sealed.prefixes import Found
from kv_sidecar.tiers.memory import LentSlot, Place
from kv_sidecar.tiers.store import Buffer
from kv_sidecar.tiers.tiers import DamagedBlock, FetchedBlock, TierName, Tiers

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_FRESH_MS = 600_000
"""How long a pulled context that nobody loads still counts as its peer's."""
NOT_FOUND = "no KV under this cache_ref"
"""One message for absent, expired, deleted and another tenant's."""


class ContextCatalog:
    """All contexts of one sidecar. Used from one event loop."""

    def __init__(  # what it is made of, by name
        self,
        *,
        tiers: Tiers,
        manifests: SealedManifests,
        runtime: Runtime,
        limits: CatalogLimits,
        on_sealed: Callable[[ManifestRecord, bool], None] | None = None,
        on_replaced: Callable[[Sequence[ManifestRecord]], None] | None = None,
    ) -> None:
        """`on_sealed` is told of KV that is durable here, and whether only its expiry is new.

        `on_replaced` is told of kept KV that others of its group stand for: it is not here any more.
        """
        self._on_sealed = on_sealed or (lambda _record, _is_touch: None)
        self._on_replaced = on_replaced or (lambda _records: None)
        self._tiers = tiers
        self._blocks = tiers.blocks
        self._manifests = manifests
        self._threads = threads = runtime.threads
        self._clock = clock = runtime.clock
        self._limits = limits
        self._metrics = metrics = runtime.metrics
        self._saving = Saving(
            tiers=tiers,
            manifests=manifests,
            clock=clock,
            limits=limits,
            metrics=metrics,
            free=self._free,
            spare=self._spare,
        )
        self._forks = Forks(manifests, self._saving, clock=clock)
        self._leases = Leases(self._blocks, runtime, max_leases=limits.max_leases, life_ms_max=limits.lease_ms)
        self._matches = PrefixMatches(
            manifests,
            threads,
            clock=clock,
            metrics=metrics,
            max_names=limits.max_tombstones,
            lose=self._lose_unreadable,
        )
        self._keeping = Keeping(
            manifests,
            clock=clock,
            is_wanted=lambda record: self._matches.is_named(record) or self._is_leased(record),
            size_bytes=tiers.blocks.stored_bytes,
        )
        self._retention = Retention(
            blocks=tiers.blocks,
            manifests=manifests,
            metrics=metrics,
            is_leased=self._is_leased,
            is_named=self._matches.is_named,
            free=self._free,
            guarantee_bytes=limits.tenant_guarantee_bytes,
        )
        self._spared: RecentNames[BlockKey] = RecentNames(keep_ms=limits.spare_ms, max_names=limits.max_tombstones)
        """Blocks that nobody holds, kept for the next save of a session, with whose they are."""
        self._expected: set[tuple[TenantId, CacheRef]] = set()
        """What a pull is fetching, or looking for."""
        self._pulled: RecentNames[tuple[CacheRef, int]] = RecentNames(
            keep_ms=_FRESH_MS, max_names=limits.max_tombstones
        )
        """Ranks of pulled contexts that nobody has loaded here yet."""
        self._from_store: RecentNames[CacheRef] = RecentNames(keep_ms=_FRESH_MS, max_names=limits.max_tombstones)
        """Contexts pulled from the shared store."""
        self._reads_ahead = False
        self._room = asyncio.Event()
        """Set, and replaced, when there may be room for a slot again."""

    @property
    def num_contexts(self) -> int:
        """Sealed manifests."""
        return len(self._manifests.index)

    def bytes_by_tenant(self) -> Mapping[TenantId, int]:
        """Return the bytes of block files on disk that each tenant has, those being written included."""
        return self._blocks.bytes_by_tenant()

    def tenant_usage(self, tenant: TenantId) -> tuple[int, int]:
        """Return the bytes a tenant has on disk that would not give way for a context of its, and the most it may have.

        0: no limit. Raises InvalidRequest.
        """
        check_tenant(tenant)
        used, limit = self._blocks.tenant_bytes(tenant)
        if limit and 2 * used > limit:
            used = max(used - self._manifests.index.kept_bytes(tenant), 0)
        return used, limit

    async def start(self) -> None:
        """Rebuild the index of manifests from the files, and what is known of their blocks from them.

        Raises SidecarUnavailable for a fault that passes: what would be left out now would be lost.
        """
        await self._manifests.rebuild(
            is_stored=lambda key: self._blocks.stored_bytes(key) is not None,
            vouch=self._know_blocks,
            now_ms=self._clock.now_ms(),
        )

    async def prepare_save(self, new: NewSave) -> PreparedSave:
        """Open the save of one rank and pin the blocks it counts on. Idempotent.

        Raises InvalidRequest (also when ranks disagree), ContextDeleted, ContextExpired, ContextExists, StorageFull.
        """
        new.check()
        manifest = await self._threads.run(new.manifest, block_tokens=self._limits.block_tokens)
        if new.is_kept and not new.early:
            self._keeping.refuse_repetition(manifest)
        await self._retention.make_share(new.tenant, 1, for_kept=new.is_kept)
        return self._saving.prepare(new, manifest)

    async def extend_save(self, more: MoreTokens) -> PreparedSave:
        """Add tokens to an open save of one rank. Idempotent.

        Raises SaveIncomplete when the save is not open or lacks tokens, InvalidRequest, ContextDeleted, StorageFull.
        """
        return await self.prepare_save(self._saving.extended(more))

    async def lend(self, borrower: str, places: Sequence[tuple[Place, int]], *, timeout_s: float) -> list[LentSlot]:
        """Lend slots for files of saves in flight, of so many bytes each: for the first ones, as many as fit now.

        Waits for the first at most `timeout_s`. Raises InvalidRequest, SaveIncomplete, ContextDeleted.
        """
        for place, _ in places:
            self._saving.expected(place.cache_ref, place.rank, place.block_index)
        lent: list[LentSlot] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not lent:
                    room = self._room
                    for place, size_bytes in places:
                        slot = self._tiers.memory.lend(borrower, place, size_bytes)
                        if slot is None:
                            break
                        lent.append(slot)
                    if not lent:
                        await room.wait()
        return lent

    def return_slots(self, borrower: str, slot_ids: Iterable[int]) -> None:
        """Free slots that their borrower will not write to any more. Idempotent."""
        self._tiers.memory.give_back(borrower, slot_ids)
        self._tell_of_room()

    def end_borrower(self, borrower: str) -> None:
        """Free all that was lent to a process that has ended."""
        self._tiers.memory.end_borrower(borrower)
        self._tell_of_room()

    def _tell_of_room(self) -> None:
        """Let those who wait for a slot try again."""
        self._room.set()
        self._room = asyncio.Event()

    async def take_slot(self, place: Place, slot_id: int) -> int:
        """Verify and take a block file in a lent slot, which is the sidecar's again whatever happens; return its bytes.

        Raises InvalidRequest, CorruptBlock, StorageFull, SaveIncomplete, ContextDeleted; the save is then over.
        """
        memory = self._tiers.memory
        slot = memory.hand_over(slot_id, place)
        if slot is None:
            raise InvalidRequest("slot_id was not lent for this file", param="slot_id")
        try:
            save, expected = self._saving.expected(place.cache_ref, place.rank, place.block_index)
        except ContextCacheError:
            memory.free(slot)
            raise

        async def take_in() -> int:
            try:
                await self._retention.make_room(expected.tenant, slot.size_bytes, for_kept=save.is_kept)
            except BaseException:
                memory.free(slot)
                raise
            return await self._tiers.take_slots([(slot, expected)])

        try:
            return await self._finish(self._saving.take(save, expected, take_in))
        finally:
            self._tell_of_room()

    async def take_block(
        self, cache_ref: CacheRef, rank: int, block_index: int, data: Buffer, *, vouched: str = ""
    ) -> int:
        """Take a whole block file that came in frames; return its bytes. Raises as `take_slot`.

        `vouched`: the checksum the sender's manifest vouches for; empty: it vouches for none.
        """
        save, expected = self._saving.expected(cache_ref, rank, block_index)

        async def take_in() -> int:
            await self._retention.make_room(expected.tenant, len(data), for_kept=save.is_kept)
            return await self._tiers.take_bytes(data, expected, vouched=vouched)

        return await self._finish(self._saving.take(save, expected, take_in))

    async def seal(self, cache_ref: CacheRef, rank: int) -> bool:
        """End a rank's save; when it was the last, write the manifest and return True. Idempotent.

        Raises SaveIncomplete when blocks are missing or nothing was prepared, ContextDeleted, StorageFull.
        """
        if self._manifests.index.get(cache_ref) is not None:
            return True
        save = self._saving.is_last_rank(cache_ref, rank)
        if save is not None:
            crash_point(BEFORE_SEAL)
            await self._finish(self._saving.publish(save))
            crash_point(AFTER_SEAL)
            self._tell_sealed(cache_ref)
            if save.is_kept:
                await self._finish(self._replace_shorter(save.manifest))
        return save is not None

    async def abandon_save(self, cache_ref: CacheRef) -> None:
        """Drop a save whose bytes will not come, with all it brought. Harmless when there is none."""
        await self._finish(self._abandon(cache_ref))

    async def give_up_save(self, failed: FailedSave) -> None:
        """Take the engine's word that nothing is saved under a name, and why; whoever waits for it learns at once.

        Nothing changes for what is sealed. Raises InvalidRequest.
        """
        await self._finish(self._give_up_save(failed))

    def save_failure(self, tenant: TenantId, cache_ref: CacheRef) -> str:
        """Return why there is no KV under a name, as a short fixed phrase; empty: not known, or there may be some."""
        return "" if self._live(tenant, cache_ref) is not None else self._saving.failure(tenant, cache_ref)

    def expect(self, tenant: TenantId, cache_refs: Iterable[CacheRef]) -> None:
        """Note that a pull may bring these: until `expect_no_more`, their manifests are pending, not missing."""
        self._expected.update((tenant, ref) for ref in cache_refs)

    def expect_no_more(self, tenant: TenantId, cache_refs: Iterable[CacheRef]) -> None:
        """Take `expect` back. Harmless when repeated."""
        for ref in cache_refs:
            self._expected.discard((tenant, ref))
            self._saving.announce(ref)

    async def changed(self, cache_ref: CacheRef, *, timeout_s: float) -> None:
        """Return once KV is sealed, or its save or pull has ended, or after `timeout_s`."""
        await self._saving.changed(cache_ref, timeout_s=timeout_s)

    def mark_pulled(self, cache_ref: CacheRef, rank: int, source: Literal["peer", "object"]) -> None:
        """Note that a rank's blocks come from a peer, or the shared store: the first load of them says so."""
        self._pulled.add((cache_ref, rank), self._clock.now_ms())
        if source == "object":
            self._from_store.add(cache_ref, self._clock.now_ms())

    def unmark_pulled(self, cache_ref: CacheRef, rank: int) -> None:
        """Take `mark_pulled` back: they do not come, and what is saved under the name is an engine's own."""
        self._pulled.discard((cache_ref, rank))
        self._from_store.discard(cache_ref)

    def holds(self, tenant: TenantId, cache_ref: CacheRef) -> bool:
        """Return whether this KV is sealed here, being saved, or expected from a peer."""
        is_here = self._live(tenant, cache_ref) is not None or self._saving.is_saving(tenant, cache_ref)
        return is_here or (tenant, cache_ref) in self._expected

    async def wait_sealed(self, tenant: TenantId, cache_ref: CacheRef, *, timeout_s: float) -> ManifestRecord | None:
        """Return the record once its manifest is durable; None after `timeout_s`, or when the save has failed."""
        record = self._live(tenant, cache_ref)
        if record is None:
            await self._saving.wait(cache_ref, timeout_s=timeout_s)
            record = self._live(tenant, cache_ref)
        return record

    async def open(self, tenant: TenantId, cache_ref: CacheRef, *, again: bool = False) -> Manifest:
        """Return a sealed, unexpired manifest whose blocks are all there. `again`: it was opened a moment ago.

        Raises CacheRefNotFound; its kind CacheRefPending while it is being saved or pulled, to its own tenant only.
        """
        record = self._live(tenant, cache_ref)
        if record is not None:
            manifest = await self._manifests.read(record, again=again)
            if manifest is not None and all(self._blocks.stored_bytes(key) for key in record.keys):
                self._manifests.index.use(cache_ref)
                return manifest
            await self._lose_unreadable(record)
        elif (tenant, cache_ref) in self._expected or self._saving.is_saving(tenant, cache_ref):
            raise CacheRefPending("the KV is not sealed yet")
        self._metrics.misses.inc()
        raise CacheRefNotFound(NOT_FOUND)

    async def match_prefix(self, question: PrefixQuestion) -> Sequence[Found]:
        """Return the tenant's KV that begins most like a prompt, the longest first. Raises InvalidRequest.

        It counts as used now, and what is kept lives on from now.
        """
        found = await self._matches.find(question)
        for one in found[:1]:
            self._manifests.index.use(one.cache_ref)
            self._keeping.use(one.cache_ref, question.expires_at_ms)
        if question.group:
            self._keeping.note_match(question, found[0].num_tokens if found else 0)
        return found

    async def kept(self, tenant: TenantId, group: SessionId = "") -> list[KeptGroup]:
        """Return the KV of a tenant's plain requests by conversation, what was used last first.

        Raises InvalidRequest.
        """
        check_tenant(tenant)
        return await self._threads.run(self._keeping.shown, self._keeping.groups(tenant, group))

    def tier_of(self, manifest: Manifest | ManifestRecord) -> TierName:
        """Return the tier that would serve most blocks of rank 0 now; of what was not loaded since its pull, whence."""
        if (manifest.cache_ref, 0) in self._pulled:
            return self._pulled_from(manifest.cache_ref)
        if isinstance(manifest, Manifest):
            keys = rank_keys(manifest, 0)
        else:
            keys = tuple(key for key in manifest.keys if key.rank == 0)
        in_memory = sum(self._blocks.is_in_memory(key) for key in keys)
        return "host" if 2 * in_memory > len(keys) else "disk"

    async def load(
        self,
        manifest: Manifest,
        fingerprint: str,
        rank: int,
        block_indices: Sequence[int],
        *,
        in_slots: bool,
        lease: LeaseTerms | None = None,
        verify: bool = False,
    ) -> AsyncGenerator[Sequence[FetchedBlock], None]:
        """Yield blocks, some at a time; slots stay in place until the generator is closed, or the lease is over.

        The first load of what was pulled names the peer as the tier of all its blocks.

        Raises InvalidRequest, FingerprintMismatch, CacheRefNotFound, CorruptBlock; a corrupt block is quarantined and
        the manifests that hold it are removed.
        """
        require_fingerprint(fingerprint, manifest.fingerprint)
        files = num_files(manifest)
        if not 0 <= rank < manifest.world_size or not all(0 <= index < files for index in block_indices):
            raise InvalidRequest("a block index is out of range", param="block_indices")
        if len(set(block_indices)) != len(block_indices):
            raise InvalidRequest("a block index appears twice", param="block_indices")
        wanted = list(block_indices)
        keys = [block_key(manifest, index, rank) for index in wanted]
        is_leased = lease is not None and self._leases.open(lease, keys)
        held = [] if is_leased or not in_slots else keys
        self._blocks.hold(held, "lease")
        blocks = self._tiers.fetch(manifest, rank, wanted, in_slots=in_slots, verify=verify)
        is_fresh = self._take_fresh(manifest.cache_ref, rank)
        try:
            async for together in blocks:
                if is_fresh:
                    yield [replace(block, tier=self._pulled_from(manifest.cache_ref)) for block in together]
                else:
                    yield together
        except DamagedBlock as exc:
            await self._finish(self._lose_block(exc.key))
            raise
        finally:
            await blocks.aclose()
            left = self._blocks.let_go(held, "lease")
            self._tell_of_room()
            if left:
                await self._finish(self._free(left))

    def record(self, cache_ref: CacheRef) -> ManifestRecord | None:
        """Return the record of sealed KV."""
        return self._manifests.index.get(cache_ref)

    def of_session(self, tenant: TenantId, session_id: SessionId) -> list[ManifestRecord]:
        """Return what is sealed here of a session."""
        return self._manifests.index.of_session(tenant, session_id)

    async def manifest(self, record: ManifestRecord) -> Manifest | None:
        """Return the manifest of a record; None when it has gone, or is bad."""
        return await self._manifests.read(record)

    async def block(self, key: BlockKey) -> Buffer | None:
        """Return a copy of a stored block file; None when it has gone, or has other bytes than were stored."""
        return await self._tiers.copy(key)

    async def read_ahead(self, tenant: TenantId, cache_refs: Iterable[CacheRef]) -> None:
        """Bring the first of these that is sealed here into memory, as a load is about to ask for it.

        Harmless when there is none, or when it is given up on the way. Nobody hears of what is wrong: the load will.
        """
        records = (self._live(tenant, cache_ref) for cache_ref in cache_refs)
        record = next((record for record in records if record is not None), None)
        if record is None or self._reads_ahead:
            return  # of two at once the second is read when its load asks
        self._reads_ahead = True
        try:
            with suppress(SidecarUnavailable):
                manifest = await self._manifests.read(record)
                if manifest is not None:
                    await self._tiers.read_ahead(manifest)
        finally:
            self._reads_ahead = False

    async def end_load(self, lease_id: str) -> None:
        """End a load's lease, and free what was deleted meanwhile. Idempotent."""
        keys = self._leases.end(lease_id)
        self._tell_of_room()
        if keys:
            await self._finish(self._free(keys))

    async def touch(self, tenant: TenantId, session_id: SessionId, expires_at_ms: int) -> int:
        """Move the expiry of a session's unexpired manifests, and of those on their way; return how many."""
        self._saving.move_expiry(tenant, session_id, expires_at_ms)
        now_ms = self._clock.now_ms()
        moved = await self._finish(self._manifests.move_expiry(tenant, session_id, expires_at_ms, now_ms=now_ms))
        for record in self._manifests.index.of_session(tenant, session_id):
            self._on_sealed(record, True)
        return moved

    async def fork(self, new: NewFork) -> ManifestRecord | None:
        """Give a new context the KV of another one, byte for byte the same files; None: there is none. Idempotent.

        Raises InvalidRequest, ContextDeleted, StorageFull.
        """
        record = await self._finish(self._forks.make(new))
        if record is not None:
            self._on_sealed(record, False)
        return record

    async def delete(self, tenant: TenantId, session_id: SessionId, cache_refs: Sequence[CacheRef]) -> Removed:
        """Remove manifests of a session ("" for none) and of `cache_refs`, then all blocks nobody else holds.

        Later saves under these names are refused. Idempotent.
        """
        return await self._finish(self._delete(tenant, session_id, cache_refs))

    async def collect(self) -> Removed:
        """Free what is reachable from no live manifest and no save in flight."""
        return await self._finish(self._collect())

    def sealed(self, *, kept: bool = False) -> list[ManifestRecord]:
        """Return the records of all sealed manifests of sessions, expired ones too, the one used longest ago first.

        `kept`: of what is kept instead.
        """
        return [record for record in self._manifests.index.records() if record.is_kept == kept]

    async def drop(self, records: Sequence[ManifestRecord]) -> Removed:
        """Remove those manifests that are still what they were, then all blocks nobody else holds.

        What was touched or sealed anew meanwhile stays. Unlike after `delete`, the names may be saved under again.
        """
        return await self._finish(self._drop(records))

    def _know_blocks(self, manifest: Manifest) -> None:
        """Note whose the stored blocks are, and what their manifest vouches for. Before anything else runs."""
        keys = all_keys(manifest)
        for key, checksum in zip_longest(keys, manifest.block_checksums):
            self._blocks.vouch(key, manifest.tenant, checksum)

    async def _finish(self, steps: Coroutine[Any, Any, Result]) -> Result:
        """Run `steps` to their end whoever still waits. Raises SidecarUnavailable for what the disk refused."""
        try:
            return await self._threads.finish(steps)
        except OSError as exc:
            raise SidecarUnavailable("the disk cannot be written") from exc

    def _tell_sealed(self, cache_ref: CacheRef) -> None:
        record = self._manifests.index.get(cache_ref)
        if record is None or cache_ref in self._from_store:
            return
        if not record.is_kept or (cache_ref, 0) not in self._pulled:  # a peer's beginning is the peer's to write
            self._on_sealed(record, False)

    def _pulled_from(self, cache_ref: CacheRef) -> Literal["peer", "object"]:
        return "object" if cache_ref in self._from_store else "peer"

    def _take_fresh(self, cache_ref: CacheRef, rank: int) -> bool:
        is_fresh = self._pulled.added_at_ms((cache_ref, rank), self._clock.now_ms()) is not None
        self._pulled.discard((cache_ref, rank))
        return is_fresh

    async def _give_up_save(self, failed: FailedSave) -> None:
        await self._free(self._saving.give_up(failed))

    async def _abandon(self, cache_ref: CacheRef) -> None:
        await self._free(self._saving.abandon(cache_ref))

    def _live(self, tenant: TenantId, cache_ref: CacheRef) -> ManifestRecord | None:
        return self._manifests.live(tenant, cache_ref, now_ms=self._clock.now_ms())

    async def _lose(self, select: Callable[[], list[ManifestRecord]]) -> list[ManifestRecord]:
        """Remove manifests that can no longer be served, and return them. Their blocks stay for now."""
        records = await self._manifests.lose(select)
        for record in records:
            log.warning("context lost", extra={"cache_ref": record.cache_ref, "tenant": record.tenant})
        return records

    async def _lose_unreadable(self, record: ManifestRecord) -> None:
        refs = [record.cache_ref]
        await self._finish(self._lose_incomplete(lambda: self._manifests.index.of_refs(record.tenant, refs)))

    async def _lose_incomplete(self, select: Callable[[], list[ManifestRecord]]) -> None:
        """Remove manifests that lack something, and spare their blocks for the save that follows the recompute.

        Not their tails: those are sent at every save, and one saved again under the same name may hold other tokens.
        """
        records = await self._lose(select)
        for record in records:
            self._spare(record, record.keys)
        await self._free([key for key in _keys_of(records) if key.kind == "tail"])

    def _spare(self, whose: Manifest | ManifestRecord, keys: Iterable[BlockKey]) -> None:
        """Keep stored whole blocks that nobody holds for a while, or until their session is deleted."""
        now_ms = self._clock.now_ms()
        for key in keys:
            if key.kind == "block" and self._blocks.stored_bytes(key):
                self._spared.add(key, now_ms, owner=(whose.tenant, whose.session_id))

    async def _lose_block(self, key: BlockKey) -> None:
        """Remove a block whose bytes are wrong, and what holds it.

        The other blocks of those contexts go too: what spoilt one may have spoilt more, and sending them again costs
        less than reading them all to find out.
        """
        await self._tiers.put_aside(key)
        await self._free(_keys_of(await self._lose(lambda: self._manifests.index.holders(key))))

    async def _delete(self, tenant: TenantId, session_id: SessionId, cache_refs: Sequence[CacheRef]) -> Removed:
        keys = self._saving.drop_deleted(tenant, session_id, cache_refs)
        # What was saved at the end of a context's prompt goes with it.
        cache_refs = [*cache_refs, *(prompt_ref(ref) for ref in cache_refs if CACHE_REF_PATTERN.fullmatch(ref))]
        index = self._manifests.index
        records = await self._manifests.remove(
            lambda: list({*index.of_refs(tenant, cache_refs), *index.of_session(tenant, session_id)})
        )
        self._metrics.deletes.inc(len(records))
        keys += self._spared.take((tenant, session_id))
        return Removed(len(records), await self._free([*_keys_of(records), *keys]))

    async def _replace_shorter(self, manifest: Manifest) -> None:
        records = await self._manifests.sweep(lambda: self._keeping.replaced_by(manifest))
        self._metrics.replaced.inc(len(records))
        self._on_replaced(records)
        await self._free(_keys_of(records))

    async def _collect(self) -> Removed:
        replaced = await self._manifests.sweep(self._keeping.take_replaced)
        self._metrics.replaced.inc(len(replaced))
        self._on_replaced(replaced)
        now_ms = self._clock.now_ms()
        keys = [*self._saving.drop_overdue(), *self._leases.expire()]
        self._tell_of_room()
        records = await self._manifests.sweep(lambda: self._manifests.index.expired(now_ms))
        self._metrics.collected.inc(len(records))
        self._spared.forget_old(now_ms)
        orphans = await self._threads.run(self._orphans)
        freed = await self._free([*_keys_of(records), *_keys_of(replaced), *keys, *orphans])
        # Last: a disk that is full takes nothing, and what is above frees it.
        for record, expires_at_ms in self._keeping.take_used():
            try:
                await self._manifests.extend(record, expires_at_ms)
            except (StorageFull, SidecarUnavailable, OSError):
                self._keeping.use(record.cache_ref, expires_at_ms)
            else:
                self._on_sealed(record, True)
        return Removed(len(records) + len(replaced), freed)

    async def _drop(self, doomed: Sequence[ManifestRecord]) -> Removed:
        index = self._manifests.index
        records = await self._manifests.sweep(lambda: [r for r in doomed if index.get(r.cache_ref) == r])
        self._metrics.orphaned.inc(len(records))
        return Removed(len(records), await self._free(_keys_of(records)))

    def _orphans(self) -> list[BlockKey]:
        return [key for key in self._blocks.garbage(self._clock.now_ms()) if not self._is_wanted(key)]

    async def _free(self, keys: Sequence[BlockKey]) -> int:
        return await self._tiers.free(keys, wanted=self._is_wanted)

    def _is_leased(self, record: ManifestRecord) -> bool:
        return self._blocks.is_leased(record.keys)

    def _is_wanted(self, key: BlockKey) -> bool:
        is_held = self._manifests.index.is_held(key) or self._saving.is_pinned(key)
        return is_held or key in self._spared


def _keys_of(records: Sequence[ManifestRecord]) -> list[BlockKey]:
    return [key for record in records for key in record.keys]
