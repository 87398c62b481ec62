"""Keys of the connector's `kv_connector_extra_config` as values of the chart, read from the connector's own source.

Its package imports torch and vLLM, which nobody needs to render a chart: so the file is parsed, never imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
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
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            field.name: dict(_JSON_TYPES[field.type]) | ({"description": field.meaning} if field.meaning else {})
            for field in connector_fields(source)
            if field.name not in CHART_CONNECTOR_KEYS
        },
    }


@dataclass(frozen=True, slots=True)
class ConnectorField:
    """One key as its source says it."""

    name: str
    type: str
    default: str | int | bool | None
    """None: the key is required."""
    meaning: str


def connector_fields(source: str | None = None) -> Iterator[ConnectorField]:
    """Yield every key of the connector's settings, in their order."""
    tree = ast.parse(_SOURCE.read_text() if source is None else source)
    (settings,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ConnectorSettings")
    for field, text in zip(settings.body, settings.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            told = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and str(text.value.value)
            default = None if field.value is None else _value(field.value, tree)
            yield ConnectorField(
                field.target.id, ast.unparse(field.annotation), default, " ".join((told or "").split())
            )


def _value(node: ast.expr, module: ast.Module) -> Any:
    """Return what a default is: a literal, a constant of the module, or one shifted by bits."""
    if isinstance(node, ast.Name):
        constants = (found for found in module.body if isinstance(found, ast.Assign))
        return next(_value(found.value, module) for found in constants if ast.unparse(found.targets[0]) == node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift):
        return _value(node.left, module) << _value(node.right, module)
    return ast.literal_eval(node)
