from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_sidecar.format.ids import block_id, chain_block_ids, pack_token_ids, unpack_token_ids

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_id_is_the_hash_of_exactly_the_documented_bytes() -> None:
    raw = b"context-cache block 1\n"
    raw += b"\x02\0\0\0fp" + b"\x04\0\0\0demo" + b"\0\0\0\0"
    raw += b"\x02\0\0\0" + b"\x01\0\0\0" + b"\xff\xff\xff\xff"

    assert block_id("fp", "demo", "", (1, 0xFFFF_FFFF)) == hashlib.sha256(raw).hexdigest()


def test_fields_that_flow_into_each_other_give_different_ids() -> None:
    assert block_id("ab", "c", "", (1,)) != block_id("a", "bc", "", (1,))


@settings(deadline=None)
@given(TOKENS, TOKENS, st.integers(1, 8))
def test_contexts_share_ids_exactly_as_far_as_their_whole_blocks_agree(
    left: list[int], right: list[int], block_tokens: int
) -> None:
    left_ids = chain_block_ids("fp", "demo", left, block_tokens=block_tokens)
    right_ids = chain_block_ids("fp", "demo", right, block_tokens=block_tokens)

    for index, (one, other) in enumerate(zip(left_ids, right_ids, strict=False)):
        end = (index + 1) * block_tokens
        assert (one == other) == (left[:end] == right[:end])


@settings(deadline=None)
@given(TOKENS, st.integers(1, 8))
def test_only_whole_blocks_have_ids(token_ids: list[int], block_tokens: int) -> None:
    ids = chain_block_ids("fp", "demo", token_ids, block_tokens=block_tokens)

    assert len(ids) == len(token_ids) // block_tokens
    assert len(set(ids)) == len(ids)


def test_another_tenant_or_fingerprint_shares_nothing() -> None:
    ids = chain_block_ids("fp", "demo", range(8), block_tokens=4)

    assert not set(ids) & set(chain_block_ids("fp", "other", range(8), block_tokens=4))
    assert not set(ids) & set(chain_block_ids("fp2", "demo", range(8), block_tokens=4))


@settings(deadline=None)
@given(TOKENS)
def test_packed_token_ids_come_back(token_ids: list[int]) -> None:
    assert unpack_token_ids(pack_token_ids(token_ids)) == tuple(token_ids)


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_id_over_32_bits_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        pack_token_ids((1, token_id))
