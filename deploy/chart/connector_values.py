"""Keys of the connector's `kv_connector_extra_config` as values of the chart, read from the connector's own source.

Its package imports torch and vLLM, which nobody needs to render a chart: so the file is parsed, never imported.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).parents[2] / "vllm_plugin" / "connector" / "settings.py"
_JSON_TYPES: dict[str, dict[str, Any]] = {
    "int": {"type": "integer", "minimum": 1},
    "str": {"type": "string"},
    "bool": {"type": "boolean"},
}
CHART_CONNECTOR_KEYS = {
    "sidecar": "the socket in the pod",
    "secret_file": "signing",
    "traces_endpoint": "tracing.endpoint",
}
"""Keys that the chart sets, and from what."""


def connector_schema(source: str | None = None) -> dict[str, Any]:
    """Return the JSON schema of the keys that the chart leaves to its user, with their docstrings."""
    tree = ast.parse(_SOURCE.read_text() if source is None else source)
    (settings,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ConnectorSettings")
    fields = zip(settings.body, settings.body[1:], strict=False)
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            field.target.id: _property(field, text)
            for field, text in fields
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and field.target.id not in CHART_CONNECTOR_KEYS
        },
    }


def _property(field: ast.AnnAssign, text: ast.stmt) -> dict[str, Any]:
    schema = dict(_JSON_TYPES[ast.unparse(field.annotation)])
    if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
        schema["description"] = " ".join(str(text.value.value).split())
    return schema
