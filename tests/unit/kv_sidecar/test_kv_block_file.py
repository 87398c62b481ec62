from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from contextcache.errors import CorruptBlock, StorageFull
from kv_sidecar.block_file import BlockFileWriter, BlockMeta, open_block_file, parse_block_file
from kv_sidecar.block_id import block_id
from kv_sidecar.block_key import BlockKey
from tests.kit.kv_blocks import FINGERPRINT, TENANT, block_file_bytes, block_meta_of, write_block

TOKENS = (5, 6, 7, 0xFFFF_FFFF)
META = BlockMeta("block", block_id(FINGERPRINT, TENANT, "", TOKENS), "", TENANT, FINGERPRINT, 3, TOKENS)


def test_pages_and_metadata_come_back(tmp_path: Path) -> None:
    writer = BlockFileWriter(tmp_path / "b", META, pages_bytes=30)
    pages = np.arange(30, dtype=np.uint8)
    writer.pages[:] = pages
    writer.finish()

    file = open_block_file(tmp_path / "b")
    file.verify(META)

    assert file.meta == META
    assert np.array_equal(file.pages, pages)
    assert file.size_bytes == writer.size_bytes == (tmp_path / "b").stat().st_size
    file.close()


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    write_block(tmp_path / "b", META, fill=9)

    with safe_open(tmp_path / "b", "numpy") as file:
        metadata = file.metadata()
    pages = safetensors.numpy.load_file(tmp_path / "b")["pages"]

    assert metadata["name"] == META.name
    assert pages.shape == (2 * 2 * 64,)
    assert np.all(pages == 9)


def test_the_file_has_its_full_size_before_it_is_finished_and_is_not_valid(tmp_path: Path) -> None:
    writer = BlockFileWriter(tmp_path / "b", META, pages_bytes=8)

    assert (tmp_path / "b").stat().st_size == writer.size_bytes
    with pytest.raises(CorruptBlock):
        open_block_file(tmp_path / "b")
    writer.discard()
    assert not (tmp_path / "b").exists()


def test_discard_after_finish_removes_the_file_and_may_be_repeated(tmp_path: Path) -> None:
    writer = BlockFileWriter(tmp_path / "b", META, pages_bytes=8)
    writer.finish()
    writer.discard()
    writer.discard()

    assert not (tmp_path / "b").exists()


def test_no_room_is_storage_full_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(StorageFull):
        BlockFileWriter(tmp_path / "b", META, pages_bytes=1 << 60)

    assert not (tmp_path / "b").exists()


def test_a_view_that_outlives_the_file_stays_readable(tmp_path: Path) -> None:
    write_block(tmp_path / "b", META, fill=4)
    file = open_block_file(tmp_path / "b")
    pages = file.pages
    file.close()

    assert np.all(pages == 4)


def test_pages_of_a_read_file_cannot_be_written() -> None:
    pages = parse_block_file(bytearray(block_file_bytes(META))).pages

    assert not pages.flags.writeable


def test_every_flipped_byte_is_detected_or_changes_nothing() -> None:
    data = block_file_bytes(META, fill=1)
    pages = parse_block_file(data).pages

    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 0x11
        try:
            file = parse_block_file(flipped)
            file.verify(META)
        except CorruptBlock:
            continue
        assert file.meta == META, position
        assert np.array_equal(file.pages, pages), position


def test_a_truncated_file_is_corrupt(tmp_path: Path) -> None:
    data = block_file_bytes(META)
    for length in range(len(data)):
        (tmp_path / "b").write_bytes(data[:length])

        with pytest.raises(CorruptBlock):
            open_block_file(tmp_path / "b")


def test_bytes_after_the_tensor_are_corrupt() -> None:
    with pytest.raises(CorruptBlock):
        parse_block_file(block_file_bytes(META) + b"x")


@pytest.mark.parametrize(
    "other",
    [
        replace(META, rank=0),
        replace(META, tenant="other"),
        replace(META, fingerprint="e" * 64),
        replace(META, token_ids=(5, 6, 7, 8)),
        replace(META, parent="a" * 64),
        replace(META, name="a" * 64),
        replace(META, kind="tail"),
        replace(META, group="a0" * 8),
        replace(META, first_token=4),
    ],
)
def test_a_file_that_belongs_elsewhere_is_corrupt(other: BlockMeta) -> None:
    with pytest.raises(CorruptBlock):
        parse_block_file(block_file_bytes(other)).verify(META)


def test_a_block_whose_id_is_not_that_of_its_tokens_is_corrupt_without_being_told_what_to_expect() -> None:
    with pytest.raises(CorruptBlock):
        parse_block_file(block_file_bytes(replace(META, token_ids=(1, 2)))).verify()


def test_a_tail_is_verified_by_its_checksum() -> None:
    meta = block_meta_of()
    parse_block_file(block_file_bytes(meta)).verify(meta)
    data = bytearray(block_file_bytes(meta))
    data[-1] ^= 1

    with pytest.raises(CorruptBlock):
        parse_block_file(data).verify(meta)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    write_block(tmp_path / "b", META)
    (tmp_path / "link").symlink_to(tmp_path / "b")

    with pytest.raises(CorruptBlock):
        open_block_file(tmp_path / "link")


@pytest.mark.parametrize("key", [BlockKey("block", "a0" * 32, 0), BlockKey("tail", "ref_" + "0b" * 16, 17)])
def test_file_names_come_back_as_keys(key: BlockKey) -> None:
    assert BlockKey.from_file_name(key.file_name) == key
    assert key.fan_out == key.name.removeprefix("ref_")[:2]


@pytest.mark.parametrize(
    "name",
    ["", "x.safetensors", "a0" * 32 + ".safetensors", "a0" * 32 + ".r00.safetensors", "A0" * 32 + ".r0.safetensors"],
)
def test_other_file_names_are_no_keys(name: str) -> None:
    assert BlockKey.from_file_name(name) is None
