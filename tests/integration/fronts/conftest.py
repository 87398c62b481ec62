"""Tests here run against both fronts: the HTTP front, and a real Envoy with the gateway as its plugin.

What is decided below both runs behind one (`only_http`, `only_envoy`).
"""

from __future__ import annotations

import pytest

from tests.kit.fronts import FRONTS, running_front
from tests.kit.gateway_server import settings_for
from tests.kit.stub_engine import StubEngine


@pytest.fixture
async def other():
    """Another pod, for tests that need two."""
    other = StubEngine()
    await other.start()
    yield other
    await other.stop()


@pytest.fixture(params=FRONTS)
def front_kind(request):
    return request.param


@pytest.fixture
def open_front(front_kind, tmp_path):
    """Return what opens a front over pods: `async with open_front({"pod-a": engine}) as front`."""

    def opened(pods, *, manager_port=1, num_ready=None, **settings):
        ready = len(pods) if num_ready is None else num_ready
        return running_front(
            front_kind, settings_for(tmp_path, pods, manager_port=manager_port, **settings), num_ready=ready
        )

    return opened


@pytest.fixture
def pod(engine):
    """The pod behind `front`: an engine alone, unless a file has another."""
    return engine


@pytest.fixture
async def front(open_front, pod, manager):
    """One pod, `pod-a`, and a real manager."""
    async with open_front({"pod-a": pod}, manager_port=manager.port) as front:
        yield front
