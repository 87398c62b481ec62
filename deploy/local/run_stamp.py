"""Kept results: the commit and the day that each of them carries, and the JSON in which they are written."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_stamp() -> dict[str, str]:
    """Return `commit`, with a `+` when files differ from it, empty without git, and `date` in UTC."""
    try:
        commit = _git("rev-parse", "--short=7", "HEAD") + ("+" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        commit = ""
    return {"commit": commit, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def as_lines(report: Mapping[str, Any]) -> str:
    """Return a report as JSON with one field or one row of a table a line."""
    return _broken(report, "\n") + "\n"


def _broken(value: Any, newline: str) -> str:
    inner = f"{newline} "
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {_written(entry, inner)}" for key, entry in value.items()]
        return "{" + inner + f",{inner}".join(entries) + newline + "}"
    return "[" + inner + f",{inner}".join(_written(entry, inner) for entry in value) + newline + "]"


def _written(value: Any, newline: str) -> str:
    return _broken(value, newline) if _holds_rows(value) else json.dumps(value, ensure_ascii=False)


def _holds_rows(value: Any) -> bool:
    """Tell whether a value is a table, or holds one: a list of objects, or an object of objects alone."""
    if isinstance(value, list):
        return any(isinstance(entry, dict) for entry in value)
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(entry, dict) for entry in value.values()) or any(map(_holds_rows, value.values()))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
