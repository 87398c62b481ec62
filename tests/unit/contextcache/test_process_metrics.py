"""Series that each part has: its version, and none that no query reads."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from deploy.docs.metrics import PARTS


@pytest.mark.parametrize("part", PARTS)
def test_each_part_tells_its_version_and_no_times_of_creation(part):
    """Seen failing: the series `…_created` doubled the page of each part."""
    registry = CollectorRegistry()
    PARTS[part](registry)

    page = generate_latest(registry).decode()

    assert f'contextcache_{part}_build_info{{version="{version("context-cache-server")}"}} 1.0\n' in page
    assert "_created" not in page


@pytest.mark.parametrize("part", ["gateway", "manager", "sidecar", "turn"])
def test_each_part_with_requests_times_them_by_route_and_code_in_one_way(part):
    registry = CollectorRegistry()
    PARTS[part](registry)
    [timed] = [one for one in registry.collect() if one.name.endswith("_request_duration_seconds")]

    assert timed.name == f"contextcache_{part}_request_duration_seconds"
    assert registry._names_to_collectors[timed.name]._labelnames == ("route", "code")
