"""The two Dockerfiles as they are, by a real builder: what they make runs as the chart runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from contextcache.cli.serve import PARTS
from deploy.docker.payload import make_payload
from deploy.release import current
from tests.kit.buildah import Buildah, missing_programs

ROOT = Path(__file__).parents[2]
BASE, IMAGE, VLLM_IMAGE = "localhost/base", "localhost/context-cache", "localhost/context-cache-vllm"
USER = "65532:65532"


@pytest.fixture(scope="module")
def buildah(tmp_path_factory):
    """A store with both images. vLLM's has gigabytes and is on no package index: the base stands for it."""
    if missing := missing_programs():
        pytest.skip(f"missing: {', '.join(missing)}")
    buildah = Buildah(tmp_path_factory.mktemp("buildah"))
    buildah.make_base(BASE)
    given = {"VERSION": current(), "PYTHON_IMAGE": BASE}
    buildah.build(IMAGE, ROOT / "deploy" / "docker" / "Dockerfile", ROOT, **given)
    buildah.build(VLLM_IMAGE, ROOT / "deploy" / "docker" / "Dockerfile.vllm", ROOT, **given, VLLM_IMAGE=BASE)
    return buildah


@pytest.mark.parametrize("part", PARTS)
def test_every_part_says_how_it_is_used_as_the_user_it_runs_as(buildah, part):
    assert buildah.run(IMAGE, "context-cache", "serve", part, "--help", user=USER).count("\n") > 3


@pytest.mark.parametrize("words", [["doctor", "--help"], ["ls", "--help"]])
def test_the_image_has_the_doctor_and_the_command_line(buildah, words):
    assert buildah.run(IMAGE, "context-cache", *words, user=USER).count("\n") > 3


def test_nothing_in_the_image_can_be_changed_by_what_runs_in_it(buildah):
    asked = "import os; print(os.getuid(), os.access('/opt/context-cache', os.W_OK))"

    assert buildah.run(IMAGE, "python", "-c", asked, user=USER) == "65532 False"


def test_vllms_python_finds_the_connector_and_what_it_brought_along(buildah):
    asked = "import sys, vllm_plugin, grpc; print(*sys.path, grpc.__file__)"
    *path, grpc = buildah.run(VLLM_IMAGE, "python3", "-c", asked, user=USER).split()

    payload = "/opt/context-cache/payload"
    assert all(path.index(payload) > path.index(each) for each in path if each.startswith("/usr/local/lib"))
    assert grpc == f"{payload}/grpc/__init__.py"


@pytest.mark.parametrize("image", [IMAGE, VLLM_IMAGE])
def test_an_image_says_its_version_and_user(buildah, image):
    config = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]

    assert config["Labels"]["org.opencontainers.image.version"] == current()
    assert config["User"] == USER


def test_an_sbom_of_the_image_names_what_is_in_it(buildah, tmp_path):
    archive, sbom = tmp_path / "image.tar", tmp_path / "sbom.json"
    buildah("push", IMAGE, f"oci-archive:{archive}:{IMAGE}")

    syft = Path(sys.executable).with_name("syft")
    subprocess.run([syft, "scan", f"oci-archive:{archive}", "-q", "-o", f"spdx-json={sbom}"], check=True, timeout=300)

    packages = {package["name"]: package["versionInfo"] for package in json.loads(sbom.read_text())["packages"]}
    assert packages["context-cache"] == current()
    assert {"grpcio", "aiohttp", "redis", "obstore", "libc6"} <= packages.keys()


def test_all_that_the_images_install_exists_for_arm64(tmp_path):
    pip = [sys.executable, "-m", "pip", "-q"]
    built = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "ours", ".", "deploy/server"]
    subprocess.run(built, check=True, cwd=ROOT)
    make_payload(tmp_path / "payload", wheels=tmp_path / "ours", machine="aarch64")

    compiled = [path.name for path in (tmp_path / "payload").rglob("*.so")]
    assert compiled
    assert all("aarch64" in name or "abi3" in name for name in compiled)

    platforms = [word for glibc in range(17, 37) for word in ("--platform", f"manylinux_2_{glibc}_aarch64")]
    target = ["--only-binary", ":all:", "--python-version", "3.12", *platforms, "--platform", "manylinux2014_aarch64"]
    locked = ["--no-deps", "--require-hashes", "--requirement", ROOT / "deploy" / "docker" / "image.lock"]
    subprocess.run([*pip, "download", "--dest", tmp_path / "wheels", *target, *locked], check=True)
