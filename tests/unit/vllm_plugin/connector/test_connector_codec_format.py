"""Coded files as docs/project/formats.md has them: its printed reader brings back the engine's own bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from kv_sidecar.client import BlockFileWriter, parse_block_file
from tests.kit.kv_blocks import block_meta_of
from tests.kit.paged_kv import HostKind
from vllm_plugin.connector.copies.codec import DTYPES, STEPS, CodedLayers
from vllm_plugin.connector.copies.pages import PageCopy

DOCUMENT = Path(__file__).parents[4] / "docs/project/formats.md"
NUM_BLOCKS, IDS = 6, [4, 1, 3]


@pytest.fixture
def reader() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    return names


def layers_of(kv: dict[str, torch.Tensor], name: str) -> CodedLayers:
    return CodedLayers(HostKind().open(kv, NUM_BLOCKS, [list(kv)]), ["full_attention"], name)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("content", [32, 13])
def test_the_printed_reader_brings_back_what_a_load_brings(
    tmp_path: Path, reader: dict[str, Any], name: str, dtype: str, content: int
) -> None:
    """Bit by bit: two layers alike and one of other pages, two pages coded and one as it is."""
    generator = torch.Generator().manual_seed(content)
    sizes = [(2, 8, content), (2, 8, content), (1, 8, content)]
    kv = {
        f"l{i}": torch.randn(NUM_BLOCKS, *size, generator=generator).to(DTYPES[dtype]) for i, size in enumerate(sizes)
    }
    layers = layers_of(kv, name)
    pages_bytes, codec = layers.stored(0, 3, 2)
    writer = BlockFileWriter(block_meta_of(), pages_bytes=pages_bytes, codec=codec)
    writer.begin(memoryview(bytearray(writer.size_bytes)))
    layers.gather([PageCopy(0, IDS, writer.pages, 3, num_full=2)])
    file = bytes(writer.finish())
    layers.scatter([PageCopy(0, IDS, parse_block_file(file).pages, 3, num_full=2)])
    (tmp_path / "file").write_bytes(file)
    metadata, _, pages = reader["read_safetensors"](tmp_path / "file")

    assert metadata["checksum"] == xxhash.xxh3_128_hexdigest(pages)
    assert reader["plain_pages"](metadata, pages) == b"".join(
        tensor[IDS].contiguous().view(torch.uint8).numpy().tobytes() for tensor in kv.values()
    )


def test_the_page_names_every_codec_and_type() -> None:
    text = DOCUMENT.read_text()

    assert all(f"`{word}`" in text for word in [*STEPS, *DTYPES])
