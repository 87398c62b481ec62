"""The reader printed in docs/formats.md reads what the sidecar writes, and notices when it is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kv_sidecar.block_file import FORMAT as BLOCK_FORMAT
from kv_sidecar.manifest import FORMAT as MANIFEST_FORMAT
from kv_sidecar.manifest import block_key, block_meta
from tests.kit.kv_blocks import ENGINE_BLOCKS, LAYERS, PAGE_BYTES, SidecarUnderTest, fill_of, new_save, write_block

DOCUMENT = Path(__file__).parents[3] / "docs" / "formats.md"


@pytest.fixture
def reader() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    return names


@pytest.mark.parametrize("num_tokens", [3, 4, 10])
async def test_the_printed_reader_reads_a_context(tmp_path: Path, reader: dict[str, Any], num_tokens: int) -> None:
    async with SidecarUnderTest(tmp_path) as kv:
        new = await kv.save(tuple(range(num_tokens)))
        plan = kv.plan(new)
    blocks = list(reader["read_pages"](tmp_path / "data", new.cache_ref))

    assert [token for ids, _, _ in blocks for token in ids] == list(range(num_tokens))
    for index, (_, shape, pages) in enumerate(blocks):
        assert shape == [LAYERS, ENGINE_BLOCKS, PAGE_BYTES]
        assert set(pages) == {fill_of(block_meta(plan, index, 0))}


@pytest.mark.parametrize("index", [0, 2])
async def test_the_printed_reader_notices_a_flipped_byte(tmp_path: Path, reader: dict[str, Any], index: int) -> None:
    async with SidecarUnderTest(tmp_path) as kv:
        new = await kv.save(tuple(range(10)))
        path = kv.path_of(block_key(kv.plan(new), index, 0))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    with pytest.raises(AssertionError):
        list(reader["read_pages"](tmp_path / "data", new.cache_ref))


@pytest.mark.parametrize("rank", [0, 1])
async def test_the_printed_reader_notices_bytes_the_manifest_does_not_vouch_for(
    tmp_path: Path, reader: dict[str, Any], rank: int
) -> None:
    async with SidecarUnderTest(tmp_path) as kv:
        for saved in range(2):
            new = new_save(
                tuple(range(10)), now_ms=kv.clock.now_ms(), cache_ref="ref_" + "1" * 32, rank=saved, world_size=2
            )
            await kv.send_all(new)
            await kv.catalog.seal(new.cache_ref, saved)
        plan = kv.plan(new)
        path = kv.path_of(block_key(plan, 1, rank))
    assert len(list(reader["read_pages"](tmp_path / "data", new.cache_ref, rank))) == 3
    path.unlink()
    write_block(path, block_meta(plan, 1, rank), fill=200)

    with pytest.raises(AssertionError):
        list(reader["read_pages"](tmp_path / "data", new.cache_ref, rank))
    assert len(list(reader["read_pages"](tmp_path / "data", new.cache_ref, 1 - rank))) == 3


def test_the_page_names_the_formats_that_are_written() -> None:
    text = DOCUMENT.read_text()

    assert f"`{BLOCK_FORMAT}`" in text
    assert f"`{MANIFEST_FORMAT}`" in text
