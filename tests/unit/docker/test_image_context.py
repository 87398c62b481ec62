"""What goes into the images: the payload for vLLM's containers, and Dockerfiles that say what the chart relies on."""

import re
import zipfile
from pathlib import Path

import pytest

from deploy.docker.context import EXTRAS, HERE, PAYLOAD_PACKAGES, unpack
from deploy.local.progress import StepFailed

DOCKERFILE = (HERE / "Dockerfile").read_text()


def wheel(folder: Path, name: str, **files: str) -> Path:
    path = folder / f"{name}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file.replace("__", "/").replace("_dot_", "."), text)
    return path


def test_wheels_of_several_pythons_lie_side_by_side(tmp_path):
    first = wheel(tmp_path, "x-cp311", xxhash__init_dot_py="same", xxhash__cp311_dot_so="a")
    second = wheel(tmp_path, "x-cp312", xxhash__init_dot_py="same", xxhash__cp312_dot_so="b")

    unpack([first, second], tmp_path / "payload")

    assert sorted(path.name for path in (tmp_path / "payload" / "xxhash").iterdir()) == [
        "cp311.so",
        "cp312.so",
        "init.py",
    ]


def test_wheels_of_different_releases_are_refused(tmp_path):
    first = wheel(tmp_path, "x-cp311", xxhash__init_dot_py="one")
    second = wheel(tmp_path, "x-cp312", xxhash__init_dot_py="two")

    with pytest.raises(StepFailed, match="differs"):
        unpack([first, second], tmp_path / "payload")


def test_of_our_own_wheel_only_what_the_plugin_imports_is_unpacked(tmp_path):
    ours = wheel(tmp_path, "ours", contextcache__rpc_dot_py="", gateway__app_dot_py="")

    unpack([ours], tmp_path / "payload", only=PAYLOAD_PACKAGES)

    assert [path.name for path in (tmp_path / "payload").iterdir()] == ["contextcache"]


def test_the_image_runs_as_a_number_that_is_not_root():
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["65532:65532"]


def test_the_image_has_every_extra_that_a_part_needs():
    assert f"context-cache[{','.join(EXTRAS)}]" in DOCKERFILE


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_no_base_is_chosen_silently(name):
    """A floating base would be another image every week; whoever builds says which one, by digest."""
    text = (HERE / name).read_text()

    assert re.findall(r"^ARG BASE.*$", text, re.MULTILINE) == ["ARG BASE"]
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
