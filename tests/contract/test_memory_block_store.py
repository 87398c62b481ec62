from __future__ import annotations

from collections.abc import Iterator

import pytest

from contextcache.errors import StorageFull
from tests.contract.block_store_contract import BLOCK, LIMIT_BYTES, TAIL, BlockStoreContract, read
from tests.kit.block_tiers import MemoryBlocks


@pytest.fixture
def store() -> Iterator[MemoryBlocks]:
    store = MemoryBlocks(LIMIT_BYTES)
    yield store
    store.memory.close()
    store.memory.close()


class TestMemoryStore(BlockStoreContract):
    """Of a region."""


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_leased_copy_that_is_dropped_is_free_once_and_the_next_copy_is_leased(store: MemoryBlocks, how: str) -> None:
    """Its reader notices by the bytes, or by the generation of the slot."""
    store.put(BLOCK, b"f" * 300)
    store.blocks.hold([BLOCK], "lease")
    if how == "deleted":
        assert store.delete(BLOCK) == 300
        assert store.memory.free_bytes == LIMIT_BYTES
    store.put(BLOCK, b"s" * 300)

    assert read(store, BLOCK) == b"s" * 300
    with pytest.raises(StorageFull):
        store.put(TAIL, b"t" * 1000)
    store.blocks.let_go([BLOCK], "lease")
    store.put(TAIL, b"t" * 1000)
    assert read(store, TAIL) == b"t" * 1000


def test_a_block_that_is_read_in_under_a_lease_stays_until_the_last_one_ends(store: MemoryBlocks) -> None:
    """Seen failing with a pin that went with the first lease."""
    store.blocks.hold([BLOCK], "lease")
    store.put(BLOCK, bytes(600))
    store.blocks.hold([BLOCK], "lease")
    store.blocks.let_go([BLOCK], "lease")

    with pytest.raises(StorageFull):
        store.put(TAIL, bytes(500))
    store.blocks.let_go([BLOCK], "lease")
    store.put(TAIL, bytes(500))
    assert store.keys() == [TAIL]


def test_a_tier_of_no_bytes_keeps_nothing() -> None:
    store = MemoryBlocks(0)

    with pytest.raises(StorageFull):
        store.put(BLOCK, b"a")
    assert store.memory.region is None
    store.memory.close()
