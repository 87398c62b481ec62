"""What most integration tests stand between: a pod, a context manager behind real gRPC, an empty Valkey."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.gateway_server import RunningManager
from tests.kit.stub_engine import StubEngine
from tests.kit.valkey import ValkeyServer


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


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path) as server:
        yield server
