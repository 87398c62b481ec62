"""The Grafana dashboard: rows of panels, each a few queries over metrics in docs/reference/metrics.md. Pure.

Grafana 11's JSON model, as far as we use it: what is left out gets Grafana's defaults. The variables are a Prometheus
data source, namespace, pod, model and tenant. Each query selects by every variable whose label its metric has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Query:
    """One expression and how its series are called; braces name labels."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph, or one number."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    """Grafana's name for it: ops, s, bytes, percentunit, short."""
    description: str = ""
    kind: str = "timeseries"
    width: int = 8
    """In 24ths."""
    stacked: bool = False

    @property
    def height(self) -> int:
        """Height of the panel: a number needs less than a graph."""
        return 4 if self.kind == "stat" else 8


def selector(metric: str, where: str = "") -> str:
    """Return a metric with a matcher for each variable that the metric has a label of."""
    more = [matcher for name, matcher in _OF_SOME.items() if metric.startswith(name)]
    return f"{metric}{{{','.join(filter(None, [_OF_EACH, *more, where]))}}}"


def rate(metric: str, *, by: str = "", where: str = "") -> str:
    """Return the sum of a counter's rates, by labels."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({selector(metric, where)}[$__rate_interval]))"


def quantile(share: float, metric: str, *, by: str = "", where: str = "") -> str:
    """Return a quantile of a histogram, by labels."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', by=labels, where=where)})"


def gauge(metric: str, *, by: str = "", how: str = "sum", where: str = "") -> str:
    """Return a gauge put together over pods, by labels."""
    grouped = f" by ({by})" if by else ""
    return f"{how}{grouped} ({selector(metric, where)})"


def growth(metric: str, *, where: str) -> str:
    """Return the sum of a counter's growth over the shown time."""
    return f"sum (increase({selector(metric, where)}[$__range]))"


_DISK = 'tier="disk"'
_TIMED = {part: f"contextcache_{part}_request_duration_seconds" for part in ("gateway", "turn", "manager", "sidecar")}
_FAILED = 'code=~"5..|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN"'
_USED = "contextcache_manager_usage_total"
_CACHED, _PROMPT = 'quantity="cached_tokens"', 'quantity=~"cached_tokens|computed_tokens"'
_SAVED_MS = 'quantity="saved_ms"'
_CONTINUED = 'kind="continue"'
_FOUND = f'{_CONTINUED},verdict=~"hit|partial"'
_TURNS = "contextcache_turn_turns_total"
_SHARE_TEXT = "Prompt tokens that were not computed, the engine's own prefix hits included, of all prompt tokens."

ROWS: dict[str, tuple[Panel, ...]] = {
    "Saved": (
        Panel(
            "Saved share",
            (Query(f"{growth(_USED, where=_CACHED)} / {growth(_USED, where=_PROMPT)}", "saved"),),
            unit="percentunit",
            description=_SHARE_TEXT,
            kind="stat",
            width=6,
        ),
        Panel("Prompt tokens not computed", (Query(growth(_USED, where=_CACHED), "tokens"),), kind="stat", width=6),
        Panel(
            "Seconds saved (estimate)",
            (Query(f"{growth(_USED, where=_SAVED_MS)} / 1000", "saved"),),
            unit="s",
            description="Time to compute the cached tokens at the engine's measured rate, less the time to load them.",
            kind="stat",
            width=6,
        ),
        Panel(
            "Turns that found their KV",
            (Query(f"{growth(_TURNS, where=_FOUND)} / {growth(_TURNS, where=_CONTINUED)}", "hit ratio"),),
            unit="percentunit",
            kind="stat",
            width=6,
        ),
        Panel(
            "Saved share by model",
            (
                Query(
                    f"{rate(_USED, by='model', where=_CACHED)} / {rate(_USED, by='model', where=_PROMPT)}", "{{model}}"
                ),
            ),
            unit="percentunit",
            description=_SHARE_TEXT,
            width=12,
        ),
        Panel(
            "Seconds saved in each second, by model (estimate)",
            (Query(f"{rate(_USED, by='model', where=_SAVED_MS)} / 1000", "{{model}}"),),
            unit="s",
            width=12,
            stacked=True,
        ),
    ),
    "Sessions": (
        Panel(
            "Live sessions",
            (Query(gauge("contextcache_manager_sessions", how="max"), "sessions"),),
            description="Every manager counts all sessions. The panel shows the largest count.",
        ),
        Panel(
            "Sessions created and ended",
            (
                Query(rate("contextcache_manager_sessions_reserved_total"), "reserved"),
                Query(rate("contextcache_manager_sessions_unregistered_total"), "deleted"),
                Query(rate("contextcache_manager_sessions_expired_total"), "expired"),
                Query(rate("contextcache_manager_sessions_abandoned_total"), "abandoned"),
            ),
            unit="ops",
        ),
        Panel(
            "Turns",
            (
                Query(rate("contextcache_manager_turns_committed_total"), "committed"),
                Query(rate("contextcache_manager_turns_aborted_total"), "aborted"),
                Query(rate("contextcache_turn_refused_commits_total", by="reason"), "not committed: {{reason}}"),
            ),
            unit="ops",
        ),
    ),
    "Hits by source": (
        Panel(
            "Turns that found their KV",
            (Query(f"{rate(_TURNS, where=_FOUND)} / {rate(_TURNS, where=_CONTINUED)}", "hit ratio"),),
            unit="percentunit",
        ),
        Panel(
            "Turns by source",
            (Query(rate(_TURNS, by="source", where=_CONTINUED), "{{source}}"),),
            unit="ops",
            description="Source of most cached tokens. device: the engine's own prefix cache.",
            stacked=True,
        ),
        Panel(
            "Prompt tokens",
            (Query(rate("contextcache_turn_prompt_tokens_total", by="how"), "{{how}}"),),
            unit="ops",
            stacked=True,
        ),
        Panel(
            "Loads, and reasons for missed ones",
            (
                Query(
                    rate(
                        "contextcache_connector_events_total",
                        by="event, reason",
                        where='event=~"loads|failed_loads|missed_loads|unneeded_loads"',
                    ),
                    "{{event}} {{reason}}",
                ),
            ),
            unit="ops",
            width=12,
        ),
        Panel(
            "Saves, and reasons for skipped ones",
            (
                Query(
                    rate(
                        "contextcache_connector_events_total", by="event, reason", where='event=~"saves|skipped_saves"'
                    ),
                    "{{event}} {{reason}}",
                ),
                Query(rate("contextcache_sidecar_refused_saves_total", by="code"), "refused by the sidecar: {{code}}"),
            ),
            unit="ops",
            width=12,
        ),
    ),
    "Time to the first token": (
        Panel(
            "Time to the first token, median, by source",
            (Query(quantile(0.5, "contextcache_turn_first_token_seconds", by="source"), "{{source}}"),),
            unit="s",
            description="Streamed turns. none and recompute reused no tokens.",
            width=12,
        ),
        Panel(
            "Restores, 95th percentile, by tier",
            (Query(quantile(0.95, "contextcache_turn_restore_seconds", by="source"), "{{source}}"),),
            unit="s",
            width=12,
        ),
    ),
    "Bytes by tier and tenant": (
        Panel("KV by tier", (Query(gauge("contextcache_sidecar_bytes", by="tier"), "{{tier}}"),), unit="bytes"),
        Panel(
            "Disk usage",
            (
                Query(
                    f"{selector('contextcache_sidecar_bytes', _DISK)} / "
                    f"({selector('contextcache_sidecar_limit_bytes', _DISK)} > 0)",
                    "{{pod}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "KV by tenant",
            (Query(gauge("contextcache_sidecar_tenant_bytes", by="tenant"), "{{tenant}}"),),
            unit="bytes",
            description="The largest tenants by name, all others under an empty name.",
            stacked=True,
        ),
        Panel(
            "Bytes in and out",
            (
                Query(rate("contextcache_sidecar_taken_bytes_total"), "saved"),
                Query(rate("contextcache_sidecar_pulled_bytes_total"), "pulled from peers"),
                Query(rate("contextcache_sidecar_freed_bytes_total"), "freed"),
                Query(rate("contextcache_connector_loaded_bytes_total"), "loaded into engines"),
            ),
            unit="Bps",
            width=12,
        ),
        Panel(
            "Blocks served by tier",
            (Query(rate("contextcache_sidecar_served_blocks_total", by="tier"), "{{tier}}"),),
            unit="ops",
            width=12,
        ),
    ),
    "Requests": (
        Panel(
            "Duration, 95th percentile, by part",
            tuple(Query(quantile(0.95, metric), part) for part, metric in _TIMED.items()),
            unit="s",
            description="Whole requests, answers included. The gateway sees those of Envoy until it has chosen a pod.",
        ),
        Panel(
            "Duration in the turn process, 95th percentile, by route",
            (Query(quantile(0.95, _TIMED["turn"], by="route"), "{{route}}"),),
            unit="s",
        ),
        Panel(
            "Failed requests, by part and code",
            tuple(
                Query(rate(f"{metric}_count", by="route, code", where=_FAILED), f"{part} {{{{route}}}}: {{{{code}}}}")
                for part, metric in _TIMED.items()
            ),
            unit="ops",
        ),
    ),
    "Errors": (
        Panel(
            "Requests by status",
            (Query(rate("contextcache_gateway_requests_total", by="status"), "{{status}}"),),
            unit="ops",
            description="`routed`: forwarded by Envoy; the gateway does not see the answer.",
        ),
        Panel(
            "Envoy's answers by class",
            (
                Query(
                    rate(
                        "envoy_http_downstream_rq_xx",
                        by="envoy_response_code_class",
                        where='envoy_http_conn_manager_prefix="front"',
                    ),
                    "{{envoy_response_code_class}}xx",
                ),
            ),
            unit="ops",
        ),
        Panel(
            "Refusals of the manager",
            (Query(rate("contextcache_manager_refusals_total", by="operation, code"), "{{operation}}: {{code}}"),),
            unit="ops",
        ),
        Panel(
            "Broken exchanges and deletes",
            (
                Query(rate("contextcache_gateway_broken_exchanges_total", by="reason"), "{{reason}}"),
                Query(rate("contextcache_gateway_unreachable_deletes_total"), "undelivered delete"),
                Query(rate("contextcache_turn_aborts_total", by="reason"), "turn aborted: {{reason}}"),
            ),
            unit="ops",
        ),
        Panel(
            "Ready pods, as gateways see them",
            (Query(gauge("contextcache_gateway_endpoint_ready_state", by="endpoint", how="min"), "{{endpoint}}"),),
        ),
        Panel(
            "Faults to inspect",
            (
                Query(rate("contextcache_sidecar_quarantined_files_total"), "quarantined files"),
                Query(rate("contextcache_sidecar_collector_failures_total"), "collector failures"),
                Query(rate("contextcache_manager_sweep_failures_total"), "sweep failures"),
                Query(rate("contextcache_gateway_auth_failures_total"), "auth failures"),
                Query(rate("envoy_api_keys_refused"), "auth failures at Envoy"),
                Query(rate("contextcache_gateway_discovery_failures_total"), "discovery failures"),
            ),
            unit="ops",
        ),
    ),
    "Redis": (
        Panel(
            "Calls",
            (Query(rate("contextcache_manager_store_duration_seconds_count", by="operation"), "{{operation}}"),),
            unit="ops",
        ),
        Panel(
            "Time of a call, 99th percentile",
            (Query(quantile(0.99, "contextcache_manager_store_duration_seconds", by="operation"), "{{operation}}"),),
            unit="s",
        ),
        Panel(
            "Commands that failed",
            (Query(rate("contextcache_manager_redis_errors_total", by="error"), "{{error}}"),),
            unit="ops",
        ),
    ),
    "Sidecar I/O": (
        Panel(
            "Bytes by operation and tier",
            (Query(rate("contextcache_sidecar_io_bytes_total", by="operation, tier"), "{{operation}} {{tier}}"),),
            unit="Bps",
        ),
        Panel(
            "Time for one block, 95th percentile",
            (Query(quantile(0.95, "contextcache_sidecar_io_seconds", by="operation, tier"), "{{operation}} {{tier}}"),),
            unit="s",
        ),
        Panel(
            "Pulls from peers",
            (
                Query(rate("contextcache_sidecar_pulls_total", by="outcome"), "{{outcome}}"),
                Query(quantile(0.95, "contextcache_sidecar_pull_seconds"), "95th percentile, seconds"),
            ),
            unit="short",
        ),
    ),
    "Gateway": (
        Panel(
            "Time the gateway adds, 99th percentile",
            (Query(quantile(0.99, "contextcache_gateway_route_seconds", by="kind"), "{{kind}}"),),
            unit="s",
        ),
        Panel(
            "Reasons for the choice of a pod",
            (Query(rate("contextcache_gateway_choices_total", by="reason"), "{{reason}}"),),
            unit="ops",
            stacked=True,
        ),
        Panel(
            "Requests of pods",
            (
                Query(
                    gauge("contextcache_gateway_endpoint_load_requests", by="endpoint, state", how="max"),
                    "{{endpoint}} {{state}}",
                ),
            ),
        ),
    ),
}
"""What is shown, from top to bottom."""


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
            if left + panel.width > _WIDTH:
                top, left = top + height, 0
            panels.append(_panel(panel, len(panels) + 1, left, top))
            left, height = left + panel.width, panel.height
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


def _panel(panel: Panel, number: int, left: int, top: int) -> dict[str, Any]:
    custom = {"fillOpacity": 20, "stacking": {"mode": "normal"}} if panel.stacked else {"fillOpacity": 0}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": left, "y": top},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "instant": panel.kind == "stat",
            }
            for index, query in enumerate(panel.queries)
        ],
    }


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
