"""The sealed manifests: their files and the index over them, changed together under one lock.

Which blocks may be freed once a manifest is gone is the catalog's to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from contextcache.errors import CorruptBlock
from contextcache.model import CacheRef, Manifest, SessionId, TenantId
from kv_sidecar.block_key import BlockKey
from kv_sidecar.io_threads import IoThreads
from kv_sidecar.manifest_index import ManifestIndex, ManifestRecord, record_of
from kv_sidecar.manifest_store import ManifestStore

log = logging.getLogger(__name__)

_REMEMBERED = 4
"""Some 5 MB each for 128 000 tokens."""


class SealedManifests:
    """A record is in `index` only while its file is on disk; the file goes first."""

    def __init__(self, store: ManifestStore, threads: IoThreads) -> None:
        self._store = store
        self._threads = threads
        self.index = ManifestIndex()
        self._read_last: dict[CacheRef, tuple[ManifestRecord, Manifest]] = {}
        """Those read last, oldest first, each with what it was read for: a record that changed is another."""
        self._lock = asyncio.Lock()
        """Held while manifest files change, so that a late seal or touch never undoes a delete. Waits for the local
        disk only, never for the network."""

    async def rebuild(self, *, is_stored: Callable[[BlockKey], bool]) -> list[Manifest]:
        """Read all files and return the usable ones; a manifest that lacks a block is removed."""
        manifests = await self._threads.run(lambda: list(self._store.read_all()))
        usable: list[Manifest] = []
        # A life that slides ends last for what was used last.
        for manifest in sorted(manifests, key=lambda manifest: manifest.expires_at_ms):
            record = record_of(manifest)
            if all(is_stored(key) for key in record.keys):
                self.index.add(record)
                usable.append(manifest)
            else:
                await self._threads.write(self._delete_each, [record])
        log.info("manifest index rebuilt", extra={"num_found": len(manifests), "num_usable": len(self.index)})
        return usable

    def live(self, tenant: TenantId, cache_ref: CacheRef, *, now_ms: int) -> ManifestRecord | None:
        """Return an unexpired record of this tenant."""
        record = self.index.get(cache_ref)
        usable = record is not None and record.tenant == tenant and record.expires_at_ms > now_ms
        return record if usable else None

    async def read(self, record: ManifestRecord, *, again: bool = False) -> Manifest | None:
        """Return the manifest of a record; None when its file is gone, or bad and therefore put aside.

        `again`: what was read a moment ago serves too, as between a load's question and its start.
        """
        before = self._read_last.get(record.cache_ref)
        if again and before is not None and before[0] is record:
            return before[1]
        manifest = await self._threads.run(self._read, record)
        self._read_last.pop(record.cache_ref, None)
        if manifest is not None:
            self._read_last[record.cache_ref] = (record, manifest)
            if len(self._read_last) > _REMEMBERED:
                del self._read_last[next(iter(self._read_last))]
        return manifest

    async def publish(self, plan: Callable[[], Manifest | None]) -> ManifestRecord | None:
        """Write the manifest that `plan` returns once nothing else changes manifests; None: there is none to write.

        What `plan` raises is raised; also StorageFull.
        """
        async with self._lock:
            manifest = plan()
            if manifest is None:
                return None
            await self._threads.write(self._store.put, manifest)
            record = record_of(manifest)
            self.index.add(record)
            return record

    async def move_expiry(self, tenant: TenantId, session_id: SessionId, expires_at_ms: int, *, now_ms: int) -> int:
        """Give a session's unexpired manifests a new expiry, in file and index; return how many."""
        async with self._lock:
            records = [r for r in self.index.of_session(tenant, session_id) if r.expires_at_ms > now_ms]
            moved = [await self._threads.write(self._rewrite, record, expires_at_ms) for record in records]
            for record in records:
                self.index.move_expiry(record.cache_ref, expires_at_ms)
            return sum(moved)

    async def remove(self, select: Callable[[], list[ManifestRecord]]) -> list[ManifestRecord]:
        """Remove for good what `select` returns once nothing else changes manifests; return it.

        Raises OSError when a file cannot be removed, and then nothing is forgotten.
        """
        async with self._lock:
            records = select()
            await self._threads.write(self._delete_files, records)
            self._forget(records)
            return records

    async def lose(self, select: Callable[[], list[ManifestRecord]]) -> list[ManifestRecord]:
        """As `remove`, for what cannot be served: forgotten although its file cannot be removed."""
        async with self._lock:
            records = select()
            await self._threads.write(self._delete_each, records)
            self._forget(records)
            return records

    async def sweep(self, select: Callable[[], list[ManifestRecord]]) -> list[ManifestRecord]:
        """As `remove`, for what nobody waits for: what cannot be removed stays, and is not returned."""
        async with self._lock:
            records = await self._threads.write(self._delete_each, select())
            self._forget(records)
            return records

    def _forget(self, records: list[ManifestRecord]) -> None:
        for record in records:
            self.index.remove(record.cache_ref)
            self._read_last.pop(record.cache_ref, None)

    def _read(self, record: ManifestRecord) -> Manifest | None:
        try:
            return self._store.read(record.cache_ref, record.tenant)
        except CorruptBlock:
            log.warning("manifest put aside", extra={"cache_ref": record.cache_ref})
            self._put_aside(record.cache_ref)
            return None

    def _put_aside(self, cache_ref: CacheRef) -> None:
        try:
            self._store.put_aside(cache_ref)
        except OSError:
            log.warning("it cannot be put aside", extra={"cache_ref": cache_ref}, exc_info=True)

    def _rewrite(self, record: ManifestRecord, expires_at_ms: int) -> bool:
        manifest = self._read(record)
        if manifest is not None:
            self._store.put(replace(manifest, expires_at_ms=expires_at_ms))
        return manifest is not None

    def _delete_each(self, records: list[ManifestRecord]) -> list[ManifestRecord]:
        """Delete what can be deleted, and return it: one file that stays must not keep the others."""
        deleted: list[ManifestRecord] = []
        for record in records:
            try:
                self._store.delete(record.cache_ref)
            except OSError:
                log.warning("manifest cannot be removed", extra={"cache_ref": record.cache_ref}, exc_info=True)
            else:
                deleted.append(record)
        return deleted

    def _delete_files(self, records: list[ManifestRecord]) -> None:
        for record in records:
            self._store.delete(record.cache_ref)
