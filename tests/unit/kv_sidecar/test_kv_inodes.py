"""Inodes run out like bytes: the KV used longest ago leaves, and saves go on.

Seen failing: with 60 inodes left every save was refused as `storage_full`, whatever lay there.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from contextcache.errors import CacheRefNotFound
from contextcache.names import KEPT_PREFIX
from kv_sidecar.blocks import _INODES_ENOUGH, _INODES_LOW, Shortage
from kv_sidecar.tiers.data_directory import DataDirectory
from tests.kit.block_tiers import DiskBlocks
from tests.kit.kv_blocks import SidecarUnderTest


class SmallFilesystem:
    """Takes so many files below `root`, and refuses the next one as a filesystem does."""

    def __init__(self, root: Path, *, inodes: int) -> None:
        self._root, self._inodes = root, inodes

    def statvfs(self, path: Path) -> os.statvfs_result:
        free = self._inodes - sum(len(files) for _, _, files in os.walk(self._root))
        return SimpleNamespace(f_files=self._inodes, f_favail=free, f_ffree=free)  # type: ignore[return-value]  # its fields

    def step(self, name: str) -> None:
        if name.startswith("write") and self.statvfs(self._root).f_favail <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("limit_bytes", [0, 1 << 30], ids=["no limit", "far from the limit of bytes"])
async def test_where_inodes_run_out_what_was_used_longest_ago_leaves_and_every_save_is_made(
    tmp_path: Path, limit_bytes: int
) -> None:
    small = SmallFilesystem(tmp_path, inodes=100)
    async with SidecarUnderTest(tmp_path, statvfs=small.statvfs, step=small.step, disk_limit_bytes=limit_bytes) as kv:
        saved = [await kv.save(tuple(range(100 * n, 100 * n + 10)), session_id=f"ctx_{n}") for n in range(50)]

        assert await kv.load(saved[-1])
        with pytest.raises(CacheRefNotFound):
            await kv.load(saved[0])
        assert kv.counted("evicted_contexts_total") > 0
        assert kv.counted("free_inodes") == small.statvfs(tmp_path).f_favail + 1, "as of the file before the manifest"
        assert kv.counted("refused_saves_total", code="storage_full") == 0


async def test_kept_kv_makes_room_for_no_inode_of_a_context_and_leaves_first(tmp_path: Path) -> None:
    small = SmallFilesystem(tmp_path, inodes=100)
    async with SidecarUnderTest(tmp_path, statvfs=small.statvfs, step=small.step) as kv:
        first = await kv.save(tuple(range(10)), session_id="ctx_first")
        for n in range(1, 50):
            await kv.save(tuple(range(100 * n, 100 * n + 10)), session_id=f"{KEPT_PREFIX}{n}")

        assert await kv.load(first)


@pytest.mark.parametrize(
    ("free", "inodes", "missing"),
    [
        (_INODES_LOW, 10**7, 0),
        (_INODES_LOW - 1, 10**7, _INODES_ENOUGH - _INODES_LOW + 1),
        (60, 10**7, _INODES_ENOUGH - 60),
        (51, 1000, 0),
        (49, 1000, 51),
        (0, 0, 0),
    ],
    ids=["enough", "one too few", "60 left", "small enough", "small", "the filesystem does not say"],
)
def test_how_many_files_have_to_leave(tmp_path: Path, free: int, inodes: int, missing: int) -> None:
    told = SimpleNamespace(f_files=inodes, f_favail=free)
    directory = DataDirectory(tmp_path, statvfs=lambda _: told)  # type: ignore[arg-type,return-value]  # its fields
    directory.open()
    store = DiskBlocks(directory)

    assert store.blocks.shortage(1) == Shortage(0, missing)
    directory.close()


async def test_a_filesystem_that_cannot_be_asked_evicts_nothing(tmp_path: Path) -> None:
    def fail(_: Path) -> os.statvfs_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with SidecarUnderTest(tmp_path, statvfs=fail) as kv:
        new = await kv.save(tuple(range(10)))

        assert await kv.load(new)
        assert kv.counted("free_inodes") == float("inf")
