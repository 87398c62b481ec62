"""What most integration tests of the gateway stand between: a pod, and a context manager behind real gRPC."""

from __future__ import annotations

import pytest

from tests.helpers.gateway_server import RunningManager
from tests.helpers.stub_engine import StubEngine


@pytest.fixture
async def engine():
    engine = StubEngine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def manager():
    manager = RunningManager()
    await manager.start()
    yield manager
    await manager.stop()
