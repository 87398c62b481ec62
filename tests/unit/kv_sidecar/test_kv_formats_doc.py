"""The reader printed in docs/project/formats.md reads what the sidecar writes, and notices when it is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from contextcache.model import KVGroup
from contextcache.names import new_cache_ref
from kv_sidecar.catalog import ForkTerms
from kv_sidecar.format.block_file import FORMAT as BLOCK_FORMAT
from kv_sidecar.format.manifest import FORMAT as MANIFEST_FORMAT
from kv_sidecar.format.manifest import FORMAT_FORK, block_key, block_meta
from tests.kit.kv_blocks import (
    ENGINE_BLOCKS,
    LAYERS,
    PAGE_BYTES,
    SidecarUnderTest,
    block_file_bytes,
    fill_of,
    new_save,
    planned,
)

DOCUMENT = Path(__file__).parents[3] / "docs/project/formats.md"


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

    assert [token for _, _, ids, _ in blocks for token in ids] == list(range(num_tokens))
    for index, (_, _, _, pages) in enumerate(blocks):
        assert len(pages) == LAYERS * ENGINE_BLOCKS * PAGE_BYTES
        assert set(pages) == {fill_of(block_meta(plan, index, 0))}


GROUPS = (
    KVGroup("full_attention", 4, ((0, 18),), 0, "a0" * 8),
    KVGroup("sliding_window", 4, ((0, 6), (10, 18)), 8, "b0" * 8),
    KVGroup("state", 4, ((7, 8), (12, 18)), 0, "c0" * 8),
)


async def test_the_printed_reader_reads_every_file_of_every_group(tmp_path: Path, reader: dict[str, Any]) -> None:
    async with SidecarUnderTest(tmp_path) as kv:
        new = await kv.save(tuple(range(18)), groups=GROUPS)
        plan = kv.plan(new)
    files = list(reader["read_pages"](tmp_path / "data", new.cache_ref))

    assert [(group["digest"], first, first + len(ids)) for group, first, ids, _ in files] == [
        (GROUPS[file.group].digest, file.first_token, file.end_token) for file in plan.files
    ]
    for index, (_, _, _, pages) in enumerate(files):
        assert set(pages) == {fill_of(block_meta(plan, index, 0))}


@pytest.mark.parametrize("groups", [(), GROUPS])
async def test_the_printed_reader_reads_a_fork(tmp_path: Path, reader: dict[str, Any], groups: Any) -> None:
    """Seen to fail with the reader of format 2: it says so, and looks for no tails."""
    async with SidecarUnderTest(tmp_path) as kv:
        new = await kv.save(tuple(range(18)), groups=groups)
        fork = ForkTerms(new.tenant, "ctx_fork", new_cache_ref(), (new.cache_ref,), new.expires_at_ms)
        await kv.catalog.fork(fork)
        await kv.catalog.delete(new.tenant, new.session_id, ())
        plan = kv.plan(new)
    files = list(reader["read_pages"](tmp_path / "data", fork.cache_ref))

    assert [set(pages) for *_, pages in files] == [
        {fill_of(block_meta(plan, index, 0))} for index in range(len(plan.files))
    ]


def test_the_page_s_example_of_a_window_has_the_files_that_it_says() -> None:
    example = "has one block, tokens 0 to 255. It has three tails: 256 to 299, 900 to 1023 and 1024 to 1099"
    assert example in " ".join(DOCUMENT.read_text().split())
    group = KVGroup("sliding_window", 256, ((0, 300), (900, 1100)), 128, "b0" * 8)
    files = planned(new_save(tuple(range(1100)), now_ms=1, groups=(group,)), block_tokens=256).files

    assert [(file.kind, file.first_token, file.end_token) for file in files] == [
        ("block", 0, 256),
        ("tail", 256, 300),
        ("tail", 900, 1024),
        ("tail", 1024, 1100),
    ]


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
            new = await kv.sent(tuple(range(10)), cache_ref="ref_" + "1" * 32, rank=saved, world_size=2)
            await kv.catalog.seal(new.cache_ref, saved)
        plan = kv.plan(new)
        path = kv.path_of(block_key(plan, 1, rank))
    assert len(list(reader["read_pages"](tmp_path / "data", new.cache_ref, rank))) == 3
    path.write_bytes(block_file_bytes(block_meta(plan, 1, rank), fill=200))

    with pytest.raises(AssertionError):
        list(reader["read_pages"](tmp_path / "data", new.cache_ref, rank))
    assert len(list(reader["read_pages"](tmp_path / "data", new.cache_ref, 1 - rank))) == 3


def test_the_page_names_the_formats_that_are_written() -> None:
    text = DOCUMENT.read_text()

    assert f"`{BLOCK_FORMAT}`" in text
    assert f"`{MANIFEST_FORMAT}`" in text
    assert f"`{FORMAT_FORK}`" in text
