"""`python -m deploy.chart`: write the chart's files that follow from others; with `--check`, fail when one is stale.

From values.yaml, which is written by hand: its schema, the tables of the README, and the keys that must stay maps.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from deploy.chart.dashboard import dashboard_json
from deploy.chart.values import BadValues, maps_text, read_values, schema_text, tables

CHART = Path(__file__).resolve().parents[2] / "charts" / "context-cache"
_TABLES_BELOW = "\n## Values\n"


def generated() -> Mapping[str, str]:
    """Return the text of each file by its path in the chart. Raises BadValues."""
    keys = read_values((CHART / "values.yaml").read_text())
    readme = (CHART / "README.md").read_text().partition(_TABLES_BELOW)[0]
    return {
        "values.schema.json": schema_text(keys),
        "README.md": f"{readme}{_TABLES_BELOW}\n{tables(keys)}",
        "files/sections.json": maps_text(keys),
        "files/dashboard.json": dashboard_json(),
    }


def main() -> None:
    """Write, or check; exit 1 when a file is stale."""
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(f"usage: python -m deploy.chart [--check]\n{__doc__}")
    try:
        texts = generated()
    except BadValues as bad:
        sys.exit(str(bad))
    stale = []
    for name, text in texts.items():
        path = CHART / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text)
    if check and stale:
        sys.exit(f"stale, run python -m deploy.chart: {', '.join(stale)}")
    print("\n".join(f"written: {name}" for name in stale) or "up to date")


if __name__ == "__main__":
    main()
