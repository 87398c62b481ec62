from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from contextcache.errors import StorageFull
from kv_sidecar.blocks import TierUsage
from kv_sidecar.tiers.data_directory import MAX_QUARANTINED, DataDirectory
from tests.contract.block_store_contract import BLOCK, LIMIT_BYTES, TAIL, BlockStoreContract, numbered, read
from tests.kit.block_tiers import DiskBlocks


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDirectory]:
    directory = DataDirectory(tmp_path / "data")
    directory.open()
    yield directory
    directory.close()


@pytest.fixture
def store(directory: DataDirectory) -> DiskBlocks:
    return opened(directory)


def opened(directory: DataDirectory) -> DiskBlocks:
    return DiskBlocks(directory, limit_bytes=LIMIT_BYTES)


class TestDiskStore(BlockStoreContract):
    @pytest.fixture
    def store(self, directory: DataDirectory) -> DiskBlocks:
        return opened(directory)


def test_blocks_and_tails_lie_where_the_format_says(directory: DataDirectory, store: DiskBlocks) -> None:
    store.put(BLOCK, b"abc")
    store.put(TAIL, b"d")

    assert (directory.root / "blocks" / "ab" / f"{'ab' * 32}.r0.safetensors").read_bytes() == b"abc"
    assert (directory.root / "tails" / "ab" / f"ref_{'ab' * 16}.r0.safetensors").read_bytes() == b"d"


def test_the_index_is_rebuilt_from_the_files(directory: DataDirectory, store: DiskBlocks) -> None:
    store.put(BLOCK, b"abc")
    store.put(TAIL, b"d")
    again = opened(directory)

    assert set(again.keys()) == {BLOCK, TAIL}
    assert again.usage() == TierUsage(2, 4, LIMIT_BYTES)
    with pytest.raises(StorageFull):
        again.put(numbered(1), bytes(LIMIT_BYTES - 3))


def test_leftovers_of_any_kind_do_not_disturb_the_index(directory: DataDirectory, store: DiskBlocks) -> None:
    store.put(BLOCK, b"abc")
    blocks = directory.root / "blocks"
    (blocks / "ab" / "README").write_text("x")
    (blocks / "ab" / f"{'cd' * 32}.r0.safetensors").write_bytes(b"in the wrong directory")
    (blocks / "ab" / f"{'ab' * 32}.r1.safetensors").mkdir()
    (blocks / "stray").write_text("x")
    (directory.root / "tails" / "ab").mkdir(parents=True)
    (directory.root / "tails" / "ab" / f"{'ab' * 32}.r0.safetensors").write_bytes(b"a block among tails")

    assert opened(directory).keys() == [BLOCK]


def test_unfinished_writes_of_a_killed_process_are_removed(directory: DataDirectory) -> None:
    (directory.tmp / "half").write_bytes(b"x")
    directory.close()
    directory.open()

    assert list(directory.tmp.iterdir()) == []


def test_a_second_process_is_kept_out(directory: DataDirectory) -> None:
    with pytest.raises(OSError, match="another kv-sidecar"):
        DataDirectory(directory.root).open()


def test_a_file_put_aside_is_no_longer_stored_and_can_be_looked_at(directory: DataDirectory, store: DiskBlocks) -> None:
    store.put(BLOCK, b"bad")
    store.put_aside(BLOCK)
    store.put_aside(BLOCK)

    assert store.read(BLOCK) is None
    assert store.usage().num_blocks == 0
    assert (directory.quarantine / BLOCK.file_name).read_bytes() == b"bad"
    assert directory.num_quarantined == 1


def test_quarantine_is_bounded(directory: DataDirectory, store: DiskBlocks) -> None:
    for number in range(MAX_QUARANTINED + 5):
        store.put(numbered(number), b"bad")
        store.put_aside(numbered(number))

    assert len(list(directory.quarantine.iterdir())) == MAX_QUARANTINED


def test_old_leftovers_are_removed_and_new_ones_stay(directory: DataDirectory) -> None:
    for path, written_s in ((directory.tmp / "old", 1000), (directory.quarantine / "new", 2000)):
        path.write_bytes(b"abc")
        os.utime(path, (written_s, written_s))

    assert directory.remove_leftovers(before_ms=1_500_000) == 3
    assert [path.name for path in directory.quarantine.iterdir()] == ["new"]


def test_a_file_somebody_removed_is_forgotten_when_it_is_read(directory: DataDirectory, store: DiskBlocks) -> None:
    store.put(BLOCK, b"abc")
    (directory.root / "blocks" / "ab" / BLOCK.file_name).unlink()

    assert store.read(BLOCK) is None
    assert store.usage() == TierUsage(0, 0, LIMIT_BYTES)


@pytest.mark.parametrize(
    ("stop_at", "number", "error"),
    [
        ("write", errno.ENOSPC, StorageFull),
        ("rename", errno.EDQUOT, StorageFull),
        ("rename", errno.EIO, OSError),
    ],
)
def test_a_failed_write_leaves_the_old_file_the_count_and_no_rest(
    tmp_path: Path, stop_at: str, number: int, error: type[Exception]
) -> None:
    failing = False

    def step(name: str) -> None:
        if failing and name.startswith(stop_at):
            raise OSError(number, "injected")

    directory = DataDirectory(tmp_path / "data", step=step)
    directory.open()
    store = opened(directory)
    store.put(BLOCK, b"old")
    failing = True

    with pytest.raises(error):
        store.put(BLOCK, b"newer")
    assert read(store, BLOCK) == b"old"
    assert store.usage().size_bytes == 3
    assert list(directory.tmp.iterdir()) == []
    directory.close()


def test_a_block_that_is_put_again_is_there_all_the_time(tmp_path: Path) -> None:
    seen: list[int | None] = []
    directory = DataDirectory(tmp_path / "data", step=lambda _: seen.append(store.size_bytes(BLOCK)))
    directory.open()
    store = opened(directory)
    store.put(BLOCK, b"abc")
    seen.clear()
    store.put(BLOCK, b"defg")

    assert set(seen) == {3}
    assert store.size_bytes(BLOCK) == 4
    directory.close()
