"""`make release` on a copy of this tree: what it changes, what it refuses, and that the next upgrade starts from it."""

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from deploy.local.progress import StepFailed
from deploy.release import current, notes, release
from tests.upgrade.snapshot import newest_snapshot

ROOT = Path(__file__).parents[2]


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def tree(tmp_path):
    """All that is or could be committed here, as the only commit of a repository."""
    root = tmp_path / "tree"
    for name in git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (ROOT / name).is_file() and not name.startswith("benchmarks/results/"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / "benchmarks" / "results", root / "benchmarks" / "results")
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "config", "user.name", "somebody")
    git(root, "config", "user.email", "somebody@example.com")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "all")
    return root


def test_a_release_is_named_everywhere_and_can_be_upgraded_from(tree):
    (tree / "changes" / "seen.feature.md").write_text("What nobody has seen before.\n")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--message", "a feature")

    tag = release("1.2.3", root=tree)

    assert tag == "v1.2.3"
    assert current(tree) == "1.2.3"
    chart = yaml.safe_load((tree / "charts" / "context-cache" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == ("1.2.3", "1.2.3")
    assert "context-cache:1.2.3" in chart["annotations"]["artifacthub.io/images"]
    assert "context-cache:1.2.3" in (tree / "docs/operations/install.md").read_text()
    assert "- What nobody has seen before.\n" in notes("1.2.3", root=tree)
    assert sorted(path.name for path in (tree / "changes").iterdir()) == ["README.md", "template.md.jinja"]
    with tarfile.open(newest_snapshot(tree / "tests" / "upgrade" / "releases")) as archive:
        assert "gateway/flows.py" in archive.getnames()
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "log", "--format=%s", "-2").splitlines()[1] == git(tree, "log", "-1", "--format=%s", tag)


def test_each_fragment_is_one_line_of_the_changelog_under_its_kind(tree):
    fragments = len(list((tree / "changes").glob("*.*.md")))

    release("1.0.0", root=tree)

    told = notes("1.0.0", root=tree)
    assert sum(line.startswith("- ") for line in told.splitlines()) == fragments
    assert [line for line in told.splitlines() if line.startswith("#")] == [
        "### Added",
        "### Fixed",
        "### Removed",
        "### Documentation",
    ]


@pytest.mark.parametrize(
    ("version", "spoil", "says"),
    [
        ("0.1.0", "", "no version after 0.1.0"),
        ("v9.0.0", "", "no version after"),
        ("", "", "make release VERSION=1.2.3"),
        ("9.0.0", "README.md", "not committed"),
        ("9.0.0", "tag", "there already"),
        ("9.0.0", "changes", "nothing to release"),
        ("9.0.0", "chart", "does not name version"),
    ],
)
def test_what_is_no_release_changes_nothing(tree, version, spoil, says):
    if spoil == "README.md":
        (tree / spoil).write_text("changed")
    elif spoil == "tag":
        git(tree, "tag", "v9.0.0")
    elif spoil == "changes":
        git(tree, "rm", "--quiet", "changes/*.*.md")
        git(tree, "commit", "--quiet", "--message", "no news")
    elif spoil == "chart":
        (tree / "charts" / "context-cache" / "Chart.yaml").write_text("version: 8.0.0\n")
        git(tree, "commit", "--quiet", "--all", "--message", "another chart")
    before = git(tree, "rev-parse", "HEAD"), git(tree, "status", "--porcelain")

    with pytest.raises(StepFailed, match=says):
        release(version, root=tree)

    assert (git(tree, "rev-parse", "HEAD"), git(tree, "status", "--porcelain")) == before
