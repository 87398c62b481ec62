"""The disk tier: one file a block under `blocks/` and `tails/`, fanned out by two hex digits.

The index (which files, how large) is rebuilt from the directory at start. Bytes are handed out unverified: the
catalog knows what they must be.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from typing_extensions import override

from contextcache.errors import StorageFull
from kv_sidecar.block_key import BlockKey
from kv_sidecar.data_directory import DataDirectory
from kv_sidecar.store import BlockStore, Buffer, TierUsage

log = logging.getLogger(__name__)

_DIRECTORIES = {"block": "blocks", "tail": "tails"}


class DiskStore(BlockStore):
    """Block files in a DataDirectory. The limit counts block files, not manifests or what is in quarantine."""

    def __init__(self, directory: DataDirectory, *, limit_bytes: int) -> None:
        """`limit_bytes` 0: no limit but the disk's own."""
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._sizes: dict[BlockKey, int] = {}
        self._used_bytes = 0
        """Bytes of all files and of those being written."""
        self._scratch = threading.local()
        """One buffer a thread, as large as its largest block: memory that is faulted in once, not at every read."""

    def open(self) -> None:
        """Rebuild the index. Files that are no block files are left alone and logged."""
        sizes: dict[BlockKey, int] = {}
        strangers = 0
        for kind, name in _DIRECTORIES.items():
            root = self._directory.root / name
            root.mkdir(exist_ok=True)
            for path in root.glob("*/*"):
                key = BlockKey.from_file_name(path.name)
                if key is None or key.kind != kind or key.fan_out != path.parent.name or not path.is_file():
                    strangers += 1
                    continue
                sizes[key] = path.stat().st_size
        with self._lock:
            self._sizes = sizes
            self._used_bytes = sum(sizes.values())
        log.info("disk index rebuilt", extra={"num_blocks": len(sizes), "num_unknown_files": strangers})

    @override
    def put(self, key: BlockKey, data: Buffer) -> None:
        size = len(data)
        with self._lock:
            if self._limit_bytes and self._used_bytes + size > self._limit_bytes:
                raise StorageFull("the disk tier has reached its limit")
            self._used_bytes += size
        try:
            self._directory.publish(data, self._path(key))
        finally:
            with self._lock:
                self._used_bytes -= size
                self._settle(key)

    @override
    def read(self, key: BlockKey) -> memoryview | None:
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            with self._lock:
                self._settle(key)
            return None
        try:
            view = self._buffer(os.fstat(descriptor).st_size)
            return view[: _read_all(descriptor, view)].toreadonly()
        finally:
            os.close(descriptor)

    @override
    def delete(self, key: BlockKey) -> int:
        # Not durable: a file that comes back after a crash has no manifest and is collected.
        self._directory.remove(self._path(key), durable=False)
        with self._lock:
            return self._settle(key)

    def put_aside(self, key: BlockKey) -> None:
        """Move a file whose bytes are wrong into quarantine."""
        self._directory.put_aside(self._path(key))
        with self._lock:
            self._settle(key)

    @override
    def size_bytes(self, key: BlockKey) -> int | None:
        return self._sizes.get(key)

    @override
    def keys(self) -> list[BlockKey]:
        with self._lock:
            return list(self._sizes)

    @override
    def usage(self) -> TierUsage:
        with self._lock:
            return TierUsage(len(self._sizes), sum(self._sizes.values()), self._limit_bytes)

    def _settle(self, key: BlockKey) -> int:
        """Make the index say what the directory says, whoever came last; return the bytes freed. Called locked.

        A block that is there is never absent in between: `size_bytes` takes no lock.
        """
        try:
            now = self._path(key).stat().st_size
        except FileNotFoundError:
            now = 0
            before = self._sizes.pop(key, 0)
        else:
            before = self._sizes.get(key, 0)
            self._sizes[key] = now
        self._used_bytes += now - before
        return max(before - now, 0)

    def relative_name(self, key: BlockKey) -> str:
        """Return the path of a block's file relative to the data directory."""
        return str(self._path(key).relative_to(self._directory.root))

    def _path(self, key: BlockKey) -> Path:
        return self._directory.root / _DIRECTORIES[key.kind] / key.fan_out / key.file_name

    def _buffer(self, size: int) -> memoryview:
        buffer: bytearray | None = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = bytearray(size)
            self._scratch.buffer = buffer
        return memoryview(buffer)[:size]


def _read_all(descriptor: int, view: memoryview) -> int:
    total = 0
    while total < len(view):
        count = os.readv(descriptor, [view[total:]])
        if count == 0:
            break
        total += count
    return total
