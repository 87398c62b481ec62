"""Alerts and dashboard ask for metrics that exist and say what to do: files of the chart against the processes."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from deploy.chart.dashboard import ROWS, dashboard_json
from deploy.docs.metrics import PARTS, metrics_of

ROOT = Path(__file__).parents[3]
FILES = ROOT / "charts" / "context-cache" / "files"
RUNBOOKS = (ROOT / "docs/operations/alerts.md").read_text()
ENVOY = {"envoy_http_downstream_rq_xx", "envoy_cluster_membership_healthy", "envoy_api_keys_refused"}
"""Metrics of Envoy's own that we rely on; tests/integration sees them on a real one."""
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
FUNCTIONS = {"absent", "by", "group_left", "histogram_quantile", "increase", "label_values", "max", "min", "on", "or"}
FUNCTIONS |= {"rate", "sum", "time", "unless", "vector", "le"}


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads((FILES / "dashboard.json").read_text())["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    asked = [rule["expr"] for rule in alerts()]
    return asked + [target["expr"] for panel in panels() for target in panel["targets"]]


def series() -> dict[str, set[str]]:
    """Every series that our processes can show, with the labels that queries may use."""
    return {
        metric.name.removesuffix("_total") + suffix: set(metric.labels)
        for part in (*PARTS, "connector")
        for metric in metrics_of(part)
        for suffix in SUFFIXES[metric.kind]
    }


def selectors(expression: str) -> list[tuple[str, str]]:
    """Return each metric name and the matchers behind it, `{__name__=~"…"}` included."""
    return re.findall(r"([a-z_][a-zA-Z0-9_:]*)?\{([^}]*)\}", expression)


def test_every_query_is_about_metrics_and_labels_that_exist():
    known = series()
    for expression in expressions():
        assert selectors(expression), expression
        for name, matchers in selectors(expression):
            asked = dict(re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', matchers))
            pattern = asked.pop("__name__", name)
            names = {one for one in known.keys() | ENVOY if re.fullmatch(pattern, one)}
            assert names, f"{pattern} in {expression}"
            for one in names - ENVOY:
                assert asked.keys() - {"namespace", "pod", "model_name"} <= known[one], (
                    f"labels of {one} in {expression}"
                )


def test_every_query_is_about_one_release_s_namespace():
    for expression in expressions():
        bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^]]*\]|(?:by|on) \([^)]*\)', "", expression)
        words = set(re.findall(r"[a-z_]{3,}", bare)) - FUNCTIONS
        assert all('namespace="$namespace"' in m or 'namespace=~"$namespace"' in m for _, m in selectors(expression))
        assert all(f"{word}{{" in expression for word in words), words


def test_every_panel_is_about_the_chosen_namespace_pod_model_and_tenant():
    """Seen failing without the matcher of the connector's model, and of the tenant."""
    known, of_label = series(), {"model": "model", "model_name": "model", "tenant": "tenant"}
    asked = [one for panel in panels() for target in panel["targets"] for one in selectors(target["expr"])]
    for name, matchers in asked:
        of_vllm = {"model_name"} if name.startswith("contextcache_connector_") else set()
        labels = {"namespace": "namespace", "pod": "pod"} | {
            label: of_label[label] for label in of_label.keys() & (known.get(name, set()) | of_vllm)
        }

        assert all(f'{label}=~"${variable}"' in matchers for label, variable in labels.items()), name
    variables = json.loads(dashboard_json())["templating"]["list"]
    assert [one["name"] for one in variables] == ["datasource", "namespace", "pod", "model", "tenant"]
    assert {one["allValue"] for one in variables[1:]} == {".*"}


def test_answers_of_envoy_are_those_to_clients_and_not_to_probes():
    asked = [matchers for text in expressions() for name, matchers in selectors(text) if name.startswith("envoy_http_")]

    assert len(asked) >= 3
    assert all('envoy_http_conn_manager_prefix="front"' in matchers for matchers in asked)


def test_prometheus_can_read_every_query():
    """Raises ValueError where Prometheus would refuse it; Grafana's variables stand for numbers and names there."""
    for expression in expressions():
        assert promql_parser.parse(expression.replace("$__rate_interval", "5m").replace("$__range", "1h")).prettify()


def test_every_alert_says_how_bad_what_and_where_to_read_on():
    for rule in alerts():
        told = rule["annotations"]
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, rule["alert"]
        assert len(told["summary"]) < 60, rule["alert"]
        assert told["description"].endswith("."), rule["alert"]
        assert told["runbook_url"] == f"$runbooks#{rule['alert'].lower()}"


def test_each_alert_has_a_runbook_and_each_runbook_an_alert():
    sections = re.findall(r"^## (ContextCache\w+)$", RUNBOOKS, re.MULTILINE)

    assert sorted(sections) == sorted(rule["alert"] for rule in alerts())


def test_a_runbook_says_what_it_means_and_what_to_do():
    parts = re.split(r"^## (ContextCache\w+)$", RUNBOOKS, flags=re.MULTILINE)[1:]
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        assert "**Means.**" in text, name
        assert "**Do.**" in text, name


def test_what_a_runbook_asks_for_exists():
    """Metrics and settings that a section names; seen to fail with a metric's name misspelt."""
    metrics = {metric.name for part in (*PARTS, "connector") for metric in metrics_of(part)}
    settings = (ROOT / "docs/reference/settings.md").read_text()

    assert set(re.findall(r"contextcache_\w+", RUNBOOKS)) <= metrics
    assert [name for name in re.findall(r"`([A-Z]+_[A-Z_]+)`", RUNBOOKS) if f"- `{name}` (" not in settings] == []


def test_the_dashboard_is_the_one_that_is_generated():
    assert (FILES / "dashboard.json").read_text() == dashboard_json()


def test_the_dashboard_has_the_rows_an_operator_asks_for():
    wanted = {
        "Saved",
        "Sessions",
        "Hits by source",
        "Time to the first token",
        "Bytes by tier and tenant",
        "Requests",
        "Errors",
        "Redis",
        "Sidecar I/O",
    }

    assert wanted <= ROWS.keys()


def test_the_first_row_tells_share_tokens_and_seconds_saved_as_numbers():
    stats = [panel for panel in panels() if panel["type"] == "stat"]
    asked = " ".join(panel["targets"][0]["expr"] for panel in stats)

    assert [panel["gridPos"]["y"] for panel in stats] == [1] * 4
    assert all(panel["targets"][0]["instant"] for panel in stats)
    assert all(f'quantity="{quantity}"' in asked for quantity in ("cached_tokens", "saved_ms"))


def test_panels_neither_overlap_nor_leave_the_page():
    places = [(p["gridPos"]["y"], p["gridPos"]["x"], p["gridPos"]["w"]) for p in panels()]
    for (y, x, w), (next_y, next_x, _) in pairwise(sorted(places)):
        assert next_y > y or next_x >= x + w
    assert all(x + w <= 24 for _, x, w in places)
    assert len({panel["id"] for panel in panels()}) == len(panels())
