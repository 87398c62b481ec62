"""KV in the store that all pods share: objects by tenant, read and written with the tenant's key, and their removal.

    <tenant>/manifests/<cache_ref>            a manifest, as its file on disk
    <tenant>/blocks/<file name>               a block file or tail, as on disk; contexts with one beginning share it
    <tenant>/holders/<file name>/<session>    empty: a manifest of this session has that block
    <tenant>/sessions/<session>/<cache_ref>   empty: this manifest is of that session

With keys (encryption.py) manifests and blocks are encrypted, and the key hides `<file name>`. The writer (writer.py)
has the order of a write. A removal deletes the manifest, then holders, the blocks without a holder and the session's
names: after a crash no manifest names the rest. docs/project/formats.md has the bytes.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from contextcache.errors import CacheRefNotFound, CorruptBlock, KeyNotAtHand
from contextcache.model import CacheRef, Manifest, SessionId, TenantId
from contextcache.process.crash_points import crash_point
from kv_sidecar.catalog import ContextCatalog
from kv_sidecar.crash_points import AFTER_EVICTED_MANIFEST, AFTER_UNSTORED_MANIFEST
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import all_keys, decode_manifest
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.sealed.manifests import MAX_FILE_BYTES, ManifestRecord
from kv_sidecar.store.encryption import OVERHEAD_BYTES_MAX, StoreKeys, TenantKey, opened
from kv_sidecar.store.objects import ObjectStore, each
from kv_sidecar.tiers.store import BLOCK_BYTES_MAX, Buffer

Session: TypeAlias = tuple[TenantId, SessionId]
_LISTED_MAX = 1000
"""Manifests of one group that are listed: several pods may each have as many as a group may."""
_KNOWN_MAX = 1_000_000
"""Blocks of which this process remembers the holders, about 200 bytes each."""


@dataclass(slots=True)
class StoredSession:
    """One context in the store, as a listing tells of it."""

    cache_refs: set[CacheRef] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    """Names of its blocks in the store."""
    used_at_ms: int = 0
    """Time of its last write or use, by the store's clock."""


@dataclass(slots=True)
class Removal:
    """KV on its way out of the store, and its blocks: after the manifests are deleted nothing else names them."""

    tenant: TenantId
    session_id: SessionId
    """Empty: the manifests tell."""
    cache_refs: set[CacheRef] = field(default_factory=set)
    is_whole: bool = False
    """The whole session leaves."""
    records: Sequence[ManifestRecord] = ()
    """Records of this pod for the same KV: a half-written context has no manifest in the store."""
    held: dict[SessionId, set[str]] = field(default_factory=dict)
    """Names of the blocks, by the session that holds them."""
    is_found: bool = False
    """`cache_refs` and `held` are complete."""
    before_ms: float = math.inf
    """Unix time of the client's answer: a later write belongs to a new context of the same name."""


@dataclass(slots=True)
class Known:
    """Blocks of one session in the store."""

    last: CacheRef = ""
    """Manifest of the last write, or empty. A removal of the session deletes it first, in every pod."""
    blocks: dict[str, bool] = field(default_factory=dict)
    """Names of blocks, each with whether it is trusted."""

    def is_trusted(self, names: Iterable[str]) -> bool:
        """Return whether all these are trusted."""
        return all(self.blocks.get(name) for name in names)

    def trust(self, name: str) -> None:
        """Trust a block that was begun, unless a removal discarded it since."""
        if name in self.blocks:
            self.blocks[name] = True

    def doubt(self) -> None:
        """Trust no block and no manifest any more."""
        self.last, self.blocks = "", dict.fromkeys(self.blocks, False)


class KnownBlocks:
    """Blocks that this process has put into the store, by session: a turn then asks for its own blocks alone.

    While the manifest of the last write is there, so are the session's trusted blocks. Others are held anew before a
    manifest counts on them: their write is in progress, the collector may have passed, or some left with a manifest.
    Keeps about `max_blocks` names and forgets the session of the oldest write first.
    """

    def __init__(self, *, max_blocks: int = _KNOWN_MAX) -> None:
        self._max_blocks = max_blocks
        self._sessions: OrderedDict[Session, Known] = OrderedDict()
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def of(self, session: Session) -> Known:
        """Return a session's blocks; without any, an empty record that is not kept."""
        return self._sessions.get(session) or Known()

    def begin(self, session: Session, name: str) -> None:
        """Note a block before it is held, so that a delete in between removes it."""
        known = self._sessions.setdefault(session, Known())
        self._sessions.move_to_end(session)
        self._num_blocks += name not in known.blocks
        known.blocks[name] = False
        while self._num_blocks > self._max_blocks and len(self._sessions) > 1:
            self.forget(next(iter(self._sessions)))

    def discard(self, session: Session, name: str) -> None:
        """Forget a block whose holder is deleted."""
        known = self.of(session)
        if known.blocks.pop(name, None) is not None:
            self._num_blocks -= 1
            if not known.blocks:
                del self._sessions[session]

    def forget(self, session: Session) -> None:
        """Forget all of a session."""
        self._num_blocks -= len(self._sessions.pop(session, Known()).blocks)


@dataclass
class StoredKV:
    """Manifests and blocks in the store. Used from one event loop; every call may raise SidecarUnavailable."""

    objects: ObjectStore
    local: ContextCatalog
    """KV of this pod."""
    keys: StoreKeys | None
    """None: no encryption."""
    metrics: SidecarMetrics
    known: KnownBlocks = field(default_factory=KnownBlocks)

    async def block(self, tenant: TenantId, key: BlockKey) -> Buffer:
        """Return a block file, unverified. Raises CacheRefNotFound, CorruptBlock."""
        for file_name in self.file_names(tenant, key):
            data = await self._get(block_name(tenant, file_name), limit_bytes=BLOCK_BYTES_MAX)
            if data is not None:
                self.metrics.store_bytes.labels("read").inc(len(data))
                return data
        raise CacheRefNotFound("a block is missing in the shared store")

    async def manifest(self, tenant: TenantId, cache_ref: CacheRef) -> Manifest | None:
        """Return a manifest, or None. Raises CorruptBlock."""
        data = await self._get(manifest_name(tenant, cache_ref), limit_bytes=MAX_FILE_BYTES)
        # In a thread: the names of a long context's blocks take a while.
        return None if data is None else await asyncio.to_thread(decode_manifest, memoryview(data))

    async def has_manifest(self, tenant: TenantId, cache_ref: CacheRef) -> bool:
        """Return whether a manifest is there."""
        return await self.objects.head(manifest_name(tenant, cache_ref)) is not None

    async def _get(self, name: str, *, limit_bytes: int) -> Buffer | None:
        data = await self.objects.get(name, limit_bytes=limit_bytes + OVERHEAD_BYTES_MAX)
        if data is None:
            return None
        try:
            if self.keys is None:
                return opened(None, name, memoryview(data))
            return await asyncio.to_thread(opened, self.keys.of(name.partition("/")[0]), name, memoryview(data))
        except KeyNotAtHand:
            self.metrics.store_unopened.inc()
            raise

    def file_names(self, tenant: TenantId, key: BlockKey) -> list[str]:
        """Return the names that a block may have in the store, that of a new write first."""
        if self.keys is None:
            return [key.file_name]
        return [tenant_key.hidden(key.file_name) for tenant_key in self.keys.of(tenant)]

    def names_of(self, tenant: TenantId, keys: Iterable[BlockKey]) -> set[str]:
        """Return all names that these blocks may have."""
        return {name for key in keys for name in self.file_names(tenant, key)}

    async def put(self, name: str, data: Buffer, key: TenantKey | None) -> None:
        """Write an object, encrypted if there is a key."""
        if key is not None:
            data = await asyncio.to_thread(key.encrypt, name, data)
        await self.objects.put(name, data)

    async def used(self, tenant: TenantId, session_id: SessionId) -> dict[CacheRef, int]:
        """Return the listed manifests of a session with the time of their last use (Unix time in ms), oldest first.

        `_LISTED_MAX` at most.
        """
        there = []
        async with aclosing(self.objects.listed(f"{tenant}/sessions/{session_id}/")) as listed:
            async for it in listed:
                there.append((it.modified_at_ms, ref_of(it.name)))
                if len(there) == _LISTED_MAX:
                    break
        return {ref: used_at_ms for used_at_ms, ref in sorted(there)}

    # Removing. The caller knows that this pod does not write the same KV meanwhile.

    async def remove(self, removal: Removal) -> list[ManifestRecord]:
        """Remove KV; after an error the same removal can be tried again.

        Returns the KV of this pod that shared blocks with it: the store may lack some now, so it is written again.
        """
        if not removal.is_found:
            await self._find(removal)
        tenant, refs = removal.tenant, removal.cache_refs
        await each(refs, lambda ref: self.objects.delete(manifest_name(tenant, ref)))
        again: list[ManifestRecord] = []
        for owner, names in removal.held.items():
            crash_point(AFTER_UNSTORED_MANIFEST)
            let_go = names - await self._wanted_by(tenant, owner, refs)
            await self._let_go(tenant, owner, let_go, refs)
            again += [
                record
                for record in self.local.manifests.of_session(tenant, owner)
                if record.cache_ref not in refs and not let_go.isdisjoint(self.names_of(tenant, record.keys))
            ]
        return again

    async def _find(self, removal: Removal) -> None:
        """Complete a removal before its first manifest is deleted."""
        tenant, session_id, refs = removal.tenant, removal.session_id, set(removal.cache_refs)
        held: dict[SessionId, set[str]] = {session_id: set()} if session_id else {}
        if removal.is_whole and session_id:
            held[session_id] = set(self.known.of((tenant, session_id)).blocks)  # some have no manifest yet
            anew = {record.cache_ref for record in self.local.manifests.of_session(tenant, session_id)} - refs
            listed = self.objects.listed(f"{tenant}/sessions/{session_id}/")
            refs.update([ref_of(it.name) async for it in listed if it.modified_at_ms <= removal.before_ms])
            refs -= anew
        for record in removal.records:
            begun = self.names_of(tenant, record.keys) & self.known.of((tenant, record.session_id)).blocks.keys()
            held.setdefault(record.session_id, set()).update(begun)
        for ref in refs:
            with suppress(CorruptBlock):  # the collector removes its blocks
                if (found := await self.manifest(tenant, ref)) is not None:
                    held.setdefault(found.session_id, set()).update(self.names_of(tenant, all_keys(found)))
        removal.cache_refs, removal.held, removal.is_found = refs, held, True

    async def _wanted_by(self, tenant: TenantId, session_id: SessionId, but: Collection[CacheRef]) -> set[str]:
        """Return the names of the blocks that a session's other manifests have, here and in the store."""
        here = {record.cache_ref: record.keys for record in self.local.manifests.of_session(tenant, session_id)}
        keys = {key for ref, held in here.items() if ref not in but for key in held}
        there = {ref_of(it.name) async for it in self.objects.listed(f"{tenant}/sessions/{session_id}/")}
        for ref in there.difference(here, but):
            with suppress(CorruptBlock):
                if (found := await self.manifest(tenant, ref)) is not None:
                    keys.update(all_keys(found))
        return self.names_of(tenant, keys)

    async def _let_go(
        self, tenant: TenantId, session_id: SessionId, names: Iterable[str], refs: Iterable[CacheRef] = ()
    ) -> None:
        """Remove a session's holders of these blocks, the blocks without another holder, and the names of `refs`."""

        async def let_go(name: str) -> None:
            self.known.discard((tenant, session_id), name)
            await self.objects.delete(holder_name(tenant, name, session_id))
            await self.delete_unheld(tenant, name)

        await each(names, let_go)
        await each(refs, lambda ref: self.objects.delete(session_name(tenant, session_id, ref)))

    async def evict(
        self, tenant: TenantId, session_id: SessionId, session: StoredSession
    ) -> list[ManifestRecord] | None:
        """Remove a listed session, unless it was used since: None.

        Returns the KV of this pod to be written again. A writer in another pod puts a name first, then looks for its
        last manifest. This deletes the manifests first, then looks for new names: one of both sees the other.
        """
        if await self._used_since(tenant, session_id, session):
            return None
        await each(session.cache_refs, lambda ref: self.objects.delete(manifest_name(tenant, ref)))
        crash_point(AFTER_EVICTED_MANIFEST)
        if await self._used_since(tenant, session_id, session):
            return None
        await self._let_go(tenant, session_id, session.files)
        begun = await self._used_since(tenant, session_id, session)
        # Their write began after the last manifest was deleted and may lack blocks: a missing manifest tells its pod.
        await each(begun, lambda ref: self.objects.delete(manifest_name(tenant, ref)))
        await each(session.cache_refs, lambda ref: self.objects.delete(session_name(tenant, session_id, ref)))
        return [record for ref in begun if (record := self.local.manifests.get(ref)) is not None]

    async def _used_since(self, tenant: TenantId, session_id: SessionId, session: StoredSession) -> list[CacheRef]:
        used = await self.used(tenant, session_id)
        return [ref for ref, used_at_ms in used.items() if used_at_ms > session.used_at_ms]

    async def delete_unheld(self, tenant: TenantId, file_name: str) -> None:
        """Remove a block file that no session holds."""
        async for _ in self.objects.listed(f"{tenant}/holders/{file_name}/"):
            return
        await self.objects.delete(block_name(tenant, file_name))


def manifest_name(tenant: TenantId, cache_ref: CacheRef) -> str:
    """Return the name of a manifest's object."""
    return f"{tenant}/manifests/{cache_ref}"


def block_name(tenant: TenantId, file_name: str) -> str:
    """Return the name of a block file's object."""
    return f"{tenant}/blocks/{file_name}"


def holder_name(tenant: TenantId, file_name: str, session_id: SessionId) -> str:
    """Return the name of the object by which a session holds a block."""
    return f"{tenant}/holders/{file_name}/{session_id}"


def session_name(tenant: TenantId, session_id: SessionId, cache_ref: CacheRef) -> str:
    """Return the name of the object by which a session lists a manifest."""
    return f"{tenant}/sessions/{session_id}/{cache_ref}"


def ref_of(name: str) -> CacheRef:
    """Return the last part of an object's name."""
    return name.rpartition("/")[2]
