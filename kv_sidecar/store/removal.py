"""How KV leaves the shared store: the manifest, then holders, the blocks that have none, and the session's names.

That order is what a crash relies on (writer.py, rule 1): what is left of a removal no manifest names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from contextcache.errors import CorruptBlock
from contextcache.model import CacheRef, Manifest, SessionId, TenantId
from contextcache.process.crash_points import crash_point
from kv_sidecar.crash_points import AFTER_EVICTED_MANIFEST, AFTER_UNSTORED_MANIFEST
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import all_keys
from kv_sidecar.sealed.index import ManifestRecord
from kv_sidecar.store.eviction import StoredSession
from kv_sidecar.store.known_blocks import KnownBlocks
from kv_sidecar.store.objects import ObjectStore
from kv_sidecar.store.stored_kv import StoredKV, block_name, each, holder_name, manifest_name, ref_of, session_name
from kv_sidecar.tiers.store import Buffer


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


class LocalKV(Protocol):
    """What this pod has: the catalog's side of the shared tier."""

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

    def block(self, key: BlockKey) -> AbstractAsyncContextManager[Buffer | None]:
        """Lend a verified copy of a block file's bytes, or None."""
        ...


class StoreRemovals:
    """Takes KV out of the store; who may write it meanwhile is the caller's to know."""

    def __init__(
        self,
        objects: ObjectStore,
        stored: StoredKV,
        local: LocalKV,
        *,
        known: KnownBlocks,
        write_again: Callable[[ManifestRecord], None],
    ) -> None:
        """`write_again`: queue KV of this pod of which the store may lack something by now."""
        self._objects = objects
        self._stored = stored
        self._local = local
        self._known = known
        self._write_again = write_again

    async def remove(self, removal: Removal) -> None:
        """Remove it; what the store did not take may be tried again with the same. Raises SidecarUnavailable."""
        if not removal.is_found:
            await self._find(removal)
        tenant, refs = removal.tenant, removal.cache_refs
        await each(refs, lambda ref: self._objects.delete(manifest_name(tenant, ref)))
        for owner, names in removal.held.items():
            crash_point(AFTER_UNSTORED_MANIFEST)
            let_go = names - await self._wanted_by(tenant, owner, refs)
            await each(let_go, lambda name, owner=owner: self._let_go(tenant, owner, name))  # type: ignore[misc]
            await each(refs, lambda ref, owner=owner: self._objects.delete(session_name(tenant, owner, ref)))  # type: ignore[misc]
            for record in self._local.of_session(tenant, owner):
                # Sealed while its blocks were let go of: they are held anew.
                if record.cache_ref not in refs and not let_go.isdisjoint(self._stored.names_of(tenant, record.keys)):
                    self._write_again(record)

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
            begun = self._stored.names_of(tenant, record.keys) & self._known.names((tenant, record.session_id))
            held.setdefault(record.session_id, set()).update(begun)
        for ref in refs:
            with suppress(CorruptBlock):  # its blocks are the collector's
                if (found := await self._stored.read(manifest_name(tenant, ref))) is not None:
                    held.setdefault(found.session_id, set()).update(self._stored.names_of(tenant, all_keys(found)))
        removal.cache_refs, removal.held, removal.is_found = refs, held, True

    async def _wanted_by(self, tenant: TenantId, session_id: SessionId, but: Collection[CacheRef]) -> set[str]:
        """Return the names of the blocks that a session's other manifests have, here and in the store."""
        here = {record.cache_ref: record.keys for record in self._local.of_session(tenant, session_id)}
        keys = {key for ref, held in here.items() if ref not in but for key in held}
        for ref in (await self._stored.refs_of(tenant, session_id)).difference(here, but):
            with suppress(CorruptBlock):
                if (found := await self._stored.read(manifest_name(tenant, ref))) is not None:
                    keys.update(all_keys(found))
        return self._stored.names_of(tenant, keys)

    async def _let_go(self, tenant: TenantId, session_id: SessionId, file_name: str) -> None:
        self._known.discard((tenant, session_id), file_name)
        await self._objects.delete(holder_name(tenant, file_name, session_id))
        await self.delete_unheld(tenant, file_name)

    async def evict(self, tenant: TenantId, session_id: SessionId, session: StoredSession) -> bool:
        """Remove what a listing told of a session, unless it was used since, and return whether that is done.

        The caller sees to it that this pod is not at it; it may be written again. Whoever writes it meanwhile puts a
        name first, then looks whether its last manifest is there; here that goes first, then new names are looked for:
        one of both sees the other. Raises SidecarUnavailable.
        """
        if await self._used_since(tenant, session_id, session):
            return False
        await each(session.cache_refs, lambda ref: self._objects.delete(manifest_name(tenant, ref)))
        crash_point(AFTER_EVICTED_MANIFEST)
        if await self._used_since(tenant, session_id, session):
            return False
        await each(session.files, lambda name: self._let_go(tenant, session_id, name))
        for ref in await self._used_since(tenant, session_id, session):
            # Begun when its last manifest had gone: it may lack what left. Its pod finds that out by this.
            await self._objects.delete(manifest_name(tenant, ref))
            if (record := self._local.record(ref)) is not None:
                self._write_again(record)
        await each(session.cache_refs, lambda ref: self._objects.delete(session_name(tenant, session_id, ref)))
        return True

    async def _used_since(self, tenant: TenantId, session_id: SessionId, session: StoredSession) -> list[CacheRef]:
        used = await self._stored.used(tenant, session_id)
        return [ref for ref, used_at_ms in used.items() if used_at_ms > session.used_at_ms]

    async def delete_unheld(self, tenant: TenantId, file_name: str) -> None:
        """Remove a block file that no session holds."""
        async for _ in self._objects.listed(f"{tenant}/holders/{file_name}/"):
            return
        await self._objects.delete(block_name(tenant, file_name))
