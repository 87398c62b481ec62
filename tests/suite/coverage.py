"""What the tests of a part run of each package: lines and branches, as coverage.py counts them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePath

from deploy.local.table import render

_COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def options(file: Path) -> list[str]:
    """Return what makes pytest count and write to a file; which packages says pyproject.toml."""
    return ["--cov", "--cov-report", f"json:{file}"]


def by_package(report: Path) -> str:
    """Return a table: each package, and each package inside it."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0] * len(_COUNTS))
    for file, found in json.loads(report.read_text())["files"].items():
        folders = PurePath(file).parent.parts
        for name in {folders[0], "/".join(folders), "all"}:
            counts[name] = [sum(pair) for pair in zip(counts[name], _figures(found["summary"]), strict=True)]
    rows = [[name, str(found[1]), _percent(found)] for name, found in sorted(counts.items())]
    return render(["package", "statements", "covered"], rows)


def _figures(summary: Mapping[str, int]) -> list[int]:
    return [summary[name] for name in _COUNTS]


def _percent(counts: list[int]) -> str:
    lines, statements, taken, branches = counts
    return f"{100 * (lines + taken) / max(statements + branches, 1):.1f}%"
