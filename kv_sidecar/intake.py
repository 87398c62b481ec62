"""Decisions on saves in flight: which ranks, tokens and files belong to a save, and when it ends. No I/O.

A save ends sealed, or by `Intake.end` with a reason. The caller of `end` frees the blocks that it returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

from contextcache.errors import (
    ContextCacheError,
    ContextDeleted,
    ContextExists,
    ContextExpired,
    InvalidRequest,
    SaveIncomplete,
    StorageFull,
)
from contextcache.model import CacheRef, Manifest, SessionId, TenantId
from contextcache.requests import TenantShares
from kv_sidecar.blocks import Blocks
from kv_sidecar.format.block_file import BlockMeta
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.limits import Limits
from kv_sidecar.refs import Phase, Ref, Refs
from kv_sidecar.runtime import Runtime
from kv_sidecar.saves import (
    HOLD_DEADLINE,
    INTERRUPTED,
    PULL_FAILED,
    SAVE_DEADLINE,
    FailedSave,
    MoreTokens,
    NewSave,
    PreparedSave,
    Save,
)

REASONS_MAX = 64
"""Reasons of engines that the metric shows by name: each is a time series. A release has about 30."""


class Intake:
    """All saves in flight. Used from one event loop."""

    def __init__(self, runtime: Runtime, refs: Refs, blocks: Blocks, limits: Limits) -> None:
        self._runtime = runtime
        self._refs = refs
        self._blocks = blocks
        self._limits = limits
        self._reasons: set[str] = set()
        """Reasons of engines that the metric shows."""

    def admit(self, new: NewSave) -> tuple[Ref, Save]:
        """Return the save that a rank's announcement belongs to, and open it for the first rank.

        Raises ContextDeleted, ContextExpired, ContextExists, InvalidRequest, StorageFull.
        """
        ref = self._refs.get(new.tenant, new.cache_ref)
        self._refs.check_not_deleted(new.tenant, new.session_id, new.cache_ref, started_at_ms=new.started_at_ms)
        if ref.phase is Phase.FAILED and not new.source and 0 < new.started_at_ms == ref.started_at_ms:
            raise ContextDeleted("another rank ended this save")
        if new.expires_at_ms <= self._runtime.clock.now_ms():
            raise ContextExpired("the context has expired")
        owner = self._refs.owner(new.cache_ref)
        if owner is not None and (owner.has_manifest or (owner.phase is Phase.PUBLISHING and owner.save is None)):
            raise ContextExists("this cache_ref is already sealed, or that of a fork")
        if owner is not None and owner.save is not None and owner.save.new.terms() != new.terms():
            raise InvalidRequest("the ranks sent different data for this cache_ref", param="cache_ref")
        if ref.save is None:
            is_one_of_several = new.world_size > 1 and not new.source
            if is_one_of_several and 0 < new.started_at_ms <= self._refs.forgotten_until_ms:
                raise ContextDeleted("another rank may have ended this save")
            saves = TenantShares(self._limits.max_saves, (save.new.tenant for _, save in self._refs.saves()))
            if not saves.takes(new.tenant):
                raise StorageFull("too many saves in flight")
            save = Save(new, self._deadline_ms())
            if ref.reason == INTERRUPTED and not new.source:
                save.interrupt(self._interrupted_until_ms())
            self._refs.open(ref, save)
        assert ref.save is not None, "opened above"
        ref.save.deadline_ms = self._deadline_ms()
        return ref, ref.save

    def opened(self, more: MoreTokens) -> tuple[Ref, Save]:
        """Return the open save that gets more tokens. Raises SaveIncomplete, ContextDeleted."""
        ref = self._refs.get(more.tenant, more.cache_ref)
        save = _save_of(ref)
        if not 0 <= more.first_token <= save.num_sent.get(more.rank, -1):
            raise SaveIncomplete("the save lacks tokens before first_token")
        return ref, save

    def announce(self, ref: Ref, save: Save, more: MoreTokens) -> PreparedSave:
        """Register tokens of a rank, which the save has by now, and hold the blocks that it counts on.

        Raises ContextDeleted when the save has ended, ContextQuotaExceeded.
        """
        if ref.save is not save:
            raise ContextDeleted("the save has ended")
        end = max(save.num_sent.get(more.rank, 0), more.first_token + len(more.token_ids))
        num_files, held = save.num_files(end), save.keys.get(more.rank, [])
        first = more.first_token // save.block_tokens if more.early else 0
        new = [save.key(index, more.rank) for index in range(len(held), num_files)]
        keys = held + new
        missing = [
            index
            for index in range(first, num_files)
            if keys[index].kind == "tail" or not self._blocks.get(keys[index]).vouched
        ]
        if missing:
            self._blocks.check_tenant(save.new.tenant)
        save.num_sent[more.rank], save.keys[more.rank] = end, keys
        save.deadline_ms = self._deadline_ms()
        self._blocks.hold(new, "save")
        if not more.early:
            self._runtime.metrics.saves.inc()
        return PreparedSave(tuple(missing), num_files)

    def refuse(self, new: NewSave, error: BaseException) -> None:
        """End a save that was refused to its only rank so far: nothing waits for a save that will not come."""
        ref = self._refs.get(new.tenant, new.cache_ref)
        if isinstance(error, ContextCacheError):
            self._runtime.metrics.refused.labels(error.code).inc()
        if ref.save is not None and (ref.save.num_sent or ref.save.num_announcing):
            return
        if isinstance(error, ContextCacheError) and not new.early and not isinstance(error, ContextExists):
            self._refs.end_save(ref, error.code, started_at_ms=None if new.source else new.started_at_ms)
        elif ref.save is not None and new.source:
            self._refs.end_save(ref, PULL_FAILED, started_at_ms=None)
        elif ref.save is not None:
            self._refs.end_early(ref)

    def expected(
        self, cache_ref: CacheRef, rank: int, block_indices: Sequence[int]
    ) -> tuple[Ref, Save, list[BlockMeta]]:
        """Return the save, and the metadata of the files that belong at these positions.

        Raises SaveIncomplete, ContextDeleted, InvalidRequest.
        """
        ref = self._owner(cache_ref)
        save = self.save_with(cache_ref, rank, block_indices)
        return ref, save, [save.meta(index, rank) for index in block_indices]

    def save_with(self, cache_ref: CacheRef, rank: int, block_indices: Sequence[int]) -> Save:
        """Return the open save that these positions are part of. Raises as `expected`."""
        save = _save_of(self._owner(cache_ref))
        if min(block_indices) < 0 or max(block_indices) >= save.num_files(save.num_sent.get(rank, 0)):
            raise InvalidRequest("block_index is not part of the save", param="block_index")
        return save

    def took(self, save: Save, num_blocks: int, size_bytes: int) -> None:
        """Note files that came: a save that goes on is not ended, however long a slow disk takes."""
        save.deadline_ms = self._deadline_ms()
        self._runtime.metrics.blocks_taken.inc(num_blocks)
        self._runtime.metrics.bytes_taken.inc(size_bytes)

    def seal(self, cache_ref: CacheRef, rank: int) -> tuple[Ref, Save] | None:
        """Note that a rank has sealed; return the save when all ranks have. Raises SaveIncomplete, ContextDeleted."""
        ref = self._owner(cache_ref)
        save = _save_of(ref)
        is_all = save.is_whole and save.num_sent.get(rank) == len(save.token_ids)
        if not is_all or not all(self._blocks.get(key).vouched for key in save.keys[rank]):
            raise SaveIncomplete("a block of this rank is missing")
        save.sealed.add(rank)
        return (ref, save) if len(save.sealed) == save.new.world_size else None

    def publish(self, ref: Ref, save: Save) -> Manifest | None:
        """Return the manifest to write now; None when another call has just written it.

        Raises SaveIncomplete when a block has gone, ContextDeleted.
        """
        if ref.save is not save:
            if ref.phase is Phase.SEALED:
                return None
            raise ContextDeleted("the save was dropped")
        num_files = len(save.files)
        blocks = [self._blocks.get(key) for rank in range(save.new.world_size) for key in save.keys[rank][:num_files]]
        sizes = [block.stored_bytes or 0 for block in blocks]
        checksums = tuple([block.vouched for block in blocks])
        if not all(sizes) or not all(checksums):
            raise SaveIncomplete("a block of this save is missing")
        self._refs.publish(ref)
        return replace(save.manifest(), size_bytes=sum(sizes), block_checksums=checksums)

    def publish_rest(self, ref: Ref, save: Save) -> Manifest | None:
        """Return the manifest of the first files that all ranks have sent. Raises as `publish`."""
        if ref.save is save and ref.phase is Phase.OPEN:
            held = [save.keys.get(rank, []) for rank in range(save.new.world_size)]
            here = takewhile(lambda keys: all(self._blocks.get(key).vouched for key in keys), zip(*held, strict=False))
            save.cut(len(list(here)))
            if not save.files:
                raise SaveIncomplete("no file that a load can continue from has come")
        return self.publish(ref, save)

    def interrupt(self, tenant: TenantId, cache_refs: Iterable[CacheRef]) -> int:
        """Note that a turn has ended without a commit; return when its KV expires, Unix time in ms."""
        until_ms = self._interrupted_until_ms()
        for ref in (self._refs.get(tenant, cache_ref) for cache_ref in cache_refs):
            if ref.save is not None:
                ref.save.interrupt(until_ms)
            elif ref.phase is Phase.ABSENT:
                self._refs.end_save(ref, INTERRUPTED, started_at_ms=0)
        return until_ms

    def let_go(self, save: Save) -> list[BlockKey]:
        """Give up the blocks that a save counted on; return those that nothing refers to now. Idempotent."""
        keys = [key for held in save.keys.values() for key in held]
        save.num_sent, save.keys = {}, {}
        return self._blocks.let_go(keys, "save")

    def end(self, ref: Ref, save: Save, reason: str, *, is_final: bool = True) -> list[BlockKey]:
        """End a save without a manifest; return its blocks that nothing refers to now. Harmless when repeated.

        Files ahead of a save end without a word unless `is_final`: the save itself may still come.
        """
        if ref.save is not save:
            return []
        keys = self.let_go(save)
        new = save.new
        if reason == HOLD_DEADLINE or (not save.is_whole and reason == SAVE_DEADLINE):
            # The next save goes on where this one ended.
            self.spare(new.tenant, new.session_id, keys)
        if save.is_whole or is_final:
            self._refs.end_save(ref, reason, started_at_ms=None if new.source else new.started_at_ms)
        else:
            self._refs.end_early(ref)
        return keys

    def give_up(self, failed: FailedSave) -> list[BlockKey]:
        """Take the engine's word that a rank saves nothing; return the blocks of the save that ends by that.

        Nothing changes for sealed KV, or for another attempt under the same name. Raises InvalidRequest.
        """
        failed.check()
        ref = self._refs.get(failed.tenant, failed.cache_ref)
        if ref.phase is Phase.OPEN and ref.save is not None:
            if ref.save.new.started_at_ms != failed.started_at_ms:
                return []
            self._count(failed.reason)
            return self.end(ref, ref.save, failed.reason)
        if ref.phase in (Phase.ABSENT, Phase.FAILED, Phase.DELETED):
            self._count(failed.reason)
            self._refs.end_save(ref, failed.reason, started_at_ms=failed.started_at_ms)
        return []

    def _count(self, reason: str) -> None:
        if len(self._reasons) < REASONS_MAX:
            self._reasons.add(reason)
        self._runtime.metrics.refused.labels(reason if reason in self._reasons else "other").inc()

    def abandon(self, cache_ref: CacheRef) -> list[BlockKey]:
        """End a save whose pull has failed; return its blocks. Harmless when there is none."""
        ref = self._owner(cache_ref)
        is_pull = ref.phase is Phase.OPEN and ref.save is not None and ref.save.new.source
        return self.end(ref, ref.save, PULL_FAILED) if is_pull and ref.save is not None else []

    def delete(self, tenant: TenantId, session_id: SessionId, cache_refs: Iterable[CacheRef]) -> list[BlockKey]:
        """Refuse these names from now on and end their saves; return the blocks of those."""
        refs = [self._refs.get(tenant, cache_ref) for cache_ref in cache_refs]
        if session_id:
            whose = (tenant, session_id)
            refs += [ref for ref, save in self._refs.saves() if (save.new.tenant, save.new.session_id) == whose]
            self._refs.delete_session(tenant, session_id)
        keys = []
        for ref in dict.fromkeys(refs):
            keys += self.let_go(ref.save) if ref.save is not None else []
            self._refs.delete(ref)
        return keys

    def end_overdue(self) -> list[BlockKey]:
        """End the saves past their deadline; return their blocks."""
        now_ms = self._runtime.clock.now_ms()
        overdue = [it for it in self._refs.saves() if it[1].deadline_ms <= now_ms and it[0].phase is Phase.OPEN]
        return [key for ref, save in overdue for key in self.end(ref, save, SAVE_DEADLINE, is_final=False)]

    def move_expiry(self, tenant: TenantId, session_id: SessionId, expires_at_ms: int) -> None:
        """Give the saves of a session another expiry."""
        for _, save in self._refs.saves():
            if (save.new.tenant, save.new.session_id) == (tenant, session_id) and not save.new.interrupted:
                save.new = replace(save.new, expires_at_ms=expires_at_ms)

    def spare(self, tenant: TenantId, session_id: SessionId, keys: Sequence[BlockKey]) -> None:
        """Keep whole blocks for a while: the next save of the session may count on them."""
        until_ms = self._runtime.clock.now_ms() + self._limits.spare_ms
        self._blocks.spare(keys, until_ms=until_ms, whose=(tenant, session_id))

    def _owner(self, cache_ref: CacheRef) -> Ref:
        return self._refs.owner(cache_ref) or Ref("", cache_ref)

    def _interrupted_until_ms(self) -> int:
        return self._runtime.clock.now_ms() + self._limits.interrupted_ms

    def _deadline_ms(self) -> int:
        return self._runtime.clock.now_ms() + self._limits.save_deadline_ms


def _save_of(ref: Ref) -> Save:
    """Return the save of a ref. Raises SaveIncomplete, ContextDeleted after its end."""
    if ref.save is not None:
        return ref.save
    if ref.phase in (Phase.FAILED, Phase.DELETED):
        raise ContextDeleted("the save was dropped")
    raise SaveIncomplete("no save with this cache_ref is open")
