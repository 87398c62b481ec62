"""Block files that the engine reads on the sidecar's disk: named inside its directory, of a block's size, whole."""

from pathlib import Path
from typing import Any

import pytest

from contextcache.errors import CorruptBlock
from kv_sidecar.block_id import block_id
from kv_sidecar.client import BlockFileWriter, BlockMeta
from vllm_plugin.connector.loading import Loader
from vllm_plugin.connector.settings import ConnectorSettings
from vllm_plugin.connector.sidecar_link import Terms

FINGERPRINT, TOKEN_IDS = "f" * 64, (1, 2)
META = BlockMeta(
    kind="block",
    name=block_id(FINGERPRINT, "demo", "", TOKEN_IDS),
    parent="",
    tenant="demo",
    fingerprint=FINGERPRINT,
    rank=0,
    token_ids=TOKEN_IDS,
)


@pytest.fixture
def loader() -> Loader:
    nothing: Any = None
    return Loader(
        settings=ConnectorSettings(sidecar="", secret_file=""),
        link=nothing,
        layers=nothing,
        results=nothing,
        reporter=nothing,
        counters=nothing,
        clock=nothing,
    )


@pytest.fixture
def terms(tmp_path: Path) -> Terms:
    directory = tmp_path / "data"
    (directory / "blocks").mkdir(parents=True)
    return Terms(256, None, 1 << 20, directory)


def write(path: Path) -> bytes:
    writer = BlockFileWriter(path, META, pages_bytes=64)
    writer.pages[:] = 7
    writer.finish()
    return path.read_bytes()


def test_a_named_file_is_read_whole_and_its_bytes_are_checked(loader: Loader, terms: Terms) -> None:
    assert terms.disk_directory is not None
    write(terms.disk_directory / "blocks" / "x")

    block = loader._read_disk("blocks/x", terms)
    block.verify(META)

    assert (block.pages == 7).all()


def test_a_cut_file_is_corrupt(loader: Loader, terms: Terms) -> None:
    assert terms.disk_directory is not None
    path = terms.disk_directory / "blocks" / "x"
    path.write_bytes(write(path)[:-1])

    with pytest.raises(CorruptBlock):
        loader._read_disk("blocks/x", terms).verify(META)


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret", "blocks/../../secret"])
def test_a_name_outside_the_data_directory_is_refused(loader: Loader, terms: Terms, name: str) -> None:
    with pytest.raises(CorruptBlock):
        loader._read_disk(name, terms)


def test_a_name_is_refused_when_no_directory_is_shared(loader: Loader) -> None:
    with pytest.raises(CorruptBlock):
        loader._read_disk("blocks/x", Terms(256, None, 1 << 20))


def test_a_file_larger_than_a_block_is_refused(loader: Loader, terms: Terms) -> None:
    assert terms.disk_directory is not None
    (terms.disk_directory / "blocks" / "x").write_bytes(bytes(2 << 20))

    with pytest.raises(CorruptBlock):
        loader._read_disk("blocks/x", terms)
