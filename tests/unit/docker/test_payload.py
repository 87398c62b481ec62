"""What the plugin brings along into vLLM's containers, and what the chart relies on in the Dockerfiles."""

import re
import tomllib
import zipfile
from pathlib import Path

import pytest

from deploy.docker.payload import LOCK, PACKAGES, PYTHONS, REQUIREMENTS, locked, names, unpack
from deploy.lock import LOCKS

DOCKERFILES = sorted(Path("deploy/docker").glob("Dockerfile*"))
PROJECT = tomllib.loads(Path("pyproject.toml").read_text())["project"]
SERVER = tomllib.loads(Path("deploy/server/pyproject.toml").read_text())["project"]


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

    with pytest.raises(SystemExit, match="differs"):
        unpack([first, second], tmp_path / "payload")


def test_of_our_own_wheel_only_what_the_plugin_imports_is_unpacked(tmp_path):
    ours = wheel(tmp_path, "ours", contextcache__rpc_dot_py="", gateway__app_dot_py="")

    unpack([ours], tmp_path / "payload", only=PACKAGES)

    assert [path.name for path in (tmp_path / "payload").iterdir()] == ["contextcache"]


def test_the_payload_serves_every_python_that_a_wheel_of_ours_may_meet():
    assert PYTHONS[0] == PROJECT["requires-python"].removeprefix(">=")
    assert all(line.startswith("#") or re.fullmatch("[a-z-]+", line) for line in REQUIREMENTS.read_text().splitlines())


def test_the_image_has_every_extra_that_a_part_needs():
    (image,) = (lock for lock in LOCKS if lock.file == "deploy/docker/image.lock")
    client, server = (re.search(r"\[([a-z,-]+)\]$", line)[1].split(",") for line in image.requirements)

    assert set(client) == set(PROJECT["optional-dependencies"]) - {"openai", "parts"}  # the server asks for parts
    assert set(server) == set(SERVER["optional-dependencies"]) - {"lmcache", "vllm-plugin"}


def test_the_payload_takes_versions_and_hashes_from_the_images_lock():
    found = locked(LOCK.read_text(), names())

    assert len(found) == len(names())
    assert all(" --hash=sha256:" in line for line in found)
    with pytest.raises(SystemExit, match="no-such-package"):
        locked(LOCK.read_text(), ["no-such-package"])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_ends_as_a_number_that_is_not_root(path):
    text = path.read_text().replace("${RUN_AS}", "65532")

    assert re.findall(r"^USER (.*)$", text, re.MULTILINE)[-1] == "65532:65532"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_base_can_be_chosen_and_none_floats(path):
    """`latest` would be another image every week."""
    text = path.read_text()
    defaults = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", text, re.MULTILINE))

    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {f"${{{name}}}" for name in defaults}
    assert all(re.search(r":v?\d+\.\d+[-.\w]*$", image) for image in defaults.values())
