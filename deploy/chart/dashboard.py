"""The Grafana dashboard: rows of panels (`dashboard.yaml`), each a few queries over our metrics.

Grafana 11's JSON model, as far as we use it: what is left out gets Grafana's defaults. The variables are a Prometheus
data source, namespace, pod, model and tenant. Each query selects by every variable whose label its metric has.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

_WIDTH = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_OF_EACH = 'namespace=~"$namespace",pod=~"$pod"'
"""Labels that Prometheus adds to each series of a pod."""
_OF_SOME = {
    "contextcache_manager_usage_total": 'model=~"$model"',
    "contextcache_connector_": 'model_name=~"$model"',
    "contextcache_sidecar_tenant_bytes": 'tenant=~"$tenant"',
}
"""Matchers of metrics with further labels, by the beginning of their names. The connector has vLLM's labels."""
_SELECTOR = re.compile(r"(\w+)\{([^}]*)\}")

ROWS: dict[str, list[dict[str, Any]]] = yaml.safe_load(Path(__file__).with_name("dashboard.yaml").read_text())
"""Panels by the title of their row, from top to bottom."""


def dashboard_json() -> str:
    """Return the dashboard as Grafana imports it."""
    return json.dumps(_dashboard(), indent=1) + "\n"


def _dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row, shown in ROWS.items():
        panels.append(_row(row, len(panels) + 1, top))
        top += 1
        left = height = 0
        for panel in shown:
            width = panel.get("width", 8)
            if left + width > _WIDTH:
                top, left = top + height, 0
            height = 4 if panel.get("kind") == "stat" else 8  # a number needs less than a graph
            place = {"h": height, "w": width, "x": left, "y": top}
            panels.append(_panel(panel, len(panels) + 1, place))
            left += width
        top += height
    return {
        "uid": "context-cache",
        "title": "context-cache",
        "tags": ["context-cache", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [_source_variable(), *(_variable(*one) for one in _VARIABLES)]},
        "panels": panels,
    }


def _row(title: str, number: int, top: int) -> dict[str, Any]:
    place = {"h": 1, "w": _WIDTH, "x": 0, "y": top}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: dict[str, Any], number: int, place: dict[str, int]) -> dict[str, Any]:
    kind = panel.get("kind", "timeseries")
    custom = {"fillOpacity": 20, "stacking": {"mode": "normal"}} if panel.get("stacked") else {"fillOpacity": 0}
    return {
        "id": number,
        "type": kind,
        "title": panel["title"],
        "description": panel.get("description", ""),
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.get("unit", "short"), "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": _SELECTOR.sub(_selected, query),
                "legendFormat": legend,
                "instant": kind == "stat",
            }
            for index, (legend, query) in enumerate(panel["queries"].items())
        ],
    }


def _selected(selector: re.Match[str]) -> str:
    """Return a metric with a matcher for each variable that the metric has a label of, before its own matchers."""
    metric, where = selector.groups()
    more = [matcher for name, matcher in _OF_SOME.items() if metric.startswith(name)]
    return f"{metric}{{{','.join(filter(None, [_OF_EACH, *more, where]))}}}"


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}


_IN_NAMESPACE = 'namespace=~"$namespace"'
_VARIABLES = (
    ("namespace", "label_values(contextcache_gateway_ext_proc_streams, namespace)"),
    ("pod", f'label_values({{__name__=~"contextcache_.+_build_info",{_IN_NAMESPACE}}}, pod)'),
    ("model", f"label_values(contextcache_manager_usage_total{{{_IN_NAMESPACE}}}, model)"),
    ("tenant", f"label_values(contextcache_sidecar_tenant_bytes{{{_IN_NAMESPACE}}}, tenant)"),
)
"""Variables by name, and the query of their values."""


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        # Also series without the label, such as those without a namespace outside Kubernetes.
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "multi": True,
        "sort": 1,
    }
