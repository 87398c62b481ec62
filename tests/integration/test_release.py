"""`make release` on a copy of this tree: its changes, its refusals, and the snapshot for the next upgrade."""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from deploy.local.progress import StepFailed
from deploy.release import current, notes, release
from tests.kit.released import ROOT, add_fragment, commit, git, next_minor, repository_of_this_tree
from tests.upgrade.snapshot import newest_snapshot

FRAGMENTS = {
    "a.feature.md": "Turns may sing.",
    "b.fix.md": "Songs end.",
    "c.removal.md": "Whistles.",
    "d.doc.md": "Tunes.",
}


@pytest.fixture
def tree(tmp_path):
    return repository_of_this_tree(tmp_path / "tree")


def without_fragments(tree: Path) -> None:
    """Remove the fragments, if there are any: a tree is one that could be the first release."""
    for fragment in (tree / "changes").glob("*.*.md"):
        fragment.unlink()
    if git(tree, "status", "--porcelain"):
        commit(tree, "no fragments")


def test_a_release_writes_its_version_everywhere_and_stores_a_snapshot_of_its_tag(tree):
    add_fragment(tree, "seen.feature.md", "Turns may sing.")
    version = next_minor()

    tag = release(version, root=tree)

    assert tag == f"v{version}"
    assert current(tree) == version
    chart = yaml.safe_load((tree / "charts" / "context-cache" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert f"context-cache:{version}" in chart["annotations"]["artifacthub.io/images"]
    assert "- Turns may sing.\n" in f"{notes(version, root=tree)}\n"
    assert sorted(path.name for path in (tree / "changes").iterdir()) == ["README.md", "template.md.jinja"]
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "log", "--format=%s", "-2").splitlines()[1] == git(tree, "log", "-1", "--format=%s", tag)


@pytest.mark.thorough
def test_the_snapshot_of_a_tag_is_code_that_starts(tree, tmp_path):
    """Seen to fail with a package missing in the snapshot that the local stack imports."""
    add_fragment(tree, "seen.feature.md", "Turns may sing.")
    release(next_minor(), root=tree)

    snapshot = newest_snapshot(tree / "tests" / "upgrade" / "releases")
    with tarfile.open(snapshot) as archive:
        archive.extractall(tmp_path / "code", filter="data")
    modules = ("deploy.local.stack", "gateway.flows", "context_manager.manager", "kv_sidecar.catalog")
    imports = f"import {', '.join(modules)}, sys; print([sys.modules[name].__file__ for name in {modules}])"
    done = subprocess.run(
        [sys.executable, "-c", imports],
        cwd=tmp_path / "code",
        env={"PYTHONPATH": str(tmp_path / "code"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.count(str(tmp_path / "code")) == len(modules), done.stdout


@pytest.mark.thorough
def test_the_first_release_is_the_current_version_with_the_date_of_its_tag(tree):
    without_fragments(tree)
    version = current(tree)
    before = notes(version, root=tree)

    assert release(version, root=tree) == f"v{version}"

    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    assert re.search(heading, (tree / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert notes(version, root=tree) == before
    with pytest.raises(StepFailed, match=f"the tag v{version} exists already"):
        release(version, root=tree)


@pytest.mark.thorough
def test_each_fragment_is_one_line_of_the_changelog_under_its_kind_and_above_the_releases_before(tree):
    """Seen to fail with towncrier's underline, a line of `=`, below the heading."""
    without_fragments(tree)
    for name, text in FRAGMENTS.items():
        add_fragment(tree, name, text)
    version = next_minor()

    release(version, root=tree)

    lines = [line for line in notes(version, root=tree).splitlines() if line]
    assert lines == [
        *("### Added", "- Turns may sing.", "### Fixed", "- Songs end."),
        *("### Removed", "- Whistles.", "### Documentation", "- Tunes."),
    ]
    headings = re.findall(r"^## \[(.*?)\]", (tree / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == [version, current(ROOT)]


def test_the_changelog_has_no_relative_links():
    """Its text stands in the repository, on the site and on a release page: a relative link works in one of them."""
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "CHANGELOG.md").read_text())

    assert links
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.parametrize(
    ("version", "spoil", "says"),
    [
        ("0.0.1", "", "no version after"),
        pytest.param("v9.0.0", "", "no version after", marks=pytest.mark.thorough),
        pytest.param("", "", "make release VERSION=1.2.3", marks=pytest.mark.thorough),
        ("9.0.0", "README.md", "not committed"),
        pytest.param("9.0.0", "tag", "exists already", marks=pytest.mark.thorough),
        ("9.0.0", "changes", "nothing to release"),
        pytest.param("9.0.0", "chart", "does not name version", marks=pytest.mark.thorough),
        ("current", "fragment", "move the fragments in changes/ into the section"),
        pytest.param("current", "changelog", "CHANGELOG.md has no section", marks=pytest.mark.thorough),
    ],
)
def test_a_refused_release_changes_nothing(tree, version, spoil, says):
    without_fragments(tree)
    version = current(tree) if version == "current" else version
    if spoil == "tag":
        git(tree, "tag", "v9.0.0")
    elif spoil == "chart":
        add_fragment(tree, "seen.feature.md", "Turns may sing.")
        (tree / "charts" / "context-cache" / "Chart.yaml").write_text("version: 8.0.0\n")
        commit(tree, "another chart")
    elif spoil == "fragment":
        add_fragment(tree, "seen.feature.md", "Turns may sing.")
    elif spoil == "changelog":
        (tree / "CHANGELOG.md").write_text("# Changelog\n")
        commit(tree, "no section")
    elif spoil == "README.md":
        (tree / spoil).write_text("changed")
    before = git(tree, "rev-parse", "HEAD"), git(tree, "status", "--porcelain")

    with pytest.raises(StepFailed, match=says):
        release(version, root=tree)

    assert (git(tree, "rev-parse", "HEAD"), git(tree, "status", "--porcelain")) == before
