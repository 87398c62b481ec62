from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from contextcache.errors import CorruptBlock
from contextcache.model import Manifest
from kv_sidecar.manifest import (
    all_keys,
    block_checksum,
    block_key,
    block_meta,
    decode_manifest,
    encode_manifest,
    num_files,
)
from tests.kit.kv_blocks import new_save


def manifest_of(token_ids: tuple[int, ...], *, block_tokens: int = 4, world_size: int = 1) -> Manifest:
    return new_save(token_ids, now_ms=1, world_size=world_size).manifest(block_tokens=block_tokens)


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


@pytest.mark.parametrize("length", [0, 8, 100, -1])
def test_a_truncated_manifest_is_corrupt(length: int) -> None:
    with pytest.raises(CorruptBlock):
        decode_manifest(encode_manifest(manifest_of((1, 2, 3)))[:length])


def test_a_manifest_with_another_contexts_block_ids_is_corrupt() -> None:
    manifest = replace(manifest_of((1, 2, 3, 4)), block_ids=manifest_of((4, 3, 2, 1)).block_ids)

    with pytest.raises(CorruptBlock):
        decode_manifest(encode_manifest(manifest))


@pytest.mark.parametrize(("num_tokens", "files"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_rank_has_a_file_for_each_whole_block_and_one_for_the_rest(num_tokens: int, files: int) -> None:
    manifest = manifest_of(tuple(range(num_tokens)), world_size=2)

    assert num_files(manifest) == files
    assert len(set(all_keys(manifest))) == 2 * files


def test_positions_say_what_the_files_must_hold() -> None:
    manifest = manifest_of((1, 2, 3, 4, 5, 6, 7, 8, 9))
    second, tail = block_meta(manifest, 1, 0), block_meta(manifest, 2, 0)

    assert (second.kind, second.parent, second.token_ids) == ("block", manifest.block_ids[0], (5, 6, 7, 8))
    assert (tail.kind, tail.name, tail.parent) == ("tail", manifest.cache_ref, manifest.block_ids[1])
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
