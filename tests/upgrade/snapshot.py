"""`python -m tests.upgrade.snapshot <tag>`: what runs beside the next release, out of a tag; part of releasing.

A snapshot is the tag's own code, xz over tar, in `releases/<tag>.tar.xz`, committed with the release. Only a tag has
one: a commit that nobody can have installed is no release to upgrade from.
"""

from __future__ import annotations

import lzma
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RELEASES = Path(__file__).with_name("releases")
CODE = (
    "gateway",
    "context_manager",
    "kv_sidecar",
    "vllm_plugin",
    "integrations",
    "contextcache",
    "deploy",
    "proto",
    "buf.yaml",
)
_TAG = re.compile(r"v?\d+\.\d+\.\d+")


def write_snapshot(tag: str, *, root: Path = ROOT, releases: Path = RELEASES) -> Path:
    """Write the snapshot of a release's tag and return its file. Raises SystemExit when there is no such tag."""
    known = subprocess.run(["git", "tag", "--list", tag], cwd=root, capture_output=True, text=True, check=True).stdout
    if not _TAG.fullmatch(tag) or known.strip() != tag:
        raise SystemExit(f"{tag} is no tag of a release here (git tag v1.2.3)")
    archive = subprocess.run(["git", "archive", tag, *CODE], cwd=root, capture_output=True, check=True).stdout
    releases.mkdir(exist_ok=True)
    file = releases / f"{tag}.tar.xz"
    file.write_bytes(lzma.compress(archive, preset=9 | lzma.PRESET_EXTREME))
    return file


def newest_snapshot(releases: Path = RELEASES) -> Path | None:
    """Return the file of the newest release; None while there is none."""
    return max(releases.glob("*.tar.xz"), key=_version, default=None)


def _version(file: Path) -> tuple[int, ...]:
    return tuple(map(int, file.name.removesuffix(".tar.xz").removeprefix("v").split(".")))


if __name__ == "__main__":
    print(write_snapshot(sys.argv[1]))
