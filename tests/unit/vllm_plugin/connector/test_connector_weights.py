"""What the weights are: any training changes it, a place or a time does not, and little is read of much."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_plugin.connector.identity.weights import PIECE_BYTES, PIECES_MAX, UnreadableWeights, sample, weights_identity

SIZES = {"norm": 512, "mlp": 3_000_000, "attention": 1_000_000}


def write_safetensors(path: Path, sizes: dict[str, int] = SIZES, *, seed: int = 0) -> Path:
    """Write uint8 tensors of random bytes."""
    generator = np.random.default_rng(seed)
    header, end = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    spelled = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(spelled)) + spelled + generator.bytes(end))
    return path


def write_sparse(path: Path, sizes: dict[str, int]) -> None:
    write_safetensors(path, dict.fromkeys(sizes, 0))
    header, end = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    spelled = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(spelled)) + spelled)
        file.truncate(8 + len(spelled) + end)


def nudge(path: Path, *, every: int = 1) -> None:
    """Change each `every`th byte behind the header by one, as training does with its last bits."""
    data = np.fromfile(path, np.uint8)
    first = 8 + int.from_bytes(data[:8].tobytes(), "little") if path.suffix == ".safetensors" else 0
    data[first::every] += 1
    data.tofile(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "model" / "a.safetensors", seed=1)
    write_safetensors(tmp_path / "model" / "b.safetensors", seed=2)
    return tmp_path / "model"


def test_files_of_the_same_size_with_other_values_are_other_weights(model: Path) -> None:
    before = sample(model).sha256
    nudge(model / "a.safetensors")

    assert sample(model).sha256 != before


def test_one_changed_byte_in_a_thousand_of_one_tensor_is_seen(model: Path) -> None:
    before = sample(model).sha256
    nudge(model / "b.safetensors", every=1000)

    assert sample(model).sha256 != before


@pytest.mark.parametrize("name", list(SIZES))
def test_every_tensor_is_looked_at(model: Path, name: str) -> None:
    before, path = sample(model).sha256, model / "a.safetensors"
    data = bytearray(path.read_bytes())
    length = struct.unpack("<Q", data[:8])[0]
    start, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    for at in range(8 + length + start, 8 + length + end):
        data[at] ^= 1
    path.write_bytes(data)

    assert sample(model).sha256 != before


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".gguf"])
def test_files_of_other_formats_count_by_their_ends_and_pieces(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(np.random.default_rng(3).bytes(5_000_000))
    before = sample(tmp_path)
    nudge(path, every=2000)

    assert sample(tmp_path).sha256 != before.sha256


def test_a_file_more_or_less_or_renamed_or_longer_is_seen(model: Path) -> None:
    seen = {sample(model).sha256}
    write_safetensors(model / "c.safetensors", seed=3)
    seen.add(sample(model).sha256)
    (model / "c.safetensors").rename(model / "d.safetensors")
    seen.add(sample(model).sha256)
    (model / "d.safetensors").unlink()
    with (model / "a.safetensors").open("ab") as file:
        file.write(b"\0")
    seen.add(sample(model).sha256)

    assert len(seen) == 4


def test_neither_the_place_nor_the_time_nor_other_files_make_other_weights(model: Path, tmp_path: Path) -> None:
    before = sample(model).sha256
    copy = tmp_path / "somewhere" / "else"
    shutil.copytree(model, copy)
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    (copy / "README.md").write_text("another")
    write_safetensors(copy / "original" / "consolidated.safetensors")
    write_safetensors(copy / ".cache" / "download.safetensors")

    assert sample(copy, ignored=["original/**/*", "original/*"]).sha256 == before


def test_a_snapshot_of_links_is_its_files(model: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for file in model.iterdir():
        (links / file.name).symlink_to(file)

    assert sample(links).sha256 == sample(model).sha256


def test_what_is_read_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    sizes = {f"layer.{i}": 64 << 20 for i in range(128)}
    write_sparse(tmp_path / "large.safetensors", sizes)
    found = sample(tmp_path)

    assert (tmp_path / "large.safetensors").stat().st_size > 8 << 30
    assert found.size_bytes < 6 << 20


def test_what_is_read_is_bounded_for_many_tensors_and_each_is_still_read(tmp_path: Path) -> None:
    sizes = {f"expert.{i}": 1 << 20 for i in range(20_000)}
    write_sparse(tmp_path / "experts.safetensors", sizes)
    found = sample(tmp_path)

    assert PIECES_MAX <= found.num_reads <= len(sizes) + 1
    assert found.size_bytes < (len(sizes) + 1000) * PIECE_BYTES


@pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 64, struct.pack("<Q", 10) + b"not json!!" + b"x" * 100])
def test_a_file_that_is_no_safetensors_file_counts_as_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.safetensors"
    path.write_bytes(content)
    before = sample(tmp_path).sha256
    path.write_bytes(content[:-1] + b"?")

    assert sample(tmp_path).sha256 != before


def test_a_header_that_points_outside_its_file_is_not_believed(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "cut.safetensors")
    os.truncate(path, 1_000_000)

    assert sample(tmp_path).num_files == 1


def test_no_files_or_no_time_is_said_and_not_guessed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableWeights):
        sample(tmp_path / "empty")
    with pytest.raises(UnreadableWeights, match="time limit"):
        sample(model, ends_at_s=0)


def engine(model: Path | str, *, draft: Any = None, **changes: Any) -> Any:
    values = {"load_format": "auto", "quantization": None, "model_weights": "", "download_dir": None} | changes
    model_config = SimpleNamespace(
        model=str(model),
        revision=values.get("revision"),
        quantization=values["quantization"],
        model_weights=values["model_weights"],
    )
    load = SimpleNamespace(
        load_format=values["load_format"], download_dir=values["download_dir"], ignore_patterns=["original/**/*"]
    )
    speculative = None if draft is None else SimpleNamespace(draft_model_config=draft, draft_load_config=None)
    return SimpleNamespace(model_config=model_config, load_config=load, speculative_config=speculative)


def test_a_draft_model_s_weights_count_too(model: Path, tmp_path: Path) -> None:
    other = write_safetensors(tmp_path / "draft" / "draft.safetensors").parent
    draft = engine(other).model_config
    with_draft = weights_identity(engine(model, draft=draft))
    nudge(other / "draft.safetensors")

    assert with_draft != weights_identity(engine(model))
    assert weights_identity(engine(model, draft=draft)) != with_draft


def test_a_draft_that_is_the_model_itself_is_not_read_twice(model: Path) -> None:
    same = engine(model)

    assert weights_identity(engine(model, draft=same.model_config)) == weights_identity(same)


@pytest.mark.parametrize(
    "changes",
    [
        {"load_format": "tensorizer"},
        {"load_format": "ipc_cache"},
        {"load_format": "somebody's plugin"},
        {"model_weights": "s3://bucket/model"},
        {"load_format": "dummy", "quantization": "gptq"},
    ],
)
def test_weights_that_lie_elsewhere_are_not_guessed_at(model: Path, changes: dict[str, Any]) -> None:
    assert weights_identity(engine(model, **changes)) is None


def test_made_up_weights_are_equal_for_an_equal_configuration(model: Path) -> None:
    assert weights_identity(engine(model, load_format="dummy")) == "dummy"


def test_a_model_of_the_hub_is_the_commit_its_revision_names_in_the_cache(tmp_path: Path) -> None:
    commits = ["a" * 40, "b" * 40]
    repository = tmp_path / "models--some--model"
    for commit in commits:
        (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commits[0])
    before = weights_identity(engine("some/model", download_dir=str(tmp_path)))
    (repository / "refs" / "main").write_text(commits[1])
    after = weights_identity(engine("some/model", download_dir=str(tmp_path)))

    assert (before, after) == tuple(f"commit:{commit}" for commit in commits)
    assert weights_identity(engine("no/model", download_dir=str(tmp_path))) is None
