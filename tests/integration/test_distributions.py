"""Both wheels, as an index would have them: their files, their metadata, and their installation beside others."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from deploy.hatch_hooks import SERVER_PACKAGES
from deploy.release import current
from tests.kit.released import repository_of_this_tree

ROOT = Path(__file__).parents[2]
OTHER_PACKAGES_MAX = 8
"""Packages that the client brings beside itself."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The files that git holds: generated sources are not among them."""
    return repository_of_this_tree(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory, checkout):
    """Both wheels by their distribution's name, built from a clean checkout without a network."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    unpublished = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    subprocess.run([*command, "--wheel-dir", folder, ".", "deploy/server"], cwd=checkout, env=unpublished, check=True)
    return {path.name.split("-")[0]: path for path in folder.glob("*.whl")}


def files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def top_level(wheel):
    return {name.split("/")[0] for name in files(wheel) if ".dist-info/" not in name}


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_each_wheel_owns_its_import_names_and_no_framework_s(wheels):
    """Seen to fail with the package `injector`, which a well-known framework has too."""
    client, server = top_level(wheels["context_cache"]), top_level(wheels["context_cache_server"])

    assert client == {"contextcache"}
    assert server == set(SERVER_PACKAGES)
    assert "injector" not in client | server


def test_the_wheels_hold_what_is_no_python(wheels):
    """Scripts, the API document, the console's page and the marks of typed packages; no cache of a compiler."""
    client, server = files(wheels["context_cache"]), files(wheels["context_cache_server"])
    kinds = ("*.lua", "*.yaml", "*.json")
    data = [path for name in SERVER_PACKAGES for kind in kinds for path in (ROOT / name).rglob(kind)]
    expected = {str(path.relative_to(ROOT)) for path in data}
    console = {str(path.relative_to(ROOT)) for path in (ROOT / "gateway/console").rglob("*.*") if path.suffix != ".pyc"}

    assert expected
    assert expected | console <= set(server)
    assert "contextcache/py.typed" in client
    assert {f"{name}/py.typed" for name in SERVER_PACKAGES} <= set(server)
    assert not [name for name in client + server if name.endswith((".pyc", ".ts"))]


def test_the_client_s_wheel_holds_its_generated_sources(wheels):
    """Seen to fail without `artifacts`: hatchling leaves out the files that git ignores."""
    assert {"contextcache/client/_sync/contexts.py", "contextcache/client/errors.py"} <= set(
        files(wheels["context_cache"])
    )


def test_the_wheels_name_their_licences(wheels):
    client, server = metadata(wheels["context_cache"]), metadata(wheels["context_cache_server"])

    assert (client["License-Expression"], server["License-Expression"]) == ("Apache-2.0", "Apache-2.0 AND MIT")
    for wheel, told in ((wheels["context_cache"], client), (wheels["context_cache_server"], server)):
        named = set(told.get_all("License-File"))
        assert {name.rpartition("/licenses/")[2] for name in files(wheel) if "/licenses/" in name} == named
    assert {"LICENSE", "LICENSE.preact", "LICENSE.uPlot"} <= set(server.get_all("License-File"))


def test_the_server_needs_the_client_of_its_version(wheels):
    told = metadata(wheels["context_cache_server"])

    assert told["Version"] == metadata(wheels["context_cache"])["Version"] == current()
    needed = [line for line in told.get_all("Requires-Dist") if "extra ==" not in line]
    assert needed == [f"context-cache[parts]=={current()}"]


def test_the_client_starts_the_command(wheels):
    with zipfile.ZipFile(wheels["context_cache"]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))

        assert "context-cache = contextcache.__main__:main" in archive.read(name).decode()
    assert not [name for name in files(wheels["context_cache_server"]) if name.endswith("entry_points.txt")]


def test_a_page_of_an_index_has_no_dead_link_and_no_extra_for_development(wheels):
    """An index has no repository beside its page: links of a README to files would lead nowhere."""
    for wheel in wheels.values():
        told = metadata(wheel)
        assert not re.findall(r"\]\((?!https?://)[^)]*\)", told.get_payload())
        assert told.get_payload().startswith(f"# {told['Name']}")
        assert not {"dev", "local", "proto", "build"} & set(told.get_all("Provides-Extra"))
        assert told["Author"]
        assert told.get_all("Classifier")


@pytest.mark.thorough
@pytest.mark.parametrize("project", [".", "deploy/server"])
def test_a_publishing_workflow_adds_the_repository_s_address(tmp_path, project):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    where = os.environ | {"GITHUB_SERVER_URL": "https://git.example.org", "GITHUB_REPOSITORY": "them/cache"}
    subprocess.run([*command, "--wheel-dir", tmp_path, project], cwd=ROOT, env=where, check=True)
    (wheel,) = tmp_path.glob("*.whl")

    assert "Source, https://git.example.org/them/cache" in metadata(wheel).get_all("Project-URL")


class Environment:
    """An empty virtual environment, into which an index's packages are installed."""

    def __init__(self, folder):
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"

    def install(self, *wanted):
        command = [self.bin / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted]
        subprocess.run(command, check=True, timeout=300)

    def run(self, *command):
        done = subprocess.run(
            [self.bin / command[0], *command[1:]], cwd="/", capture_output=True, text=True, check=False, timeout=60
        )
        return done.returncode, done.stdout, done.stderr

    def packages(self):
        _, listed, _ = self.run("python", "-m", "pip", "list", "--format", "freeze", "--exclude", "pip")
        return {line.split("==")[0].split(" @")[0] for line in listed.splitlines()} - {"setuptools", "wheel"}


@pytest.mark.thorough
def test_the_client_brings_few_packages_and_names_the_extra_of_the_command_line(wheels, tmp_path):
    environment = Environment(tmp_path / "venv")
    environment.install(wheels["context_cache"])
    others = environment.packages() - {"context-cache"}
    imported = environment.run("python", "-c", "import contextcache.client, contextcache.doctor.examination")
    code, _, said = environment.run("context-cache", "--help")

    assert len(others) <= OTHER_PACKAGES_MAX, others
    assert imported[0] == 0, imported
    assert (code, "pip install 'context-cache[cli]'" in said) == (2, True)


@pytest.mark.thorough
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "theirs first"])
def test_both_install_beside_a_framework_named_injector_without_damage(wheels, tmp_path, ours_first):
    environment = Environment(tmp_path / "venv")
    ours = [f"{wheels['context_cache']}[cli]", f"{wheels['context_cache_server']}[injector]"]
    for wanted in (ours, ["injector"]) if ours_first else (["injector"], ours):
        environment.install(*wanted)

    used = environment.run("python", "-c", "import injector, pod_injector.pod_patch; injector.Injector()")
    assert used[0] == 0, used
    for words in (["--help"], ["doctor", "--help"], ["serve", "--help"], ["serve", "injector", "--help"]):
        code, said, complaint = environment.run("context-cache", *words)
        assert (code, complaint) == (0, ""), words
        assert "Usage" in said or "INJECTOR_" in said
    code, _, said = environment.run("context-cache", "serve", "manager")
    assert code == 2
    assert "install context-cache-server[manager]" in said
    assert environment.run("context-cache", "--version")[1] == f"context-cache {current()}\n"
