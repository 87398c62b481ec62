"""`python -m deploy.chart`: write the chart's generated files; with `--check`, fail when one is stale."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from deploy.chart.dashboard import dashboard_json
from deploy.chart.generate_readme import readme
from deploy.chart.generate_schema import values_schema
from deploy.chart.generate_values import values_yaml
from deploy.chart.sections import sections_json
from deploy.chart.values import ChartValues

CHART = Path(__file__).resolve().parents[2] / "charts" / "context-cache"


def generated() -> Mapping[str, str]:
    """Return the text of each generated file by its path in the chart."""
    return {
        "values.yaml": values_yaml(ChartValues),
        "values.schema.json": values_schema(ChartValues),
        "README.md": readme(ChartValues),
        "files/sections.json": sections_json(ChartValues),
        "files/dashboard.json": dashboard_json(),
    }


def main() -> None:
    """Write, or check; exit 1 when a file is stale."""
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(f"usage: python -m deploy.chart [--check]\n{__doc__}")
    stale = []
    for name, text in generated().items():
        path = CHART / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if check and stale:
        sys.exit(f"stale, run python -m deploy.chart: {', '.join(stale)}")
    print("\n".join(f"written: {name}" for name in stale) or "up to date")


if __name__ == "__main__":
    main()
