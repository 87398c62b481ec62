"""Plans and matching, without an engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextcache.model import Manifest
from vllm_plugin.connector.metadata import LoadPlan, RankFacts, SavePlan, common_prefix, plan_load, refusal

FACTS = RankFacts("f" * 64, "{}", 0, 1, 16)


def manifest(num_tokens: int, block_tokens: int = 64) -> Manifest:
    return Manifest(
        cache_ref="ref_" + "1" * 32,
        tenant="demo",
        session_id="ctx_1",
        fingerprint=FACTS.fingerprint,
        token_ids=tuple(range(num_tokens)),
        block_tokens=block_tokens,
        block_ids=tuple(f"block{i}" for i in range(num_tokens // block_tokens)),
        tail_tokens=num_tokens % block_tokens,
        world_size=1,
        expires_at_ms=1,
    )


def load(num_tokens: int, device_tokens: int, loaded_tokens: int, block_tokens: int = 64) -> LoadPlan:
    return plan_load(
        manifest(num_tokens, block_tokens),
        FACTS,
        engine_request_id="e",
        request_id="r",
        block_ids=list(range(1000, 1100)),
        device_tokens=device_tokens,
        loaded_tokens=loaded_tokens,
        asked_at_s=0,
    )


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_the_common_prefix_is_as_long_as_it_is(left: list[int], right: list[int]) -> None:
    length = common_prefix(np.array(left, dtype=np.int64), np.array(right, dtype=np.int64))

    assert left[:length] == right[:length]
    assert left[length : length + 1] != right[length : length + 1] or length == min(len(left), len(right))


@given(
    num_tokens=st.integers(1, 700),
    device_blocks=st.integers(0, 40),
    wanted=st.integers(1, 700),
    block_tokens=st.sampled_from([16, 64, 256]),
)
def test_a_load_fills_each_position_once_from_the_page_that_belongs_there(
    num_tokens: int, device_blocks: int, wanted: int, block_tokens: int
) -> None:
    device_tokens = device_blocks * 16
    if device_tokens >= num_tokens:
        return
    loaded = min(wanted, num_tokens - device_tokens)
    plan = load(num_tokens, device_tokens, loaded, block_tokens)
    filled = {}
    for piece in plan.pieces():
        assert piece.token_ids == plan.token_ids[piece.block_index * block_tokens :][:block_tokens]
        for offset, block_id in enumerate(piece.block_ids):
            page = piece.first_page + offset
            assert page * 16 < len(piece.token_ids)
            filled[piece.block_index * (block_tokens // 16) + page] = block_id

    first, last = device_blocks, -(-(device_tokens + loaded) // 16)
    assert filled == {position: 1000 + position for position in range(first, last)}


def test_blocks_are_named_by_id_and_the_tail_by_the_ref() -> None:
    plan = load(150, 0, 150)

    assert [plan.name(piece.block_index) for piece in plan.pieces()] == ["block0", "block1", plan.cache_ref]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"fingerprint": "0" * 64}, "fingerprint_mismatch"),
        ({"world_size": 2}, "world_size_mismatch"),
        ({"block_tokens": 40}, "block_size_mismatch"),
        ({"block_tokens": 0}, "block_size_mismatch"),
        ({"block_ids": ("block0",)}, "manifest_malformed"),
        ({"tail_tokens": 0}, "manifest_malformed"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_with_a_reason(change: dict[str, object], reason: str | None) -> None:
    assert refusal(replace(manifest(150), **change), FACTS) == reason


@given(num_tokens=st.integers(1, 700), block_tokens=st.sampled_from([16, 64, 256]))
def test_the_pieces_of_a_save_hold_every_block_once(num_tokens: int, block_tokens: int) -> None:
    num_blocks = -(-num_tokens // 16)
    plan = SavePlan("e", "demo", "ctx_1", "ref", 1, 1, tuple(range(num_tokens)), tuple(range(num_blocks)), "f")
    count = -(-num_tokens // block_tokens)
    pieces = [plan.piece(i, block_tokens=block_tokens, engine_block_tokens=16) for i in range(count)]

    assert [block for piece in pieces for block in piece.block_ids] == list(range(num_blocks))
    assert [token for piece in pieces for token in piece.token_ids] == list(range(num_tokens))
    assert all(len(piece.block_ids) == -(-len(piece.token_ids) // 16) for piece in pieces)
