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
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from contextcache.clock import Clock
from contextcache.errors import CacheRefNotFound, CorruptBlock, KeyNotAtHand, SidecarUnavailable
from contextcache.model import (
    CACHE_REF_PATTERN,
    KEPT_PREFIX,
    MAX_TTL_S,
    OBJECT_PREFIX,
    CacheRef,
    Manifest,
    SessionId,
    TenantId,
    prompt_ref,
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
class Known:
    """What this process has written of a session: as long as `last` is there, so are these blocks."""

    last: CacheRef = ""
    """The manifest that it wrote last; the first one that goes, whoever removes the session's KV."""
    files: set[str] = field(default_factory=set)
    """Names of the blocks that it holds."""
    doubted: set[str] = field(default_factory=set)
    """Of the same, those that no manifest vouches for: the collector may have them. They are held anew."""


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
        self._at_work: tuple[TenantId, SessionId] | None = None
        """The session of which the writer writes or removes something now; a delete of it comes after that."""
        self._rests = asyncio.Event()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._paced_until_s = 0.0
        self._is_hurried = False
        self._known: OrderedDict[tuple[TenantId, SessionId], Known] = OrderedDict()
        self._num_known = 0
        self._noted: RecentNames[tuple[TenantId, SessionId]] = RecentNames(keep_ms=_NOTE_MS, max_names=65_536)
        """Sessions that the store was told of in the last hour: they were used."""
        self._deleted: RecentNames[CacheRef] = RecentNames(keep_ms=_TOMBSTONE_MS, max_names=65_536)
        self._replaced: RecentNames[CacheRef] = RecentNames(keep_ms=_TOMBSTONE_MS, max_names=65_536)
        """Kept KV that is to leave the store when what stands for it is there; what is forgotten goes by its end."""
        self._deleted_groups: RecentNames[tuple[TenantId, SessionId]] = RecentNames(
            keep_ms=MAX_TTL_S * 1000, max_names=65_536
        )
        """Kept conversations that were deleted: the store may still have what it had of them by then."""
        self._chores: deque[Callable[[], Awaitable[None]]] = deque(maxlen=limits.queue_max)
        """Removals that the store did not take, and what it is told of use: tried until it takes them."""
        self._untidy: OrderedDict[tuple[TenantId, SessionId], None] = OrderedDict()
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
        """Write what waits, what was used last first, for so many seconds; return how many are left."""
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
            chore = self._chores.popleft()
            try:
                await chore()
            except SidecarUnavailable as exc:
                self._chores.append(chore)
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
        known = await self._known_of(record)
        try:
            await each(dict.fromkeys(record.keys), lambda it: self._hold(record, it, key, known), at_once=_AT_ONCE)
        except CacheRefNotFound:
            return "deleted" if cache_ref in self._deleted else "gone"
        except _GivesWayError:
            if not known.last:
                # It may take long until it is written on, and nothing tells the collector that it will be.
                known.doubted |= known.files
                known.files.clear()
            raise
        crash_point(AFTER_STORED_BLOCKS)
        data = await asyncio.to_thread(encode_manifest, manifest)
        if cache_ref in self._deleted:
            return "deleted"  # whoever deletes it waits for this, and removes what was written by now
        await self._objects.put(_session_name(record.tenant, record.session_id, cache_ref), b"")
        await self._put(name, data, key)
        known.last = cache_ref
        if record.is_kept:
            self._tidy_soon(record.tenant, record.session_id)
        return "written"

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
            await self._remove(tenant, group, gone, is_whole=False)

    async def _known_of(self, record: ManifestRecord) -> Known:
        """Return what the store still has of what was written of a session: another pod may have collected it."""
        session = (record.tenant, record.session_id)
        known = self._known.get(session)
        if known is not None and known.last:
            is_there = await self._objects.size_bytes(_manifest_name(record.tenant, known.last)) is not None
            if not is_there:
                self._forget(session)
        known = self._known.setdefault(session, Known())
        self._known.move_to_end(session)
        while self._num_known > _KNOWN_MAX and len(self._known) > 1:
            self._forget(next(iter(self._known)))
        return known

    def _forget(self, session: tuple[TenantId, SessionId]) -> None:
        if (known := self._known.pop(session, None)) is not None:
            self._num_known -= len(known.files) + len(known.doubted)

    async def _hold(self, record: ManifestRecord, block: BlockKey, key: TenantKey | None, known: Known) -> None:
        """Note that a session holds a block, and write that unless it is there.

        Raises CacheRefNotFound when it has gone here meanwhile, or the KV was deleted.
        """
        if record.cache_ref in self._deleted:
            raise CacheRefNotFound("the KV was deleted")
        file_name = block.file_name if key is None else key.hidden(block.file_name)
        if file_name in known.files:
            return
        if record.is_kept and self._queue:
            raise _GivesWayError
        self._num_known += file_name not in known.doubted
        known.doubted.add(file_name)  # whatever comes now, a delete looks for it
        await self._objects.put(_holder_name(record.tenant, file_name, record.session_id), b"")
        if await self._objects.size_bytes(_block_name(record.tenant, file_name)) is None:
            data = await self._local.block(block)
            if data is None:
                raise CacheRefNotFound("the block has gone")
            await self._pace(len(data))
            await self._put(_block_name(record.tenant, file_name), data, key)
            self._metrics.store_bytes.labels("write").inc(len(data))
        known.doubted.discard(file_name)
        known.files.add(file_name)

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
            self._add_chore(partial(self._note, tenant, session_id, cache_ref))

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

        When it returns, this pod writes and removes nothing more of it: what the writer is at comes to its end first.
        What the store does not take, or takes longer for than the caller waits, is tried again until it does, or this
        process ends; then the collector finds it. Raises SidecarUnavailable.
        """
        refs = tuple(ref for ref in cache_refs if CACHE_REF_PATTERN.fullmatch(ref))
        refs += tuple(prompt_ref(ref) for ref in refs)
        writing = self._writing
        if is_whole and writing is not None and (writing.tenant, writing.session_id) == (tenant, session_id):
            refs += (writing.cache_ref,)
        if is_whole and session_id.startswith(KEPT_PREFIX):
            self._deleted_groups.add((tenant, session_id), self._clock.now_ms())
        for ref in refs:
            self._deleted.add(ref, self._clock.now_ms())
            self._queue.pop(ref, None)
            self._kept.pop(ref, None)
        try:
            while self._at_work == (tenant, session_id) or (
                self._writing is not None and self._writing.cache_ref in refs
            ):
                await self._rests.wait()
            await self._remove(tenant, session_id, refs, is_whole=is_whole)
        except (SidecarUnavailable, asyncio.CancelledError):
            self._add_chore(partial(self._remove, tenant, session_id, refs, is_whole=is_whole))
            raise

    def _add_chore(self, chore: Callable[[], Awaitable[None]]) -> None:
        self._chores.append(chore)
        self._idle.clear()
        self._work.set()

    async def _remove(
        self, tenant: TenantId, session_id: SessionId, cache_refs: Collection[CacheRef], *, is_whole: bool
    ) -> None:
        refs = set(cache_refs)
        if is_whole and session_id:
            refs |= await self._refs_of(tenant, session_id)
        held: dict[SessionId, set[str]] = {session_id: set()} if session_id else {}
        if is_whole and (known := self._known.get((tenant, session_id))) is not None:
            # What was begun and has no manifest yet.
            held[session_id] = known.files | known.doubted
        for ref in refs:
            name = _manifest_name(tenant, ref)
            with suppress(CorruptBlock):  # its blocks are the collector's
                if (found := await self.read(name)) is not None:
                    held.setdefault(found.session_id, set()).update(self._names_of(tenant, all_keys(found)))
            await self._objects.delete(name)
        for owner, names in held.items():
            crash_point(AFTER_UNSTORED_MANIFEST)
            let_go = names - await self._wanted_by(tenant, owner, refs)
            await each(let_go, lambda name, owner=owner: self._let_go(tenant, owner, name))  # type: ignore[misc]
            await each(refs, lambda ref, owner=owner: self._objects.delete(_session_name(tenant, owner, ref)))  # type: ignore[misc]
            for record in self._local.of_session(tenant, owner):
                # Sealed while its blocks were let go of: they are held anew.
                if record.cache_ref not in refs and not let_go.isdisjoint(self._names_of(tenant, record.keys)):
                    self.write_soon(record, again=True)

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
        known = self._known.get((tenant, session_id))
        if known is not None and (file_name in known.files or file_name in known.doubted):
            known.files.discard(file_name)
            known.doubted.discard(file_name)
            self._num_known -= 1
        await self._objects.delete(_holder_name(tenant, file_name, session_id))
        await self.delete_unheld(tenant, file_name)

    async def evict(self, tenant: TenantId, session_id: SessionId, session: StoredSession) -> None:
        """Remove what a listing told of a session; it may be written again. Raises SidecarUnavailable.

        A turn that is written meanwhile lacks what leaves here: a miss (rule 2).
        """
        self._forget((tenant, session_id))
        await each(session.cache_refs, lambda ref: self._objects.delete(_manifest_name(tenant, ref)))
        crash_point(AFTER_EVICTED_MANIFEST)
        await each(session.files, lambda name: self._let_go(tenant, session_id, name))
        await each(session.cache_refs, lambda ref: self._objects.delete(_session_name(tenant, session_id, ref)))

    async def delete_unheld(self, tenant: TenantId, file_name: str) -> None:
        """Remove a block file that no session holds."""
        async for _ in self._objects.listed(f"{tenant}/holders/{file_name}/"):
            return
        await self._objects.delete(_block_name(tenant, file_name))


async def each(
    items: Iterable[Item], call: Callable[[Item], Awaitable[None]], *, at_once: int = _CALLS_AT_ONCE
) -> None:
    """Make a call for each, some at a time; when all have ended, raise what the first of those that failed did."""
    slots = asyncio.Semaphore(at_once)

    async def one(item: Item) -> None:
        async with slots:
            await call(item)

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
