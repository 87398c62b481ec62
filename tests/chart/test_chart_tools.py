"""Fetching Helm: what is whole is kept, what is not is fetched, and nothing is taken that is not what it should be."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from deploy.chart import tools
from deploy.local.progress import StepFailed

PROGRAM = b"#!/bin/sh\n"
HELM = tools.Helm("9.9.9", "some-wheel==1", "0" * 64, hashlib.sha256(PROGRAM).hexdigest())


def wheel(path: Path, program: bytes) -> Path:
    """Write a wheel of the shape that brings Helm: a zip in a tar in a zip."""
    layer, package = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(layer, "w") as archive:
        archive.writestr("helm/helm", program)
    with tarfile.open(fileobj=package, mode="w:gz") as tar:
        member = tarfile.TarInfo("package/layer.zip")
        member.size = layer.tell()
        layer.seek(0)
        tar.addfile(member, layer)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/_jsii/x.jsii.tgz", package.getvalue())
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Stand for the package index; returns what it brings and what was asked of it."""
    brought = {"program": PROGRAM, "downloads": 0}

    def download(_helm: tools.Helm, folder: Path) -> Path:
        brought["downloads"] += 1
        return wheel(folder / "a.whl", brought["program"])

    monkeypatch.setattr(tools, "DIRECTORY", tmp_path / "helm")
    monkeypatch.setattr(tools, "_download", download)
    monkeypatch.setattr(tools, "_has_wheels", lambda: True)
    return brought


def test_a_program_is_fetched_once(index):
    tools.fetch((HELM,))
    tools.fetch((HELM,))

    assert index["downloads"] == 1
    assert HELM.path.read_bytes() == PROGRAM
    assert HELM.path.stat().st_mode & 0o111


def test_a_program_that_is_damaged_is_fetched_again(index):
    tools.fetch((HELM,))
    HELM.path.write_bytes(PROGRAM[:4])
    tools.fetch((HELM,))

    assert (index["downloads"], HELM.path.read_bytes()) == (2, PROGRAM)


def test_a_program_that_is_not_the_one_that_was_pinned_is_refused_and_leaves_nothing(index):
    index["program"] = b"something else"
    with pytest.raises(StepFailed, match=r"not Helm 9\.9\.9"):
        tools.fetch((HELM,))

    assert [path.name for path in tools.DIRECTORY.iterdir()] == [".lock"]


def test_where_there_is_no_wheel_for_the_machine_it_says_what_to_do(index, monkeypatch):
    monkeypatch.setattr(tools, "_has_wheels", lambda: False)
    with pytest.raises(StepFailed, match="put the program at"):
        tools.fetch((HELM,))

    HELM.path.write_bytes(b"the machine's own")
    tools.fetch((HELM,))
    assert index["downloads"] == 0


def test_both_versions_are_pinned_by_the_hash_of_wheel_and_program():
    for helm in tools.HELMS:
        assert all(len(helm_hash) == 64 for helm_hash in (helm.wheel_sha256, helm.program_sha256))
    assert {helm.version[0] for helm in tools.HELMS} == {"3", "4"}
