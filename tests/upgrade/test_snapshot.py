"""What a snapshot is made of, and which one is the release before."""

from __future__ import annotations

import subprocess
import tarfile

import pytest

from tests.upgrade.snapshot import CODE, newest_snapshot, write_snapshot


@pytest.fixture
def repository(tmp_path):
    """A repository with one commit that has a tag of a release, and another."""
    root = tmp_path / "repository"
    for name in CODE:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name) if "." in name else (root / name).mkdir()
        if (root / name).is_dir():
            (root / name / "code.py").write_text(name)
    commit = ["-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "-qm", "x"]
    for words in (["init", "-q"], ["add", "."], commit, ["tag", "v0.10.0"], ["tag", "not-a-release"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    return root


def test_a_snapshot_is_the_code_of_the_tag(repository, tmp_path):
    (repository / "gateway" / "code.py").write_text("newer than the tag")

    file = write_snapshot("v0.10.0", root=repository, releases=tmp_path)

    with tarfile.open(file) as archive:
        assert archive.extractfile("gateway/code.py").read() == b"gateway"
        assert {name.partition("/")[0] for name in archive.getnames()} == set(CODE)


@pytest.mark.parametrize("tag", ["HEAD", "v0.11.0", "not-a-release"])
def test_what_is_no_tag_of_a_release_has_no_snapshot(repository, tmp_path, tag):
    with pytest.raises(SystemExit, match=f"{tag} is no tag"):
        write_snapshot(tag, root=repository, releases=tmp_path)

    assert newest_snapshot(tmp_path) is None


def test_the_newest_is_that_of_the_highest_version(tmp_path):
    for name in ("v0.9.0", "v0.10.0", "v0.2.11"):
        (tmp_path / f"{name}.tar.xz").touch()

    assert newest_snapshot(tmp_path) == tmp_path / "v0.10.0.tar.xz"
