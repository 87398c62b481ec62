from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from contextcache.errors import CorruptBlock
from kv_sidecar.format.block_file import BlockFileWriter, BlockMeta, parse_block_file
from kv_sidecar.format.ids import block_id
from tests.kit.kv_blocks import FINGERPRINT, TENANT, block_file_bytes, block_meta_of

TOKENS = (5, 6, 7, 0xFFFF_FFFF)
META = BlockMeta("block", block_id(FINGERPRINT, TENANT, "", TOKENS), "", TENANT, FINGERPRINT, 3, TOKENS)


def begun(*, pages_bytes: int) -> tuple[BlockFileWriter, bytearray]:
    """Return a writer and the memory it writes to, which others have used before."""
    writer = BlockFileWriter(META, pages_bytes=pages_bytes)
    room = bytearray(b"\xff" * writer.size_bytes)
    writer.begin(memoryview(room))
    return writer, room


def test_pages_and_metadata_come_back() -> None:
    writer, room = begun(pages_bytes=30)
    pages = np.arange(30, dtype=np.uint8)
    writer.pages[:] = pages

    assert bytes(writer.finish()) == room
    file = parse_block_file(room)
    file.verify(META)
    assert file.meta == META
    assert np.array_equal(file.pages, pages)
    assert file.size_bytes == writer.size_bytes
    file.close()


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(block_file_bytes(META, fill=9))

    with safe_open(tmp_path / "b", "numpy") as file:
        metadata = file.metadata()
    pages = safetensors.numpy.load_file(tmp_path / "b")["pages"]

    assert metadata["name"] == META.name
    assert pages.shape == (2 * 2 * 64,)
    assert np.all(pages == 9)


def test_a_file_is_not_valid_before_it_is_finished_nor_when_another_page_came_after() -> None:
    writer, room = begun(pages_bytes=8)
    with pytest.raises(CorruptBlock):
        parse_block_file(room)
    writer.pages[:] = 1
    writer.finish()
    parse_block_file(room).verify(META)
    room[-1] = 2

    with pytest.raises(CorruptBlock):
        parse_block_file(room).verify(META)


@pytest.mark.parametrize("finished", [True, False])
def test_the_memory_can_be_given_back_when_the_writer_has_ended(finished: bool) -> None:
    """A bytearray of which somebody holds a view can be neither resized nor, as a region, unmapped."""
    writer, room = begun(pages_bytes=8)
    if finished:
        writer.finish()
    with pytest.raises(BufferError):
        room.clear()
    writer.end()
    writer.end()

    room.clear()


def test_a_view_that_outlives_the_file_stays_readable() -> None:
    file = parse_block_file(block_file_bytes(META, fill=4))
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


def test_a_truncated_file_is_corrupt() -> None:
    data = block_file_bytes(META)
    for length in range(len(data)):
        with pytest.raises(CorruptBlock):
            parse_block_file(data[:length])


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
