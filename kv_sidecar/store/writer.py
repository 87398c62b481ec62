"""KV that outlives its pod: written behind to a store that all pods share, fetched from there, removed from there.

stored_kv.py has what is there and under which names, removal.py how it leaves.

Rules:
1. Write: holder, then block, then, when all are there, session and manifest. Remove: the manifest, then holders, the
   blocks that have none, and the session. A crash in between leaves what no manifest names: collector.py's.
2. A store has no locks: another pod may begin to hold a block in the moment in which its last holder lets go of it.
   Then the block is gone, whoever wants that KV computes it, and its manifest goes too. Bytes are never wrong: what
   comes from here is verified as what comes from a peer is (moving/pulling.py).
3. Nobody waits for the store but who asks for KV that is nowhere else, and a DELETE.
4. Kept KV (its session is its group) is written when no context waits. What longer KV of its group stands for leaves
   the store once all that this pod has of the group is there; what was not written by then is not.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

from contextcache.errors import CacheRefNotFound, CorruptBlock, SidecarUnavailable
from contextcache.model import MAX_TTL_S, CacheRef, Manifest, SessionId, TenantId
from contextcache.names import KEPT_PREFIX, OBJECT_PREFIX
from contextcache.process.crash_points import crash_point
from kv_sidecar.crash_points import AFTER_STORED_BLOCKS
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import encode_manifest
from kv_sidecar.keeping import GROUP_MAX
from kv_sidecar.runtime import Runtime
from kv_sidecar.sealed.index import ManifestRecord, RecentNames
from kv_sidecar.store.encryption import StoreKeys, TenantKey
from kv_sidecar.store.eviction import StoredSession
from kv_sidecar.store.known_blocks import KnownBlocks, Session
from kv_sidecar.store.objects import ObjectStore
from kv_sidecar.store.removal import LocalKV, Removal, StoreRemovals
from kv_sidecar.store.stored_kv import StoredKV, block_name, each, holder_name, manifest_name, session_name

log = logging.getLogger(__name__)

_AT_ONCE = 4
"""Block files on their way to or from the store for one context."""
_KNOWN_MAX = 1_000_000
"""Blocks whose holders are known to be noted; about 200 bytes each."""
_LOOKED_AT = 4
"""Manifests of a kept conversation that are read to find the one that a prompt begins with."""
_NOTE_MS = 3_600_000
_TOMBSTONE_MS = 3_600_000
BACKOFF_S, _BACKOFF_S_MAX = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """What the shared tier may cost."""

    bytes_per_s: int
    """Bytes of KV written per second; 0: no limit."""
    queue_max: int = 100_000
    """Contexts and kept conversations that wait to be written, about 20 MB. The oldest are dropped, kept ones first."""


class _GivesWayError(Exception):
    """A context waits: what is kept is written on after it."""


class SharedTier:
    """One pod's view of the store; owns the task that writes. Used from one event loop."""

    def __init__(
        self,
        objects: ObjectStore,
        local: LocalKV,
        runtime: Runtime,
        *,
        limits: SharedLimits,
        keys: StoreKeys | None = None,
    ) -> None:
        """`keys`: what objects are encrypted with; None: they are not."""
        self._objects = objects
        self._keys = keys
        self.stored = StoredKV(objects, keys=keys, metrics=runtime.metrics)
        """What is there, whoever wrote it."""
        self._local = local
        self._limits = limits
        self._clock = runtime.clock
        self._metrics = runtime.metrics
        self._queue: OrderedDict[CacheRef, bool] = OrderedDict()
        """Each with whether it is to be written although the store has it."""
        self._kept: OrderedDict[CacheRef, bool] = OrderedDict()
        """The same of what is kept: for when nothing else waits."""
        self._writing: ManifestRecord | None = None
        self._at_work: Session | None = None
        """The session of which the writer writes or removes something now; a delete of it comes after that."""
        self._rests = asyncio.Event()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._paced_until_s = 0.0
        self._is_hurried = False
        self._known = KnownBlocks(max_blocks=_KNOWN_MAX)
        again = partial(self.write_soon, again=True)
        self.removals = StoreRemovals(objects, self.stored, local, known=self._known, write_again=again)
        self._noted: RecentNames[Session] = RecentNames(keep_ms=_NOTE_MS, max_names=65_536)
        """Sessions that the store was told of in the last hour: they were used."""
        self._deleted: RecentNames[CacheRef] = RecentNames(keep_ms=_TOMBSTONE_MS, max_names=65_536)
        self._replaced: RecentNames[CacheRef] = RecentNames(keep_ms=_TOMBSTONE_MS, max_names=65_536)
        """Kept KV that is to leave the store when what stands for it is there; what is forgotten goes by its end."""
        self._deleted_groups: RecentNames[Session] = RecentNames(keep_ms=MAX_TTL_S * 1000, max_names=65_536)
        """Kept conversations that were deleted: the store may still have what it had of them by then."""
        self._chores: deque[tuple[Session, Callable[[], Awaitable[None]]]] = deque(maxlen=limits.queue_max)
        """Removals that the store did not take, and what it is told of use: tried until it takes them."""
        self._untidy: OrderedDict[Session, None] = OrderedDict()
        """Kept conversations of which the store may have more than it should; each once, and no chore gives way."""
        self._writer: asyncio.Task[None] | None = None

    # Writing behind.

    @property
    def num_waiting(self) -> int:
        """Contexts and kept conversations not in the store yet, the one that is being written among them."""
        return len(self._queue) + len(self._kept) + (self._writing is not None)

    def start(self) -> None:
        """Begin to write what is queued."""
        self._writer = asyncio.create_task(self._write_all())

    async def close(self) -> None:
        """Stop writing."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)

    def write_soon(self, record: ManifestRecord, *, again: bool = False) -> None:
        """Queue sealed KV; `again`: the store may have it, with another expiry, or without blocks it lacks by now.

        LMCache's objects stay in their pod: it asks no other.
        """
        if record.session_id.startswith(OBJECT_PREFIX):
            return
        queue = self._kept if record.is_kept else self._queue
        queue[record.cache_ref] = again or queue.get(record.cache_ref, False)
        queue.move_to_end(record.cache_ref)
        if len(self._queue) + len(self._kept) > self._limits.queue_max:
            (self._kept or self._queue).popitem(last=False)
            self._metrics.store_writes.labels("queue_full").inc()
        self._idle.clear()
        self._work.set()

    def replace(self, records: Iterable[ManifestRecord]) -> None:
        """Have kept KV that others of its group stand for leave the store once those are there."""
        for record in records:
            self._kept.pop(record.cache_ref, None)
            self._replaced.add(record.cache_ref, self._clock.now_ms())
            self._tidy_soon(record.tenant, record.session_id)

    async def flush(self, timeout_s: float) -> int:
        """Write what waits, what was used last first, and remove what is to go, for so many seconds.

        Return how many contexts are left.
        """
        for queue, sealed in ((self._queue, self._local.sealed()), (self._kept, self._local.sealed(kept=True))):
            for record in sealed:
                if record.cache_ref in queue:
                    queue.move_to_end(record.cache_ref, last=False)
        self._is_hurried = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self.num_waiting

    async def _write_all(self) -> None:
        backoff_s = BACKOFF_S
        while True:
            await self._work.wait()
            try:
                await self._write_next()
                backoff_s = BACKOFF_S
            except SidecarUnavailable as exc:
                self._metrics.store_writes.labels("unavailable").inc()
                log.warning("shared store refused a write", extra={"reason": exc.message})
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_S_MAX)
            except Exception:
                self._metrics.store_writes.labels("internal_error").inc()
                log.exception("write to the shared store failed")

    async def _write_next(self) -> None:
        """Write one context, or what is kept; what the store refuses goes to the end of the queue.

        One chore and one group to tidy before it, whose refusal does not keep it from being tried: the store may take
        the one and not the other.
        """
        refused: SidecarUnavailable | None = None
        if self._chores:
            session, chore = self._chores.popleft()
            try:
                with self._working(*session):
                    await chore()
            except SidecarUnavailable as exc:
                self._chores.append((session, chore))
                refused = exc
        if self._untidy:
            group, _ = self._untidy.popitem(last=False)
            try:
                with self._working(*group):
                    await self._tidy(*group)
            except SidecarUnavailable as exc:
                self._tidy_soon(*group)
                refused = exc
        if queue := self._queue or self._kept:
            cache_ref, again = queue.popitem(last=False)
            self._writing = record = self._local.record(cache_ref)
            try:
                with self._working(record.tenant, record.session_id) if record is not None else nullcontext():
                    outcome = await self._write(cache_ref, again=again)
                self._metrics.store_writes.labels(outcome).inc()
            except _GivesWayError:
                self._kept[cache_ref] = again or self._kept.get(cache_ref, False)
                self._kept.move_to_end(cache_ref, last=False)
            except SidecarUnavailable:
                queue.setdefault(cache_ref, again)
                raise
            finally:
                self._writing = None
        if refused is not None:
            raise refused
        if not (self._queue or self._kept or self._chores or self._untidy):
            self._work.clear()
            self._idle.set()

    @contextmanager
    def _working(self, tenant: TenantId, session_id: SessionId) -> Iterator[None]:
        self._at_work, self._rests = (tenant, session_id), asyncio.Event()
        try:
            yield
        finally:
            self._at_work = None
            self._rests.set()

    async def _write(self, cache_ref: CacheRef, *, again: bool) -> str:
        record = self._local.record(cache_ref)
        name = manifest_name("" if record is None else record.tenant, cache_ref)
        key = None if record is None or self._keys is None else next(iter(self._keys.of(record.tenant)), None)
        if record is not None and self._keys is not None and key is None:
            return "no_key"
        if record is not None and not again and await self._objects.size_bytes(name) is not None:
            return "present"
        manifest = None if record is None else await self._local.manifest(record)
        if record is None or manifest is None:
            return "gone"
        try:
            await self._write_out(record, manifest, key)
        except CacheRefNotFound:
            if cache_ref in self._deleted:
                return "deleted"  # whoever deletes it waits for this, and removes what was written by now
            self.delete_later(Removal(record.tenant, record.session_id, records=[record]))
            return "gone"
        return "written"

    async def _write_out(self, record: ManifestRecord, manifest: Manifest, key: TenantKey | None) -> None:
        """Write a manifest's blocks, and it. Raises CacheRefNotFound when it goes here meanwhile, or is deleted."""
        session, known = (record.tenant, record.session_id), self._known
        if await self._has_lost(session):
            known.forget(session)
        names = {it: it.file_name if key is None else key.hidden(it.file_name) for it in record.keys}
        try:
            await each(names.items(), lambda it: self._hold(record, *it, key), at_once=_AT_ONCE)
        except _GivesWayError:
            if not known.last(session):
                # It may take long until it is written on, and nothing tells the collector that it will be.
                known.doubt(session)
            raise
        crash_point(AFTER_STORED_BLOCKS)
        data = await asyncio.to_thread(encode_manifest, manifest)
        self._check_not_deleted(record)
        await self._objects.put(session_name(*session, record.cache_ref), b"")
        if known.last(session) not in self._deleted and await self._has_lost(session):
            known.doubt(session)  # blocks leave with it; where this pod removed it they are known
        await self.stored.put(manifest_name(record.tenant, record.cache_ref), data, key)
        known.vouch(session, record.cache_ref)
        if not known.is_trusted(session, names.values()):
            self.write_soon(record, again=True)  # some left the store meanwhile
        if record.is_kept:
            self._tidy_soon(*session)

    async def _has_lost(self, session: Session) -> bool:
        """Return whether what was written last of a session has gone: another pod evicts or collects it."""
        last = self._known.last(session)
        return bool(last) and await self._objects.size_bytes(manifest_name(session[0], last)) is None

    def _tidy_soon(self, tenant: TenantId, group: SessionId) -> None:
        self._untidy[tenant, group] = None
        if len(self._untidy) > self._limits.queue_max:
            self._untidy.popitem(last=False)  # what it has too much goes by its end
        self._idle.clear()
        self._work.set()

    async def _tidy(self, tenant: TenantId, group: SessionId) -> None:
        """Remove what others of a group stand for, and what is more than a group has, once those are there."""
        here = {record.cache_ref for record in self._local.of_session(tenant, group)}
        if any(ref in self._kept for ref in here):
            return
        there = await self.stored.used(tenant, group)
        if not here or not here.issubset(there):
            return
        others = [ref for ref in there if ref not in here]
        gone = {ref for ref in others if ref in self._replaced}
        left = [ref for ref in others if ref not in gone]
        gone.update(left[: max(len(there) - len(gone) - GROUP_MAX, 0)])
        if gone:
            await self.end_delete(Removal(tenant, group, gone))

    def _check_not_deleted(self, record: ManifestRecord) -> None:
        if record.cache_ref in self._deleted:
            raise CacheRefNotFound("the KV was deleted")

    async def _hold(self, record: ManifestRecord, block: BlockKey, file_name: str, key: TenantKey | None) -> None:
        """Note that a session holds a block, and write that unless it is there.

        Raises CacheRefNotFound when it has gone here meanwhile, or the KV was deleted.
        """
        session = (record.tenant, record.session_id)
        self._check_not_deleted(record)
        if self._known.is_trusted(session, [file_name]):
            return
        if record.is_kept and self._queue:
            raise _GivesWayError
        self._known.begin(session, file_name)
        await self._objects.put(holder_name(record.tenant, file_name, record.session_id), b"")
        if await self._objects.size_bytes(block_name(record.tenant, file_name)) is None:
            async with self._local.block(block) as data:
                if data is None:
                    raise CacheRefNotFound("the block is no longer stored")
                await self._pace(len(data))
                await self.stored.put(block_name(record.tenant, file_name), data, key)
                self._metrics.store_bytes.labels("write").inc(len(data))
        self._known.trust(session, file_name)

    async def _pace(self, size_bytes: int) -> None:
        if self._is_hurried or not self._limits.bytes_per_s:
            return
        now_s = asyncio.get_running_loop().time()
        begins_s = max(now_s, self._paced_until_s)
        self._paced_until_s = begins_s + size_bytes / self._limits.bytes_per_s
        await asyncio.sleep(begins_s - now_s)

    # Fetching; moving/pulling.py has the story.

    async def manifest(self, tenant: TenantId, cache_ref: CacheRef) -> Manifest:
        """Return a manifest of the store. Raises CacheRefNotFound, CorruptBlock, SidecarUnavailable."""
        found = None if cache_ref in self._deleted else await self.stored.read(manifest_name(tenant, cache_ref))
        if found is None:
            raise CacheRefNotFound("the shared store has no KV with this cache_ref")
        if found.expires_at_ms <= self._clock.now_ms():
            raise CacheRefNotFound("the KV in the shared store has expired")
        self.note_use(tenant, found.session_id, cache_ref)
        return found

    async def of_group(self, tenant: TenantId, group: SessionId) -> Sequence[Manifest]:
        """Return what the store has of a kept conversation and this pod has not, `_LOOKED_AT` at most: those used last.

        Raises SidecarUnavailable.
        """
        here = {record.cache_ref for record in self._local.of_session(tenant, group)}
        there = await self.stored.used(tenant, group)
        deleted_at_ms = self._deleted_groups.added_at_ms((tenant, group), self._clock.now_ms()) or 0
        refs = [
            ref
            for ref, used_at_ms in there.items()
            if ref not in here and ref not in self._deleted and used_at_ms > deleted_at_ms
        ]
        found: list[Manifest] = []

        async def look(ref: CacheRef) -> None:
            with suppress(CorruptBlock):
                it = await self.stored.read(manifest_name(tenant, ref))
                if it is not None and (it.cache_ref, it.session_id) == (ref, group):
                    found.append(it)

        await each(refs[-_LOOKED_AT:], look)
        return [it for it in found if it.expires_at_ms > self._clock.now_ms()]

    def note_use(self, tenant: TenantId, session_id: SessionId, cache_ref: CacheRef) -> None:
        """Have the store know that a context that is there was used, once an hour: what was not leaves it first."""
        session, now_ms = (tenant, session_id), self._clock.now_ms()
        if self._noted.added_at_ms(session, now_ms) is None and not session_id.startswith(OBJECT_PREFIX):
            self._noted.add(session, now_ms)
            self._add_chore(session, partial(self._note, tenant, session_id, cache_ref))

    async def _note(self, tenant: TenantId, session_id: SessionId, cache_ref: CacheRef) -> None:
        if await self._objects.size_bytes(manifest_name(tenant, cache_ref)) is not None:
            await self._objects.put(session_name(tenant, session_id, cache_ref), b"")

    # Removing.

    async def delete(
        self, tenant: TenantId, session_id: SessionId, cache_refs: Iterable[CacheRef], *, is_whole: bool
    ) -> None:
        """Remove KV of a session, and the blocks that nobody else holds; `is_whole`: nothing of the session stays.

        See `end_delete`.
        """
        await self.end_delete(self.begin_delete(tenant, session_id, cache_refs, is_whole=is_whole))

    def begin_delete(
        self, tenant: TenantId, session_id: SessionId, cache_refs: Iterable[CacheRef], *, is_whole: bool
    ) -> Removal:
        """Have nothing of it written or found from this moment on; `end_delete` or `delete_later` has to follow."""
        refs, now_ms = set(cache_refs), self._clock.now_ms()
        here = [self._writing, *map(self._local.record, refs)]
        if is_whole:
            here += self._local.of_session(tenant, session_id)
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
        """Remove it. When this returns, this pod writes and removes nothing more of it: the writer ends that first.

        What the store does not take, or takes longer for than the caller waits, is tried again until it does, or this
        process ends; then the collector finds it. Raises SidecarUnavailable.
        """
        try:
            while self._is_at(removal):
                await self._rests.wait()
            await self.removals.remove(removal)
        except (SidecarUnavailable, asyncio.CancelledError):
            self.delete_later(removal)
            raise

    def delete_later(self, removal: Removal) -> None:
        """Leave a removal to the writer: nobody waits for it."""
        removal.before_ms = min(removal.before_ms, self._clock.now_ms())
        self._add_chore((removal.tenant, removal.session_id), partial(self.removals.remove, removal))

    def _is_at(self, removal: Removal) -> bool:
        """Return whether the writer is at the same KV."""
        is_written = self._writing is not None and self._writing.cache_ref in removal.cache_refs
        return is_written or (removal.is_whole and self._at_work == (removal.tenant, removal.session_id))

    def _add_chore(self, session: Session, chore: Callable[[], Awaitable[None]]) -> None:
        self._chores.append((session, chore))
        self._idle.clear()
        self._work.set()

    async def evict(self, tenant: TenantId, session_id: SessionId, session: StoredSession) -> bool:
        """Remove what a listing told of a session, unless it was used since, and return whether that is done.

        Raises SidecarUnavailable.
        """
        return self._at_work != (tenant, session_id) and await self.removals.evict(tenant, session_id, session)
