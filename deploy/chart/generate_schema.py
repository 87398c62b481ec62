"""values.schema.json: what Helm refuses. Draft 2020-12; both Helm 3 and Helm 4 obey it."""

from __future__ import annotations

import json
from typing import Any

from deploy.chart.section import Section

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def values_schema(values: type[Section]) -> str:
    """Return the schema of the chart's values as JSON text."""
    schema = _without_titles(values.model_json_schema())
    schema = {"$schema": DRAFT, "title": "Values of the context-cache chart", **schema}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _without_titles(node: Any, *, of_names: bool = False) -> Any:
    """Drop pydantic's titles, which repeat the keys. `of_names`: the keys of this node are names, not keywords."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_titles(value, of_names=not of_names and key in {"properties", "$defs"})
        for key, value in node.items()
        if of_names or key != "title"
    }
