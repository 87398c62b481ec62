"""Copies of this tree as repositories of their own, for tests that release."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from deploy.release import current

ROOT = Path(__file__).parents[2]


def git(root: Path, *words: str) -> str:
    """Run git in a repository and return its output."""
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def repository_of_this_tree(root: Path) -> Path:
    """Copy each file that is or could be committed here into a new repository with one commit; return `root`."""
    for name in git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "config", "user.name", "releaser")
    git(root, "config", "user.email", "releaser@example.com")
    commit(root, "all")
    return root


def commit(root: Path, message: str) -> None:
    """Commit all changes of a repository."""
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", message)


def add_fragment(root: Path, name: str, text: str) -> None:
    """Commit a fragment of the changelog."""
    (root / "changes" / name).write_text(f"{text}\n")
    commit(root, name)


def next_minor(root: Path = ROOT) -> str:
    """Return the next version with a new feature after the tree's: 0.2.0 after 0.1.3."""
    major, minor, _ = current(root).split(".")
    return f"{major}.{int(minor) + 1}.0"
