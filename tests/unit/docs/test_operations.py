"""docs/operations.md lists every metric, and nothing else calls itself one."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from context_manager.metrics import ManagerMetrics
from gateway.metrics import Metrics as GatewayMetrics
from injector.metrics import InjectorMetrics
from kv_sidecar.metrics import SidecarMetrics
from vllm_plugin.turn.metrics import TurnMetrics

DOC = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
PREFIXES = {
    "gateway": GatewayMetrics,
    "manager": ManagerMetrics,
    "sidecar": SidecarMetrics,
    "turn": TurnMetrics,
    "injector": InjectorMetrics,
}


@pytest.mark.parametrize("component", PREFIXES)
def test_the_page_lists_exactly_the_metrics_of_a_process(component):
    registry = CollectorRegistry()
    metrics = PREFIXES[component](registry)
    if isinstance(metrics, SidecarMetrics):
        metrics.watch({}, lambda: 0)
    shown = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}

    listed = set(re.findall(rf"^\| `(contextcache_{component}_\w+)`", DOC, re.MULTILINE))

    assert listed == shown
