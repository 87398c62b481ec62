"""The memory tier: verified blocks ready for the engine, least recently used out first, under a hard byte limit.

With a shared directory (tmpfs) its blocks are files there, and the engine maps them without any copy through gRPC.
Without one they are bytes in this process. Nothing here survives a start; everything is also on disk.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from typing_extensions import override

from contextcache.errors import InvalidRequest, StorageFull
from kv_sidecar.block_key import BlockKey
from kv_sidecar.data_directory import write_all
from kv_sidecar.eviction import ByteLru
from kv_sidecar.leftovers import entries, make_real_directory, remove_old, remove_whatever
from kv_sidecar.store import BlockStore, Buffer, TierUsage

INCOMING = "incoming"
"""Where the engine leaves files for the sidecar to take over."""
_INCOMING_MODE = 0o2770
"""What lands there gets this process's group, so that it can be read also where the engine runs as root."""
_BLOCKS = "blocks"
_WRITING = "writing"


class MemoryStore(BlockStore):
    """Blocks in shared or own memory. `put` raises StorageFull when pinned blocks leave no room."""

    def __init__(self, *, limit_bytes: int, shared_directory: Path | None = None) -> None:
        self.shared_directory = shared_directory
        self._lock = threading.Lock()
        self._lru = ByteLru(limit_bytes)
        self._bytes: dict[BlockKey, bytes] = {}
        """The blocks themselves, when there is no shared directory."""
        self._counter = 0

    def open(self) -> None:
        """Create the directories and empty them; an engine that is alive may be using `incoming/` meanwhile."""
        if self.shared_directory is None:
            return
        for name in (INCOMING, _BLOCKS, _WRITING):
            directory = self.shared_directory / name
            make_real_directory(directory)
            for entry in entries(directory):
                remove_whatever(Path(entry.path))
        (self.shared_directory / INCOMING).chmod(_INCOMING_MODE)

    @override
    def put(self, key: BlockKey, data: Buffer) -> None:
        size = len(data)
        self._reserve(size)
        try:
            if self.shared_directory is None:
                self._install(key, size, kept=bytes(data))
            else:
                temporary = self._write(data, self.shared_directory / _WRITING)
                try:
                    self._install(key, size, path=temporary)
                except OSError:
                    remove_whatever(temporary)
                    raise
        except BaseException:
            with self._lock:
                self._lru.cancel(size)
            raise

    def adopt(self, key: BlockKey, path: Path) -> None:
        """Take over a file of the shared directory by rename, as `put` does. Raises StorageFull."""
        size = path.stat().st_size
        self._reserve(size)
        try:
            self._install(key, size, path=path)
        except BaseException:
            with self._lock:
                self._lru.cancel(size)
            raise

    @override
    def read(self, key: BlockKey) -> memoryview | None:
        if self.shared_directory is None:
            kept = self._bytes.get(key)
            return None if kept is None else memoryview(kept)
        try:
            return memoryview(self.path_of(key).read_bytes())
        except FileNotFoundError:
            return None

    @override
    def delete(self, key: BlockKey) -> int:
        with self._lock:
            return self._drop(key)

    @override
    def size_bytes(self, key: BlockKey) -> int | None:
        with self._lock:
            return self._lru.get(key)

    @override
    def keys(self) -> list[BlockKey]:
        with self._lock:
            return list(self._lru)

    @override
    def usage(self) -> TierUsage:
        with self._lock:
            return TierUsage(len(self._lru), self._lru.size_bytes, self._lru.limit_bytes)

    def shared_name(self, key: BlockKey) -> str:
        """Return a block's path relative to the shared directory."""
        return f"{_BLOCKS}/{key.file_name}"

    def incoming_path(self, shared_name: str) -> Path:
        """Return where a file announced by the engine lies. Raises InvalidRequest for anything but a plain name."""
        if self.shared_directory is None:
            raise InvalidRequest("this sidecar has no shared directory; send frames", param="shared_name")
        plain = 0 < len(shared_name) <= 255 and not shared_name.startswith(".") and "\0" not in shared_name
        if not plain or "/" in shared_name:
            raise InvalidRequest("shared_name must be a plain file name", param="shared_name")
        return self.shared_directory / INCOMING / shared_name

    def remove_old_incoming(self, *, before_ms: int) -> int:
        """Remove incoming files last written before a Unix time in ms that nobody announced; return their bytes."""
        if self.shared_directory is None:
            return 0
        return remove_old(self.shared_directory / INCOMING, before_ms=before_ms)

    def pins(self) -> Pins:
        """Return an empty set of pins."""
        return Pins(self._lock, self._lru, self)

    @property
    def has_pins(self) -> bool:
        """Whether any reader keeps a block from leaving."""
        with self._lock:
            return self._lru.has_pins

    def is_there(self, key: BlockKey) -> bool:
        """Return whether the block can really be opened; one whose file somebody removed is forgotten. Locked by us."""
        if key not in self._lru:
            return False
        if self.shared_directory is None or self.path_of(key).exists():
            return True
        self._drop(key)
        return False

    def _reserve(self, size: int) -> None:
        with self._lock:
            victims = self._lru.reserve(size)
            for key in victims or ():
                self._remove_bytes(key)
        if victims is None:
            raise StorageFull("pinned blocks leave no room in the memory tier")

    def _install(self, key: BlockKey, size: int, *, path: Path | None = None, kept: bytes = b"") -> None:
        """Turn reserved room into the block: by rename of `path`, or by keeping the bytes."""
        with self._lock:
            if path is None:
                self._bytes[key] = kept
            else:
                path.rename(self.path_of(key))
            self._lru.add(key, size)

    def _drop(self, key: BlockKey) -> int:
        self._remove_bytes(key)
        return self._lru.remove(key)

    def _remove_bytes(self, key: BlockKey) -> None:
        if self.shared_directory is None:
            self._bytes.pop(key, None)
        else:
            remove_whatever(self.path_of(key))

    def path_of(self, key: BlockKey) -> Path:
        """Return where a block lies in the shared directory; only with one."""
        assert self.shared_directory is not None
        return self.shared_directory / self.shared_name(key)

    def _write(self, data: Buffer, directory: Path) -> Path:
        with self._lock:
            self._counter += 1
            path = directory / str(self._counter)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            write_all(descriptor, data)
        except OSError as exc:
            path.unlink(missing_ok=True)
            raise StorageFull("no room in shared memory") from exc
        finally:
            os.close(descriptor)
        return path


class Pins:
    """Blocks kept in the memory tier for one reader, until `close()`. Safe from several threads."""

    def __init__(self, lock: threading.Lock, lru: ByteLru, store: MemoryStore) -> None:
        self._lock = lock
        self._lru = lru
        self._store = store
        self._keys: list[BlockKey] = []
        self._closed = False

    def take(self, key: BlockKey) -> bool:
        """Pin a block and make it the most recently used; False when it is not there, or `close` came first."""
        with self._lock:
            if self._closed or not self._store.is_there(key):
                return False
            self._lru.touch(key)
            self._lru.pin(key)
            self._keys.append(key)
            return True

    def close(self) -> None:
        """Let all of them go. Harmless when repeated."""
        with self._lock:
            self._closed = True
            for key in self._keys:
                self._lru.unpin(key)
            self._keys.clear()
