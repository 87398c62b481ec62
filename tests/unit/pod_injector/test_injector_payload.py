"""The payload: whole or not there, readable for every user, and behind vLLM's own packages on the search path."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pod_injector.payload import copy_payload


@pytest.fixture
def source(tmp_path):
    """A payload with a package of its own, and one that vLLM brings too."""
    folder = tmp_path / "image"
    for name in ("ours_only", "both"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("WHERE = 'payload'\n")
    (folder / "both" / "__pycache__").mkdir()
    (folder / "both" / "__pycache__" / "stale.pyc").write_text("x")
    return folder


@pytest.fixture
def vllms(tmp_path):
    """What stands for vLLM's site-packages: the package, and a sitecustomize of its own."""
    folder = tmp_path / "vllms"
    (folder / "both").mkdir(parents=True)
    (folder / "both" / "__init__.py").write_text("WHERE = 'vllm'\n")
    (folder / "sitecustomize.py").write_text("import builtins\nbuiltins.vllms_own = True\n")
    return folder


def run_python(program, *, path):
    """Return what an interpreter prints, which sees PYTHONPATH as in the injected container."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(map(str, path)), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_packages_of_vllm_win_and_what_it_lacks_is_found(tmp_path, source, vllms):
    copy_payload(tmp_path / "copy", source=source)

    # PYTHONPATH is the only place in front of site-packages that the test may use; the order is what counts.
    said = run_python(
        "import both, ours_only; print(both.WHERE, ours_only.WHERE)", path=(tmp_path / "copy" / "start", vllms)
    )

    assert said == ["vllm", "payload"]


def test_processes_that_vllm_starts_find_it_too(tmp_path, source, vllms):
    copy_payload(tmp_path / "copy", source=source)
    child = "import ours_only; print(ours_only.WHERE)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"

    assert run_python(parent, path=(tmp_path / "copy" / "start", vllms)) == ["payload"]


def test_a_sitecustomize_of_the_image_still_runs(tmp_path, source, vllms):
    copy_payload(tmp_path / "copy", source=source)

    said = run_python("import builtins; print(builtins.vllms_own)", path=(tmp_path / "copy" / "start", vllms))

    assert said == ["True"]


def test_the_path_has_the_payload_once_and_last(tmp_path, source, vllms):
    copy_payload(tmp_path / "copy", source=source)

    said = run_python("import sys, sitecustomize; print(*sys.path[1:])", path=(tmp_path / "copy" / "start", vllms))

    packages = str(tmp_path / "copy" / "packages")
    assert said[-1] == packages
    assert said.count(packages) == 1


def test_everybody_may_read_a_copy_and_nobody_elses_bytecode_is_in_it(tmp_path, source):
    (source / "both" / "__init__.py").chmod(0o600)
    copy_payload(tmp_path / "copy", source=source)

    modes = {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "copy").rglob("*")}
    assert modes == {"0o755", "0o644"}
    assert not list((tmp_path / "copy").rglob("*.pyc"))


def test_a_second_run_replaces_what_an_interrupted_one_left(tmp_path, source):
    target = tmp_path / "copy"
    (target / ".incoming" / "packages").mkdir(parents=True)
    (target / "packages" / "old").mkdir(parents=True)
    copy_payload(target, source=source)

    assert sorted(path.name for path in target.iterdir()) == ["packages", "start"]
    assert sorted(path.name for path in (target / "packages").iterdir()) == ["both", "ours_only"]


def test_an_image_without_the_payload_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="without the payload"):
        copy_payload(tmp_path / "copy", source=tmp_path / "nothing")
