"""The disk tier: one file a block under `blocks/` and `tails/`, fanned out by two hex digits.

Calls block; each runs in a thread. Bytes are handed out unverified. Sizes and phases are in `kv_sidecar/blocks.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from contextcache.errors import CorruptBlock, SidecarUnavailable
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.tiers.data_directory import DataDirectory, read_with, regular_size
from kv_sidecar.tiers.store import Buffer

log = logging.getLogger(__name__)

_DIRECTORIES = {"block": "blocks", "tail": "tails"}


class Disk:
    """Block files in a DataDirectory."""

    def __init__(self, directory: DataDirectory, *, block_bytes_max: int = 1 << 40) -> None:
        """Take the size in bytes above which a file is no block."""
        self.directory = directory
        self._block_bytes_max = block_bytes_max

    def sizes(self) -> dict[BlockKey, int]:
        """Return the size of every block file. Raises OSError.

        A file without a byte, or larger than a block, is put aside. Files of other names are left alone and logged.
        """
        sizes: dict[BlockKey, int] = {}
        strangers = 0
        for kind, name in _DIRECTORIES.items():
            files, others = self.directory.fan_out_files(name, is_ours=partial(_is_ours, kind))
            strangers += others
            for path in files:
                key = BlockKey.from_file_name(path.rpartition("/")[2])
                size = _size_or_none(path)
                if size is not None and not 0 < size <= self._block_bytes_max:
                    self.directory.put_aside_or_leave(Path(path))
                elif key is not None and size is not None:
                    sizes[key] = size
        log.info("disk index rebuilt", extra={"num_blocks": len(sizes), "num_unknown_files": strangers})
        return sizes

    def size_bytes(self, key: BlockKey) -> int | None:
        """Return the size of a block's file; None: there is none. Raises OSError."""
        return regular_size(self.path_of(key))

    def put(self, key: BlockKey, data: Buffer) -> None:
        """Write a whole file, atomically and durably; replaces the file before. Raises StorageFull, OSError."""
        self.directory.publish(data, self._file(key))

    def read_into(self, key: BlockKey, room: memoryview) -> None:
        """Fill `room`, of a file's size, with the file.

        Raises FileNotFoundError when there is none, CorruptBlock when it has another size, SidecarUnavailable.
        """

        def fill(descriptor: int, size: int) -> None:
            if size != len(room) or _read_all(descriptor, room) != size:
                raise CorruptBlock("the file's size changed")

        read_with(self._file(key), fill)

    def prefetch(self, keys: Iterable[BlockKey]) -> None:
        """Have the kernel begin to read files that will be asked for soon. Files that cannot be read are ignored."""
        for key in keys:
            with suppress(CorruptBlock, SidecarUnavailable, OSError):
                read_with(self._file(key), _will_need)

    def delete(self, key: BlockKey) -> int | None:
        """Remove a file; return the size of a file that is still there. Raises OSError.

        Not durable: a file that comes back after a crash has no manifest and is collected.
        """
        self.directory.remove(self.path_of(key))
        return self.size_bytes(key)

    def put_aside(self, key: BlockKey) -> int | None:
        """Move a file whose bytes are wrong into quarantine; returns as `delete`. Raises OSError."""
        self.directory.put_aside(self.path_of(key))
        return self.size_bytes(key)

    def path_of(self, key: BlockKey) -> Path:
        """Return where a block's file belongs."""
        return Path(self._file(key))

    def _file(self, key: BlockKey) -> str:
        return f"{self.directory.root}/{_DIRECTORIES[key.kind]}/{key.fan_out}/{key.file_name}"


def _is_ours(kind: str, folder: str, name: str) -> bool:
    key = BlockKey.from_file_name(name)
    return key is not None and key.kind == kind and key.fan_out == folder


def _size_or_none(path: str) -> int | None:
    """Return a file's size; None for a file that cannot be looked at, which fails no start."""
    try:
        return regular_size(path)
    except OSError:
        log.warning("block file not checked", extra={"directory": Path(path).parent.name}, exc_info=True)
        return None


def _will_need(descriptor: int, size: int) -> None:
    os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_WILLNEED)


def _read_all(descriptor: int, view: memoryview) -> int:
    total = 0
    while total < len(view):
        count = os.readv(descriptor, [view[total:]])
        if count == 0:
            break
        total += count
    return total
