"""The disk tier: one file a block under `blocks/` and `tails/`, fanned out by two hex digits.

The index (which files, how large) is rebuilt from the directory at start. Bytes are handed out unverified: the
catalog knows what they must be.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from typing_extensions import override

from contextcache.errors import CorruptBlock, StorageFull
from contextcache.model import TenantId
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.quota import NOBODY, TenantQuota
from kv_sidecar.tiers.data_directory import DataDirectory, reading, regular_size
from kv_sidecar.tiers.store import BlockStore, Buffer, Room, TierUsage

log = logging.getLogger(__name__)

_UPPER_MARK, _LOWER_MARK = 0.95, 0.9
"""Shares of the limit between which contexts go: what several saves write at once fits above."""
_INODES_LOW, _INODES_ENOUGH = 1024, 2048
"""Free inodes below which contexts are evicted, and up to which: a save of 128 000 tokens has some 500 files.

On a small filesystem the same shares count as of bytes.
"""
_DIRECTORIES = {"block": "blocks", "tail": "tails"}


@dataclass(frozen=True, slots=True)
class Shortage:
    """Bytes and files to delete before a new file is written; 0 or less: none."""

    size_bytes: int
    num_files: int = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing has to leave."""
        return self.size_bytes <= 0 and self.num_files <= 0


class _Scratch(threading.local):
    """Room of each thread."""

    def __init__(self) -> None:
        self.room = Room()


class DiskStore(BlockStore):
    """Block files in a DataDirectory. The limit counts block files, not manifests or what is in quarantine."""

    def __init__(
        self, directory: DataDirectory, *, limit_bytes: int, tenant_limit_bytes: int = 0, block_bytes_max: int = 1 << 40
    ) -> None:
        """Limits of 0: none but the disk's own. A file larger than `block_bytes_max` is no block, and is not read."""
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._block_bytes_max = block_bytes_max
        self._lock = threading.Lock()
        """Held for a few lines only: the event loop takes it too, and must not wait for a disk."""
        self._settling = threading.Lock()
        """Held while a file is looked at and counted; taken before the other one, never in the event loop."""
        self._sizes: dict[BlockKey, int] = {}
        self._stored_bytes = 0
        self._used_bytes = 0
        """Bytes of all files and of those being written."""
        self._tenants = TenantQuota(tenant_limit_bytes)
        self._scratch = _Scratch()
        self._inodes: tuple[int, int] | None = None
        """Free ones and all of the filesystem, as of the last block file written or removed."""

    def open(self) -> None:
        """Rebuild the index. Files that are no block files are left alone and logged."""
        sizes: dict[BlockKey, int] = {}
        strangers = 0
        for kind, name in _DIRECTORIES.items():
            files, others = self._directory.fan_out_files(name, is_ours=partial(_is_ours, kind))
            strangers += others
            for path in files:
                key = BlockKey.from_file_name(path.name)
                size = _size_or_none(path)
                if key is not None and size is not None:
                    sizes[key] = size
        with self._lock:
            self._sizes = sizes
            self._used_bytes = self._stored_bytes = sum(sizes.values())
        self._inodes = self._directory.inodes()
        log.info("disk index rebuilt", extra={"num_blocks": len(sizes), "num_unknown_files": strangers})

    def own(self, key: BlockKey, tenant: TenantId) -> None:
        """Count a file that is there for its tenant, as a manifest names it. Never refused: it is there."""
        self._settle(key, owner=tenant)

    @override
    def put(self, key: BlockKey, data: Buffer, *, tenant: TenantId = NOBODY) -> None:
        """See BlockStore. Raises ContextQuotaExceeded too, when the tenant may not have so much more."""
        size = len(data)
        with self._lock:
            if self._limit_bytes and self._used_bytes + size > self._limit_bytes:
                raise StorageFull("the disk tier has reached its limit")
            self._tenants.reserve(tenant, size)
            self._used_bytes += size
        written = False
        try:
            self._directory.publish(data, self.path_of(key))
            written = True
        finally:
            self._settle(key, owner=tenant if written else None, reserved=(tenant, size))

    @override
    def read(self, key: BlockKey, room: Room | None = None) -> memoryview | None:
        """See BlockStore; with `room` the bytes are valid until that is used again.

        Raises CorruptBlock when no file of a block's size lies there, SidecarUnavailable.
        """
        try:
            with reading(self.path_of(key)) as (descriptor, size):
                if size > self._block_bytes_max:
                    raise CorruptBlock("the file is larger than a block")
                view = (room or self._scratch.room).of(size)
                return view[: _read_all(descriptor, view)].toreadonly()
        except FileNotFoundError:
            self._settle(key)
            return None

    def read_into(self, key: BlockKey, room: memoryview) -> None:
        """Fill `room`, of a file's size, with the file.

        Raises FileNotFoundError when there is none, CorruptBlock when it has another size, SidecarUnavailable.
        """
        with reading(self.path_of(key)) as (descriptor, size):
            if size != len(room) or _read_all(descriptor, room) != size:
                raise CorruptBlock("the file's size changed")

    @override
    def delete(self, key: BlockKey) -> int:
        # Not durable: a file that comes back after a crash has no manifest and is collected.
        self._directory.remove(self.path_of(key))
        return self._settle(key)

    def put_aside(self, key: BlockKey) -> None:
        """Move a file whose bytes are wrong into quarantine."""
        self._directory.put_aside(self.path_of(key))
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
            return TierUsage(len(self._sizes), self._stored_bytes, self._limit_bytes)

    def tenant_bytes(self, tenant: TenantId) -> tuple[int, int]:
        """Return what a tenant's files have, those being written included, and the most they may have; 0: no limit."""
        with self._lock:
            return self._tenants.used_bytes(tenant), self._tenants.limit_bytes

    def shortage(self, size_bytes: int) -> Shortage:
        """Return which bytes and how many files have to leave before a file of this size should come."""
        return Shortage(self._missing_bytes(size_bytes), self._missing_files())

    def _missing_bytes(self, size_bytes: int) -> int:
        with self._lock:
            wanted = self._used_bytes + size_bytes
        if not self._limit_bytes or wanted <= self._limit_bytes * _UPPER_MARK:
            return 0
        return wanted - int(self._limit_bytes * _LOWER_MARK)

    def _missing_files(self) -> int:
        if self._inodes is None:
            return 0
        free, inodes = self._inodes
        if free >= min(_INODES_LOW, inodes - int(inodes * _UPPER_MARK)):
            return 0
        return min(_INODES_ENOUGH, inodes - int(inodes * _LOWER_MARK)) - free

    def free_inodes(self) -> float:
        """Return how many files the filesystem took at the last change; infinite: it does not say."""
        return math.inf if self._inodes is None else self._inodes[0]

    def check_tenant(self, tenant: TenantId) -> None:
        """Raise ContextQuotaExceeded when the tenant may not have another byte."""
        with self._lock:
            self._tenants.check(tenant, 1)

    def tenants_of(self, sizes: Mapping[BlockKey, int]) -> Mapping[TenantId, int]:
        """Return bytes that are held elsewhere by the tenants whose files they are copies of."""
        with self._lock:
            return self._tenants.of(sizes)

    def bytes_by_tenant(self) -> Mapping[TenantId, int]:
        """Return the bytes of every tenant's files."""
        with self._lock:
            return self._tenants.by_tenant()

    def _settle(
        self, key: BlockKey, *, owner: TenantId | None = None, reserved: tuple[TenantId, int] = (NOBODY, 0)
    ) -> int:
        """Make the index say what the directory says, whoever came last; return the bytes freed. Waits for the disk.

        A block that is there is never absent in between: `size_bytes` takes no lock. What was `reserved` for a tenant
        is given back in the same moment, also when OSError is raised: the file cannot be looked at.
        """
        with self._settling:
            try:
                now = regular_size(self.path_of(key))
            except OSError:
                with self._lock:
                    self._give_back(*reserved)
                raise
            with self._lock:
                self._give_back(*reserved)
                if now is None:
                    before = self._sizes.pop(key, 0)
                else:
                    before = self._sizes.get(key, 0)
                    self._sizes[key] = now
                freed = before - (now or 0)
                self._used_bytes -= freed
                self._stored_bytes -= freed
                self._tenants.settle(key, before, now or 0, owner=owner)
            self._inodes = self._directory.inodes()
        return max(freed, 0)

    def _give_back(self, tenant: TenantId, size_bytes: int) -> None:
        self._used_bytes -= size_bytes
        self._tenants.cancel(tenant, size_bytes)

    def path_of(self, key: BlockKey) -> Path:
        """Return where a block's file belongs."""
        return self._directory.root / _DIRECTORIES[key.kind] / key.fan_out / key.file_name


def _is_ours(kind: str, path: Path) -> bool:
    key = BlockKey.from_file_name(path.name)
    return key is not None and key.kind == kind and key.fan_out == path.parent.name


def _size_or_none(path: Path) -> int | None:
    """Return a file's size; None for what cannot be looked at, which no start may fail for."""
    try:
        return regular_size(path)
    except OSError:
        log.warning("block file not checked", extra={"directory": path.parent.name}, exc_info=True)
        return None


def _read_all(descriptor: int, view: memoryview) -> int:
    total = 0
    while total < len(view):
        count = os.readv(descriptor, [view[total:]])
        if count == 0:
            break
        total += count
    return total
