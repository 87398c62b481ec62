"""KV that outlives its pod: written behind to a store that all pods share, fetched from there, removed from there.

Objects, by tenant (docs/formats.md):

    <tenant>/manifests/<cache_ref>            a manifest, as its file on disk
    <tenant>/blocks/<file name>               a block file or tail, as on disk; contexts that begin alike share it
    <tenant>/holders/<file name>/<session>    empty: a manifest of this session has that block
    <tenant>/sessions/<session>/<cache_ref>   empty: this manifest is of that session

With keys (encryption.py) manifests and blocks are encrypted, and `<file name>` is what the key makes of it.

Rules:
1. Write: holder, then block, then, when all are there, session and manifest. Remove: the manifest, then holders, the
   blocks that have none, and the session. A crash in between leaves what no manifest names: shared_collector.py's.
2. A store has no locks: another pod may begin to hold a block in the moment in which its last holder lets go of it.
   Then the block is gone, whoever wants that KV computes it, and its manifest goes too. Bytes are never wrong: what
   comes from here is verified as what comes from a peer is (pulling.py).
3. Nobody waits for the store but who asks for KV that is nowhere else, and a DELETE.
4. Kept KV (its session is its group) is written when no context waits. What longer KV of its group stands for leaves
   the store once all that this pod has of the group is there; what was not written by then is not.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from contextcache.clock import Clock
from contextcache.errors import CacheRefNotFound, CorruptBlock, KeyNotAtHand, SidecarUnavailable
from contextcache.model import (
    KEPT_PREFIX,
    MAX_TTL_S,
    OBJECT_PREFIX,
    CacheRef,
    Manifest,
    SessionId,
    TenantId,
)
from contextcache.process.crash_points import crash_point
from kv_sidecar.crash_points import AFTER_EVICTED_MANIFEST, AFTER_STORED_BLOCKS, AFTER_UNSTORED_MANIFEST
from kv_sidecar.encryption import OVERHEAD_BYTES_MAX, StoreKeys, TenantKey, opened
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import all_keys, decode_manifest, encode_manifest
from kv_sidecar.index import ManifestRecord, RecentNames
from kv_sidecar.keeping import GROUP_MAX
from kv_sidecar.manifests import MAX_FILE_BYTES
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.object_store import ObjectStore
from kv_sidecar.shared_eviction import StoredSession
from kv_sidecar.shared_known import KnownBlocks, Session
from kv_sidecar.store import Buffer

log = logging.getLogger(__name__)

Item = TypeVar("Item")
_AT_ONCE = 4
"""Block files on their way to or from the store for one context."""
_CALLS_AT_ONCE = 16
"""Calls without bytes."""
_KNOWN_MAX = 1_000_000
"""Blocks whose holders are known to be noted; about 200 bytes each."""
_LOOKED_AT = 4
"""Manifests of a kept conversation that are read to find the one that a prompt begins with."""
_LISTED_MAX = 1000
"""Of a group: several pods may each have the most that a group has."""
_NOTE_MS = 3_600_000
_TOMBSTONE_MS = 3_600_000
BACKOFF_S, _BACKOFF_S_MAX = 1.0, 30.0


class LocalKV(Protocol):
    """What this pod has: the catalog's side of the write-behind."""

    def record(self, cache_ref: CacheRef) -> ManifestRecord | None:
        """Return the record of sealed KV."""
        ...

    def of_session(self, tenant: TenantId, session_id: SessionId) -> list[ManifestRecord]:
        """Return what is sealed here of a session."""
        ...

    def sealed(self, *, kept: bool = False) -> list[ManifestRecord]:
        """Return all that is sealed here of sessions, or is kept, the one used longest ago first."""
        ...

    async def manifest(self, record: ManifestRecord) -> Manifest | None:
        """Return its manifest, or None."""
        ...

    async def block(self, key: BlockKey) -> Buffer | None:
        """Return a verified copy of a block file's bytes, or None."""
        ...


@dataclass(slots=True)
class Removal:
    """KV that is to leave the store, and what was found of it: once its manifests have gone nothing else tells."""

    tenant: TenantId
    session_id: SessionId
    """Or nothing: the manifests tell."""
    cache_refs: set[CacheRef] = field(default_factory=set)
    is_whole: bool = False
    """Whether nothing of the session stays."""
    records: Sequence[ManifestRecord] = ()
    """Of the same, what was here: what is half written has no manifest there."""
    held: dict[SessionId, set[str]] = field(default_factory=dict)
    """Names of the blocks to let go of, by the session that holds them."""
    is_found: bool = False
    """Whether `cache_refs` and `held` are all there is."""
    before_ms: float = math.inf
    """Whoever asked had his answer then (Unix time): what was written since is of another one of the same name."""


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """What the shared tier may cost."""

    bytes_per_s: int
    """Written, at most; 0: no limit."""
    queue_max: int
    """Contexts and what is kept that wait to be written; the oldest give way, kept ones first, and are counted."""
    block_bytes_max: int


class _GivesWayError(Exception):
    """A context waits: what is kept is written on after it."""


class SharedTier:
    """One pod's view of the store; owns the task that writes. Used from one event loop."""

    def __init__(
        self,
        objects: ObjectStore,
        local: LocalKV,
        *,
        limits: SharedLimits,
        clock: Clock,
        metrics: SidecarMetrics,
        keys: StoreKeys | None = None,
    ) -> None:
        """`keys`: what objects are encrypted with; None: they are not."""
        self._objects = objects
        self._keys = keys
        self._local = local
        self._limits = limits
        self._clock = clock
        self._metrics = metrics
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
                log.warning("shared store refuses a write", extra={"reason": exc.message})
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_S_MAX)
            except Exception:
                self._metrics.store_writes.labels("internal_error").inc()
                log.exception("write to the shared store broke")

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
        name = _manifest_name("" if record is None else record.tenant, cache_ref)
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
        await self._objects.put(_session_name(*session, record.cache_ref), b"")
        if known.last(session) not in self._deleted and await self._has_lost(session):
            known.doubt(session)  # blocks leave with it; where this pod removed it they are known
        await self._put(_manifest_name(record.tenant, record.cache_ref), data, key)
        known.vouch(session, record.cache_ref)
        if not known.is_trusted(session, names.values()):
            self.write_soon(record, again=True)  # some left the store meanwhile
        if record.is_kept:
            self._tidy_soon(*session)

    async def _has_lost(self, session: Session) -> bool:
        """Return whether what was written last of a session has gone: another pod evicts or collects it."""
        last = self._known.last(session)
        return bool(last) and await self._objects.size_bytes(_manifest_name(session[0], last)) is None

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
        there = await self._used(tenant, group)
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
        await self._objects.put(_holder_name(record.tenant, file_name, record.session_id), b"")
        if await self._objects.size_bytes(_block_name(record.tenant, file_name)) is None:
            data = await self._local.block(block)
            if data is None:
                raise CacheRefNotFound("the block has gone")
            await self._pace(len(data))
            await self._put(_block_name(record.tenant, file_name), data, key)
            self._metrics.store_bytes.labels("write").inc(len(data))
        self._known.trust(session, file_name)

    async def _put(self, name: str, data: Buffer, key: TenantKey | None) -> None:
        if key is not None:
            data = await asyncio.to_thread(key.encrypt, name, data)
        await self._objects.put(name, data)

    async def _pace(self, size_bytes: int) -> None:
        if self._is_hurried or not self._limits.bytes_per_s:
            return
        now_s = asyncio.get_running_loop().time()
        begins_s = max(now_s, self._paced_until_s)
        self._paced_until_s = begins_s + size_bytes / self._limits.bytes_per_s
        await asyncio.sleep(begins_s - now_s)

    # Fetching; pulling.py has the story.

    async def manifest(self, tenant: TenantId, cache_ref: CacheRef) -> Manifest:
        """Return a manifest of the store. Raises CacheRefNotFound, CorruptBlock, SidecarUnavailable."""
        found = None if cache_ref in self._deleted else await self.read(_manifest_name(tenant, cache_ref))
        if found is None:
            raise CacheRefNotFound("the shared store has no such KV")
        if found.expires_at_ms <= self._clock.now_ms():
            raise CacheRefNotFound("the KV in the shared store has expired")
        self.note_use(tenant, found.session_id, cache_ref)
        return found

    async def of_group(self, tenant: TenantId, group: SessionId) -> Sequence[Manifest]:
        """Return what the store has of a kept conversation and this pod has not, `_LOOKED_AT` at most: those used last.

        Raises SidecarUnavailable.
        """
        here = {record.cache_ref for record in self._local.of_session(tenant, group)}
        there = await self._used(tenant, group)
        deleted_at_ms = self._deleted_groups.added_at_ms((tenant, group), self._clock.now_ms()) or 0
        refs = [
            ref
            for ref, used_at_ms in there.items()
            if ref not in here and ref not in self._deleted and used_at_ms > deleted_at_ms
        ]
        found: list[Manifest] = []

        async def look(ref: CacheRef) -> None:
            with suppress(CorruptBlock):
                it = await self.read(_manifest_name(tenant, ref))
                if it is not None and (it.cache_ref, it.session_id) == (ref, group):
                    found.append(it)

        await each(refs[-_LOOKED_AT:], look)
        return [it for it in found if it.expires_at_ms > self._clock.now_ms()]

    async def _used(self, tenant: TenantId, group: SessionId) -> dict[CacheRef, int]:
        """Return what the store lists of a group, the one used longest ago first, and when that was (Unix time in ms).

        `_LISTED_MAX` at most.
        """
        there = []
        async with aclosing(self._objects.listed(f"{tenant}/sessions/{group}/")) as listed:
            async for it in listed:
                there.append((it.modified_at_ms, ref_of(it.name)))
                if len(there) == _LISTED_MAX:
                    break
        return {ref: used_at_ms for used_at_ms, ref in sorted(there)}

    def note_use(self, tenant: TenantId, session_id: SessionId, cache_ref: CacheRef) -> None:
        """Have the store know that a context that is there was used, once an hour: what was not leaves it first."""
        session, now_ms = (tenant, session_id), self._clock.now_ms()
        if self._noted.added_at_ms(session, now_ms) is None and not session_id.startswith(OBJECT_PREFIX):
            self._noted.add(session, now_ms)
            self._add_chore(session, partial(self._note, tenant, session_id, cache_ref))

    async def _note(self, tenant: TenantId, session_id: SessionId, cache_ref: CacheRef) -> None:
        if await self._objects.size_bytes(_manifest_name(tenant, cache_ref)) is not None:
            await self._objects.put(_session_name(tenant, session_id, cache_ref), b"")

    async def block(self, tenant: TenantId, key: BlockKey) -> Buffer:
        """Return a block file, unverified. Raises CacheRefNotFound, CorruptBlock, SidecarUnavailable."""
        for file_name in self._file_names(tenant, key):
            data = await self._get(_block_name(tenant, file_name), limit_bytes=self._limits.block_bytes_max)
            if data is not None:
                self._metrics.store_bytes.labels("read").inc(len(data))
                return data
        raise CacheRefNotFound("a block has gone from the shared store")

    async def read(self, name: str) -> Manifest | None:
        """Return the manifest under an object's name, or None. Raises CorruptBlock, SidecarUnavailable."""
        data = await self._get(name, limit_bytes=MAX_FILE_BYTES)
        # In a thread, as the names of a long context's blocks take a while.
        return None if data is None else await asyncio.to_thread(decode_manifest, memoryview(data))

    async def _get(self, name: str, *, limit_bytes: int) -> Buffer | None:
        data = await self._objects.get(name, limit_bytes=limit_bytes + OVERHEAD_BYTES_MAX)
        if data is None:
            return None
        try:
            if self._keys is None:
                return opened(None, name, memoryview(data))
            return await asyncio.to_thread(opened, self._keys.of(name.partition("/")[0]), name, memoryview(data))
        except KeyNotAtHand:
            self._metrics.store_unopened.inc()
            raise

    def _file_names(self, tenant: TenantId, key: BlockKey) -> list[str]:
        """Return what a block may be called in the store, as what is written now would be first."""
        if self._keys is None:
            return [key.file_name]
        return [tenant_key.hidden(key.file_name) for tenant_key in self._keys.of(tenant)]

    def _names_of(self, tenant: TenantId, keys: Iterable[BlockKey]) -> set[str]:
        return {name for key in keys for name in self._file_names(tenant, key)}

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
            await self._remove(removal)
        except (SidecarUnavailable, asyncio.CancelledError):
            self.delete_later(removal)
            raise

    def delete_later(self, removal: Removal) -> None:
        """Leave a removal to the writer: nobody waits for it."""
        removal.before_ms = min(removal.before_ms, self._clock.now_ms())
        self._add_chore((removal.tenant, removal.session_id), partial(self._remove, removal))

    def _is_at(self, removal: Removal) -> bool:
        """Return whether the writer is at the same KV."""
        is_written = self._writing is not None and self._writing.cache_ref in removal.cache_refs
        return is_written or (removal.is_whole and self._at_work == (removal.tenant, removal.session_id))

    def _add_chore(self, session: Session, chore: Callable[[], Awaitable[None]]) -> None:
        self._chores.append((session, chore))
        self._idle.clear()
        self._work.set()

    async def _remove(self, removal: Removal) -> None:
        if not removal.is_found:
            await self._find(removal)
        tenant, refs = removal.tenant, removal.cache_refs
        await each(refs, lambda ref: self._objects.delete(_manifest_name(tenant, ref)))
        for owner, names in removal.held.items():
            crash_point(AFTER_UNSTORED_MANIFEST)
            let_go = names - await self._wanted_by(tenant, owner, refs)
            await each(let_go, lambda name, owner=owner: self._let_go(tenant, owner, name))  # type: ignore[misc]
            await each(refs, lambda ref, owner=owner: self._objects.delete(_session_name(tenant, owner, ref)))  # type: ignore[misc]
            for record in self._local.of_session(tenant, owner):
                # Sealed while its blocks were let go of: they are held anew.
                if record.cache_ref not in refs and not let_go.isdisjoint(self._names_of(tenant, record.keys)):
                    self.write_soon(record, again=True)

    async def _find(self, removal: Removal) -> None:
        """Find out all that is to go before the first manifest does."""
        tenant, session_id, refs = removal.tenant, removal.session_id, set(removal.cache_refs)
        held: dict[SessionId, set[str]] = {session_id: set()} if session_id else {}
        if removal.is_whole and session_id:
            held[session_id] = self._known.names((tenant, session_id))  # some have no manifest yet
            anew = {record.cache_ref for record in self._local.of_session(tenant, session_id)} - refs
            listed = self._objects.listed(f"{tenant}/sessions/{session_id}/")
            refs.update([ref_of(it.name) async for it in listed if it.modified_at_ms <= removal.before_ms])
            refs -= anew
        for record in removal.records:
            begun = self._names_of(tenant, record.keys) & self._known.names((tenant, record.session_id))
            held.setdefault(record.session_id, set()).update(begun)
        for ref in refs:
            with suppress(CorruptBlock):  # its blocks are the collector's
                if (found := await self.read(_manifest_name(tenant, ref))) is not None:
                    held.setdefault(found.session_id, set()).update(self._names_of(tenant, all_keys(found)))
        removal.cache_refs, removal.held, removal.is_found = refs, held, True

    async def _refs_of(self, tenant: TenantId, session_id: SessionId) -> set[CacheRef]:
        return {ref_of(it.name) async for it in self._objects.listed(f"{tenant}/sessions/{session_id}/")}

    async def _wanted_by(self, tenant: TenantId, session_id: SessionId, but: Collection[CacheRef]) -> set[str]:
        """Return the names of the blocks that a session's other manifests have, here and in the store."""
        here = {record.cache_ref: record.keys for record in self._local.of_session(tenant, session_id)}
        keys = {key for ref, held in here.items() if ref not in but for key in held}
        for ref in (await self._refs_of(tenant, session_id)).difference(here, but):
            with suppress(CorruptBlock):
                if (found := await self.read(_manifest_name(tenant, ref))) is not None:
                    keys.update(all_keys(found))
        return self._names_of(tenant, keys)

    async def _let_go(self, tenant: TenantId, session_id: SessionId, file_name: str) -> None:
        self._known.discard((tenant, session_id), file_name)
        await self._objects.delete(_holder_name(tenant, file_name, session_id))
        await self.delete_unheld(tenant, file_name)

    async def evict(self, tenant: TenantId, session_id: SessionId, session: StoredSession) -> bool:
        """Remove what a listing told of a session, unless it was used since, and return whether that is done.

        It may be written again. Whoever writes it meanwhile puts a name first, then looks whether its last manifest is
        there; here that goes first, then new names are looked for: one of both sees the other. Raises
        SidecarUnavailable.
        """
        if self._at_work == (tenant, session_id) or await self._used_since(tenant, session_id, session):
            return False
        await each(session.cache_refs, lambda ref: self._objects.delete(_manifest_name(tenant, ref)))
        crash_point(AFTER_EVICTED_MANIFEST)
        if await self._used_since(tenant, session_id, session):
            return False
        await each(session.files, lambda name: self._let_go(tenant, session_id, name))
        for ref in await self._used_since(tenant, session_id, session):
            # Begun when its last manifest had gone: it may lack what left. Its pod finds that out by this.
            await self._objects.delete(_manifest_name(tenant, ref))
            if (record := self._local.record(ref)) is not None:
                self.write_soon(record, again=True)
        await each(session.cache_refs, lambda ref: self._objects.delete(_session_name(tenant, session_id, ref)))
        return True

    async def _used_since(self, tenant: TenantId, session_id: SessionId, session: StoredSession) -> list[CacheRef]:
        used = await self._used(tenant, session_id)
        return [ref for ref, used_at_ms in used.items() if used_at_ms > session.used_at_ms]

    async def delete_unheld(self, tenant: TenantId, file_name: str) -> None:
        """Remove a block file that no session holds."""
        async for _ in self._objects.listed(f"{tenant}/holders/{file_name}/"):
            return
        await self._objects.delete(_block_name(tenant, file_name))


async def each(
    items: Iterable[Item], call: Callable[[Item], Awaitable[None]], *, at_once: int = _CALLS_AT_ONCE
) -> None:
    """Make a call for each, some at a time, until one fails; when those that began have ended, raise what it did."""
    slots, has_failed = asyncio.Semaphore(at_once), False

    async def one(item: Item) -> None:
        nonlocal has_failed
        async with slots:
            if has_failed:
                return
            try:
                await call(item)
            except BaseException:
                has_failed = True
                raise

    ends = await asyncio.gather(*map(one, items), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end


def _manifest_name(tenant: TenantId, cache_ref: CacheRef) -> str:
    return f"{tenant}/manifests/{cache_ref}"


def _block_name(tenant: TenantId, file_name: str) -> str:
    return f"{tenant}/blocks/{file_name}"


def _holder_name(tenant: TenantId, file_name: str, session_id: SessionId) -> str:
    return f"{tenant}/holders/{file_name}/{session_id}"


def _session_name(tenant: TenantId, session_id: SessionId, cache_ref: CacheRef) -> str:
    return f"{tenant}/sessions/{session_id}/{cache_ref}"


def ref_of(name: str) -> CacheRef:
    """Return the last part of an object's name."""
    return name.rpartition("/")[2]
