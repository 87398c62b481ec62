"""The sealed manifests: their files and the index over them, changed together under one lock.

One small file each under `manifests/`, small enough that a read is a few microseconds. Which blocks may be freed once a
manifest is gone is the catalog's to say.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from contextcache.errors import CorruptBlock
from contextcache.model import CacheRef, Manifest, SessionId, TenantId
from contextcache.names import CACHE_REF_PATTERN
from kv_sidecar.blocks import Blocks
from kv_sidecar.format.ids import TOKEN_BYTES, BlockKey, fan_out
from kv_sidecar.format.manifest import decode_manifest, encode_manifest
from kv_sidecar.format.safetensors_header import HEAD_BYTES, tensor_start
from kv_sidecar.refs import Refs
from kv_sidecar.sealed.index import ManifestIndex, ManifestRecord, record_of
from kv_sidecar.sealed.prefixes import Prompt, common
from kv_sidecar.tiers.data_directory import DataDirectory, reading
from kv_sidecar.tiers.store import IoThreads

log = logging.getLogger(__name__)

_REMEMBERED = 4
"""Manifests in memory, about 5 MB each for 128 000 tokens."""
SWEPT_AT_ONCE = 100
"""Manifests removed while seals, touches and deletes wait."""


class SealedManifests:
    """A record is in `index` only while its file is on disk; the file goes first."""

    def __init__(self, store: ManifestStore, threads: IoThreads, blocks: Blocks, refs: Refs) -> None:
        self._store = store
        self._threads = threads
        self.index = ManifestIndex(blocks, refs)
        self._read_last: dict[CacheRef, tuple[ManifestRecord, Manifest]] = {}
        """Manifests read or written last, oldest first, each with the record of that time."""
        self._lock = asyncio.Lock()
        """Held while manifest files change, so that a late seal or touch never undoes a delete. Waits for the local
        disk only, never for the network."""

    async def rebuild(
        self, *, is_stored: Callable[[BlockKey], bool], vouch: Callable[[Manifest], None], now_ms: int
    ) -> None:
        """Read all files, one after the other; remove manifests that lack a block or have expired.

        `vouch` is told of each of the others, in a thread. Raises SidecarUnavailable for a fault that passes.
        """
        usable, doomed = await self._threads.run(self._read_all, is_stored, vouch, now_ms)
        # An expiry that slides is the latest for the context that was used last.
        for record in sorted(usable, key=lambda record: record.expires_at_ms):
            self.index.add(record)
        await self._threads.write(self._delete_each, doomed)
        fields = {"num_found": len(usable) + len(doomed), "num_usable": len(usable)}
        log.info("manifest index rebuilt", extra=fields)

    def live(self, tenant: TenantId, cache_ref: CacheRef, *, now_ms: int) -> ManifestRecord | None:
        """Return an unexpired record of this tenant."""
        record = self.index.get(cache_ref)
        usable = record is not None and record.tenant == tenant and record.expires_at_ms > now_ms
        return record if usable else None

    async def read(self, record: ManifestRecord, *, again: bool = False) -> Manifest | None:
        """Return the manifest of a record; None when its file is gone, or bad and therefore put aside.

        `again`: a manifest read or written a moment ago serves too, as between a question and its load.
        """
        before = self._read_last.pop(record.cache_ref, None)
        if again and before is not None and before[0] is record:
            manifest: Manifest | None = before[1]
        else:
            manifest = await self._threads.run(self._read, record)
        if manifest is not None:
            self._remember(record, manifest)
        return manifest

    def _remember(self, record: ManifestRecord, manifest: Manifest) -> None:
        self._read_last[record.cache_ref] = (record, manifest)
        if len(self._read_last) > _REMEMBERED:
            del self._read_last[next(iter(self._read_last))]

    async def in_common(self, record: ManifestRecord, prompt: Prompt, first: int, count: int) -> int | None:
        """Return how many of `count` tokens from `first` on a manifest shares with a prompt; None as `read`.

        Verifies the file's length only.
        """
        return await self._threads.run(self._in_common, record, prompt, first, count)

    async def publish(self, plan: Callable[[], Manifest | None]) -> ManifestRecord | None:
        """Write the manifest that `plan` returns once nothing else changes manifests; None: there is none to write.

        Raises the errors of `plan`, and StorageFull.
        """
        async with self._lock:
            manifest = plan()
            if manifest is None:
                return None
            await self._threads.write(self._store.put, manifest)
            record = record_of(manifest)
            self.index.add(record)
            self._remember(record, manifest)
            return record

    async def move_expiry(
        self, tenant: TenantId, session_id: SessionId, expires_at_ms: int, *, now_ms: int
    ) -> list[ManifestRecord]:
        """Give a session's unexpired manifests a new expiry, in file and index; return them."""
        async with self._lock:
            return [
                self.index.move_expiry(record.cache_ref, expires_at_ms)
                for record in self.index.of_session(tenant, session_id)
                if record.expires_at_ms > now_ms and await self._threads.write(self._rewrite, record, expires_at_ms)
            ]

    async def extend(self, record: ManifestRecord, expires_at_ms: int) -> None:
        """Give one manifest a later expiry, unless it is another by now."""
        async with self._lock:
            if self.index.get(record.cache_ref) == record and await self._threads.write(
                self._rewrite, record, expires_at_ms
            ):
                self.index.move_expiry(record.cache_ref, expires_at_ms)

    async def remove(
        self, tenant: TenantId, session_id: SessionId, cache_refs: Sequence[CacheRef]
    ) -> list[ManifestRecord]:
        """Remove the manifests of a session ("" for none) and of `cache_refs` for good; return them.

        Raises OSError when a file cannot be removed, and then nothing is forgotten.
        """
        async with self._lock:
            found = [*self.index.of_refs(tenant, cache_refs), *self.index.of_session(tenant, session_id)]
            records = list(dict.fromkeys(found))
            await self._threads.write(self._delete_files, records)
            self._forget(records)
            return records

    async def lose(self, doomed: Sequence[ManifestRecord]) -> list[ManifestRecord]:
        """Remove and return those that have not changed: they cannot be served.

        A record is forgotten even if its file cannot be removed.
        """
        async with self._lock:
            records = [record for record in doomed if self.index.get(record.cache_ref) == record]
            await self._threads.write(self._delete_each, records)
            self._forget(records)
            return records

    async def sweep(self, doomed: Sequence[ManifestRecord]) -> list[ManifestRecord]:
        """Remove and return those that have not changed, `SWEPT_AT_ONCE` at a time: no call waits for them.

        A record whose file cannot be removed stays, and is not returned.
        """
        # Files of one directory together: its sync then serves all of them.
        selected = sorted(doomed, key=lambda record: fan_out(record.cache_ref))
        swept: list[ManifestRecord] = []
        for first in range(0, len(selected), SWEPT_AT_ONCE):
            async with self._lock:
                part = selected[first : first + SWEPT_AT_ONCE]
                unchanged = [record for record in part if self.index.get(record.cache_ref) is record]
                records = await self._threads.write(self._delete_each, unchanged)
                self._forget(records)
            swept += records
        return swept

    def _forget(self, records: list[ManifestRecord]) -> None:
        for record in records:
            self.index.remove(record.cache_ref)
            self._read_last.pop(record.cache_ref, None)

    def _read_all(
        self, is_stored: Callable[[BlockKey], bool], vouch: Callable[[Manifest], None], now_ms: int
    ) -> tuple[list[ManifestRecord], list[ManifestRecord]]:
        """Return usable and unusable manifests, as records: the tokens of all may exceed the memory."""
        usable: list[ManifestRecord] = []
        doomed: list[ManifestRecord] = []
        known: dict[BlockKey, BlockKey] = {}
        for manifest in self._store.read_all():
            record = record_of(manifest)
            if record.expires_at_ms <= now_ms or not all(map(is_stored, record.keys)):
                doomed.append(record)
                continue
            vouch(manifest)
            # Forks share their blocks, and so the names of them.
            usable.append(replace(record, keys=tuple(known.setdefault(key, key) for key in record.keys)))
        return usable, doomed

    def _read(self, record: ManifestRecord) -> Manifest | None:
        try:
            return self._store.read(record.cache_ref, record.tenant)
        except CorruptBlock:
            self._store.put_aside(record.cache_ref)
            return None

    def _in_common(self, record: ManifestRecord, prompt: Prompt, first: int, count: int) -> int | None:
        try:
            return self._store.in_common(record, prompt, first, count)
        except CorruptBlock:
            self._store.put_aside(record.cache_ref)
            return None

    def _rewrite(self, record: ManifestRecord, expires_at_ms: int) -> bool:
        manifest = self._read(record)
        if manifest is not None:
            self._store.put(replace(manifest, expires_at_ms=expires_at_ms))
        return manifest is not None

    def _delete_each(self, records: list[ManifestRecord]) -> list[ManifestRecord]:
        """Delete the files that can be deleted, and return their records: one stuck file must not keep the others."""
        failed = self._store.delete(record.cache_ref for record in records)
        for cache_ref, error in failed.items():
            log.warning("manifest not removed", extra={"cache_ref": cache_ref}, exc_info=error)
        return [record for record in records if record.cache_ref not in failed]

    def _delete_files(self, records: list[ManifestRecord]) -> None:
        for error in self._store.delete(record.cache_ref for record in records).values():
            raise error


_SUFFIX = ".safetensors"
MAX_FILE_BYTES = 256 << 20
"""Largest manifest file: it has 4 bytes a token and about 35 a block file, so ten million tokens are far below."""


class ManifestStore:
    """Durable, verified manifests. Writes are atomic; deletes are durable when they return."""

    def __init__(self, directory: DataDirectory) -> None:
        self._directory = directory
        self._root = directory.root / "manifests"

    def put(self, manifest: Manifest) -> None:
        """Write a manifest, replacing one of the same name. Raises StorageFull."""
        self._directory.publish(encode_manifest(manifest), self._path(manifest.cache_ref))

    def read(self, cache_ref: CacheRef, tenant: TenantId | None = None) -> Manifest | None:
        """Return a manifest, or None.

        Raises CorruptBlock for a damaged, unreadable or foreign manifest, SidecarUnavailable.
        """
        try:
            data = _read_file(self._path(cache_ref))
        except FileNotFoundError:
            return None
        manifest = decode_manifest(data)
        if manifest.cache_ref != cache_ref or tenant not in {None, manifest.tenant}:
            raise CorruptBlock("the manifest belongs to a different context")
        return manifest

    def in_common(self, record: ManifestRecord, prompt: Prompt, first: int, count: int) -> int | None:
        """Return how many tokens in a row are the prompt's too, or None when there is no file.

        Verifies the file's length only. Raises CorruptBlock, SidecarUnavailable.
        """
        count = min(count, record.num_tokens - first)
        try:
            with reading(self._path(record.cache_ref)) as (descriptor, size_bytes):
                start = tensor_start(os.pread(descriptor, HEAD_BYTES, 0))
                if start + record.num_tokens * TOKEN_BYTES != size_bytes:
                    raise CorruptBlock("the manifest's size differs from its header")
                theirs = os.pread(descriptor, count * TOKEN_BYTES, start + first * TOKEN_BYTES)
        except FileNotFoundError:
            return None
        return common(theirs, prompt.token_ids[first * TOKEN_BYTES : (first + count) * TOKEN_BYTES]) // TOKEN_BYTES

    def delete(self, cache_refs: Iterable[CacheRef]) -> dict[CacheRef, OSError]:
        """Remove manifests for good, as many as possible; return the errors of the others. Idempotent."""
        paths = {self._path(cache_ref): cache_ref for cache_ref in cache_refs}
        failed = self._directory.remove_for_good(path for path in paths if path.parent.is_dir())
        return {paths[path]: error for path, error in failed.items()}

    def written_at_ms(self, cache_ref: CacheRef) -> int | None:
        """Return when a manifest's file was written (Unix time in ms, at its seal or a later touch); None: no file."""
        try:
            return self._path(cache_ref).lstat().st_mtime_ns // 1_000_000
        except OSError:
            return None

    def put_aside(self, cache_ref: CacheRef) -> None:
        """Move a damaged manifest file into quarantine, or leave it where it cannot be moved."""
        log.warning("manifest in quarantine", extra={"cache_ref": cache_ref})
        try:
            self._directory.put_aside(self._path(cache_ref))
        except OSError:
            log.warning("manifest quarantine failed", extra={"cache_ref": cache_ref}, exc_info=True)

    def read_all(self) -> Iterator[Manifest]:
        """Yield every manifest; bad files are put aside and left out. Raises SidecarUnavailable."""
        files, _ = self._directory.fan_out_files(self._root.name, is_ours=self._is_ours)
        for path in sorted(files):
            cache_ref = path.name.removesuffix(_SUFFIX)
            try:
                manifest = self.read(cache_ref)
            except CorruptBlock:
                self.put_aside(cache_ref)
                continue
            if manifest is not None:
                yield manifest

    def _is_ours(self, path: Path) -> bool:
        cache_ref = path.name.removesuffix(_SUFFIX)
        return CACHE_REF_PATTERN.fullmatch(cache_ref) is not None and path == self._path(cache_ref)

    def _path(self, cache_ref: CacheRef) -> Path:
        return self._root / fan_out(cache_ref) / f"{cache_ref}{_SUFFIX}"


def _read_file(path: Path) -> bytes:
    with reading(path) as (descriptor, size), os.fdopen(descriptor, "rb", closefd=False) as file:
        if size > MAX_FILE_BYTES:
            raise CorruptBlock("the file is larger than a manifest")
        return file.read(size)
