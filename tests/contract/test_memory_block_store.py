from __future__ import annotations

from pathlib import Path

import pytest
from typing_extensions import override

from contextcache.errors import InvalidRequest, StorageFull
from kv_sidecar.memory_store import MemoryStore
from kv_sidecar.store import Buffer
from tests.contract.block_store_contract import BLOCK, LIMIT_BYTES, TAIL, BlockStoreContract, numbered, read


class TestMemoryStoreInProcess(BlockStoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore(limit_bytes=LIMIT_BYTES)


class TestMemoryStoreInSharedFiles(BlockStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> MemoryStore:
        return opened(tmp_path)


@pytest.fixture(params=[True, False])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryStore:
    return opened(tmp_path) if request.param else MemoryStore(limit_bytes=LIMIT_BYTES)


def opened(root: Path) -> MemoryStore:
    store = MemoryStore(limit_bytes=LIMIT_BYTES, shared_directory=root / "shared")
    store.open()
    return store


def shared_bytes(store: MemoryStore) -> int:
    assert store.shared_directory is not None
    return sum(path.stat().st_size for path in store.shared_directory.rglob("*") if path.is_file())


def test_the_least_recently_pinned_block_leaves_for_a_new_one(either: MemoryStore) -> None:
    for number in range(3):
        either.put(numbered(number), bytes(300))
    pins = either.pins()
    assert pins.take(numbered(0))
    pins.close()
    either.put(numbered(3), bytes(300))

    assert either.keys() == [numbered(2), numbered(0), numbered(3)]
    assert either.read(numbered(1)) is None


def test_pinned_blocks_stay_and_what_does_not_fit_beside_them_is_refused(either: MemoryStore) -> None:
    either.put(BLOCK, bytes(600))
    pins = either.pins()
    pins.take(BLOCK)

    with pytest.raises(StorageFull):
        either.put(TAIL, bytes(500))
    assert either.keys() == [BLOCK]
    pins.close()
    either.put(TAIL, bytes(500))
    assert either.keys() == [TAIL]


def test_nothing_can_be_pinned_after_the_reader_has_gone(either: MemoryStore) -> None:
    either.put(BLOCK, bytes(600))
    pins = either.pins()
    pins.close()

    assert not pins.take(BLOCK)
    either.put(TAIL, bytes(600))
    assert either.keys() == [TAIL]


def test_a_deleted_block_is_gone_although_somebody_pinned_it(either: MemoryStore) -> None:
    either.put(BLOCK, bytes(600))
    pins = either.pins()
    pins.take(BLOCK)

    assert either.delete(BLOCK) == 600
    assert not pins.take(BLOCK)
    pins.close()


class WatchedStore(MemoryStore):
    """Looks at what lies in shared memory at the worst moment: a block written and not yet in its place."""

    seen_bytes = 0

    @override
    def _write(self, data: Buffer, directory: Path) -> Path:
        path = super()._write(data, directory)
        self.seen_bytes = max(self.seen_bytes, shared_bytes(self))
        return path


def test_shared_memory_never_holds_more_than_the_limit_even_while_a_block_is_written(tmp_path: Path) -> None:
    store = WatchedStore(limit_bytes=LIMIT_BYTES, shared_directory=tmp_path / "shared")
    store.open()
    for number in range(200):
        store.put(numbered(number), bytes(100 + number))

    assert LIMIT_BYTES - 300 < store.seen_bytes <= LIMIT_BYTES
    assert shared_bytes(store) == store.usage().size_bytes <= LIMIT_BYTES


def test_an_incoming_file_becomes_a_block_by_rename(tmp_path: Path) -> None:
    store = opened(tmp_path)
    path = store.incoming_path("x")
    path.write_bytes(b"abc")
    number = path.stat().st_ino
    store.adopt(BLOCK, path)

    assert not path.exists()
    assert read(store, BLOCK) == b"abc"
    assert store.shared_directory is not None
    assert (store.shared_directory / store.shared_name(BLOCK)).stat().st_ino == number


def test_a_reader_of_a_replaced_file_still_sees_the_first(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(BLOCK, b"first")
    assert store.shared_directory is not None
    with (store.shared_directory / store.shared_name(BLOCK)).open("rb") as file:
        store.put(BLOCK, b"second")

        assert file.read() == b"first"


def test_a_block_whose_file_somebody_removed_is_not_there(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(BLOCK, b"abc")
    assert store.shared_directory is not None
    (store.shared_directory / store.shared_name(BLOCK)).unlink()

    assert not store.pins().take(BLOCK)
    assert store.usage().num_blocks == 0


def test_opening_clears_what_the_last_process_left(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(BLOCK, b"abc")
    store.incoming_path("left").write_bytes(b"x")
    again = opened(tmp_path)

    assert shared_bytes(again) == 0
    assert again.keys() == []


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", ".hidden", "a\0b", "x" * 256])
def test_only_plain_names_are_taken_from_the_engine(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest):
        opened(tmp_path).incoming_path(name)


def test_a_name_is_refused_when_nothing_is_shared() -> None:
    with pytest.raises(InvalidRequest):
        MemoryStore(limit_bytes=1).incoming_path("x")
