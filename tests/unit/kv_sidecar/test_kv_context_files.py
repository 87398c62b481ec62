"""Which files a context has, from its tokens and groups alone.

Seen failing: with a group's digest left out of a block's key, the files of two groups lie at one place; with the cuts
made at multiples of a block from a run's first token on, a window's blocks are named for tokens they do not hold; with
a state cut like the others, it has several files and none that is the state.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contextcache.errors import InvalidRequest
from contextcache.model import KVGroup, Manifest, plain_group
from kv_sidecar.format.ids import BlockKey, chain_block_ids
from kv_sidecar.format.manifest import (
    MAX_GROUPS,
    all_keys,
    block_meta,
    check_groups,
    context_files,
    is_plain,
    num_files,
    rank_keys,
)
from tests.kit.kv_blocks import (
    FINGERPRINT,
    TENANT,
    new_save,
    planned,
)
from tests.kit.kv_groups import digest_of, one_group, some_contexts

REF = "ref_" + "1" * 32
A, B = digest_of(10), digest_of(11)
FULL = KVGroup("full_attention", 4, ((0, 10),), 0, A)
WINDOW = KVGroup("sliding_window", 4, ((3, 10),), 7, B)
STATE = KVGroup("state", 4, ((9, 10),), 0, B)

Piece = tuple[str, int, int]


def manifest_of(token_ids: tuple[int, ...], groups: tuple[KVGroup, ...], *, world_size: int = 1) -> Manifest:
    new = new_save(token_ids, now_ms=1, cache_ref=REF, world_size=world_size, groups=groups)
    return planned(new, block_tokens=1)


def pieces_of(num_tokens: int, *groups: KVGroup) -> list[Piece]:
    files = context_files(REF, FINGERPRINT, TENANT, range(num_tokens), groups)
    return [(file.kind, file.first_token, file.end_token) for file in files]


@settings(deadline=None)
@given(some_contexts())
def test_the_files_of_a_group_cover_its_runs_in_order_without_gap(
    context: tuple[tuple[int, ...], tuple[KVGroup, ...]],
) -> None:
    token_ids, groups = context
    files = context_files(REF, FINGERPRINT, TENANT, token_ids, groups)
    by_group = {number: list(found) for number, found in groupby(files, key=lambda file: file.group)}

    assert list(by_group) == list(range(len(groups)))
    for number, group in enumerate(groups):
        covered: list[list[int]] = []
        for file in by_group[number]:
            assert file.first_token < file.end_token
            if covered and covered[-1][1] == file.first_token:
                covered[-1][1] = file.end_token
            else:
                covered.append([file.first_token, file.end_token])
        assert covered == [list(run) for run in group.runs]


@settings(deadline=None)
@given(some_contexts())
def test_whole_pieces_are_blocks_named_by_the_chain_and_all_others_tails(
    context: tuple[tuple[int, ...], tuple[KVGroup, ...]],
) -> None:
    token_ids, groups = context
    for file in context_files(REF, FINGERPRINT, TENANT, token_ids, groups):
        group = groups[file.group]
        chain = chain_block_ids(FINGERPRINT, TENANT, token_ids, block_tokens=group.block_tokens)
        index, begins_within = divmod(file.first_token, group.block_tokens)
        is_whole = not begins_within and file.end_token - file.first_token == group.block_tokens

        assert file.parent == (chain[index - 1] if index else "")
        if is_whole and group.kind != "state":
            assert (file.kind, file.name) == ("block", chain[index])
        else:
            assert (file.kind, file.name) == ("tail", REF)
        if group.kind != "state":
            assert file.end_token <= (index + 1) * group.block_tokens


@settings(deadline=None)
@given(some_contexts(), st.integers(1, 3))
def test_every_file_lies_at_a_place_of_its_own_and_its_name_says_which(
    context: tuple[tuple[int, ...], tuple[KVGroup, ...]], world_size: int
) -> None:
    manifest = manifest_of(*context, world_size=world_size)
    keys = all_keys(manifest)

    assert len({key.file_name for key in keys}) == len(keys) == world_size * num_files(manifest)
    for key in keys:
        assert BlockKey.from_file_name(key.file_name) == key
    for index, key in enumerate(rank_keys(manifest, world_size - 1)):
        meta = block_meta(manifest, index, world_size - 1)
        assert meta.key == key
        assert meta.token_ids == manifest.token_ids[manifest.files[index].first_token :][: len(meta.token_ids)]


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 9), st.integers(1, 9), st.data())
def test_contexts_that_begin_alike_share_the_blocks_before_they_part_and_no_tail(
    num_alike: int, num_left: int, num_right: int, data: st.DataObject
) -> None:
    left_ids = tuple(range(num_alike + num_left))
    right_ids = tuple(range(num_alike)) + tuple(range(100, 100 + num_right))
    size = data.draw(st.integers(1, 9))
    left, right = (
        manifest_of(ids, (KVGroup("full_attention", size, ((0, len(ids)),), 0, A),)) for ids in (left_ids, right_ids)
    )
    right = replace(right, cache_ref="ref_" + "2" * 32, files=())
    files = context_files(right.cache_ref, FINGERPRINT, TENANT, right_ids, right.groups)
    shared = set(rank_keys(left, 0)) & set(rank_keys(replace(right, files=files), 0))

    assert shared == set(rank_keys(left, 0)[: num_alike // size])
    assert {key.kind for key in shared} <= {"block"}


@settings(deadline=None)
@given(st.data())
def test_groups_share_nothing_however_alike_they_are(data: st.DataObject) -> None:
    group = data.draw(one_group(20, A))
    manifest = manifest_of(tuple(range(20)), (group, replace(group, digest=B)))
    first, second = (
        {key for key, file in zip(rank_keys(manifest, 0), manifest.files, strict=True) if file.group == number}
        for number in (0, 1)
    )

    assert len(first) == len(second)
    assert {key.name for key in first} == {key.name for key in second}
    assert not {key.file_name for key in first} & {key.file_name for key in second}


def test_a_window_shares_its_whole_blocks_with_a_context_that_kept_more_of_them() -> None:
    whole, windowed = (manifest_of(tuple(range(10)), (replace(WINDOW, runs=((first, 10),)),)) for first in (0, 3))

    assert [file for file in windowed.files if file.kind == "block"] == [whole.files[1]]
    assert rank_keys(windowed, 0)[1] == rank_keys(whole, 0)[1]


def test_a_window_whose_first_token_is_on_no_block_edge_begins_with_a_tail() -> None:
    assert pieces_of(10, WINDOW) == [("tail", 3, 4), ("block", 4, 8), ("tail", 8, 10)]


def test_a_window_whose_first_token_is_on_a_block_edge_begins_with_a_block() -> None:
    assert pieces_of(10, replace(WINDOW, runs=((4, 10),))) == [("block", 4, 8), ("tail", 8, 10)]


@pytest.mark.parametrize("run", [(0, 10), (3, 10), (4, 10), (9, 10), (8, 12), (0, 4), (4, 8)])
def test_a_state_is_always_one_tail(run: tuple[int, int]) -> None:
    assert pieces_of(run[1], replace(STATE, runs=(run,))) == [("tail", *run)]


def test_every_run_has_its_own_files() -> None:
    assert pieces_of(18, replace(WINDOW, runs=((0, 6), (7, 8), (10, 18)))) == [
        ("block", 0, 4),
        ("tail", 4, 6),
        ("tail", 7, 8),
        ("tail", 10, 12),
        ("block", 12, 16),
        ("tail", 16, 18),
    ]
    assert pieces_of(10, replace(STATE, runs=((3, 4), (9, 10)))) == [("tail", 3, 4), ("tail", 9, 10)]


def test_groups_follow_one_another_each_in_blocks_of_its_own() -> None:
    assert pieces_of(10, FULL, replace(WINDOW, block_tokens=6), replace(STATE, digest=digest_of(12))) == [
        ("block", 0, 4),
        ("block", 4, 8),
        ("tail", 8, 10),
        ("tail", 3, 6),
        ("tail", 6, 10),
        ("tail", 9, 10),
    ]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60).map(tuple), st.integers(1, 9), st.integers(0, 3))
def test_a_plain_group_has_the_very_names_of_before_there_were_groups(
    token_ids: tuple[int, ...], block_tokens: int, rank: int
) -> None:
    manifest = manifest_of(token_ids, (plain_group(len(token_ids), block_tokens),), world_size=4)
    names = list(chain_block_ids(FINGERPRINT, TENANT, token_ids, block_tokens=block_tokens))
    names += [REF] if len(token_ids) % block_tokens else []

    assert is_plain(manifest.groups)
    assert [key.file_name for key in rank_keys(manifest, rank)] == [f"{name}.r{rank}.safetensors" for name in names]


@settings(deadline=None)
@given(some_contexts())
def test_what_an_engine_may_have_is_not_refused(context: tuple[tuple[int, ...], tuple[KVGroup, ...]]) -> None:
    token_ids, groups = context

    check_groups(groups, len(token_ids))


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param((), id="none"),
        pytest.param((FULL, replace(WINDOW, digest=A)), id="one digest twice"),
        pytest.param((replace(FULL, digest=""), WINDOW), id="no digest beside another group"),
        pytest.param((replace(FULL, digest=""),) * 2, id="two without a digest"),
        pytest.param((replace(WINDOW, digest=""),), id="a window without a digest"),
        pytest.param((replace(STATE, digest=""),), id="a state without a digest"),
        pytest.param((replace(FULL, digest=A[:-1]),), id="a short digest"),
        pytest.param((replace(FULL, digest=A + "0"),), id="a long digest"),
        pytest.param((replace(FULL, digest=A.upper()),), id="a digest in capitals"),
        pytest.param((replace(FULL, digest="../../../../../x"),), id="a digest that leads away"),
        pytest.param((replace(FULL, digest="٣" * 16),), id="a digest of other digits"),
        pytest.param((replace(FULL, digest=A + "\n"),), id="a digest and a line feed"),
        pytest.param(tuple(replace(FULL, digest=digest_of(n)) for n in range(MAX_GROUPS + 1)), id="too many"),
    ],
)
def test_groups_that_have_no_names_of_their_own_are_refused(groups: tuple[KVGroup, ...]) -> None:
    with pytest.raises(InvalidRequest):
        check_groups(groups, 10)


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param((), id="none"),
        pytest.param(((0, 6), (5, 10)), id="overlapping"),
        pytest.param(((0, 6), (6, 10)), id="touching"),
        pytest.param(((0, 2), (5, 5), (8, 10)), id="an empty one"),
        pytest.param(((10, 10),), id="empty"),
        pytest.param(((8, 3), (9, 10)), id="backwards"),
        pytest.param(((8, 10), (0, 3)), id="in another order"),
        pytest.param(((0, 9),), id="ending before"),
        pytest.param(((0, 11),), id="ending behind"),
        pytest.param(((-1, 10),), id="beginning before the first token"),
        pytest.param(((0, 1), (2, 3), (4, 5), (6, 7), (8, 10)), id="too many"),
    ],
)
@pytest.mark.parametrize("group", [FULL, WINDOW, STATE], ids=lambda group: group.kind)
def test_runs_that_cannot_be_are_refused(group: KVGroup, runs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidRequest):
        check_groups((replace(group, runs=runs),), 10)


@pytest.mark.parametrize(
    ("group", "change"),
    [
        pytest.param(FULL, {"runs": ((0, 4), (6, 10))}, id="full attention with a hole"),
        pytest.param(FULL, {"runs": ((4, 10),)}, id="full attention without its beginning"),
        pytest.param(FULL, {"window": 7}, id="full attention with a window"),
        pytest.param(WINDOW, {"window": 0}, id="a sliding window of none"),
        pytest.param(WINDOW, {"window": -1}, id="a window of less than none"),
        pytest.param(STATE, {"window": 7}, id="a state with a window"),
        pytest.param(STATE, {"window": -1}, id="a state with a window of less than none"),
        pytest.param(FULL, {"block_tokens": 0}, id="blocks of no token"),
        pytest.param(FULL, {"block_tokens": -4}, id="blocks of less than none"),
    ],
)
def test_what_does_not_fit_its_kind_is_refused(group: KVGroup, change: dict[str, Any]) -> None:
    check_groups((group,), 10)

    with pytest.raises(InvalidRequest):
        check_groups((replace(group, **change),), 10)


@pytest.mark.parametrize("group", [plain_group(10, 4), FULL, WINDOW, STATE], ids=["plain", "full", "window", "state"])
def test_blocks_smaller_than_the_least_are_refused(group: KVGroup) -> None:
    check_groups((group,), 10, block_tokens_min=4)

    with pytest.raises(InvalidRequest):
        check_groups((group,), 10, block_tokens_min=5)
    with pytest.raises(InvalidRequest):
        planned(new_save(tuple(range(10)), now_ms=1, groups=(group,)), block_tokens=5)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (BlockKey("block", "a0" * 32, 0), "a0" * 32 + ".r0.safetensors"),
        (BlockKey("block", "a0" * 32, 3, A), "a0" * 32 + f".{A}.r3.safetensors"),
        (BlockKey("tail", REF, 17), f"{REF}.r17.safetensors"),
        (BlockKey("tail", REF, 0, A), f"{REF}.{A}.0.r0.safetensors"),
        (BlockKey("tail", REF, 2, A, 1_000_000), f"{REF}.{A}.1000000.r2.safetensors"),
    ],
)
def test_a_file_is_named_for_its_group_and_a_tail_for_its_first_token(key: BlockKey, name: str) -> None:
    assert key.file_name == name
    assert BlockKey.from_file_name(name) == key
    assert key.fan_out == key.name.removeprefix("ref_")[:2]


@pytest.mark.parametrize(
    "name",
    [
        "a0" * 32 + f".{A}.0.r0.safetensors",
        "a0" * 32 + f".{A[1:]}.r0.safetensors",
        "a0" * 32 + f".{A}.r0.safetensors".upper(),
        f"{REF}.{A}.r0.safetensors",
        f"{REF}.{A}.00.r0.safetensors",
        f"{REF}.{A}.-1.r0.safetensors",
        f"{REF}.0.r0.safetensors",
        "",
        "x.safetensors",
        "a0" * 32 + ".safetensors",
        "a0" * 32 + ".r00.safetensors",
        "A0" * 32 + ".r0.safetensors",
    ],
)
def test_other_file_names_are_no_keys(name: str) -> None:
    assert BlockKey.from_file_name(name) is None
