"""KV that outlives its pod: a writer puts sealed KV into the store behind the seal and removes deleted KV from it.

Rules:
1. Write: holder, then block, then, when all are there, session and manifest. A removal has the order of stored_kv.py.
   A crash in between leaves objects that no manifest names: the collector removes them.
2. A store has no locks: another pod may begin to hold a block in the moment in which its last holder is deleted.
   Then the block is gone, its readers compute that KV, and its manifest goes too. Bytes are never wrong: a pull
   verifies the store's bytes as it verifies a peer's (moving/pulling.py).
3. Only a DELETE and a reader of KV that is nowhere else wait for the store.
4. Kept KV (its session is its group) is written when no context waits. KV that a longer one of its group replaces
   leaves the store once all that this pod has of the group is there; if it was not written by then, it never is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from contextcache.errors import CacheRefNotFound, CorruptBlock, SidecarUnavailable
from contextcache.model import MAX_TTL_S, CacheRef, Manifest, SessionId, TenantId
from contextcache.names import KEPT_PREFIX, OBJECT_PREFIX
from contextcache.process.crash_points import crash_point
from kv_sidecar.crash_points import AFTER_STORED_BLOCKS
from kv_sidecar.format.manifest import encode_manifest, num_files
from kv_sidecar.limits import Limits
from kv_sidecar.recent import RecentNames
from kv_sidecar.retention import GROUP_MAX
from kv_sidecar.runtime import Runtime
from kv_sidecar.sealed.manifests import Change, ManifestRecord
from kv_sidecar.store.encryption import TenantKey
from kv_sidecar.store.objects import each
from kv_sidecar.store.stored_kv import (
    Removal,
    Session,
    StoredKV,
    StoredSession,
    block_name,
    holder_name,
    manifest_name,
    session_name,
)

log = logging.getLogger(__name__)

_AT_ONCE = 4
"""Block files of one context in transfer at once: each is in memory, encrypted a second time."""
_LOOKED_AT = 4
"""Manifests of a kept conversation that are read to find the one that a prompt begins with."""
_REMEMBER_MS = 3_600_000
"""A use is noted once in this time; a deleted name refuses a write for this time."""
_NAMES_MAX = 65_536
"""Names of each kind that are remembered, about 10 MB."""
BACKOFF_S, _BACKOFF_S_MAX = 1.0, 30.0
_Chore: TypeAlias = tuple[Session, Callable[[], Awaitable[None]]]


class _GivesWayError(Exception):
    """A context waits: the kept KV in progress is written after it."""


def _names(keep_ms: int = _REMEMBER_MS) -> RecentNames[Any]:
    return RecentNames(keep_ms=keep_ms, max_names=_NAMES_MAX)


@dataclass
class SharedTier:
    """One pod's view of the store; owns the task that writes. Used from one event loop."""

    stored: StoredKV
    runtime: Runtime
    limits: Limits
    _queue: OrderedDict[CacheRef, bool] = field(default_factory=OrderedDict)
    """Contexts, each with whether it is written although the store has it."""
    _kept: OrderedDict[CacheRef, bool] = field(default_factory=OrderedDict)
    """Kept KV, the same way: written when nothing else waits."""
    _writing: ManifestRecord | None = None
    _at_work: Session | None = None
    """Session of the writer's current write or removal; a delete of it comes after that."""
    _rests: asyncio.Event = field(default_factory=asyncio.Event)
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _paced_until_s: float = 0
    _is_hurried: bool = False
    _noted: RecentNames[Session] = field(default_factory=_names)
    """Sessions whose use the store knows."""
    _deleted: RecentNames[CacheRef] = field(default_factory=_names)
    _replaced: RecentNames[CacheRef] = field(default_factory=_names)
    """Kept KV that leaves the store once its replacement is there; a forgotten name leaves at its expiry."""
    _deleted_groups: RecentNames[Session] = field(default_factory=partial(_names, MAX_TTL_S * 1000))
    """Deleted kept conversations: older KV of them that is still in the store is not used."""
    _chores: deque[_Chore] = field(init=False)
    """Removals that the store did not take, and notes of use: retried until the store takes them."""
    _untidy: OrderedDict[Session, Removal | None] = field(default_factory=OrderedDict)
    """Kept conversations of which the store may have too much, each with the removal that the store refused.

    Apart from chores, which none pushes out."""
    _writer: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._chores = deque(maxlen=self.limits.store_queue_max)
        self._idle.set()

    # Writing behind.

    @property
    def num_waiting(self) -> int:
        """Contexts and kept conversations not in the store yet, with the one in progress."""
        return len(self._queue) + len(self._kept) + (self._writing is not None)

    def start(self) -> None:
        """Start the writer."""
        self._writer = asyncio.create_task(self._write_all())

    async def close(self) -> None:
        """Stop writing."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)

    def write_soon(self, record: ManifestRecord, *, again: bool = False) -> None:
        """Queue sealed KV; `again`: the store may have it with another expiry, or without some blocks.

        LMCache's objects stay in their pod: it asks no other.
        """
        if record.session_id.startswith(OBJECT_PREFIX):
            return
        queue = self._kept if record.is_kept else self._queue
        queue[record.cache_ref] = again or queue.get(record.cache_ref, False)
        queue.move_to_end(record.cache_ref)
        if len(self._queue) + len(self._kept) > self.limits.store_queue_max:
            (self._kept or self._queue).popitem(last=False)
            self.runtime.metrics.store_writes.labels("queue_full").inc()
        self._wake()

    def takes(self, tenant: TenantId) -> bool:
        """Return whether the tenant's sealed KV is written to the store: it is encrypted, or needs no key."""
        return self.stored.keys is None or bool(self.stored.keys.of(tenant))

    def learn(self, change: Change, record: ManifestRecord) -> None:
        """Queue a manifest that changed; replaced kept KV leaves once the rest is there."""
        if change != "replaced":
            self.write_soon(record, again=change == "touched")
        else:
            self._kept.pop(record.cache_ref, None)
            self._replaced.add(record.cache_ref, self.runtime.clock.now_ms())
            self._tidy_soon((record.tenant, record.session_id))

    async def flush(self, timeout_s: float) -> int:
        """Write the queues, most recently used first, and finish removals within this time.

        Returns the number of contexts that are left.
        """
        for record in self.stored.local.manifests:
            queue = self._kept if record.is_kept else self._queue
            if record.cache_ref in queue:
                queue.move_to_end(record.cache_ref, last=False)
        self._is_hurried = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self.num_waiting

    def _wake(self) -> None:
        self._idle.clear()
        self._work.set()

    async def _write_all(self) -> None:
        backoff_s = BACKOFF_S
        while True:
            await self._work.wait()
            try:
                await self._write_next()
                backoff_s = BACKOFF_S
            except SidecarUnavailable as exc:
                log.warning("shared store refused a write", extra={"reason": exc.message})
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_S_MAX)
            except Exception:
                self.runtime.metrics.store_writes.labels("internal_error").inc()
                log.exception("write to the shared store failed")

    async def _write_next(self) -> None:
        """Do one chore, tidy one group and write one context; refused work goes to the end of its queue.

        A refusal stops none of the three: the store may take one and not the other. Raises SidecarUnavailable when it
        took none.
        """
        refused: list[SidecarUnavailable] = []
        num_taken = 0
        if self._chores:
            session, chore = self._chores.popleft()
            with self._working(session), _noting(refused, lambda: self._chores.append((session, chore))):
                await chore()
                num_taken += 1
        if self._untidy:
            group, surplus = self._untidy.popitem(last=False)
            with self._working(group), _noting(refused, lambda: self._tidy_soon(group, surplus)):
                if surplus is None:
                    surplus = await self._surplus(group)
                else:
                    self._tidy_soon(group)
                if surplus is not None:
                    await self._remove(surplus)
                num_taken += 1
        if queue := self._queue or self._kept:
            cache_ref, again = queue.popitem(last=False)
            with _noting(refused, lambda: queue.setdefault(cache_ref, again)):
                await self._write(cache_ref, again=again)
                num_taken += 1
        if refused:
            self.runtime.metrics.store_writes.labels("unavailable").inc()
        if refused and not num_taken:
            raise refused[-1]
        if not (self._queue or self._kept or self._chores or self._untidy):
            self._work.clear()
            self._idle.set()

    @contextmanager
    def _working(self, session: Session) -> Iterator[None]:
        self._at_work, self._rests = session, asyncio.Event()
        try:
            yield
        finally:
            self._at_work = None
            self._rests.set()

    async def _write(self, cache_ref: CacheRef, *, again: bool) -> None:
        self._writing = record = self.stored.local.manifests.get(cache_ref)
        outcome = "gone"
        try:
            if record is not None:
                with self._working((record.tenant, record.session_id)):
                    outcome = await self._write_record(record, again=again)
            self.runtime.metrics.store_writes.labels(outcome).inc()
        except _GivesWayError:
            self._kept[cache_ref] = again or self._kept.get(cache_ref, False)
            self._kept.move_to_end(cache_ref, last=False)
        finally:
            self._writing = None

    async def _write_record(self, record: ManifestRecord, *, again: bool) -> str:
        """Write a context, and return the outcome as the metric has it."""
        keys = self.stored.keys
        key = None if keys is None else next(iter(keys.of(record.tenant)), None)
        if keys is not None and key is None:
            return "no_key"
        if not again and await self.stored.has_manifest(record.tenant, record.cache_ref):
            return "present"
        manifest = await self.stored.local.manifests.read(record)
        if manifest is None:
            return "gone"
        try:
            await self._write_out(record, manifest, key)
        except CacheRefNotFound:
            if record.cache_ref in self._deleted:
                return "deleted"  # its delete waits for this, and removes the written part
            self.delete_later(Removal(record.tenant, record.session_id, records=[record]))
            return "gone"
        return "written"

    async def _write_out(self, record: ManifestRecord, manifest: Manifest, key: TenantKey | None) -> None:
        """Write a manifest's blocks, and it. Raises CacheRefNotFound if it is removed here meanwhile."""
        session, known = (record.tenant, record.session_id), self.stored.known
        if await self._has_lost(session):
            known.forget(session)
        names = [it.file_name if key is None else key.hidden(it.file_name) for it in record.keys]
        absent: set[int] = set()
        try:
            await each(enumerate(names), lambda it: self._hold(record, manifest, *it, key, absent), at_once=_AT_ONCE)
        except _GivesWayError:
            if not known.of(session).last:
                # Its rest may wait for long, and nothing tells the collector to wait for it.
                known.of(session).doubt()
            raise
        crash_point(AFTER_STORED_BLOCKS)
        data = await asyncio.to_thread(encode_manifest, manifest)
        self._check_not_deleted(record)
        await self.stored.objects.put(session_name(*session, record.cache_ref), b"")
        if known.of(session).last not in self._deleted and await self._has_lost(session):
            known.of(session).doubt()  # blocks leave with it; those that this pod removed are known
        await self.stored.put(manifest_name(record.tenant, record.cache_ref), data, key)
        known.of(session).last = record.cache_ref
        if not known.of(session).is_trusted(names):
            self.write_soon(record, again=True)  # some left the store meanwhile
        if record.is_kept:
            self._tidy_soon(session)

    async def _has_lost(self, session: Session) -> bool:
        """Return whether the last manifest of a session has left the store: another pod evicts or collects it."""
        last = self.stored.known.of(session).last
        return bool(last) and not await self.stored.has_manifest(session[0], last)

    async def _hold(
        self,
        record: ManifestRecord,
        manifest: Manifest,
        position: int,
        file_name: str,
        key: TenantKey | None,
        absent: set[int],
    ) -> None:
        """Hold a block for a session, and write it unless it is there.

        `position`: of the block among the files of all ranks. `absent`: ranks with a block that was not there. Blocks
        form a chain: the next ones are not looked for, and a second write of a block changes nothing. Raises
        CacheRefNotFound if it is removed here meanwhile.
        """
        session = (record.tenant, record.session_id)
        rank, index = divmod(position, num_files(manifest))
        self._check_not_deleted(record)
        if self.stored.known.of(session).is_trusted([file_name]):
            return
        if record.is_kept and self._queue:
            raise _GivesWayError
        self.stored.known.begin(session, file_name)
        name = block_name(record.tenant, file_name)
        await self.stored.objects.put(holder_name(record.tenant, file_name, record.session_id), b"")
        if rank in absent or await self.stored.objects.head(name) is None:
            absent.add(rank)
            data = await self.stored.local.tiers.copy(manifest, rank, index)
            if data is None:
                raise CacheRefNotFound("the block is no longer stored")
            await self._pace(len(data))
            await self.stored.put(name, data, key)
            self.runtime.metrics.store_bytes.labels("write").inc(len(data))
        self.stored.known.of(session).trust(file_name)

    def _check_not_deleted(self, record: ManifestRecord) -> None:
        if record.cache_ref in self._deleted:
            raise CacheRefNotFound("the KV was deleted")

    async def _pace(self, size_bytes: int) -> None:
        if self._is_hurried or not self.limits.store_bytes_per_s:
            return
        now_s = asyncio.get_running_loop().time()
        begins_s = max(now_s, self._paced_until_s)
        self._paced_until_s = begins_s + size_bytes / self.limits.store_bytes_per_s
        await asyncio.sleep(begins_s - now_s)

    # Fetching; moving/pulling.py has the story.

    async def manifest(self, tenant: TenantId, cache_ref: CacheRef) -> Manifest:
        """Return a manifest of the store. Raises CacheRefNotFound, CorruptBlock, SidecarUnavailable."""
        found = None if cache_ref in self._deleted else await self.stored.manifest(tenant, cache_ref)
        if found is None:
            raise CacheRefNotFound("the shared store has no KV with this cache_ref")
        if found.expires_at_ms <= self.runtime.clock.now_ms():
            raise CacheRefNotFound("the KV in the shared store has expired")
        self.note_use(tenant, found.session_id, cache_ref)
        return found

    async def of_group(self, tenant: TenantId, group: SessionId) -> Sequence[Manifest]:
        """Return the `_LOOKED_AT` most recently used manifests of a kept conversation that this pod lacks.

        Raises SidecarUnavailable.
        """
        here = {record.cache_ref for record in self.stored.local.manifests.of_session(tenant, group)}
        there = await self.stored.used(tenant, group)
        deleted_at_ms = self._deleted_groups.added_at_ms((tenant, group), self.runtime.clock.now_ms()) or 0
        refs = [
            ref
            for ref, used_at_ms in there.items()
            if ref not in here and ref not in self._deleted and used_at_ms > deleted_at_ms
        ]
        found: list[Manifest] = []

        async def look(ref: CacheRef) -> None:
            with suppress(CorruptBlock):
                it = await self.stored.manifest(tenant, ref)
                if it is not None and (it.cache_ref, it.session_id) == (ref, group):
                    found.append(it)

        await each(refs[-_LOOKED_AT:], look)
        return [it for it in found if it.expires_at_ms > self.runtime.clock.now_ms()]

    def note_use(self, tenant: TenantId, session_id: SessionId, cache_ref: CacheRef) -> None:
        """Tell the store once an hour that a context is used: it evicts the least recently used ones first."""
        session, now_ms = (tenant, session_id), self.runtime.clock.now_ms()
        if self._noted.added_at_ms(session, now_ms) is None and not session_id.startswith(OBJECT_PREFIX):
            self._noted.add(session, now_ms)
            self._add_chore(session, partial(self._note, session, cache_ref))

    async def _note(self, session: Session, cache_ref: CacheRef) -> None:
        if await self.stored.has_manifest(session[0], cache_ref):
            await self.stored.objects.put(session_name(*session, cache_ref), b"")

    # Removing.

    def begin_delete(
        self, tenant: TenantId, session_id: SessionId, cache_refs: Iterable[CacheRef], *, is_whole: bool
    ) -> Removal:
        """Refuse writes and reads of a session's KV from now on; `end_delete` or `delete_later` has to follow.

        `is_whole`: the whole session.
        """
        refs, now_ms = set(cache_refs), self.runtime.clock.now_ms()
        here = [self._writing, *map(self.stored.local.manifests.get, refs)]
        if is_whole:
            here += self.stored.local.manifests.of_session(tenant, session_id)
        meant = [
            record
            for record in here
            if record is not None
            and record.tenant == tenant
            and (record.cache_ref in refs or (is_whole and record.session_id == session_id))
        ]
        refs.update(record.cache_ref for record in meant)
        if is_whole and session_id.startswith(KEPT_PREFIX):
            self._deleted_groups.add((tenant, session_id), now_ms)
        for ref in refs:
            self._deleted.add(ref, now_ms)
            self._queue.pop(ref, None)
            self._kept.pop(ref, None)
        return Removal(tenant, session_id, refs, is_whole, meant)

    async def end_delete(self, removal: Removal) -> None:
        """Remove KV, and the blocks without another holder, after the writer's current work on it.

        Then this pod writes nothing more of it. If the store refuses, or takes longer than the caller waits, the
        removal is retried until the store takes it or this process ends. Then the collector finds it.
        Raises SidecarUnavailable.
        """
        try:
            while self._is_at(removal):
                await self._rests.wait()
            await self._remove(removal)
        except (SidecarUnavailable, asyncio.CancelledError):
            self.delete_later(removal)
            raise

    def delete_later(self, removal: Removal) -> None:
        """Leave a removal to the writer: no caller waits for it."""
        removal.before_ms = min(removal.before_ms, self.runtime.clock.now_ms())
        self._add_chore((removal.tenant, removal.session_id), partial(self._remove, removal))

    async def evict(self, tenant: TenantId, session_id: SessionId, session: StoredSession) -> bool:
        """Remove a listed session unless it was used since; return whether it is removed.

        Raises SidecarUnavailable.
        """
        if self._at_work == (tenant, session_id):
            return False
        again = await self.stored.evict(tenant, session_id, session)
        self._write_again(again or ())
        return again is not None

    async def _remove(self, removal: Removal) -> None:
        self._write_again(await self.stored.remove(removal))

    def _write_again(self, records: Iterable[ManifestRecord]) -> None:
        for record in records:
            self.write_soon(record, again=True)

    def _is_at(self, removal: Removal) -> bool:
        """Return whether the writer is at the same KV."""
        is_written = self._writing is not None and self._writing.cache_ref in removal.cache_refs
        return is_written or (removal.is_whole and self._at_work == (removal.tenant, removal.session_id))

    def _add_chore(self, session: Session, chore: Callable[[], Awaitable[None]]) -> None:
        self._chores.append((session, chore))
        self._wake()

    def _tidy_soon(self, group: Session, surplus: Removal | None = None) -> None:
        self._untidy[group] = surplus or self._untidy.get(group)
        if len(self._untidy) > self.limits.store_queue_max:
            self._untidy.popitem(last=False)  # its surplus leaves at its expiry
        self._wake()

    async def _surplus(self, group: Session) -> Removal | None:
        """Return replaced and surplus KV of a group, once all its KV of this pod is there; None: there is none."""
        here = {record.cache_ref for record in self.stored.local.manifests.of_session(*group)}
        if any(ref in self._kept for ref in here):
            return None
        there = await self.stored.used(*group)
        if not here or not here.issubset(there):
            return None
        others = [ref for ref in there if ref not in here]
        gone = {ref for ref in others if ref in self._replaced}
        left = [ref for ref in others if ref not in gone]
        gone.update(left[: max(len(there) - len(gone) - GROUP_MAX, 0)])
        return Removal(*group, gone) if gone else None


@contextmanager
def _noting(refused: list[SidecarUnavailable], try_again: Callable[[], object]) -> Iterator[None]:
    """Note a refusal of the store and have the work tried again."""
    try:
        yield
    except SidecarUnavailable as exc:
        try_again()
        refused.append(exc)
