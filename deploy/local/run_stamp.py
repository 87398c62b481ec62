"""Which commit a run was of, and on which day: what every kept figure carries."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_stamp() -> dict[str, str]:
    """Return `commit`, with a `+` when files differ from it, empty without git, and `date` in UTC."""
    try:
        commit = _git("rev-parse", "--short=7", "HEAD") + ("+" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        commit = ""
    return {"commit": commit, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
