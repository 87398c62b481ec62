"""`make release VERSION=1.2.3`: the version everywhere it stands, the changelog, a tag, and the snapshot of the tag.

Everything stays on this machine, in two commits and a tag; what to push is printed. The version's own place is
`pyproject.toml`. The next release's upgrade is rehearsed against the snapshot, which can only be taken of a tag.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from deploy.local.progress import StepFailed, say

ROOT = Path(__file__).resolve().parents[1]
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
_STANDS = {
    "pyproject.toml": r'^version = "{0}"$',
    "charts/context-cache/Chart.yaml": r'^(?:version: {0}|appVersion: "{0}")$|^ +image: context-cache(?:-vllm)?:{0}$',
    "docs/operations/install.md": r"context-cache(?:-vllm)?:{0}|VERSION={0}",
}
"""Where a version stands, by file: a pattern with the version in it."""


def release(version: str, *, root: Path = ROOT) -> str:
    """Commit and tag a release of what `root` holds; return the tag. Raises StepFailed: then nothing was changed."""
    before = current(root)
    if not _VERSION.fullmatch(version) or _parts(version) <= _parts(before):
        raise StepFailed(f"{version or 'nothing'} is no version after {before}: make release VERSION=1.2.3")
    if _run(root, "git", "status", "--porcelain"):
        raise StepFailed("there are changes that are not committed: a release is what is committed")
    tag = f"v{version}"
    if _run(root, "git", "tag", "--list", tag):
        raise StepFailed(f"{tag} is there already")
    if not list((root / "changes").glob("*.*.md")):
        raise StepFailed("changes/ is empty: nothing to release")
    try:
        for file, pattern in _STANDS.items():
            _write_version(root / file, pattern, before, version)
        _run(root, sys.executable, "-m", "towncrier", "build", "--yes", "--version", version)
        for generated in ("deploy.chart", "deploy.docs"):
            _run(root, sys.executable, "-m", generated)
    except StepFailed:
        _run(root, "git", "reset", "--hard", "--quiet")
        raise
    _run(root, "git", "add", "--all")
    _run(root, "git", "commit", "--quiet", "--message", f"Release {version}")
    _run(root, "git", "tag", "--annotate", tag, "--message", f"context-cache {version}")
    _run(root, sys.executable, "-m", "tests.upgrade.snapshot", tag)
    _run(root, "git", "add", "tests/upgrade/releases")
    _run(
        root, "git", "commit", "--quiet", "--message", f"Snapshot of {tag}, which the next release is rehearsed against"
    )
    return tag


def current(root: Path = ROOT) -> str:
    """Return the version of this tree."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version


def notes(version: str, *, root: Path = ROOT) -> str:
    """Return what the changelog says of a version, without its heading. Raises StepFailed when it says nothing."""
    changelog = (root / "CHANGELOG.md").read_text()
    found = re.search(rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise StepFailed(f"CHANGELOG.md says nothing of {version}")
    return found.group(1).strip()


def _write_version(file: Path, pattern: str, before: str, version: str) -> None:
    text = file.read_text()
    found = re.compile(pattern.format(re.escape(before)), re.MULTILINE)
    if not found.search(text):
        raise StepFailed(f"{file.name} does not name version {before}")
    file.write_text(found.sub(lambda match: match.group().replace(before, version), text))


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _run(root: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StepFailed(f"{' '.join(command[:4])}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout.strip()


def main(arguments: list[str] | None = None) -> int:
    """Release, or print this tree's `version`, or the changelog's `notes` on it; return the exit code."""
    given = (sys.argv[1:] if arguments is None else arguments) or [""]
    try:
        if given[0] in {"version", "notes"}:
            print(current() if given[0] == "version" else notes(current()))
            return 0
        tag = release(given[0])
    except StepFailed as failure:
        say(f"error: {failure}")
        return 1
    say(f"{tag} is committed and tagged here. Publish it: git push origin HEAD {tag}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
