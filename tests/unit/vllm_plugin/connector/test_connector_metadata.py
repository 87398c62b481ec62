"""Plans and matching, without an engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from contextcache.model import KVGroup, Manifest, plain_group
from kv_sidecar.client import context_files, restorable_tokens, with_files
from tests.kit.connector_rank import plan_of
from vllm_plugin.connector.metadata import (
    EngineGroup,
    LoadPlan,
    RankFacts,
    common_prefix,
    refusal,
)

PLAIN = RankFacts("f" * 64, "{}", 0, 1, (EngineGroup("full_attention", 16),))
FULL = EngineGroup("full_attention", 32, 0, "1" * 16)
WINDOW = EngineGroup("sliding_window", 32, 64, "2" * 16)
NARROW = EngineGroup("sliding_window", 16, 40, "3" * 16)
STATE = EngineGroup("state", 512, 0, "4" * 16)
MIXES = ((FULL,), (WINDOW,), (WINDOW, FULL), (FULL, NARROW, WINDOW), (STATE, FULL), (STATE, NARROW))


def facts_of(groups: tuple[EngineGroup, ...]) -> RankFacts:
    return replace(PLAIN, groups=groups)


def manifest(num_tokens: int, groups: tuple[KVGroup, ...]) -> Manifest:
    return with_files(
        Manifest(
            cache_ref="ref_" + "1" * 32,
            tenant="demo",
            session_id="ctx_1",
            fingerprint=PLAIN.fingerprint,
            token_ids=tuple(range(num_tokens)),
            groups=groups,
            files=(),
            world_size=1,
            expires_at_ms=1,
        )
    )


def kept(groups: tuple[EngineGroup, ...], num_tokens: int, file_tokens: int = 64) -> tuple[KVGroup, ...]:
    return tuple(group.kept(num_tokens, file_tokens_min=file_tokens) for group in groups)


def load(saved: Manifest, facts: RankFacts, device_tokens: int, loaded_tokens: int) -> LoadPlan:
    tables = [list(range(1000 * number, 1000 * number + 100)) for number in range(1, 1 + len(facts.groups))]
    return plan_of(saved, facts, tables, device_tokens, loaded_tokens)


def filled_by(plan: LoadPlan, facts: RankFacts) -> dict[tuple[int, int], int]:
    """Return the engine block of each (group, position), which is filled once."""
    filled: dict[tuple[int, int], int] = {}
    for piece in plan.pieces:
        group = facts.groups[piece.file.group]
        for offset, block_id in enumerate(piece.block_ids):
            page = piece.first_page + offset
            assert page < piece.num_pages
            place = piece.file.group, piece.file.first_token // group.block_tokens + page
            assert place not in filled
            filled[place] = block_id
    return filled


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
    assume(device_tokens < num_tokens)
    loaded = min(wanted, num_tokens - device_tokens)
    plan = load(manifest(num_tokens, (plain_group(num_tokens, block_tokens),)), PLAIN, device_tokens, loaded)

    for piece in plan.pieces:
        assert piece.token_ids == tuple(range(num_tokens))[piece.file.first_token : piece.file.end_token]
    first, last = device_blocks, -(-(device_tokens + loaded) // 16)
    assert filled_by(plan, PLAIN) == {(0, position): 1000 + position for position in range(first, last)}


@given(
    groups=st.sampled_from(MIXES),
    num_tokens=st.integers(1, 500),
    limit=st.integers(1, 500),
    device_blocks=st.integers(0, 14),
    file_tokens=st.sampled_from([16, 32, 64, 256]),
)
@example(groups=(WINDOW,), num_tokens=95, limit=95, device_blocks=0, file_tokens=64)
@example(groups=(WINDOW,), num_tokens=200, limit=160, device_blocks=0, file_tokens=64)
def test_what_is_restored_is_what_the_next_token_sees_in_every_group(
    groups: tuple[EngineGroup, ...], num_tokens: int, limit: int, device_blocks: int, file_tokens: int
) -> None:
    """Of each group all positions it needs, those the engine has excepted, and none beside them."""
    facts = facts_of(groups)
    saved = manifest(num_tokens, kept(groups, num_tokens, file_tokens))
    most, device_tokens = restorable_tokens(saved, min(limit, num_tokens)), device_blocks * 32
    assume(device_tokens < most)
    plan = load(saved, facts, device_tokens, most - device_tokens)

    wanted = {}
    for number, group in enumerate(groups):
        held = 0 if group.kind == "state" else device_tokens // group.block_tokens
        first = max(held, group.first_needed(most))
        wanted |= {(number, p): 1000 * (number + 1) + p for p in range(first, group.num_positions(most))}
    assert filled_by(plan, facts) == wanted


@given(groups=st.sampled_from(MIXES), num_tokens=st.integers(1, 400), limit=st.integers(0, 400))
def test_the_most_that_can_be_restored_is_found(groups: tuple[EngineGroup, ...], num_tokens: int, limit: int) -> None:
    """Against trying every length: each position that a length needs lies in what was saved."""
    saved = kept(groups, num_tokens)

    def is_there(length: int) -> bool:
        for group, of_it in zip(groups, saved, strict=True):
            [(first, end)] = of_it.runs
            if length > end or (group.kind == "state" and length != end):
                return False
            if group.kind != "state" and group.first_needed(length) * group.block_tokens < first:
                return False
        return True

    possible = [length for length in range(1, min(limit, num_tokens) + 1) if is_there(length)]

    found = restorable_tokens(manifest(num_tokens, saved), min(limit, num_tokens))
    assert found == max(possible, default=0)


def test_a_checkpoint_before_the_end_serves_what_the_end_does_not() -> None:
    """A window that ends at 200 tokens, and one that ended at 100: regenerate and fork start there."""
    group = KVGroup("sliding_window", 64, ((32, 100), (128, 200)), 64, WINDOW.digest)
    facts, saved = facts_of((WINDOW,)), manifest(200, (group,))

    assert restorable_tokens(saved, 300) == 200
    assert restorable_tokens(saved, 150) == 100
    assert restorable_tokens(saved, 97) == 97
    assert restorable_tokens(saved, 90) == 0
    assert filled_by(load(saved, facts, 0, 100), facts) == {(0, p): 1000 + p for p in (1, 2, 3)}


def test_blocks_are_named_by_id_and_the_tail_by_the_ref() -> None:
    saved = manifest(150, (plain_group(150, 64),))
    plan = load(saved, PLAIN, 0, 150)

    assert [piece.file.name for piece in plan.pieces[:2]] == [file.name for file in saved.files[:2]]
    assert plan.meta(plan.pieces[2], 0).name == plan.cache_ref
    assert [block for piece in plan.pieces for block in piece.block_ids] == list(range(1000, 1010))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"fingerprint": "0" * 64}, "fingerprint_mismatch"),
        ({"world_size": 2}, "world_size_mismatch"),
        ({"groups": (plain_group(150, 40),)}, "block_size_mismatch"),
        ({"groups": kept((WINDOW,), 150)}, "layout_mismatch"),
        ({"groups": kept((FULL, WINDOW), 150)}, "layout_mismatch"),
        ({"groups": (replace(plain_group(150, 64), digest="5" * 16),)}, "layout_mismatch"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_with_a_reason(change: dict[str, object], reason: str | None) -> None:
    assert refusal(replace(manifest(150, (plain_group(150, 64),)), **change), PLAIN) == reason


@given(groups=st.sampled_from(MIXES), num_tokens=st.integers(1, 700), file_tokens=st.sampled_from([16, 64, 256]))
def test_the_files_of_a_save_hold_every_kept_block_once(
    groups: tuple[EngineGroup, ...], num_tokens: int, file_tokens: int
) -> None:
    held = [tuple(range(g.first_needed(num_tokens), g.num_positions(num_tokens))) for g in groups]
    kept = [group.kept(num_tokens, file_tokens_min=file_tokens) for group in groups]
    files = context_files("ref", "f", "demo", tuple(range(num_tokens)), kept)

    for number, (group, ids) in enumerate(zip(groups, held, strict=True)):
        own = [file for file in files if file.group == number]
        first = group.first_needed(num_tokens)
        assert tuple(block for file in own for block in group.blocks_of(file, ids, first)) == ids
        assert all(group.blocks_of(file, ids, first) for file in own)
        assert not group.blocks_of(own[-1], ids[:-1], first)
