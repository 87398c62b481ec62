"""Promises of every tier of blocks. A subclass gives the `store` fixture: an empty tier with a limit of LIMIT_BYTES."""

from __future__ import annotations

from typing import Protocol

import pytest

from contextcache.errors import StorageFull
from kv_sidecar.blocks import TierUsage
from kv_sidecar.format.ids import BlockKey

LIMIT_BYTES = 1024
"""Whole cache lines: the memory tier has slots of them."""
BLOCK = BlockKey("block", "ab" * 32, 0)
OTHER_RANK = BlockKey("block", "ab" * 32, 1)
TAIL = BlockKey("tail", "ref_" + "ab" * 16, 0)


class BlockStore(Protocol):
    """One tier of blocks."""

    def put(self, key: BlockKey, data: bytes | bytearray | memoryview) -> object: ...

    def read(self, key: BlockKey) -> bytes | None: ...

    def delete(self, key: BlockKey) -> int: ...

    def size_bytes(self, key: BlockKey) -> int | None: ...

    def keys(self) -> list[BlockKey]: ...

    def usage(self) -> TierUsage: ...


def numbered(number: int) -> BlockKey:
    return BlockKey("block", f"{number:064x}", 0)


def read(store: BlockStore, key: BlockKey) -> bytes | None:
    return store.read(key)


class BlockStoreContract:
    """Subclass it with a `store` fixture."""

    def test_what_was_put_is_read(self, store: BlockStore) -> None:
        store.put(BLOCK, b"abc")
        store.put(OTHER_RANK, bytearray(b"defg"))
        store.put(TAIL, memoryview(b"h"))

        assert read(store, BLOCK) == b"abc"
        assert read(store, OTHER_RANK) == b"defg"
        assert read(store, TAIL) == b"h"
        assert store.size_bytes(OTHER_RANK) == 4
        assert set(store.keys()) == {BLOCK, OTHER_RANK, TAIL}
        assert store.usage() == TierUsage(3, 8, LIMIT_BYTES)

    def test_what_was_never_put_is_not_there(self, store: BlockStore) -> None:
        assert store.read(BLOCK) is None
        assert store.size_bytes(BLOCK) is None
        assert store.delete(BLOCK) == 0
        assert store.usage() == TierUsage(0, 0, LIMIT_BYTES)

    def test_a_second_put_replaces_the_first_and_is_counted_once(self, store: BlockStore) -> None:
        store.put(BLOCK, b"abc")
        store.put(BLOCK, b"defgh")

        assert read(store, BLOCK) == b"defgh"
        assert store.usage() == TierUsage(1, 5, LIMIT_BYTES)

    def test_delete_frees_and_may_be_repeated(self, store: BlockStore) -> None:
        store.put(BLOCK, b"abc")
        store.put(TAIL, b"d")

        assert store.delete(BLOCK) == 3
        assert store.delete(BLOCK) == 0
        assert store.read(BLOCK) is None
        assert store.keys() == [TAIL]
        assert store.usage() == TierUsage(1, 1, LIMIT_BYTES)

    def test_a_file_as_large_as_the_limit_fits(self, store: BlockStore) -> None:
        store.put(BLOCK, bytes(LIMIT_BYTES))

        assert store.usage().size_bytes == LIMIT_BYTES

    def test_a_file_over_the_limit_is_refused_and_nothing_changes(self, store: BlockStore) -> None:
        store.put(BLOCK, b"abc")

        with pytest.raises(StorageFull):
            store.put(TAIL, bytes(LIMIT_BYTES + 1))
        assert store.read(TAIL) is None
        assert read(store, BLOCK) == b"abc"
        assert store.usage() == TierUsage(1, 3, LIMIT_BYTES)

    def test_room_of_a_deleted_file_is_room_again(self, store: BlockStore) -> None:
        for number in range(10):
            store.put(numbered(number), bytes(LIMIT_BYTES))
            assert store.delete(numbered(number)) == LIMIT_BYTES

        assert store.usage().size_bytes == 0
