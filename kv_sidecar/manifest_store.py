"""Manifests on disk: one small file each under `manifests/`. Small enough that a read is a few microseconds."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from contextcache.errors import CorruptBlock
from contextcache.model import CACHE_REF_PATTERN, CacheRef, Manifest, TenantId
from kv_sidecar.block_key import fan_out
from kv_sidecar.data_directory import DataDirectory
from kv_sidecar.manifest import decode_manifest, encode_manifest
from kv_sidecar.regular_file import open_regular

log = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
MAX_FILE_BYTES = 256 << 20
"""Of a manifest: 4 bytes a token and about 35 a block file; one of ten million tokens is far below."""


class ManifestStore:
    """Durable, verified manifests. Writes are atomic; deletes are durable when they return."""

    def __init__(self, directory: DataDirectory) -> None:
        self._directory = directory
        self._root = directory.root / "manifests"

    def put(self, manifest: Manifest) -> None:
        """Write a manifest, replacing one of the same name. Raises StorageFull."""
        self._directory.publish(encode_manifest(manifest), self._path(manifest.cache_ref))

    def read(self, cache_ref: CacheRef, tenant: TenantId | None = None) -> Manifest | None:
        """Return a manifest, or None. Raises CorruptBlock when it is not what was written, unreadable or another's."""
        try:
            data = _read_file(self._path(cache_ref))
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise CorruptBlock("the manifest cannot be read") from exc
        manifest = decode_manifest(data)
        if manifest.cache_ref != cache_ref or tenant not in {None, manifest.tenant}:
            raise CorruptBlock("the manifest is another's")
        return manifest

    def delete(self, cache_ref: CacheRef) -> None:
        """Remove a manifest for good. Idempotent."""
        path = self._path(cache_ref)
        if path.parent.is_dir():
            self._directory.remove(path, durable=True)

    def written_at_ms(self, cache_ref: CacheRef) -> int | None:
        """Return when a manifest's file was written (Unix time in ms, at its seal or a later touch); None: no file."""
        try:
            return self._path(cache_ref).stat().st_mtime_ns // 1_000_000
        except OSError:
            return None

    def put_aside(self, cache_ref: CacheRef) -> None:
        """Move a manifest file that is not what was written into quarantine."""
        self._directory.put_aside(self._path(cache_ref))

    def read_all(self) -> Iterator[Manifest]:
        """Yield every manifest; bad files are put aside and left out."""
        files, _ = self._directory.fan_out_files(self._root.name, is_ours=self._is_ours)
        for path in sorted(files):
            cache_ref = path.name.removesuffix(_SUFFIX)
            try:
                manifest = self.read(cache_ref)
            except CorruptBlock:
                self._put_aside_or_leave(cache_ref)
                continue
            if manifest is not None:
                yield manifest

    def _put_aside_or_leave(self, cache_ref: CacheRef) -> None:
        log.warning("manifest put aside", extra={"cache_ref": cache_ref})
        try:
            self.put_aside(cache_ref)
        except OSError:
            log.warning("it cannot be put aside", extra={"cache_ref": cache_ref}, exc_info=True)

    def _is_ours(self, path: Path) -> bool:
        cache_ref = path.name.removesuffix(_SUFFIX)
        return CACHE_REF_PATTERN.fullmatch(cache_ref) is not None and path == self._path(cache_ref)

    def _path(self, cache_ref: CacheRef) -> Path:
        return self._root / fan_out(cache_ref) / f"{cache_ref}{_SUFFIX}"


def _read_file(path: Path) -> bytes:
    descriptor, size = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        if size > MAX_FILE_BYTES:
            raise CorruptBlock("the file is larger than a manifest")
        return file.read(size)
