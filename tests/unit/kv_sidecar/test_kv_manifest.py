from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from contextcache.errors import CorruptBlock
from contextcache.model import KVGroup, Manifest
from kv_sidecar.format.manifest import (
    all_keys,
    block_checksum,
    block_key,
    block_meta,
    decode_manifest,
    encode_manifest,
    manifest_checksum,
    num_files,
)
from kv_sidecar.format.safetensors_header import TensorHeader, decode_header, encode_header
from tests.kit.kv_blocks import new_save, planned
from tests.kit.kv_groups import some_contexts


def manifest_of(token_ids: tuple[int, ...], *, block_tokens: int = 4, world_size: int = 1) -> Manifest:
    return planned(new_save(token_ids, now_ms=1, world_size=world_size), block_tokens=block_tokens)


def vouching(manifest: Manifest) -> Manifest:
    """The same manifest with a checksum for every file."""
    checksums = tuple(f"{number:032x}" for number in range(num_files(manifest) * manifest.world_size))
    return replace(manifest, block_checksums=checksums)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60).map(tuple),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 2**62),
)
def test_a_manifest_comes_back_from_its_file(
    token_ids: tuple[int, ...], block_tokens: int, world_size: int, size_bytes: int
) -> None:
    manifest = replace(manifest_of(token_ids, block_tokens=block_tokens, world_size=world_size), size_bytes=size_bytes)

    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert decode_manifest(encode_manifest(vouching(manifest))) == vouching(manifest)


def test_the_safetensors_library_reads_it() -> None:
    tensors = safetensors.numpy.load(encode_manifest(vouching(manifest_of((1, 2, 0xFFFF_FFFF)))))

    assert tensors["token_ids"].dtype == np.uint32
    assert tensors["token_ids"].tolist() == [1, 2, 0xFFFF_FFFF]


@pytest.mark.parametrize("manifest", [manifest_of((1, 2, 3, 4, 5)), vouching(manifest_of((1, 2, 3, 4, 5)))])
def test_every_flipped_byte_is_detected_or_changes_nothing(manifest: Manifest) -> None:
    data = encode_manifest(manifest)

    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 0x11
        try:
            found = decode_manifest(bytes(flipped))
        except CorruptBlock:
            continue
        assert found == manifest, position


@settings(deadline=None)
@given(some_contexts(), st.integers(1, 3))
def test_a_manifest_of_groups_comes_back_from_its_file(
    context: tuple[tuple[int, ...], tuple[KVGroup, ...]], world_size: int
) -> None:
    token_ids, groups = context
    manifest = planned(new_save(token_ids, now_ms=1, world_size=world_size, groups=groups), block_tokens=1)

    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert decode_manifest(encode_manifest(vouching(manifest))) == vouching(manifest)


@pytest.mark.parametrize("length", [0, 8, 100, -1])
def test_a_truncated_manifest_is_corrupt(length: int) -> None:
    with pytest.raises(CorruptBlock):
        decode_manifest(encode_manifest(manifest_of((1, 2, 3)))[:length])


HYBRID = (
    KVGroup("full_attention", 4, ((0, 9),), 0, "a0" * 8),
    KVGroup("sliding_window", 4, ((1, 3), (4, 9)), 5, "b0" * 8),
    KVGroup("state", 4, ((8, 9),), 0, "c0" * 8),
)


def with_groups(groups: str, *, metadata: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """The file of a manifest of nine tokens that says this of its groups, with a right checksum."""
    whole = encode_manifest(planned(new_save(tuple(range(9)), now_ms=1, groups=HYBRID), block_tokens=4))
    header, start = decode_header(memoryview(whole))
    changed = {key: value for key, value in header.metadata.items() if key != "checksum"} | {
        "groups": groups,
        **metadata,
    }
    changed["checksum"] = manifest_checksum(changed, whole[start:])
    return encode_header(TensorHeader(header.tensor, header.dtype, header.shape, changed)) + whole[start:]


def test_groups_are_written_as_the_page_says() -> None:
    """Seen by every release after this one."""
    listed = (
        '[{"block_tokens":4,"digest":"a0a0a0a0a0a0a0a0","kind":"full_attention","runs":[[0,9]]},'
        '{"block_tokens":4,"digest":"b0b0b0b0b0b0b0b0","kind":"sliding_window","runs":[[1,3],[4,9]],"window":5},'
        '{"block_tokens":4,"digest":"c0c0c0c0c0c0c0c0","kind":"state","runs":[[8,9]]}]'
    )

    assert decode_manifest(with_groups(listed)).groups == HYBRID
    header, _ = decode_header(memoryview(encode_manifest(decode_manifest(with_groups(listed)))))
    assert header.metadata["groups"] == listed


GROUP = {"block_tokens": 4, "digest": "a0" * 8, "kind": "sliding_window", "runs": [[1, 3], [4, 9]], "window": 5}


@pytest.mark.parametrize(
    "change",
    [
        {"runs": [[0, 9], [9, 9]]},
        {"runs": [[1, 5], [4, 9]]},
        {"runs": [[0, 8]]},
        {"runs": [[0, "9"]]},
        {"runs": [[0, 9.0]]},
        {"runs": [[0, 1, 9]]},
        {"runs": []},
        {"runs": None},
        {"window": 0},
        {"window": "5"},
        {"window": True},
        {"window": float("inf")},
        {"block_tokens": 0},
        {"block_tokens": float("inf")},
        {"block_tokens": float("nan")},
        {"kind": "full_attention"},
        {"kind": "mla"},
        {"kind": ["state"]},
        {"digest": ""},
        {"digest": "a0"},
        {"digest": 5},
        {"digest": ["a0"]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_manifest_whose_group_cannot_be_is_corrupt_whatever_its_checksum(change: dict[str, object]) -> None:
    def listed(group: dict[str, object]) -> str:
        return json.dumps([group], sort_keys=True, separators=(",", ":"))

    assert decode_manifest(with_groups(listed(GROUP)))
    with pytest.raises(CorruptBlock):
        decode_manifest(with_groups(listed({**GROUP, **change})))


@pytest.mark.parametrize("groups", ["", "[]", "null", "{}", "[[]]", "[1]", '["x"]', "[" * 10_000, "[{}]"])
def test_a_manifest_whose_groups_are_none_is_corrupt(groups: str) -> None:
    with pytest.raises(CorruptBlock):
        decode_manifest(with_groups(groups))


def test_a_group_changed_under_the_checksums_of_its_files_is_corrupt() -> None:
    """The other group could be: what the manifest vouches for is of the one it had."""
    manifest = vouching(manifest_of(tuple(range(9))))
    data = encode_manifest(manifest)
    for before, after in ((b"[[0,9]]", b"[[0,8]]"), (b'tokens\\":4', b'tokens\\":5'), (b"full_", b"fool_")):
        assert data.count(before) == 1
        with pytest.raises(CorruptBlock):
            decode_manifest(data.replace(before, after))
    header, start = decode_header(memoryview(data))
    metadata = {key: value for key, value in header.metadata.items() if key != "checksum"}
    metadata["groups"] = metadata["groups"].replace('"block_tokens":4', '"block_tokens":5')
    metadata["checksum"] = manifest_checksum(metadata, data[start:])
    changed = TensorHeader(header.tensor, header.dtype, header.shape, metadata)

    assert decode_manifest(encode_header(changed) + data[start:]).groups[0].block_tokens == 5
    with pytest.raises(CorruptBlock):
        decode_manifest(encode_header(replace(changed, supplement=header.supplement)) + data[start:])


@pytest.mark.parametrize(("num_tokens", "files"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_rank_has_a_file_for_each_whole_block_and_one_for_the_rest(num_tokens: int, files: int) -> None:
    manifest = manifest_of(tuple(range(num_tokens)), world_size=2)

    assert num_files(manifest) == files
    assert len(set(all_keys(manifest))) == 2 * files


def test_positions_say_what_the_files_must_hold() -> None:
    manifest = manifest_of((1, 2, 3, 4, 5, 6, 7, 8, 9))
    second, tail = block_meta(manifest, 1, 0), block_meta(manifest, 2, 0)

    assert (second.kind, second.parent, second.token_ids) == ("block", manifest.files[0].name, (5, 6, 7, 8))
    assert (tail.kind, tail.name, tail.parent) == ("tail", manifest.cache_ref, manifest.files[1].name)
    assert tail.token_ids == (9,)
    assert block_key(manifest, 2, 0) == tail.key


@pytest.mark.parametrize(
    "checksums",
    [("0" * 32,), ("0" * 32,) * 3, ("0" * 32, "0" * 31 + "g"), ("0" * 32, "")],
    ids=["too few", "too many", "no hex", "one empty"],
)
def test_checksums_that_are_not_one_for_each_file_are_corrupt(checksums: tuple[str, ...]) -> None:
    manifest = replace(manifest_of((1, 2, 3, 4, 5)), block_checksums=checksums)

    with pytest.raises(CorruptBlock):
        decode_manifest(encode_manifest(manifest))


def test_a_position_of_a_rank_has_its_own_checksum() -> None:
    manifest = vouching(manifest_of((1, 2, 3, 4, 5), world_size=2))

    assert [int(block_checksum(manifest, index, rank), 16) for rank in (0, 1) for index in (0, 1)] == [0, 1, 2, 3]
    assert block_checksum(manifest_of((1,)), 0, 0) == ""
