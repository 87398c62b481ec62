"""A gateway with two ready pods, sessions in memory and one tenant per key."""

import pytest
from prometheus_client import CollectorRegistry

from gateway.metrics import Metrics
from gateway.tenants.keys import KeyFile
from tests.kit.gateway_parts import KEY, OTHER_KEY, GatewayParts, write_keys


async def _ready(tmp_path, **rules):
    write_keys(tmp_path / "keys.json", {KEY: "demo", OTHER_KEY: "other"})
    metrics = Metrics(CollectorRegistry())
    parts = GatewayParts(KeyFile(tmp_path / "keys.json", metrics=metrics), **rules)
    await parts.endpoints.probe_all()
    return parts


@pytest.fixture
async def parts(tmp_path):
    return await _ready(tmp_path)


@pytest.fixture
async def two_addresses(tmp_path):
    """As `parts`, with pods whose turns run in processes of their own."""
    return await _ready(tmp_path, turn_port=8010)


@pytest.fixture
async def salting(tmp_path):
    """As `parts`, with stateless completions salted."""
    return await _ready(tmp_path, salt_stateless=True)


@pytest.fixture
async def limited(tmp_path):
    """As `parts`, with room for one request of all tenants together."""
    return await _ready(tmp_path, limits={"total_requests_max": 1})
