"""The story of saved KV: announce, take, seal, wait, open, load, touch, fork, delete, collect. Read this first.

Rules:
1. Publish the pointer last, remove it first. Save: blocks and tail, then the manifest. Delete: manifest, then the
   blocks without a reference. A crash in between leaves files without a manifest, which the collector frees.
2. A block stays while a manifest, a lease or a save in flight refers to it.
3. Wrong bytes are a miss, never an answer.

Parts: `refs` has the state of every cache_ref, `blocks` of every block, `intake` decides on saves, `retention` on
evictions. They return decisions; the catalog carries them out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from contextcache.errors import (
    CacheRefNotFound,
    CacheRefPending,
    ContextCacheError,
    ContextDeleted,
    ContextExists,
    ContextExpired,
    InvalidRequest,
    SidecarUnavailable,
)
from contextcache.model import NO_PROMISE, CacheRef, Manifest, Promise, SessionId, TenantId
from contextcache.names import CACHE_REF_PATTERN, check_cache_refs, check_session_id, check_tenant, prompt_ref
from contextcache.process.crash_points import crash_point
from kv_sidecar.crash_points import AFTER_SEAL, BEFORE_SEAL
from kv_sidecar.format.block_file import BlockMeta
from kv_sidecar.format.ids import BlockKey, require_fingerprint
from kv_sidecar.format.manifest import all_keys, block_key, num_files
from kv_sidecar.intake import Intake
from kv_sidecar.limits import Limits
from kv_sidecar.placements import Placements
from kv_sidecar.promises import NOT_SAVED, Promises
from kv_sidecar.refs import PENDING, Phase, Ref, Refs
from kv_sidecar.retention import Leases, LeaseTerms, Removed, Retention, keys_of
from kv_sidecar.runtime import Runtime
from kv_sidecar.saves import ENGINE_GONE, FailedSave, MoreTokens, NewSave, PreparedSave, Save, check_retain_ms
from kv_sidecar.sealed.manifests import ManifestRecord, Manifests
from kv_sidecar.sealed.prefixes import Found, PrefixQuestion
from kv_sidecar.tiers.memory import LentSlot, Place
from kv_sidecar.tiers.store import Buffer
from kv_sidecar.tiers.tiers import DamagedBlock, FetchedBlock, TierName, Tiers

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_FRESH_MS = 600_000
"""Time for which pulled KV that no load has asked for counts as its peer's."""
_HASHED_HERE = 16_384
"""Most tokens that the event loop hashes itself, in about 2 ms. A thread hashes more."""
SOURCES_MAX = 4
"""Refs that a fork may name; a session has two."""
FORK_WAIT_S = 1.0
"""Wait of a fork for KV that is being saved: a fork right after a turn gets all of it."""
NOT_FOUND = "no KV under this cache_ref"
"""One message for an absent, expired or deleted ref and for another tenant's."""


@dataclass(frozen=True, slots=True)
class ForkTerms:
    """A new context that gets the KV of another one."""

    tenant: TenantId
    session_id: SessionId
    """Session of the fork."""
    cache_ref: CacheRef
    """Name of the fork's KV."""
    sources: tuple[CacheRef, ...]
    """Names of the KV to take, best first."""
    expires_at_ms: int

    def check(self) -> None:
        """Raise InvalidRequest for an invalid field."""
        check_tenant(self.tenant)
        check_session_id(self.session_id)
        if not 1 <= len(self.sources) <= SOURCES_MAX:
            raise InvalidRequest(f"a fork must have 1 to {SOURCES_MAX} sources", param="sources")
        check_cache_refs((self.cache_ref, *self.sources))


class ContextCatalog:
    """All contexts of one sidecar. Used from one event loop."""

    def __init__(self, runtime: Runtime, refs: Refs, *, tiers: Tiers, manifests: Manifests, limits: Limits) -> None:
        self.refs = refs
        self.tiers = tiers
        self.manifests = manifests
        self.promises = Promises(runtime, manifests, tiers.blocks, limits)
        self.retention = Retention(
            runtime,
            refs,
            tiers=tiers,
            manifests=manifests,
            promises=self.promises,
            guarantee_bytes=limits.tenant_guarantee_bytes,
        )
        self.placements = Placements(runtime, manifests, tiers)
        self._runtime = runtime
        self._blocks = tiers.blocks
        self._limits = limits
        self._intake = Intake(runtime, refs, tiers.blocks, limits)
        self._leases = Leases(tiers.blocks, runtime, max_leases=limits.max_leases, life_ms_max=limits.lease_ms)
        self._reading_ahead = asyncio.Lock()

    def tenant_usage(self, tenant: TenantId) -> tuple[int, int]:
        """Return the bytes on disk that a tenant's new contexts cannot use, and its limit; 0: none.

        Near the limit kept KV does not count, because the tenant's contexts evict it. Raises InvalidRequest.
        """
        check_tenant(tenant)
        used, limit = self._blocks.tenant_bytes(tenant)
        if limit and 2 * used > limit:
            used = max(used - self._blocks.kept_bytes(tenant), 0)
        return used, limit

    async def prepare_save(self, new: NewSave) -> PreparedSave:
        """Open the save of one rank and hold the blocks that it counts on. Idempotent.

        Raises InvalidRequest (also when ranks disagree), ContextDeleted, ContextExpired, ContextExists, StorageFull.
        """
        new = new.checked(block_tokens=self._limits.block_tokens)
        try:
            ref, save = self._intake.admit(new)
            prepared = await self._announce(
                ref, save, MoreTokens(new.tenant, new.cache_ref, new.rank, 0, new.token_ids, new.early)
            )
        except BaseException as exc:
            self._intake.refuse(new, exc)
            raise
        if new.source:
            ref.source, ref.fresh_ranks = new.source, ref.fresh_ranks | {new.rank}
            ref.fresh_until_ms = self._runtime.clock.now_ms() + _FRESH_MS
        return prepared

    async def extend_save(self, more: MoreTokens) -> PreparedSave:
        """Add tokens to an open save of one rank. Idempotent.

        Raises SaveIncomplete when the save is not open or lacks tokens, InvalidRequest, ContextDeleted, StorageFull.
        """
        ref, save = self._intake.opened(more)
        return await self._announce(ref, save, more)

    async def _announce(self, ref: Ref, save: Save, more: MoreTokens) -> PreparedSave:
        save.num_announcing += 1
        try:
            async with save.lock:
                if len(more.token_ids) <= _HASHED_HERE:
                    files = save.new_files(more)
                else:
                    files = await self._runtime.threads.run(save.new_files, more)
                save.grow(more, files)
                if save.new.is_kept and save.is_whole and (kept := self.retention.repeated(save.manifest())):
                    self._retain_soon(kept, save.new)
                    raise ContextExists("these tokens are already kept")
                await self.retention.make_share(save.new.tenant, 1, for_kept=save.new.is_expendable)
                return self._intake.announce(ref, save, more)
        finally:
            save.num_announcing -= 1

    async def lend(self, borrower: str, places: Sequence[tuple[Place, int]], *, timeout_s: float) -> list[LentSlot]:
        """Lend slots for files of one rank's save, with their sizes in bytes: for the first files, as many as fit now.

        Waits at most `timeout_s` for the first one. Raises InvalidRequest, SaveIncomplete, ContextDeleted.
        """
        first, _ = places[0]
        save = self._intake.save_with(first.cache_ref, first.rank, [place.block_index for place, _ in places])
        save.borrowers.add(borrower)
        lent: list[LentSlot] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not lent:
                    room = self.tiers.memory.next_room()
                    for place, size_bytes in places:
                        slot = self.tiers.memory.lend(borrower, place, size_bytes)
                        if slot is None:
                            break
                        lent.append(slot)
                    if not lent:
                        await room.wait()
        return lent

    async def take_slots(self, cache_ref: CacheRef, rank: int, files: Sequence[tuple[int, int]]) -> int:
        """Verify and take block files in lent slots, which are the sidecar's again in any case; return their bytes.

        `files`: block index and slot id of each. Raises InvalidRequest, CorruptBlock, StorageFull, SaveIncomplete,
        ContextDeleted; the save has then ended.
        """
        memory = self.tiers.memory
        handed = [memory.hand_over(slot_id, Place(cache_ref, rank, index)) for index, slot_id in files]
        slots = [slot for slot in handed if slot is not None]
        try:
            if len(slots) < len(handed):
                raise InvalidRequest("slot_id was not lent for this file", param="slot_id")
            ref, save, expected = self._intake.expected(cache_ref, rank, [index for index, _ in files])
        except ContextCacheError:
            for slot in slots:
                memory.free(slot)
            raise

        size_bytes = sum([slot.size_bytes for slot in slots])
        room = self.retention.make_room(save.new.tenant, size_bytes, for_kept=save.new.is_expendable)
        storing = self.tiers.take_slots(list(zip(slots, expected, strict=True)), room)
        return await self._finish(self._take(ref, save, expected, storing))

    async def take_block(
        self, cache_ref: CacheRef, rank: int, block_index: int, data: Buffer, *, vouched: str = ""
    ) -> int:
        """Take a whole block file that came in frames; return its bytes. Raises as `take_slots`.

        `vouched`: the checksum in the sender's manifest; empty: it has none.
        """
        ref, save, expected = self._intake.expected(cache_ref, rank, [block_index])
        room = self.retention.make_room(save.new.tenant, len(data), for_kept=save.new.is_expendable)
        storing = self.tiers.take_bytes(data, expected[0], room, vouched=vouched)
        return await self._finish(self._take(ref, save, expected, storing))

    async def _take(self, ref: Ref, save: Save, files: Sequence[BlockMeta], storing: Coroutine[Any, Any, int]) -> int:
        """Store files. A failure ends the save. Files that arrive after that are freed."""
        try:
            size_bytes = await storing
        except (ContextCacheError, OSError) as exc:
            code = _code_of(exc)
            self._runtime.metrics.refused.labels(code).inc()
            keys = self._intake.end(ref, save, code, is_final=False) if ref.phase is Phase.OPEN else []
            await self.tiers.free([*keys, *(file.key for file in files)])
            raise
        if ref.save is not save:
            await self.tiers.free(file.key for file in files)
            raise ContextDeleted("the save was dropped")
        self._intake.took(save, len(files), size_bytes)
        return size_bytes

    async def seal(self, cache_ref: CacheRef, rank: int) -> bool:
        """End a rank's save and, after the last rank, write the manifest; False: other ranks have to seal. Idempotent.

        Raises SaveIncomplete when blocks are missing or no save is open, ContextDeleted, StorageFull.
        """
        if self.manifests.get(cache_ref) is not None:
            return True
        complete = self._intake.seal(cache_ref, rank)
        if complete is None:
            return False
        crash_point(BEFORE_SEAL)
        await self._finish(self._publish(*complete))
        crash_point(AFTER_SEAL)
        return True

    async def _publish(self, ref: Ref, save: Save, *, is_rest: bool = False) -> None:
        plan = self._intake.publish_rest if is_rest else self._intake.publish

        def promised() -> Manifest | None:
            manifest = plan(ref, save)
            return self.promises.at_seal(manifest, save.new) if manifest is not None else None

        try:
            if save.new.pinned and save.is_whole:
                await self._bring_to_pin(save.manifest())
            record = await self.manifests.publish(promised)
        except Exception as exc:
            if ref.phase is Phase.PUBLISHING:
                code = _code_of(exc)
                self._runtime.metrics.refused.labels(code).inc()
                await self.tiers.free(self._intake.end(ref, save, code))
            raise
        if record is None:
            return
        await self.tiers.free(self._intake.let_go(save))
        if ref.phase is not Phase.SEALED:
            raise ContextDeleted("the save was dropped")
        self._runtime.metrics.seals.inc()
        log.info("context sealed", extra={"cache_ref": record.cache_ref, "num_tokens": record.num_tokens})
        # KV from the store is there already, and a peer writes its own kept KV.
        if not record.interrupted and (not ref.source or (ref.source == "peer" and not record.is_kept)):
            self.manifests.on_change("sealed", record)
        if save.new.retain_ms:
            self.promises.count(record.promise)
            self.promises.end_covered(replace(save.manifest(), promise=record.promise))
            await self._bring_pinned([record])
        if record.is_kept:
            await self.retention.replace(save.manifest())
        await self.placements.carry_out(record, save.new.placements)

    async def seal_rest(self, borrower: str) -> None:
        """Seal the saves that a process of the engine has left behind, as far as all ranks' files have come.

        A save without such files ends. Raises nothing.
        """
        is_last = not self.tiers.memory.borrowers
        for ref, save in self.refs.saves():
            if ref.phase is not Phase.OPEN or save.new.source or not (is_last or borrower in save.borrowers):
                continue
            try:
                for key in [key for keys in save.keys.values() for key in keys]:
                    await self._blocks.settled(key)  # a file that was handed over may be on its way to the disk
                await self._publish(ref, save, is_rest=True)
            except (ContextCacheError, OSError):
                await self.tiers.free(self._intake.end(ref, save, ENGINE_GONE, is_final=False))

    async def interrupt(self, tenant: TenantId, cache_ref: CacheRef) -> None:
        """Keep the KV of a turn that ended without a commit for a while, saved by now or later. Idempotent.

        KV of the end of its prompt has the same life. Raises InvalidRequest.
        """
        check_tenant(tenant)
        check_cache_refs([cache_ref])
        refs = (cache_ref, prompt_ref(cache_ref))
        until_ms = self._intake.interrupt(tenant, refs)

        def sealed() -> Iterable[ManifestRecord]:
            found = (self.manifests.live(tenant, ref) for ref in refs)
            return [it for it in found if it is not None]

        await self._finish(self.manifests.move_expiry(sealed, until_ms, interrupts=True))

    async def abandon_save(self, cache_ref: CacheRef) -> None:
        """End a save whose pull has failed, and free its blocks. Harmless when there is none."""
        await self._finish(self.tiers.free(self._intake.abandon(cache_ref)))

    async def give_up_save(self, failed: FailedSave) -> None:
        """Take the engine's word that nothing is saved under a name, and why; waiters learn it at once.

        Nothing changes for sealed KV. Raises InvalidRequest.
        """
        await self._finish(self.tiers.free(self._intake.give_up(failed)))

    def holds(self, tenant: TenantId, cache_ref: CacheRef) -> bool:
        """Return whether this KV is sealed here, being saved, or expected from a peer."""
        return bool(self.manifests.live(tenant, cache_ref)) or self.refs.get(tenant, cache_ref).phase in PENDING

    async def wait_sealed(self, tenant: TenantId, cache_ref: CacheRef, *, timeout_s: float) -> ManifestRecord | None:
        """Return the record once its manifest is durable; None after `timeout_s`, or when the save has failed."""
        ends_at_s = asyncio.get_running_loop().time() + timeout_s
        while self.refs.get(tenant, cache_ref).phase in (*PENDING, Phase.ABSENT):
            if not await self.refs.wait(tenant, [cache_ref], timeout_s=ends_at_s - asyncio.get_running_loop().time()):
                break
        return self.manifests.live(tenant, cache_ref)

    async def open(self, tenant: TenantId, cache_ref: CacheRef, *, again: bool = False) -> Manifest:
        """Return a sealed, unexpired manifest whose blocks are all there. `again`: it was opened a moment ago.

        Raises CacheRefNotFound; its kind CacheRefPending while it is being saved or pulled, to its own tenant only.
        """
        record = self.manifests.live(tenant, cache_ref)
        if record is not None:
            manifest = await self.manifests.read(record, again=again)
            if manifest is not None and self.manifests.is_whole(record):
                self.manifests.use(cache_ref)
                return manifest
            await self._finish(self._lose_incomplete(record))
        elif self.refs.get(tenant, cache_ref).phase in PENDING:
            raise CacheRefPending("the KV is not sealed yet")
        self._runtime.metrics.misses.inc()
        raise CacheRefNotFound(NOT_FOUND)

    async def match_prefix(self, question: PrefixQuestion) -> Sequence[Found]:
        """Return the tenant's KV that begins most like a prompt, the longest first. Raises InvalidRequest.

        The first answer counts as used now, and its life begins anew if it is kept KV.
        """
        found = await self.manifests.match(question, lambda record: self._finish(self._lose_incomplete(record)))
        for one in found[:1]:
            self.manifests.use(one.cache_ref)
            self.retention.use(one.cache_ref, question.expires_at_ms)
        if question.group:
            self.retention.note_match(question, found[0].num_tokens if found else 0)
        return found

    def tier_of(self, manifest: Manifest | ManifestRecord) -> TierName:
        """Return the tier that would serve most blocks of rank 0; of pulled KV before its first load, the origin."""
        if (fresh := self._fresh(self.refs.get(manifest.tenant, manifest.cache_ref), 0)) is not None:
            return fresh
        record = self.manifests.get(manifest.cache_ref)
        keys = [] if record is None else [key for key in record.keys if key.rank == 0]
        in_memory = sum(self._blocks.get(key).in_memory is not None for key in keys)
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

        The first load of pulled KV names the peer as the tier of all its blocks. `verify`: compare all bytes first.

        Raises InvalidRequest, FingerprintMismatch, CacheRefNotFound, CorruptBlock, StorageFull; a corrupt block is
        quarantined and the manifests that hold it are removed.
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
        wait_s = 0 if lease is None else lease.room_wait_ms / 1000
        blocks = self.tiers.fetch(manifest, rank, wanted, in_slots=in_slots, verify=verify, room_wait_s=wait_s)
        ref = self.refs.get(manifest.tenant, manifest.cache_ref)
        fresh = self._fresh(ref, rank)
        ref.fresh_ranks = ref.fresh_ranks - {rank}
        try:
            async for together in blocks:
                yield together if fresh is None else [replace(block, tier=fresh) for block in together]
        except DamagedBlock as exc:
            await self._finish(self._lose_block(exc.key))
            raise
        finally:
            await blocks.aclose()
            left = self._blocks.let_go(held, "lease")
            if left:
                await self._finish(self.tiers.free(left))

    async def read_ahead(self, tenant: TenantId, cache_refs: Iterable[CacheRef]) -> None:
        """Bring the first of these refs that is sealed here into memory, as a load is about to ask for it.

        Harmless without such a ref, and when cancelled. The load reports what is wrong. Of two calls at once the second
        returns at once: its load reads.
        """
        records = (self.manifests.live(tenant, cache_ref) for cache_ref in cache_refs)
        record = next((record for record in records if record is not None), None)
        if record is None or self._reading_ahead.locked():
            return
        async with self._reading_ahead:
            await self._bring(record)

    async def end_load(self, lease_id: str) -> None:
        """End a load's lease, and free what was deleted meanwhile. Idempotent."""
        keys = self._leases.end(lease_id)
        if keys:
            await self._finish(self.tiers.free(keys))

    async def retain(
        self, tenant: TenantId, cache_refs: Sequence[CacheRef], *, retain_ms: int, pinned: bool
    ) -> Promise:
        """Promise that the first sealed KV of these stays for so long, `pinned` in memory too; or say why not.

        A denial waits for no write. Raises InvalidRequest, StorageFull, SidecarUnavailable.
        """
        check_tenant(tenant)
        check_cache_refs(cache_refs)
        check_retain_ms(retain_ms)
        promise = Promise(reason=NOT_SAVED)

        def promised(record: ManifestRecord) -> ManifestRecord | None:
            nonlocal promise
            changed = self.promises.later(record, retain_ms=retain_ms, pinned=pinned)
            promise = changed.promise
            return changed if replace(promise, reason="") != replace(record.promise, reason="") else None

        found = (self.manifests.live(tenant, cache_ref) for cache_ref in cache_refs)
        record = next((it for it in found if it is not None and not it.interrupted), None)
        if record is not None and pinned and (manifest := await self.manifests.read(record, again=True)):
            await self._bring_to_pin(manifest)
        if record is not None and promised(record) is not None:
            names = [record.cache_ref]
            changing = self.manifests.change(
                lambda: [it for name in names if (it := self.manifests.live(tenant, name))], promised
            )
            await self._finish(changing)
            await self._bring_pinned(it for name in names if (it := self.manifests.get(name)))
            if not self.is_promised(tenant, record.cache_ref):
                promise = Promise(reason=promise.reason or NOT_SAVED)  # deleted, or lost, meanwhile
        self.promises.count(promise)
        return promise

    def is_promised(self, tenant: TenantId, cache_ref: CacheRef) -> bool:
        """Return whether sealed KV of this tenant is under a promise."""
        record = self.manifests.live(tenant, cache_ref)
        return record is not None and self.promises.is_promised(record)

    def _retain_soon(self, record: ManifestRecord, new: NewSave) -> None:
        """Give kept KV the promise and the placements that a save of the same tokens asks for."""
        if new.retain_ms:
            retaining = self.retain(record.tenant, [record.cache_ref], retain_ms=new.retain_ms, pinned=new.pinned)
            self._runtime.threads.begin(retaining)
        if new.placements:
            self._runtime.threads.begin(self.placements.carry_out(record, new.placements))

    async def restore_pins(self) -> None:
        """Bring the KV that is promised in memory there again, after a start."""
        await self._bring_pinned(self.manifests)

    async def _bring_pinned(self, records: Iterable[ManifestRecord]) -> None:
        """Bring pinned KV into memory, where its blocks are no longer: the pin holds only those that are there."""
        for record in records:
            if record.promise.pinned and self.promises.is_promised(record):
                await self._bring(record)

    async def _bring_to_pin(self, manifest: Manifest) -> None:
        """Read KV into memory that is to be pinned there. Without room for the pin it would only displace other KV."""
        if not self.promises.refusal(manifest.tenant, all_keys(manifest), pinned=True):
            await self.tiers.read_ahead(manifest)

    async def _bring(self, record: ManifestRecord) -> None:
        with suppress(SidecarUnavailable):
            manifest = await self.manifests.read(record, again=True)
            if manifest is not None:
                await self.tiers.read_ahead(manifest)

    async def touch(self, tenant: TenantId, session_id: SessionId, expires_at_ms: int) -> int:
        """Move the expiry of a session's unexpired manifests and of its saves in flight; return how many manifests."""
        self._intake.move_expiry(tenant, session_id, expires_at_ms)
        return await self._finish(
            self.manifests.move_expiry(lambda: self.manifests.of_session(tenant, session_id), expires_at_ms)
        )

    async def fork(self, terms: ForkTerms) -> ManifestRecord | None:
        """Give a new context the KV of another one, byte for byte the same files; None: there is none. Idempotent.

        The fork is a manifest of its own over the same blocks and tails, which stay until the last manifest goes. It is
        written under the lock of all manifests: a delete of the source comes before it, or leaves the files alone.

        Raises InvalidRequest, ContextExpired, ContextExists, ContextDeleted, StorageFull.
        """
        terms.check()
        return await self._finish(self._fork(terms))

    async def _fork(self, terms: ForkTerms) -> ManifestRecord | None:
        begun_ms = self._runtime.clock.now_ms()
        if terms.expires_at_ms <= begun_ms:
            raise ContextExpired("the context has expired")
        for cache_ref in terms.sources:
            if self.refs.get(terms.tenant, cache_ref).save is not None:
                await self.wait_sealed(terms.tenant, cache_ref, timeout_s=FORK_WAIT_S)
            if (source := self.manifests.live(terms.tenant, cache_ref)) is not None:
                break
        else:
            return None
        at_prompt = self.manifests.live(terms.tenant, prompt_ref(source.cache_ref))
        if at_prompt is not None:  # KV of the end of its prompt
            await self._publish_fork(terms, at_prompt, prompt_ref(terms.cache_ref), begun_ms)
        record = await self._publish_fork(terms, source, terms.cache_ref, begun_ms)
        if record is not None:
            self.manifests.on_change("sealed", record)
            log.info("context forked", extra={"cache_ref": terms.cache_ref, "num_tokens": record.num_tokens})
        return record

    async def _publish_fork(
        self, terms: ForkTerms, source: ManifestRecord, cache_ref: CacheRef, begun_ms: int
    ) -> ManifestRecord | None:
        manifest = await self.manifests.read(source, again=True)

        def plan() -> Manifest | None:
            self.refs.check_not_deleted(terms.tenant, terms.session_id, cache_ref, started_at_ms=begun_ms)
            taken, owner = self.manifests.get(cache_ref), self.refs.owner(cache_ref)
            is_ours = taken is None or (taken.tenant, taken.session_id) == (terms.tenant, terms.session_id)
            if not is_ours or (owner is not None and owner.save is not None):
                raise ContextExists("this cache_ref is already sealed")
            known = self.manifests.get(source.cache_ref)
            if manifest is None or known is None or known.keys != source.keys:
                return None  # deleted, lost or saved anew since it was read
            if taken is None:
                self.refs.begin_fork(self.refs.get(terms.tenant, cache_ref))
            # The files keep their names, tails too: nothing is hashed under the lock.
            return replace(
                manifest,
                cache_ref=cache_ref,
                session_id=terms.session_id,
                expires_at_ms=terms.expires_at_ms,
                tail_ref=manifest.tail_ref or manifest.cache_ref,
                interrupted=False,
                promise=NO_PROMISE,
            )

        try:
            return await self.manifests.publish(plan)
        except Exception as exc:
            ref = self.refs.get(terms.tenant, cache_ref)
            if ref.phase is Phase.PUBLISHING and ref.save is None:
                self.refs.end_save(ref, _code_of(exc), started_at_ms=None)
            raise

    async def delete(self, tenant: TenantId, session_id: SessionId, cache_refs: Sequence[CacheRef]) -> Removed:
        """Remove manifests of a session ("" for none) and of `cache_refs`, then all blocks without a reference.

        KV of the end of a context's prompt goes with it. Later saves under these names are refused. Idempotent.
        """
        refs = [ref for ref in cache_refs if CACHE_REF_PATTERN.fullmatch(ref)]
        refs = [*refs, *map(prompt_ref, refs)]
        return await self._finish(self._delete(tenant, session_id, refs))

    async def _delete(self, tenant: TenantId, session_id: SessionId, cache_refs: Sequence[CacheRef]) -> Removed:
        keys = self._intake.delete(tenant, session_id, cache_refs)
        records = await self.manifests.remove(tenant, session_id, cache_refs)
        self._runtime.metrics.deletes.inc(len(records))
        keys += self._blocks.unspare((tenant, session_id))
        return Removed(len(records), await self.tiers.free([*keys_of(records), *keys]))

    async def collect(self) -> Removed:
        """Free everything that no live manifest and no save in flight refers to."""
        return await self._finish(self._collect())

    async def _collect(self) -> Removed:
        num_replaced = await self.retention.remove_replaced()
        self._intake.end_overdue()
        self._leases.expire()
        while not self.manifests.end_promises():  # noqa: ASYNC110  # each part ends some
            await asyncio.sleep(0)
        now_ms = self._runtime.clock.now_ms()
        expired = [record for record in self.manifests if record.expires_at_ms <= now_ms]
        records, freed = await self.retention.sweep(expired, self._runtime.metrics.collected)
        self._blocks.forget_spared(now_ms)
        freed += await self.tiers.free(await self._runtime.threads.run(self._blocks.garbage, now_ms))
        # Last: a full disk takes nothing, and the steps above free it.
        await self.retention.prolong_used()
        return Removed(len(records) + num_replaced, freed)

    async def drop(self, records: Sequence[ManifestRecord]) -> Removed:
        """Remove those manifests that have not changed, then all blocks without a reference.

        Unlike after `delete`, the names may be saved under again.
        """
        sweeping = self.retention.sweep(records, self._runtime.metrics.orphaned)
        removed, freed_bytes = await self._finish(sweeping)
        return Removed(len(removed), freed_bytes)

    def _fresh(self, ref: Ref, rank: int) -> Literal["peer", "object"] | None:
        """Return the origin of a rank's pulled KV that no load has asked for."""
        is_fresh = rank in ref.fresh_ranks and self._runtime.clock.now_ms() < ref.fresh_until_ms
        return (ref.source or None) if is_fresh else None

    async def _lose_incomplete(self, record: ManifestRecord) -> None:
        """Remove a manifest that lacks something, and spare its blocks for the save that follows the recompute.

        Not its tails: every save sends those, and a save under the same name may have other tokens.
        """
        for lost in await self.manifests.lose(lambda: [record]):
            self._intake.spare(lost.tenant, lost.session_id, lost.keys)
            await self.tiers.free([key for key in lost.keys if key.kind == "tail"])

    async def _lose_block(self, key: BlockKey) -> None:
        """Remove a block whose bytes are wrong, and the manifests that hold it.

        The other blocks of those contexts go too: what spoilt one may have spoilt more, and sending them again costs
        less than reading them all to find out.
        """
        await self.tiers.put_aside(key)
        await self.tiers.free(keys_of(await self.manifests.lose(lambda: self.manifests.holders(key))))

    async def _finish(self, steps: Coroutine[Any, Any, Result]) -> Result:
        """Run `steps` to their end even if the caller leaves. Raises SidecarUnavailable for a refusal of the disk."""
        try:
            return await self._runtime.threads.finish(steps)
        except OSError as exc:
            raise SidecarUnavailable("the disk cannot be written") from exc


def _code_of(error: Exception) -> str:
    return error.code if isinstance(error, ContextCacheError) else SidecarUnavailable.code
