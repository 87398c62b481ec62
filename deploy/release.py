"""`make release VERSION=1.2.3`: write the version and the changelog, commit, tag, and store the snapshot of the tag.

The first release has a section of the changelog that was written by hand. Later ones get theirs from the fragments in
`changes/`. Nothing leaves this machine: the command makes two commits and a tag, and prints the push command.
"""

from __future__ import annotations

import datetime as dt
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from deploy.local.progress import StepFailed, exit_code, say

ROOT = Path(__file__).resolve().parents[1]
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
_PLACES = {
    "pyproject.toml": r'^version = "{0}"$',
    "charts/context-cache/Chart.yaml": r'^(?:version: {0}|appVersion: "{0}")$|^ +image: context-cache(?:-vllm)?:{0}$',
}
"""Pattern of each place that must name the version, by file."""
_IN_PAGES = r"(?:context-cache(?:-vllm|-server)?(?:\[[a-z,-]+\])?(?::|==)|VERSION=|--version ){0}(?![\w.-])"
"""Pattern of the version in commands of README.md and the pages in docs/."""


def release(version: str, *, root: Path = ROOT) -> str:
    """Commit and tag a release of the tree in `root`; return the tag. Raises StepFailed; the tree is then unchanged."""
    before = current(root)
    tag = f"v{version}"
    if not _VERSION.fullmatch(version) or _parts(version) < _parts(before):
        raise StepFailed(f"{version or 'nothing'} is no version after {before}: make release VERSION=1.2.3")
    if _run(root, "git", "status", "--porcelain"):
        raise StepFailed("the tree has changes that are not committed: commit them first")
    if _run(root, "git", "tag", "--list", tag):
        raise StepFailed(f"the tag {tag} exists already")
    fragments = list((root / "changes").glob("*.*.md"))
    if version != before and not fragments:
        raise StepFailed("changes/ has no fragments: there is nothing to release")
    try:
        if version == before:
            _date_section(root, version, fragments)
        else:
            _write_version(root, before, version)
            _run(root, sys.executable, "-m", "towncrier", "build", "--yes", "--version", version)
        for generated in ("deploy.client_sources", "deploy.chart", "deploy.docs"):
            _run(root, sys.executable, "-m", generated)
    except StepFailed:
        _run(root, "git", "reset", "--hard", "--quiet")
        raise
    _commit(root, f"Release {version}")
    _run(root, "git", "tag", "--annotate", tag, "--message", f"context-cache {version}")
    _run(root, sys.executable, "-m", "tests.upgrade.snapshot", tag)
    _commit(root, f"Snapshot of {tag} for the rehearsal of the next upgrade")
    return tag


def current(root: Path = ROOT) -> str:
    """Return the version of this tree."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version


def notes(version: str, *, root: Path = ROOT) -> str:
    """Return the changelog's section of a version, without its heading. Raises StepFailed when there is none."""
    changelog = (root / "CHANGELOG.md").read_text()
    found = re.search(rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise StepFailed(f"CHANGELOG.md has no section '## [{version}]'")
    return found.group(1).strip()


def _date_section(root: Path, version: str, fragments: list[Path]) -> None:
    """Write today's date into the section of the first release, which was written by hand."""
    notes(version, root=root)
    if fragments:
        names = ", ".join(sorted(path.name for path in fragments))
        raise StepFailed(f"move the fragments in changes/ into the section {version} of CHANGELOG.md: {names}")
    changelog = root / "CHANGELOG.md"
    heading = f"## [{version}] - "
    text = re.sub(rf"^{re.escape(heading)}.*$", heading + _today(), changelog.read_text(), flags=re.MULTILINE)
    changelog.write_text(text)


def _today() -> str:
    return dt.datetime.now(dt.UTC).date().isoformat()


def _write_version(root: Path, before: str, version: str) -> None:
    for name, pattern in _PLACES.items():
        if not _replace(root / name, pattern, before, version):
            raise StepFailed(f"{Path(name).name} does not name version {before}")
    for page in (root / "README.md", *(root / "docs").rglob("*.md")):
        _replace(page, _IN_PAGES, before, version)


def _replace(file: Path, pattern: str, before: str, version: str) -> bool:
    """Replace the version in all matches; return whether there is one."""
    text = file.read_text()
    found = re.compile(pattern.format(re.escape(before)), re.MULTILINE)
    new, matches = found.subn(lambda match: match.group().replace(before, version), text)
    if new != text:
        file.write_text(new)
    return matches > 0


def _commit(root: Path, message: str) -> None:
    """Commit all changes; without changes there is no commit."""
    _run(root, "git", "add", "--all")
    if _run(root, "git", "status", "--porcelain"):
        _run(root, "git", "commit", "--quiet", "--message", message)


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _run(root: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StepFailed(f"{' '.join(command[:4])}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout.strip()


@exit_code
def main(arguments: list[str] | None = None) -> None:
    """Release, or print the tree's `version` or its section of the changelog (`notes`); return the exit code."""
    given = (sys.argv[1:] if arguments is None else arguments) or [""]
    if given[0] in {"version", "notes"}:
        print(current() if given[0] == "version" else notes(current()))
        return
    tag = release(given[0])
    say(f"{tag} is committed and tagged here. Publish it: git push origin HEAD {tag}")


if __name__ == "__main__":
    sys.exit(main())
